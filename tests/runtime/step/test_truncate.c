/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Cutting tokens off a sequence: what comes next equals what comes without them, bit for bit.
 *
 * Two sequences get the same tokens. One of them gets others after those, and loses them again.
 * Then both get the same tail, in steps and chunks, and say the same.
 */

#include <kvferry/prune.h>

#include "retain_world.h"

/* Tokens by prefill and by decode steps. */
typedef struct piece {
    uint32_t chunk; /* tokens of a chunk, or 0: single steps */
    uint32_t count;
} piece;

#define PIECES 4u

typedef struct cut_case {
    kvf_cache_config cc;
    uint32_t arena;        /* as kvf_runtime.prefill_arena */
    uint32_t forks;        /* 1: the cut sequence is a fork, 2: it was forked */
    piece before[PIECES];  /* what stays */
    piece dropped[PIECES]; /* what is cut off */
    piece tail[PIECES];    /* what follows */
} cut_case;

typedef struct walk {
    test_world *w;
    kvf_sequence *s;
    const test_tokens *t;
    char *out; /* where the next output goes */
    uint32_t at;
} walk;

static size_t row_bytes(const test_world *w)
{
    const kvf_cache_config *c = &w->config;
    return (size_t)c->query_heads * c->head_dim * test_dtype_bytes(c->dtype);
}

static uint32_t count_of(const piece *p)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < PIECES; i++)
        count += p[i].count;
    return count;
}

/* Every layer gets the pieces, layer by layer within a piece of a prompt. */
static void go(walk *k, const piece *pieces)
{
    const uint32_t layers = k->w->config.layers;
    const size_t row = row_bytes(k->w);
    for (uint32_t i = 0; i < PIECES; i++) {
        const piece *p = &pieces[i];
        for (uint32_t l = 0; p->chunk && p->count && l < layers; l++)
            test_prefill(
                k->w, k->s, k->t,
                &(test_range){.layer = l, .first = k->at, .count = p->count, .chunk = p->chunk},
                k->out + l * p->count * row);
        for (uint32_t n = 0; !p->chunk && n < p->count; n++)
            for (uint32_t l = 0; l < layers; l++)
                test_decode(k->w, k->s, k->t, l, k->at + n, k->out + (n * layers + l) * row, NULL);
        k->at += p->count;
        k->out += p->count * layers * row;
    }
}

/* Counters that must not depend on what was dropped. */
static void same_stats(const kvf_stats *a, const kvf_stats *b)
{
    assert_int_equal(a->steps, b->steps);
    assert_int_equal(a->tokens_attended, b->tokens_attended);
    assert_int_equal(a->pages_selected, b->pages_selected);
    assert_int_equal(a->hits + a->misses, b->hits + b->misses);
    assert_int_equal(a->bytes_to_host, b->bytes_to_host);
    assert_int_equal(a->refreshes, b->refreshes);
    assert_int_equal(a->verified, b->verified);
    assert_true(a->recall_sum == b->recall_sum);
}

static void same_inside(const test_world *w, const kvf_sequence *s)
{
    const kvf_cache *c = w->cache;
    assert_true(kvf_page_pool_is_valid(&c->kv_groups[0].pool));
    assert_true(test_residency_is_valid(&c->kv_groups[0].residency));
    for (uint32_t l = 0; l < c->config.layers; l++)
        assert_int_equal(s->layers[l].extent.sealed,
                         kvf_sealed_blocks(s->layers[l].kv_group, s->layers[l].extent.length));
}

/* The tail of a sequence that had the dropped tokens, or had not. */
static void run_side(const cut_case *x, const test_tokens branch[2], int cuts, char *out,
                     kvf_stats *stats)
{
    const uint32_t before = count_of(x->before);
    test_world w;
    open_world(&w, &x->cc, x->arena);
    char *scratch = test_alloc((before + count_of(x->dropped)) * x->cc.layers * row_bytes(&w));
    walk k = {&w, test_sequence(&w), &branch[0], scratch, 0};
    kvf_sequence *other = NULL;
    go(&k, x->before);
    const uint32_t held = w.cache->kv_groups[0].pool.free_count;
    if (cuts) {
        if (x->forks)
            test_ok(&w, kvf_sequence_fork(w.cache, k.s, w.stream, &other));
        if (x->forks == 1) {
            kvf_sequence *parent = k.s;
            k.s = other;
            other = parent;
        }
        k.t = &branch[1];
        go(&k, x->dropped);
        test_ok(&w, kvf_sequence_truncate(w.cache, k.s, before, w.stream));
        for (uint32_t l = 0; l < x->cc.layers; l++)
            assert_int_equal(kvf_sequence_length(k.s, l), before);
        assert_int_equal(w.cache->kv_groups[0].pool.free_count, held);
        test_wait(&w);
        same_inside(&w, k.s);
    }
    test_wait(&w);
    kvf_cache_stats_reset(w.cache);
    k = (walk){&w, k.s, &branch[0], out, before};
    go(&k, x->tail);
    test_wait(&w);
    kvf_cache_stats(w.cache, stats);
    same_inside(&w, k.s);
    if (other) { /* and who shared the pages goes on as well */
        char *again = test_alloc(count_of(x->tail) * x->cc.layers * row_bytes(&w));
        k = (walk){&w, other, &branch[0], again, before};
        go(&k, x->tail);
        test_wait(&w);
        assert_memory_equal(again, out, count_of(x->tail) * x->cc.layers * row_bytes(&w));
        test_release(again);
    }
    test_release(scratch);
    test_world_close(&w);
}

static void check_cut(const cut_case *x, uint64_t seed)
{
    const uint32_t before = count_of(x->before), tail = count_of(x->tail);
    const uint32_t dropped = count_of(x->dropped);
    const uint32_t total = before + (tail > dropped ? tail : dropped);
    const size_t bytes = (size_t)tail * x->cc.layers * x->cc.query_heads * x->cc.head_dim *
                         test_dtype_bytes(x->cc.dtype);
    test_tokens branch[2];
    kvf_stats stats[2];
    char *out[2] = {test_alloc(bytes), test_alloc(bytes)};
    test_branches_make(branch, &x->cc, total, before, seed);
    for (int cuts = 0; cuts < 2; cuts++)
        run_side(x, branch, cuts, out[cuts], &stats[cuts]);
    if (memcmp(out[0], out[1], bytes) != 0)
        fail_msg("seed %llu: pages of %u, %u tokens, %u dropped: the tail differs by %g",
                 (unsigned long long)seed, x->cc.page_size, before, dropped,
                 test_distance(out[0], out[1], x->cc.dtype, bytes / test_dtype_bytes(x->cc.dtype)));
    same_stats(&stats[0], &stats[1]);
    for (int i = 0; i < 2; i++) {
        test_release(out[i]);
        test_tokens_free(&branch[i]);
    }
}

static kvf_cache_config cut_config(void)
{
    kvf_cache_config c = test_config_small();
    c.layers = 2;
    c.sequences_max = 2;
    c.verify_interval = 7;
    return c;
}

static piece random_piece(test_random *r, uint32_t most)
{
    const uint32_t is_step = test_random_below(r, 2);
    return (piece){.chunk = is_step ? 0 : 1 + test_random_below(r, 100),
                   .count = test_random_below(r, is_step ? 12 : most)};
}

/* The first one has nothing left after the cut. */
TEST(any_history)
{
    const uint64_t seed = test_seed(907);
    test_random r = {seed};
    static const kvf_select policies[] = {KVF_SELECT_DYNAMIC,   KVF_SELECT_FULL,
                                          KVF_SELECT_STREAMING, KVF_SELECT_QUEST,
                                          KVF_SELECT_ORACLE,    KVF_SELECT_HYBRID};
    for (uint32_t i = 0; i < test_afford(28); i++) {
        cut_case x = {
            .cc = cut_config(), .arena = i % 3, .forks = i ? test_random_below(&r, 3) : 0};
        x.before[0] = (piece){128, 1 + test_random_below(&r, 200)};
        for (uint32_t j = 0; j < 3; j++) {
            x.before[j + 1] = random_piece(&r, 20);
            x.dropped[j] = random_piece(&r, 70);
            x.tail[j + 1] = random_piece(&r, 40);
        }
        x.tail[0] = (piece){0, 5};
        if (i == 0) {
            memset(x.before, 0, sizeof x.before);
            x.dropped[3] = (piece){128, 300};
            x.tail[0] = (piece){100, 200};
        }
        x.cc.select = policies[i % 6];
        x.cc.static_ratio = 0;
        x.cc.page_size = 1u << i % 7;
        x.cc.dtype = (kvf_dtype)test_random_below(&r, 3);
        x.cc.sink_tokens = test_random_below(&r, 40);
        x.cc.budget_tokens = 192 + x.cc.sink_tokens;
        x.cc.transfer = test_transfer(i % 2 ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT);
        check_cut(&x, seed + i);
    }
}

/* ---- the static set ---- */

/* Chosen before the cut, with all keys at every refresh: what was resident has no say. A refresh is
 * in the tail, after as many tokens as were dropped. */
TEST(a_static_set_stays)
{
    const uint64_t seed = test_seed(919);
    for (uint32_t forks = 0; forks < 3; forks++) {
        cut_case x = {.cc = cut_config(),
                      .forks = forks,
                      .before = {{128, 230}, {0, 4}},
                      .dropped = {{0, 5}},
                      .tail = {{0, 24}}};
        x.cc.refresh = KVF_REFRESH_EXACT;
        x.cc.transfer = test_transfer(forks ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT);
        check_cut(&x, seed + forks);
        x.dropped[0] = (piece){40, 64}; /* several tokens at once, all of which are wrong */
        x.dropped[1] = (piece){0, 0};
        x.tail[0].count = 8; /* until the refresh, which has too few queries */
        check_cut(&x, seed + forks);
        x.cc.static_ratio = KVF_STATIC_RATIO_AUTO;
        check_cut(&x, seed + forks);
    }
}

/* Chosen by dropped queries: as if the tokens that stay were a prompt of whose queries only those
 * that are left were kept. */
TEST(a_static_set_is_dissolved)
{
    const uint64_t seed = test_seed(929);
    enum { PROMPT = 200, TAIL = 40 };
    for (uint32_t i = 0; i < 4; i++) {
        /* The first refresh is at 201 tokens, where auto chooses too, the second one at 217. */
        const uint32_t stay = i < 2 ? 210 : 200, end = i < 2 ? 218 : 206, total = stay + TAIL;
        kvf_cache_config c = cut_config();
        test_tokens t;
        test_world w;
        c.layers = 1;
        c.sink_tokens = i % 2 ? 21 : 0;
        c.static_ratio = i < 2 ? 0.5f : KVF_STATIC_RATIO_AUTO;
        c.refresh = KVF_REFRESH_EXACT;
        test_tokens_make(
            &t, &c,
            &(test_tokens_spec){.count = total, .seed = seed + i, .sharpness = 2.0f, .topics = 5});
        open_world(&w, &c, i % 3);
        const size_t row = row_bytes(&w);
        kvf_sequence *cut = test_sequence(&w), *plain = test_sequence(&w);
        char *out[2] = {test_scratch(row), test_scratch(row)};
        test_prefill(&w, cut, &t, &(test_range){.count = PROMPT, .chunk = 128}, NULL);
        for (uint32_t n = PROMPT; n < end; n++)
            test_decode(&w, cut, &t, 0, n, out[0], NULL);
        test_ok(&w, kvf_sequence_truncate(w.cache, cut, stay, w.stream));
        const uint32_t left = c.local_tokens - (end - stay);
        test_prefill(&w, plain, &t,
                     &(test_range){.count = stay - left, .chunk = 128, .append_only = 1}, NULL);
        test_prefill(&w, plain, &t,
                     &(test_range){.first = stay - left, .count = left, .chunk = 128}, NULL);
        for (uint32_t n = stay; n < total; n++) {
            test_decode(&w, cut, &t, 0, n, out[0], NULL);
            test_decode(&w, plain, &t, 0, n, out[1], NULL);
            test_wait(&w);
            assert_memory_equal(out[0], out[1], row);
        }
        same_inside(&w, cut);
        test_close(&w, &t);
    }
}

/* Kept queries are those of the tokens that stay, however many of the newest go with a cut. */
TEST(queries_go_with_their_tokens)
{
    enum { PROMPT = 100, WINDOW = 20 }; /* more than local_tokens */
    for (uint32_t dropped = WINDOW - 2; dropped <= WINDOW + 2; dropped++) {
        kvf_cache_config c = cut_config();
        test_tokens t;
        test_world w;
        c.layers = 1;
        c.observe_window = WINDOW;
        open_world(&w, &c, 0);
        test_tokens_make(&t, &c, &(test_tokens_spec){.count = PROMPT, .seed = 953});
        kvf_sequence *s = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = PROMPT, .chunk = 128}, NULL);
        test_ok(&w, kvf_sequence_truncate(w.cache, s, PROMPT - dropped, w.stream));
        float *work = test_scratch(kvf_scores_work_floats(w.cache) * sizeof *work);
        const kvf_scores_args one = {.window = 1,
                                     .candidates = 1,
                                     .pool_width = 1,
                                     .out = test_scratch(c.kv_heads * sizeof(float))};
        test_expect(w.runtime, kvf_sequence_scores(w.cache, s, &one, work, w.stream),
                    dropped < WINDOW ? KVF_OK : KVF_INVALID);
        test_wait(&w);
        test_close(&w, &t);
    }
}

/* ---- ends ---- */

/* By position, because layers may hold different tokens. */
TEST(layers_are_cut_by_position)
{
    kvf_cache_config c = cut_config();
    test_tokens t;
    test_world w;
    uint32_t positions[60];
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 120, .seed = 941, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    test_prefill(&w, s, &t, &(test_range){.count = 120, .chunk = 128}, NULL);
    for (uint32_t i = 0; i < 60; i++)
        positions[i] = 2 * i;
    test_ok(&w, kvf_prefill(w.cache,
                            &(kvf_prefill_args){.sequence = s,
                                                .layer = 1,
                                                .tokens = 60,
                                                .k = test_k(&t, 1, 0),
                                                .v = test_v(&t, 1, 0),
                                                .positions = positions},
                            w.stream));
    test_ok(&w, kvf_sequence_truncate(w.cache, s, 101, w.stream));
    test_ok(&w, kvf_sequence_truncate(w.cache, s, 101, w.stream));
    assert_int_equal(kvf_sequence_length(s, 0), 101);
    assert_int_equal(kvf_sequence_length(s, 1), 51);
    assert_int_equal(kvf_sequence_position(s, 1, 50), 100);
    test_wait(&w);
    test_close(&w, &t);
}

/* Tokens that were chosen per KV head have no common end. */
TEST(kept_tokens_go_together)
{
    kvf_cache_config c = cut_config();
    test_tokens t;
    test_world w;
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 120, .seed = 947, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    test_fill(&w, s, &t, 0, 100);
    uint32_t ids[2 * 40];
    for (uint32_t i = 0; i < 80; i++)
        ids[i] = i < 40 ? 2 * i : i + 20;
    void *work = test_scratch(kvf_keep_work_bytes(w.cache));
    test_ok(&w, kvf_sequence_keep(w.cache, s, 1, ids, 40, work, w.stream));
    char *out = test_scratch(row_bytes(&w));
    for (uint32_t l = 0; l < c.layers; l++)
        test_decode(&w, s, &t, l, 100, out, NULL);
    test_refused(w.runtime, kvf_sequence_truncate(w.cache, s, 99, w.stream), KVF_UNSUPPORTED,
                 "tokens = 99: layer 1 holds what a prune policy chose of the positions below 100, "
                 "per KV head its own tokens; cut after them, cut all, or fork before pruning");
    assert_int_equal(kvf_sequence_length(s, 0), 101);
    test_ok(&w, kvf_sequence_truncate(w.cache, s, 100, w.stream));
    assert_int_equal(kvf_sequence_length(s, 1), 40);
    test_ok(&w, kvf_sequence_truncate(w.cache, s, 0, w.stream));
    test_wait(&w);
    assert_int_equal(w.cache->kv_groups[0].pool.free_count, w.cache->kv_groups[0].pool.block_count);
    test_close(&w, &t);
}
