/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A caller's own selection: what a policy chose, given to another cache as ids or scores, has that
 * policy's bits; and any ids at all attend to what a model of a few lines says.
 *
 * The choice of a step is read where the library has it; nothing else is looked at inside.
 */

#include "harness.h"

#include <math.h>

#include "cache.h"

#define ROWS  2u
#define STEPS (TEST_SANITIZED ? 12u : 30u)

static const uint32_t prompts[ROWS] = {290, 63};

typedef enum form { SCORES, IDS } form;

/* Two caches of the same tokens, the second of which is told what the first one chose. */
typedef struct pair {
    kvf_cache_config cc;
    test_world w[2];
    test_tokens t[ROWS];
    kvf_sequence *s[2][ROWS];
    kvf_recording *recording; /* of the second, or NULL */
    test_rows rows[2];        /* [layers, ROWS] */
    float *scores;            /* [layers, ROWS, kv_heads, stride] */
    int32_t *ids;             /* the same shape */
    uint32_t stride;          /* of both */
    size_t heads_given;       /* entries of a row */
    test_random random;
} pair;

static void pair_open(pair *x, const kvf_cache_config *cc, uint64_t seed)
{
    const size_t rows = cc->layers * ROWS;
    *x = (pair){.cc = *cc, .random = {seed}, .stride = cc->tokens_max};
    x->heads_given = (size_t)cc->kv_heads * x->stride;
    for (uint32_t i = 0; i < ROWS; i++)
        test_tokens_make(
            &x->t[i], cc,
            &(test_tokens_spec){
                .count = prompts[i] + STEPS, .seed = seed + i, .sharpness = 2.0f, .topics = 5});
    for (uint32_t c = 0; c < 2; c++) {
        test_world_open(&x->w[c], NULL, cc);
        for (uint32_t i = 0; i < ROWS; i++) {
            x->s[c][i] = test_sequence(&x->w[c]);
            test_fill(&x->w[c], x->s[c][i], &x->t[i], 0, prompts[i]);
        }
        test_wait(&x->w[c]);
        test_rows_open(&x->rows[c], cc, rows);
    }
    x->scores = test_alloc(rows * x->heads_given * sizeof *x->scores);
    x->ids = test_alloc(rows * x->heads_given * sizeof *x->ids);
}

static void pair_close(pair *x)
{
    kvf_recording_destroy(x->recording);
    test_release(x->scores);
    test_release(x->ids);
    for (uint32_t c = 0; c < 2; c++) {
        test_rows_close(&x->rows[c]);
        test_world_close(&x->w[c]);
    }
    for (uint32_t i = 0; i < ROWS; i++)
        test_tokens_free(&x->t[i]);
}

static void lay_out(const pair *x, uint32_t step)
{
    for (uint32_t n = 0; n < 2 * x->cc.layers * ROWS; n++) {
        const uint32_t row = n / 2, i = row % ROWS;
        test_rows_put(&x->rows[n % 2], row, &x->t[i], row / ROWS, prompts[i] + step);
    }
}

static kvf_decode_args call_of(const pair *x, uint32_t cache, uint32_t layer)
{
    return test_rows_args(&x->rows[cache], layer * ROWS, x->s[cache], ROWS, layer);
}

static kvf_decode_args given_of(const pair *x, uint32_t layer, form how)
{
    const size_t first = (size_t)layer * ROWS * x->heads_given;
    kvf_decode_args a = call_of(x, 1, layer);
    a.page_scores = how == SCORES ? x->scores + first : NULL;
    a.page_ids = how == IDS ? x->ids + first : NULL;
    a.page_stride = x->stride;
    return a;
}

/* One list of what is given. */
static size_t list_at(const pair *x, uint32_t layer, uint32_t row, uint32_t head)
{
    return ((size_t)layer * ROWS + row) * x->heads_given + (size_t)head * x->stride;
}

/* The pages of a list in some order, with what names none, or one of them again, among them. */
static void scatter(pair *x, const int32_t *ids, uint32_t count, int32_t *to)
{
    uint32_t at = 0;
    int32_t *mine = test_alloc((count + 1) * sizeof *mine);
    memcpy(mine, ids, count * sizeof *mine);
    for (uint32_t left = count; left > 0; left--) {
        static const int32_t none[] = {-1, INT32_MIN, INT32_MAX, 100000};
        const uint32_t n = test_random_below(&x->random, left);
        if (test_random_below(&x->random, 3) == 0)
            to[at++] = none[test_random_below(&x->random, 4)];
        if (at > 0 && test_random_below(&x->random, 5) == 0)
            to[at] = to[at - 1], at++;
        to[at++] = mine[n];
        mine[n] = mine[left - 1];
    }
    assert_true(at <= x->stride);
    while (at < x->stride)
        to[at++] = -1;
    test_release(mine);
}

/* The first cache's choice of its last step, of a layer, is given to the second. */
static void copy_choice(pair *x, uint32_t layer)
{
    const kvf_cache *cache = x->w[0].cache;
    const kvf_layer_group *of = &cache->layer_groups[layer];
    const kvf_kv_group *kv_group = of->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const uint32_t ids_max = kv_group->dims.ids_max;
    uint32_t stride = 1; /* of the step's scores */
    for (uint32_t i = 0; i < ROWS; i++)
        stride =
            kvf_max_u32(stride, cache->sequences[i].layers[layer].extent.sealed * p->block_pages);
    int32_t *ids = test_alloc((size_t)ROWS * p->lists * ids_max * sizeof *ids);
    uint32_t *count = test_alloc(ROWS * p->lists * sizeof *count);
    float *scores = test_alloc((size_t)ROWS * p->lists * stride * sizeof *scores);
    test_copy(ids, kv_group->tables.now.ids, (size_t)ROWS * p->lists * ids_max * sizeof *ids);
    test_copy(count, kv_group->tables.now.id_count, ROWS * p->lists * sizeof *count);
    test_copy(scores, kv_group->tables.reduced, (size_t)ROWS * p->lists * stride * sizeof *scores);
    for (uint32_t i = 0; i < ROWS * p->lists; i++) {
        const uint32_t head = of->heads ? of->heads[i % p->lists] : i % p->lists;
        const size_t at = list_at(x, layer, i / p->lists, head);
        scatter(x, ids + (size_t)i * ids_max, count[i], x->ids + at);
        for (uint32_t n = 0; n < x->stride; n++)
            x->scores[at + n] = n < stride ? scores[(size_t)i * stride + n] : NAN;
    }
    test_release(ids);
    test_release(count);
    test_release(scores);
}

/* The same step in both; a recording has all layers. */
static void run_step(pair *x, uint32_t step, form how)
{
    const bool replays = x->recording && kvf_replay_is_possible(x->recording);
    lay_out(x, step);
    for (uint32_t l = 0; l < x->cc.layers; l++) {
        const kvf_decode_args a = call_of(x, 0, l);
        test_ok(&x->w[0], kvf_decode(x->w[0].cache, &a, x->w[0].stream));
        test_wait(&x->w[0]);
        copy_choice(x, l);
        const kvf_decode_args b = given_of(x, l, how);
        if (!replays)
            test_ok(&x->w[1], kvf_decode(x->w[1].cache, &b, x->w[1].stream));
    }
    if (replays)
        test_ok(&x->w[1], kvf_replay(x->recording, x->w[1].stream));
    test_wait(&x->w[1]);
}

static void expect_same(const pair *x, uint32_t step, const char *what)
{
    const test_rows *a = &x->rows[0], *b = &x->rows[1];
    const size_t rows = x->cc.layers * ROWS;
    if (memcmp(a->out, b->out, rows * a->out_bytes) != 0 ||
        memcmp(a->lse, b->lse, rows * a->query_heads * sizeof(float)) != 0)
        fail_msg("%s: step %u has other bits than the policy's", what, step);
}

static void expect_same_stats(const pair *x)
{
    kvf_stats a, b;
    kvf_cache_stats(x->w[0].cache, &a);
    kvf_cache_stats(x->w[1].cache, &b);
    assert_int_equal(a.tokens_attended, b.tokens_attended);
    assert_int_equal(a.pages_selected, b.pages_selected);
    assert_int_equal(a.refreshes, b.refreshes);
    assert_true(a.pages_selected > 0);
}

static kvf_cache_config config_of(const char *settings)
{
    kvf_cache_config cc = test_config_small();
    cc.select = KVF_SELECT_DYNAMIC;
    cc.layers = 2;
    cc.sequences_max = ROWS;
    test_set(&cc, settings);
    cc.transfer = test_transfer(cc.transfer);
    return cc;
}

TEST(a_policys_choice_has_its_bits)
{
    static const char *const settings[] = {
        "",
        "digest=codes page_size=4 transfer=gather",
        "select=hybrid static_ratio=0.4 transfer=each",
        "digest=codes page_size=1 sink_tokens=0",
        "digest=codes page_size=4 budget_share=0.5 dtype=bf16 transfer=mapped",
        "digest=codes page_size=4 head_mask=0121 budget_tokens=64 streaming_recent=21",
        "digest=codes page_size=4 head_mask=1101 streaming_recent=21 streaming_sink=3",
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        for (uint32_t how = 0; how < 2; how++) {
            if (!test_takes(2 * i + how))
                continue;
            const kvf_cache_config cc = config_of(settings[i]);
            pair x;
            pair_open(&x, &cc, test_seed(900 + i));
            for (uint32_t step = 0; step < test_afford(STEPS); step++) {
                run_step(&x, step, (form)how);
                expect_same(&x, step, settings[i]);
            }
            expect_same_stats(&x);
            pair_close(&x);
        }
}

/* Replays read what is in the arrays then. */
TEST(a_recorded_step_reads_them_anew)
{
    static const char *const settings[] = {
        "transfer=mapped dtype=bf16 digest=codes page_size=4",
        "transfer=mapped dtype=bf16 digest=codes page_size=4 head_mask=0111 streaming_recent=21",
    };
    if (!test_on_cuda()) {
        print_message("# the host device cannot record\n");
        return;
    }
    for (uint32_t i = 0; i < 4; i++) {
        if (!test_takes(i))
            continue;
        const kvf_cache_config cc = config_of(settings[i / 2]);
        pair x;
        pair_open(&x, &cc, test_seed(930 + i));
        test_ok(&x.w[1], kvf_record_begin(x.w[1].cache, x.s[1], ROWS, x.w[1].stream));
        for (uint32_t l = 0; l < cc.layers; l++) {
            const kvf_decode_args a = given_of(&x, l, i % 2 ? IDS : SCORES);
            test_ok(&x.w[1], kvf_decode(x.w[1].cache, &a, x.w[1].stream));
        }
        test_ok(&x.w[1], kvf_record_end(x.w[1].cache, &x.recording));
        assert_non_null(x.recording);
        for (uint32_t step = 0; step < test_afford(STEPS); step++) {
            run_step(&x, step, i % 2 ? IDS : SCORES);
            expect_same(&x, step, settings[i / 2]);
        }
        expect_same_stats(&x);
        pair_close(&x);
    }
}

/* ---- any ids ---- */

/* Tokens that a list attends to, by a few plain words: sink, window, and of the pages in order each
 * once, sealed ones with a token after the sink, and no more than have room. */
static void tokens_taken(const pair *x, uint32_t length, const int32_t *ids, uint8_t *is_taken)
{
    const kvf_cache_config *c = &x->cc;
    const uint32_t page = c->page_size, block = kvf_cache_memory(x->w[1].cache)->block_size;
    const uint32_t sealed =
        length < c->local_tokens ? 0 : (length - c->local_tokens) / block * block;
    const uint32_t fixed = c->sink_tokens + length - sealed;
    uint32_t left = c->budget_tokens > fixed ? (c->budget_tokens - fixed) / page : 0;
    if (length <= c->budget_tokens)
        left = sealed / page;
    memset(is_taken, 0, c->tokens_max);
    for (uint32_t i = 0; i < x->stride && left > 0; i++) {
        const int64_t p = ids[i];
        if (p < 0 || (p + 1) * page > sealed || (p + 1) * page <= c->sink_tokens || is_taken[p])
            continue;
        is_taken[p] = 1;
        left--;
    }
    for (uint32_t t = length; t-- > 0;) /* in place, from pages to tokens */
        is_taken[t] = t < c->sink_tokens || t >= sealed || is_taken[t / page];
}

/* LSE of a query head over the tokens that are taken, and the first element of the output. */
static double attend_plainly(const pair *x, uint32_t row, uint32_t head, uint32_t length,
                             const uint8_t *is_taken, double *value)
{
    const kvf_cache_config *c = &x->cc;
    const uint32_t kv_head = head / (c->query_heads / c->kv_heads);
    const float *q = (const float *)test_q(&x->t[row], 0, length - 1) + head * c->head_dim;
    double sum = 0.0, out = 0.0;
    for (uint32_t t = 0; t < length; t++) {
        const float *k = (const float *)test_k(&x->t[row], 0, t) + kv_head * c->head_dim;
        const float *v = (const float *)test_v(&x->t[row], 0, t) + kv_head * c->head_dim;
        double logit = 0.0;
        for (uint32_t d = 0; d < c->head_dim; d++)
            logit += (double)q[d] * (double)k[d];
        const double weight = is_taken[t] ? exp(logit / sqrt(c->head_dim)) : 0.0;
        sum += weight;
        out += weight * (double)v[0];
    }
    *value = out / sum;
    return log(sum);
}

/* Lists of one step: all pages, none, few, or numbers of any kind. */
static void draw_lists(pair *x)
{
    for (uint32_t l = 0; l < ROWS * x->cc.kv_heads; l++) {
        int32_t *ids = x->ids + (size_t)l * x->stride;
        const uint32_t kind = test_random_below(&x->random, 4);
        for (uint32_t i = 0; i < x->stride; i++)
            ids[i] = kind == 0   ? (int32_t)(x->stride - 1 - i)
                     : kind == 1 ? -1
                     : kind == 2
                         ? (int32_t)test_random_next(&x->random)
                         : (int32_t)test_random_below(&x->random, 400 / x->cc.page_size) - 9;
    }
}

TEST(any_ids_attend_to_what_they_name)
{
    static const char *const settings[] = {
        "page_size=8", "page_size=4 digest=codes sink_tokens=11 transfer=gather",
        "page_size=1 digest=codes sink_tokens=33",
        "page_size=8 digest=codes budget_tokens=400 local_tokens=40"};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        if (!test_takes(i))
            continue;
        kvf_cache_config cc = config_of(settings[i]);
        cc.layers = 1;
        pair x;
        pair_open(&x, &cc, test_seed(940 + i));
        uint8_t *is_taken = test_alloc(cc.tokens_max);
        for (uint32_t step = 0; step < test_afford(STEPS); step++) {
            lay_out(&x, step);
            draw_lists(&x);
            const kvf_decode_args a = given_of(&x, 0, IDS);
            test_ok(&x.w[1], kvf_decode(x.w[1].cache, &a, x.w[1].stream));
            test_wait(&x.w[1]);
            for (uint32_t n = 0; n < ROWS * cc.query_heads; n++) {
                const uint32_t row = n / cc.query_heads, head = n % cc.query_heads;
                const uint32_t length = prompts[row] + step + 1;
                const uint32_t list = head / (cc.query_heads / cc.kv_heads);
                double value;
                tokens_taken(&x, length, x.ids + list_at(&x, 0, row, list), is_taken);
                const double lse = attend_plainly(&x, row, head, length, is_taken, &value);
                const float *out = (const float *)(void *)x.rows[1].out + (size_t)n * cc.head_dim;
                if (!(fabs(lse - (double)x.rows[1].lse[n]) <= TEST_LSE_TOLERANCE) ||
                    !(fabs(value - (double)out[0]) <= test_tolerance(KVF_FP32)))
                    fail_msg("%s: step %u head %u: LSE %.7g, the model has %.7g", settings[i], step,
                             n, (double)x.rows[1].lse[n], lse);
            }
        }
        test_release(is_taken);
        pair_close(&x);
    }
}

/* ---- several tokens of a sequence, and lists ---- */

/* The sixth token seals a block, so the call is two steps. */
TEST(tokens_of_a_call_have_lists_of_their_own)
{
    kvf_cache_config cc =
        config_of("digest=codes page_size=4 local_tokens=8 tokens_per_step_max=7");
    cc.layers = 1;
    pair x;
    pair_open(&x, &cc, test_seed(960));
    const uint32_t tokens[ROWS] = {7, 4}, rows = 11;
    const size_t entries = rows * x.heads_given;
    int32_t *ids = test_scratch(entries * sizeof *ids);
    test_rows all, one;
    test_rows_open(&all, &cc, rows);
    test_rows_open(&one, &cc, rows);
    for (size_t i = 0; i < entries; i++)
        ids[i] = (int32_t)test_random_below(&x.random, 80);
    for (uint32_t n = 0; n < rows; n++) { /* one by one in the first cache */
        const uint32_t i = n >= tokens[0], token = prompts[i] + n - i * tokens[0];
        test_rows_put(&all, n, &x.t[i], 0, token);
        test_rows_put(&one, n, &x.t[i], 0, token);
        kvf_decode_args a = test_rows_args(&one, n, &x.s[0][i], 1, 0);
        a.page_ids = ids + n * x.heads_given;
        a.page_stride = x.stride;
        test_ok(&x.w[0], kvf_decode(x.w[0].cache, &a, x.w[0].stream));
        test_wait(&x.w[0]);
    }
    kvf_decode_args a = test_rows_args(&all, 0, x.s[1], ROWS, 0);
    a.tokens = tokens;
    a.page_ids = ids;
    a.page_stride = x.stride;
    test_ok(&x.w[1], kvf_decode(x.w[1].cache, &a, x.w[1].stream));
    test_wait(&x.w[1]);
    assert_memory_equal(one.out, all.out, rows * all.out_bytes);
    test_rows_close(&all);
    test_rows_close(&one);
    pair_close(&x);
}

/* Page lists name what was given, beside sink and window. */
TEST(page_lists_have_what_was_given)
{
    kvf_cache_config cc = config_of("digest=codes page_size=4");
    cc.layers = 1;
    pair x;
    pair_open(&x, &cc, test_seed(970));
    const kvf_page_lists to = test_page_lists(x.w[1].cache, ROWS);
    for (size_t i = 0; i < ROWS * x.heads_given; i++)
        x.ids[i] = i % x.stride < 2 ? (int32_t)(i % x.stride) * 2 + 3 : -1; /* 3 and 5 */
    lay_out(&x, 0);
    const kvf_decode_args a = given_of(&x, 0, IDS);
    test_ok(&x.w[1], kvf_select_pages(x.w[1].cache, &a, &to, x.w[1].stream));
    test_wait(&x.w[1]);
    const uint32_t sealed = (prompts[0] + 1 - cc.local_tokens) / 32 * 8; /* pages */
    const uint32_t pages = (prompts[0] + 1 + 3) / 4;
    assert_int_equal(to.indptr[1], 3 + pages - sealed);
    const int32_t want[] = {0, 3, 5, (int32_t)sealed};
    assert_memory_equal(to.indices, want, sizeof want);
    test_page_lists_free(&to);
    pair_close(&x);
}
