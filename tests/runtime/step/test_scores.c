/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of tokens against a restatement in double: kept queries and given ones, every way to pool
 * and to reduce, ties, constant rows, windows as long as the prompt.
 *
 * Looks inside, because pruning does.
 */

#include "cache.h"
#include "naive_scores.h"
#include "retain_world.h"

#include <math.h>

typedef struct scores_case {
    kvf_scores_args args; /* of kept queries if q is NULL */
    uint32_t length;
    kvf_dtype dtype;
    uint32_t kv_heads, group, page_size;
    kvf_select select;
    uint32_t is_constant; /* all keys and queries are one row */
    uint32_t rounds;      /* calls that add up */
} scores_case;

static void flatten(test_tokens *t)
{
    const size_t bytes = t->head_dim * test_dtype_bytes(t->dtype);
    for (uint32_t i = 0; i < t->count; i++) {
        for (uint32_t h = 0; h < t->query_heads; h++)
            memcpy((char *)test_q(t, 0, i) + h * bytes, test_q(t, 0, 0), bytes);
        for (uint32_t h = 0; h < t->kv_heads; h++)
            memcpy((char *)test_k(t, 0, i) + h * bytes, test_k(t, 0, 0), bytes);
    }
}

static void compare(const float *got, const double *want, size_t count, double rounds,
                    double tolerance, const char *what)
{
    for (size_t i = 0; i < count; i++) {
        const double expected = want[i] * rounds;
        if (!(fabs((double)got[i] - expected) <= tolerance * (1.0 + fabs(expected)) * rounds))
            fail_msg("%s[%zu] = %g, not %g", what, i, (double)got[i], expected);
    }
}

/* Tokens that every query sees and that are all the same tie to the last bit, wherever they lie;
 * averages do where no zero was padded. */
static void check_ties(const kvf_scores_args *a, uint32_t first, const float *out, uint32_t rows)
{
    const uint32_t n = a->candidates - a->begin, half = a->pool_width / 2;
    for (uint32_t h = 0; h < rows && a->candidates <= first; h++)
        for (uint32_t i = half + 1; i + half < n; i++)
            assert_memory_equal(&out[h * n + i], &out[h * n + half], sizeof *out);
}

static void run_scores(const scores_case *x, uint64_t seed)
{
    test_world w;
    test_tokens t;
    kvf_cache_config cc = test_config_small();
    cc.dtype = x->dtype;
    cc.kv_heads = x->kv_heads;
    cc.query_heads = x->kv_heads * x->group;
    cc.page_size = x->page_size;
    cc.budget_tokens = 4 * x->page_size + 64;
    cc.select = x->select;
    cc.tokens_max = 512;
    cc.observe_window = x->args.q ? 1 : x->args.window;
    test_tokens_make(&t, &cc,
                     &(test_tokens_spec){.count = x->length, .seed = seed, .sharpness = 2.0f});
    if (x->is_constant)
        flatten(&t);
    test_world_open(&w, NULL, &cc);
    kvf_sequence *s = test_sequence(&w);
    test_prefill(&w, s, &t, &(test_range){.count = x->length, .chunk = 96}, NULL);
    kvf_scores_args a = x->args;
    const uint32_t first = a.q ? a.first : x->length - a.window;
    if (a.q)
        a.q = test_q(&t, 0, first);
    const size_t n = a.candidates - a.begin;
    const size_t all = n * cc.kv_heads, each = n * cc.query_heads;
    float *out = test_scratch(all * sizeof *out), *heads = test_scratch(each * sizeof *heads);
    float *work = test_scratch(kvf_scores_work_floats(w.cache) * sizeof *work);
    double *want = test_scratch(all * sizeof *want),
           *want_heads = test_scratch(each * sizeof *want_heads);
    a.out = out;
    a.heads = x->args.heads ? heads : NULL;
    for (uint32_t i = 0; i < x->rounds; i++) {
        a.accumulates = i > 0;
        test_ok(&w, kvf_sequence_scores(w.cache, s, &a, work, w.stream));
    }
    test_wait(&w);
    a.first = first;
    naive_token_scores(&t, NULL, &a, want, want_heads);
    const double tolerance = a.is_raw ? 2e-4 : 2e-5; /* sums of fp32 */
    compare(out, want, all, x->rounds, tolerance, "out");
    if (x->is_constant)
        check_ties(&a, first, out, cc.kv_heads);
    if (a.heads)
        compare(heads, want_heads, each, x->rounds, tolerance, "heads");
    test_close(&w, &t);
}

static uint32_t between(test_random *r, uint32_t low, uint32_t high)
{
    return low + test_random_below(r, high - low + 1);
}

TEST(scores_are_what_they_say)
{
    const uint64_t seed = 20260;
    static float some;
    static const kvf_select selects[] = {KVF_SELECT_FULL, KVF_SELECT_STREAMING, KVF_SELECT_HYBRID,
                                         KVF_SELECT_QUEST};
    test_random r = {seed};
    test_seed_print(__func__, seed);
    for (uint32_t i = 0; i < (TEST_SANITIZED || test_on_cuda() ? 24 : 60); i++) {
        scores_case x = {.dtype = (kvf_dtype)(i % 3),
                         .kv_heads = between(&r, 1, 3),
                         .group = i < 9        ? i
                                  : i % 9 == 8 ? between(&r, 17, 128)
                                               : between(&r, 1, 8),
                         .page_size = 8u << test_random_below(&r, 2),
                         .select = selects[i % 4],
                         .is_constant = i % 7 == 3,
                         .rounds = between(&r, 1, 2)};
        x.group = x.group ? x.group : 1;
        kvf_scores_args *a = &x.args;
        const bool given = i % 3 == 1;
        a->window = given ? between(&r, 1, 200) : between(&r, 1, 40);
        x.length = a->window + (i % 5 == 0 ? i % 2 : between(&r, 1, 250));
        a->first = given ? test_random_below(&r, x.length - a->window + 1) : 0;
        a->q = given ? &some : NULL;
        a->candidates = i % 4 ? x.length - a->window : between(&r, 0, x.length);
        a->begin = i % 6 == 4 ? test_random_below(&r, given ? a->first + 1 : a->candidates + 1) : 0;
        if (a->begin > a->candidates)
            a->begin = 0;
        a->window_mean = test_random_below(&r, 2);
        a->is_weighted = test_random_below(&r, 2);
        a->is_raw = i % 8 == 6;
        a->pool = (kvf_pool_kind)test_random_below(&r, 2);
        a->pool_width = 2 * test_random_below(&r, 4) + 1;
        a->group_reduce = (kvf_group_reduce)test_random_below(&r, 3);
        a->heads = i % 2 ? &some : NULL;
        run_scores(&x, seed + i);
    }
}

/* Every query of a prompt, chunk after chunk into rows as long as the prompt. */
TEST(chunks_add_up_to_the_prompt)
{
    const uint64_t seed = 640;
    const uint32_t n = 150, chunk = 47;
    test_world w;
    test_tokens t;
    kvf_cache_config cc = test_config_small();
    cc.observe_window = 1;
    test_seed_print(__func__, seed);
    test_open(&w, &t, &cc, &(test_tokens_spec){.count = n, .seed = seed, .sharpness = 2.0f});
    kvf_sequence *s = test_sequence(&w);
    const size_t all = (size_t)cc.kv_heads * n, each = (size_t)cc.query_heads * n;
    float *out = test_scratch(all * sizeof *out);
    float *work = test_scratch(kvf_scores_work_floats(w.cache) * sizeof *work);
    double *want = test_scratch(all * sizeof *want),
           *want_heads = test_scratch(each * sizeof *want_heads);
    for (uint32_t kind = 0; kind < 3; kind++) {
        test_ok(&w, kvf_sequence_clear(w.cache, s));
        memset(out, 0, all * sizeof *out);
        kvf_scores_args a = {.candidates = n,
                             .pool_width = 1,
                             .group_reduce = (kvf_group_reduce)kind,
                             .accumulates = 1,
                             .out = out};
        for (uint32_t first = 0; first < n; first += a.window) {
            a.first = first;
            a.window = n - first < chunk ? n - first : chunk;
            a.q = test_q(&t, 0, first);
            test_prefill(&w, s, &t,
                         &(test_range){.first = first, .count = a.window, .chunk = chunk}, NULL);
            test_ok(&w, kvf_sequence_scores(w.cache, s, &a, work, w.stream));
            test_wait(&w);
        }
        if (kind == KVF_GROUP_MAX) /* of each chunk, which is another number */
            continue;
        a.first = 0;
        a.window = n;
        naive_token_scores(&t, NULL, &a, want, want_heads);
        compare(out, want, all, 1.0, 2e-5, "out");
    }
    test_close(&w, &t);
}
