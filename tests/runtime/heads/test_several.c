/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Several tokens of a sequence in one call: outputs, statistics and what later calls find are those
 * of single calls, bit for bit, whatever the policy, the way to move pages, and the kinds of heads;
 * also after the last of them were taken back.
 *
 * Compares runs of the library with each other; what is right is the business of other tests.
 */

#include <math.h>

#include "cache.h"
#include "harness.h"

#define SEQUENCES 3u
#define MOST      16u

/* A draft: tokens that are right, and after them some that are not. */
typedef struct play {
    kvf_cache_config cc;
    const kvf_runtime_config *rc;
    uint32_t tokens; /* of each sequence, after its prompt */
    uint32_t wrong;  /* 1: some calls have wrong tokens at their end, which are cut off again */
    uint64_t seed;
} play;

static const uint32_t prompts[SEQUENCES] = {TEST_SANITIZED ? 120 : 190, 14, 75};

typedef struct result {
    char *out;  /* [SEQUENCES, tokens, layers, query_heads, head_dim] */
    float *lse; /* [SEQUENCES, tokens, layers, query_heads] */
    kvf_stats stats;
} result;

typedef struct stage {
    const play *p;
    test_world w;
    kvf_sequence *s[SEQUENCES];
    const test_tokens *right, *other; /* [SEQUENCES] */
    uint32_t at[SEQUENCES];           /* tokens done, after the prompt */
    char *q, *k, *v, *out;            /* of a call */
    float *lse;
    result *r;
} stage;

static size_t row_bytes(const kvf_cache_config *c)
{
    return (size_t)c->query_heads * c->head_dim * test_dtype_bytes(c->dtype);
}

static void stage_open(stage *x, const play *p, const test_tokens *tokens, result *r)
{
    const kvf_cache_config *c = &p->cc;
    const size_t row = row_bytes(c), rows = SEQUENCES * MOST;
    *x = (stage){.p = p, .right = tokens, .other = tokens + SEQUENCES, .r = r};
    test_world_open(&x->w, p->rc, c);
    x->q = test_alloc(rows * row);
    x->k = test_alloc(rows * row);
    x->v = test_alloc(rows * row);
    x->out = test_alloc(rows * row);
    x->lse = test_alloc(rows * c->query_heads * sizeof *x->lse);
    r->out = test_alloc(SEQUENCES * p->tokens * c->layers * row);
    r->lse =
        test_alloc((size_t)SEQUENCES * p->tokens * c->layers * c->query_heads * sizeof *r->lse);
    for (uint32_t b = 0; b < SEQUENCES; b++) {
        x->s[b] = test_sequence(&x->w);
        for (uint32_t l = 0; l < c->layers; l++)
            test_prefill(&x->w, x->s[b], &x->right[b],
                         &(test_range){.layer = l, .count = prompts[b], .chunk = 128}, NULL);
    }
}

static void stage_close(stage *x)
{
    test_wait(&x->w);
    kvf_cache_stats(x->w.cache, &x->r->stats);
    for (uint32_t i = 0; i < x->w.cache->kv_group_count; i++) {
        assert_true(kvf_page_pool_is_valid(&x->w.cache->kv_groups[i].pool));
        assert_true(test_residency_is_valid(&x->w.cache->kv_groups[i].residency));
    }
    test_release(x->q);
    test_release(x->k);
    test_release(x->v);
    test_release(x->out);
    test_release(x->lse);
    test_world_close(&x->w);
}

/* Token i of a draft of which `right` are right. */
static void put_row(stage *x, uint32_t row, uint32_t b, uint32_t layer, uint32_t i, uint32_t right)
{
    const kvf_cache_config *c = &x->p->cc;
    const test_tokens *t = i < right ? &x->right[b] : &x->other[b];
    const size_t q = row_bytes(c), k = q / c->query_heads * c->kv_heads;
    const uint32_t token = prompts[b] + x->at[b] + i;
    memcpy(x->q + row * q, test_q(t, layer, token), q);
    memcpy(x->k + row * k, test_k(t, layer, token), k);
    memcpy(x->v + row * k, test_v(t, layer, token), k);
}

static void keep_row(stage *x, uint32_t row, uint32_t b, uint32_t layer, uint32_t token)
{
    const kvf_cache_config *c = &x->p->cc;
    const size_t at = ((size_t)b * x->p->tokens + token) * c->layers + layer, q = row_bytes(c);
    memcpy(x->r->out + at * q, x->out + row * q, q);
    memcpy(x->r->lse + at * c->query_heads, x->lse + row * c->query_heads,
           c->query_heads * sizeof *x->lse);
}

/* For each sequence `right[b]` tokens and as many more as make `count[b]`, all layers. */
static void call(stage *x, const uint32_t count[SEQUENCES], const uint32_t right[SEQUENCES],
                 int is_told)
{
    kvf_sequence *s[SEQUENCES];
    uint32_t tokens[SEQUENCES], batch = 0;
    for (uint32_t b = 0; b < SEQUENCES; b++)
        if (count[b]) {
            s[batch] = x->s[b];
            tokens[batch++] = count[b];
        }
    for (uint32_t layer = 0; layer < x->p->cc.layers; layer++) {
        uint32_t row = 0;
        for (uint32_t b = 0; b < SEQUENCES; b++)
            for (uint32_t i = 0; i < count[b]; i++)
                put_row(x, row++, b, layer, i, right[b]);
        const kvf_decode_args a = {.layer = layer,
                                   .batch = batch,
                                   .sequences = s,
                                   .q = x->q,
                                   .k = x->k,
                                   .v = x->v,
                                   .out = x->out,
                                   .lse = x->lse,
                                   .tokens = is_told ? tokens : NULL};
        test_ok(&x->w, kvf_decode(x->w.cache, &a, x->w.stream));
        test_wait(&x->w);
        row = 0;
        for (uint32_t b = 0; b < SEQUENCES; b++)
            for (uint32_t i = 0; i < count[b]; i++, row++)
                if (i < right[b])
                    keep_row(x, row, b, layer, x->at[b] + i);
    }
    for (uint32_t b = 0; b < SEQUENCES; b++) {
        x->at[b] += right[b];
        if (count[b] > right[b])
            test_ok(&x->w,
                    kvf_sequence_truncate(x->w.cache, x->s[b], prompts[b] + x->at[b], x->w.stream));
    }
}

static void run_single(const play *p, const test_tokens *tokens, result *r)
{
    stage x;
    stage_open(&x, p, tokens, r);
    for (uint32_t i = 0; i < p->tokens; i++)
        for (uint32_t b = 0; b < SEQUENCES; b++) {
            uint32_t count[SEQUENCES] = {0};
            count[b] = 1;
            call(&x, count, count, 0);
        }
    stage_close(&x);
}

/* Calls of any shape: some sequences, different numbers, all ones. */
static void run_several(const play *p, const test_tokens *tokens, result *r)
{
    stage x;
    test_random random = {p->seed};
    stage_open(&x, p, tokens, r);
    for (;;) {
        uint32_t count[SEQUENCES], right[SEQUENCES], any = 0, left = 0;
        for (uint32_t b = 0; b < SEQUENCES; b++) {
            const uint32_t rest = p->tokens - x.at[b];
            const uint32_t most = test_random_below(&random, 4) ? MOST : 1;
            count[b] = test_random_below(&random, 4) ? 1 + test_random_below(&random, most) : 0;
            right[b] = count[b] = kvf_min_u32(count[b], rest);
            if (p->wrong && count[b])
                count[b] += test_random_below(&random, MOST - count[b] + 1);
            any |= count[b];
            left |= rest;
        }
        if (!left)
            break;
        if (any)
            call(&x, count, right, 1);
    }
    stage_close(&x);
}

static void same_stats(const kvf_stats *a, const kvf_stats *b)
{
    assert_int_equal(a->steps, b->steps);
    assert_int_equal(a->tokens_attended, b->tokens_attended);
    assert_int_equal(a->tokens_held, b->tokens_held);
    assert_int_equal(a->pages_selected, b->pages_selected);
    assert_int_equal(a->hits + a->misses, b->hits + b->misses);
    assert_int_equal(a->bytes_to_host, b->bytes_to_host);
    assert_int_equal(a->refreshes, b->refreshes);
    assert_int_equal(a->verified, b->verified);
    /* Sequences take turns in another order, so sums of at most some hundred shares round another
     * way. */
    assert_true(fabs(a->recall_sum - b->recall_sum) < 1e-9);
}

static void check(const play *p)
{
    const kvf_cache_config *c = &p->cc;
    test_tokens tokens[2 * SEQUENCES];
    result single, several;
    for (uint32_t b = 0; b < 2 * SEQUENCES; b++)
        test_tokens_make(&tokens[b], c,
                         &(test_tokens_spec){.count = prompts[b % SEQUENCES] + p->tokens + MOST,
                                             .seed = p->seed + b,
                                             .sharpness = 2.5f,
                                             .topics = 6});
    run_single(p, tokens, &single);
    run_several(p, tokens, &several);
    const size_t rows = (size_t)SEQUENCES * p->tokens * c->layers;
    if (memcmp(single.out, several.out, rows * row_bytes(c)) != 0 ||
        memcmp(single.lse, several.lse, rows * c->query_heads * sizeof *single.lse) != 0)
        fail_msg("seed %llu, select %u: several tokens and single ones differ by %g",
                 (unsigned long long)p->seed, (unsigned)c->select,
                 test_distance(single.out, several.out, c->dtype,
                               rows * row_bytes(c) / test_dtype_bytes(c->dtype)));
    if (!p->wrong)
        same_stats(&single.stats, &several.stats);
    for (uint32_t b = 0; b < 2 * SEQUENCES; b++)
        test_tokens_free(&tokens[b]);
    test_release(single.out);
    test_release(single.lse);
    test_release(several.out);
    test_release(several.lse);
}

/* The newest pages that have a score; of a policy of one's own. */
static uint32_t choose_scored(void *user, const kvf_select_view *view, int32_t *ids)
{
    uint32_t count = 0;
    (void)user;
    for (uint32_t i = view->pages; i-- > 0 && count < view->pages_max;)
        if (view->scores[i] > -INFINITY && (i % 3 || view->pages < 8))
            ids[count++] = (int32_t)i;
    for (uint32_t i = 0; i < count / 2; i++) {
        const int32_t id = ids[i];
        ids[i] = ids[count - 1 - i];
        ids[count - 1 - i] = id;
    }
    return count;
}

static play play_of(kvf_select select, uint64_t seed)
{
    play p = {.cc = test_config_small(), .tokens = test_afford(44), .seed = seed};
    p.cc.layers = 2;
    p.cc.sequences_max = SEQUENCES;
    p.cc.tokens_per_step_max = MOST;
    p.cc.select = select;
    p.cc.select_fn = select == KVF_SELECT_CUSTOM ? choose_scored : NULL;
    return p;
}

static void every_policy(void **state)
{
    const uint64_t seed = test_seed(1201);
    static const kvf_transfer methods[] = {KVF_TRANSFER_DIRECT, KVF_TRANSFER_GATHER,
                                           KVF_TRANSFER_EACH};
    for (uint32_t i = 0; i <= KVF_SELECT_CUSTOM; i++) {
        if (!test_takes(i))
            continue;
        play p = play_of((kvf_select)i, seed + 10 * i);
        p.cc.transfer = methods[i % 3];
        p.cc.dtype = (kvf_dtype)(i % 3);
        p.cc.verify_interval = i % 2 ? 9 : 0;
        check(&p);
        p.cc.transfer = methods[(i + 1) % 3];
        p.cc.page_size = 1u << (i % 5);
        p.cc.digest = KVF_DIGEST_CODES;
        p.cc.verify_interval = 0;
        check(&p);
    }
}

/* Blocks of 32, few slots, and a window whose queries one call overwrites. */
static void sizes(void **state)
{
    const uint64_t seed = test_seed(1207);
    const kvf_runtime_config rc = test_runtime_config();
    test_seams.block_size = 0;
    for (uint32_t i = 0; i < 4; i++) {
        play p = play_of(i % 2 ? KVF_SELECT_DYNAMIC : KVF_SELECT_HYBRID, seed + 10 * i);
        p.rc = &rc;
        p.cc.digest = KVF_DIGEST_CODES;
        p.cc.page_size = 4;
        p.cc.local_tokens = i < 2 ? 5 : 40;
        p.cc.sink_tokens = i < 2 ? 37 : 3;
        p.cc.budget_tokens = 112;
        p.cc.refresh = i < 2 ? KVF_REFRESH_RESIDENT : KVF_REFRESH_EXACT;
        p.cc.static_ratio = i == 2 ? KVF_STATIC_RATIO_AUTO : 0.3f;
        p.cc.budget_share = i % 2 ? 0.6f : 0.0f;
        p.cc.device_bytes = i % 2 ? 0 : UINT64_C(1) << 30;
        p.cc.transfer = i < 2 ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT;
        check(&p);
    }
}

/* Layers with hot, coarse and streaming heads, with streaming heads only, and without. */
static void kinds_of_heads(void **state)
{
    const uint64_t seed = test_seed(1217);
    static const uint8_t mask[4][2] = {{1, 2}, {0, 1}, {0, 0}, {2, 2}};
    play p = play_of(KVF_SELECT_DYNAMIC, seed);
    p.cc.digest = KVF_DIGEST_CODES;
    p.cc.layers = 4;
    p.cc.head_mask = &mask[0][0];
    p.cc.coarse_share = 0.3f;
    p.cc.streaming_sink = 5;
    p.cc.streaming_recent = 30;
    p.cc.transfer = KVF_TRANSFER_DIRECT;
    check(&p);
    p.cc.transfer = KVF_TRANSFER_GATHER;
    check(&p);
}

/* Wrong tokens of a draft are taken back, and leave nothing. */
static void rejected_tokens(void **state)
{
    const uint64_t seed = test_seed(1223);
    static const kvf_select selects[] = {KVF_SELECT_DYNAMIC, KVF_SELECT_FULL, KVF_SELECT_STREAMING,
                                         KVF_SELECT_QUEST, KVF_SELECT_ARKVALE};
    for (uint32_t i = 0; i < sizeof selects / sizeof *selects; i++) {
        if (!test_takes(i))
            continue;
        play p = play_of(selects[i], seed + 10 * i);
        p.wrong = 1;
        p.cc.transfer = i % 2 ? KVF_TRANSFER_DIRECT : KVF_TRANSFER_GATHER;
        p.cc.digest = i == 0 ? KVF_DIGEST_CODES : KVF_DIGEST_MINMAX;
        check(&p);
    }
}

/* Sixteen tokens are one step, or as many as begin with a block that is sealed. */
static void tokens_share_a_step(void **state)
{
    const uint64_t seed = test_seed(1231);
    kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config c = play_of(KVF_SELECT_DYNAMIC, seed).cc;
    test_tokens t;
    test_world w;
    test_seams.block_size = 0;
    c.layers = 1;
    test_tokens_make(&t, &c, &(test_tokens_spec){.count = 200, .seed = seed, .sharpness = 1.0f});
    test_world_open(&w, &rc, &c);
    kvf_sequence *s = test_sequence(&w);
    char *out = test_alloc(MOST * row_bytes(&c));
    /* Blocks of 32 leave a window of 16: one is sealed at 112 tokens. */
    static const uint32_t tokens[] = {11, 16, 16}, steps[] = {1, 1, 2};
    test_prefill(&w, s, &t, &(test_range){.count = 81, .chunk = 128}, NULL);
    uint32_t first = 81;
    for (uint32_t i = 0; i < 3; first += tokens[i++]) {
        const uint32_t before = w.cache->order.next_frame;
        kvf_decode_args a = test_step_args(&s, &t, 0, first, out);
        a.tokens = &tokens[i];
        test_ok(&w, kvf_decode(w.cache, &a, w.stream));
        assert_int_equal((w.cache->order.next_frame + KVF_FRAMES - before) % KVF_FRAMES, steps[i]);
    }
    test_wait(&w);
    test_release(out);
    test_close(&w, &t);
}

/* A pool that has room for some of the tokens: nothing is appended. */
static void a_full_pool_takes_nothing(void **state)
{
    const uint64_t seed = test_seed(1229);
    kvf_cache_config c = test_config_small();
    test_tokens t;
    test_world w;
    c.tokens_per_step_max = MOST;
    c.host_tokens_max = 64; /* 8 blocks, which are sealed at 80 tokens */
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 120, .seed = seed, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    char *out = test_alloc(MOST * row_bytes(&c));
    const uint32_t tokens = 10;
    test_prefill(&w, s, &t, &(test_range){.count = 78, .chunk = 128}, NULL);
    kvf_decode_args a = test_step_args(&s, &t, 0, 78, out);
    a.tokens = &tokens;
    test_expect(w.runtime, kvf_decode(w.cache, &a, w.stream), KVF_FULL);
    assert_int_equal(kvf_sequence_length(s, 0), 78);
    a.tokens = &(const uint32_t){9};
    test_ok(&w, kvf_decode(w.cache, &a, w.stream));
    assert_int_equal(kvf_sequence_length(s, 0), 87);
    test_wait(&w);
    test_release(out);
    test_close(&w, &t);
}

static void refusals(void **state)
{
    kvf_cache_config c = test_config_small();
    test_tokens t;
    test_world w;
    c.tokens_per_step_max = 4;
    c.select = KVF_SELECT_DYNAMIC;
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 40, .seed = 1, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    void *out = test_alloc(MOST * row_bytes(&c));
    uint32_t tokens = 5;
    kvf_decode_args a = test_step_args(&s, &t, 0, 0, out);
    a.tokens = &tokens;
    test_expect(w.runtime, kvf_decode(w.cache, &a, w.stream), KVF_INVALID);
    assert_string_equal(kvf_runtime_error(w.runtime)->text,
                        "tokens[0] = 5: a step has 1 to tokens_per_step_max = 4 of a sequence; use "
                        "kvf_prefill, several calls, or open the cache with more");
    tokens = 0;
    test_expect(w.runtime, kvf_decode(w.cache, &a, w.stream), KVF_INVALID);
    tokens = 2;
    kvf_page_lists lists = {0};
    test_expect(w.runtime, kvf_select_pages(w.cache, &a, &lists, w.stream), KVF_UNSUPPORTED);
    assert_string_equal(
        kvf_runtime_error(w.runtime)->text,
        "tokens[0] = 2: page lists are of one token of each sequence; leave tokens NULL");
    a.positions = (const uint32_t[]){3, 3};
    test_expect(w.runtime, kvf_decode(w.cache, &a, w.stream), KVF_INVALID);
    assert_int_equal(kvf_sequence_length(s, 0), 0);
    a.positions = (const uint32_t[]){3, 7};
    test_ok(&w, kvf_decode(w.cache, &a, w.stream));
    assert_int_equal(kvf_sequence_position(s, 0, 1), 7);
    test_wait(&w);
    test_release(out);
    test_close(&w, &t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy),
        cmocka_unit_test(sizes),
        cmocka_unit_test(kinds_of_heads),
        cmocka_unit_test(rejected_tokens),
        cmocka_unit_test(tokens_share_a_step),
        cmocka_unit_test(a_full_pool_takes_nothing),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests_name("runtime: several tokens a call", tests, NULL, NULL);
}
