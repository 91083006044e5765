/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What pruning does to a cache: scores against a restatement in double, keeping against a fresh
 * sequence that was given only those tokens, seeding, clearing.
 *
 * Looks inside, because pruning does. Where bytes are moved, outputs are compared bit for bit.
 */

#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "retain.h"

static void *must(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    assert_non_null(p);
    memset(p, 0, (bytes + 127) / 64 * 64);
    return p;
}

/* ---- scores ---------------------------------------------------------------------------------- */

typedef struct scores_case {
    kvf_scores_args args; /* of kept queries if q is NULL */
    uint32_t length;
    kvf_dtype dtype;
    uint32_t kv_heads, group, page_size;
    kvf_select select;
    uint32_t is_constant; /* all keys and queries are one row */
    uint32_t rounds;      /* calls that add up */
} scores_case;

static double product(const test_tokens *t, uint32_t query, uint32_t head, uint32_t key,
                      uint32_t kv_head)
{
    const size_t d = t->head_dim;
    const void *q = test_q(t, 0, query), *k = test_k(t, 0, key);
    double sum = 0.0;
    for (uint32_t i = 0; i < d; i++)
        sum += (double)kvf_element_get(q, t->dtype, head * d + i) *
               (double)kvf_element_get(k, t->dtype, kv_head * d + i);
    return sum;
}

static double bf16(double x, uint32_t rounds)
{
    return rounds ? (double)kvf_bf16_to_float(kvf_bf16_from_float((float)x)) : x;
}

/* s[begin .. candidates) of one query head, queries first .. first + window - 1. */
static void head_scores(const test_tokens *t, const kvf_scores_args *a, uint32_t first,
                        uint32_t head, uint32_t kv_head, double *s)
{
    const double scale = (double)(1.0f / sqrtf((float)t->head_dim));
    double *x = malloc(t->count * sizeof *x);
    assert_non_null(x);
    for (uint32_t j = 0; j < a->candidates; j++)
        s[j] = 0.0;
    for (uint32_t w = 0; w < a->window; w++) {
        const uint32_t end = first + w + 1; /* sees itself */
        double top = -INFINITY, sum = 0.0;
        for (uint32_t j = a->begin; j < end; j++) {
            x[j] = bf16(product(t, first + w, head, j, kv_head), a->rounds_bf16);
            if (!a->is_raw)
                x[j] = bf16(x[j] * scale, a->rounds_bf16);
            top = fmax(top, x[j]);
        }
        for (uint32_t j = a->begin; j < end; j++)
            sum += exp(x[j] - top);
        double weight = a->is_weighted ? (w + 1.0) / a->window : 1.0;
        weight /= a->window_mean ? a->window : 1;
        for (uint32_t j = a->begin; j < end && j < a->candidates; j++)
            s[j] += (a->is_raw ? x[j] : bf16(exp(x[j] - top) / sum, a->rounds_bf16)) * weight;
    }
    for (uint32_t j = 0; j < a->candidates; j++)
        s[j] = bf16(s[j], a->rounds_bf16);
    free(x);
}

static double pooled(const kvf_scores_args *a, const double *s, uint32_t j)
{
    const int64_t half = a->pool_width / 2;
    double sum = 0.0, top = -INFINITY;
    for (int64_t i = (int64_t)j - half; i <= (int64_t)j + half; i++) {
        if (i < (int64_t)a->begin || i >= (int64_t)a->candidates)
            continue;
        sum += s[i];
        top = fmax(top, s[i]);
    }
    return bf16(a->pool == KVF_POOL_MAX ? top : sum / a->pool_width, a->rounds_bf16);
}

/* out [kv_heads, candidates - begin], heads [query heads, candidates - begin]. */
static void restate(const test_tokens *t, const kvf_scores_args *a, uint32_t first, double *out,
                    double *heads)
{
    const uint32_t group = t->query_heads / t->kv_heads, n = a->candidates - a->begin;
    double *s = malloc((a->candidates + 1) * sizeof *s);
    assert_non_null(s);
    for (uint32_t h = 0; h < t->kv_heads; h++)
        for (uint32_t g = 0; g < group; g++) {
            head_scores(t, a, first, h * group + g, h, s);
            for (uint32_t i = 0; i < n; i++) {
                double *to = &out[h * n + i];
                const double x = pooled(a, s, a->begin + i);
                heads[(h * group + g) * n + i] = s[a->begin + i];
                if (a->group_reduce == KVF_GROUP_MAX)
                    *to = g == 0 || x > *to ? x : *to;
                else
                    *to =
                        (g == 0 ? 0.0 : *to) + x / (a->group_reduce == KVF_GROUP_SUM ? 1.0 : group);
            }
        }
    free(s);
}

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
    float *out = must(all * sizeof *out), *heads = must(each * sizeof *heads);
    float *work = must(kvf_scores_work_floats(w.cache) * sizeof *work);
    double *want = must(all * sizeof *want), *want_heads = must(each * sizeof *want_heads);
    a.out = out;
    a.heads = x->args.heads ? heads : NULL;
    for (uint32_t i = 0; i < x->rounds; i++) {
        a.accumulates = i > 0;
        test_ok(&w, kvf_sequence_scores(w.cache, s, &a, work, w.stream));
    }
    test_wait(&w);
    restate(&t, &a, first, want, want_heads);
    /* Sums of fp32, or neighbours in bf16 of logits up to 16 and of everything after them. */
    const double tolerance = a.rounds_bf16 ? 0.15 : a.is_raw ? 2e-4 : 2e-5;
    compare(out, want, all, x->rounds, tolerance, "out");
    if (a.heads)
        compare(heads, want_heads, each, x->rounds, tolerance, "heads");
    test_world_close(&w);
    test_tokens_free(&t);
    free(out);
    free(heads);
    free(work);
    free(want);
    free(want_heads);
}

static uint32_t between(test_random *r, uint32_t low, uint32_t high)
{
    return low + test_random_below(r, high - low + 1);
}

static void scores_are_what_they_say(void **state)
{
    (void)state;
    const uint64_t seed = 20260;
    static float some;
    static const kvf_select selects[] = {KVF_SELECT_FULL, KVF_SELECT_STREAMING, KVF_SELECT_HYBRID,
                                         KVF_SELECT_QUEST};
    test_random r = {seed};
    test_seed_print(__func__, seed);
    for (uint32_t i = 0; i < (TEST_SANITIZED || test_on_cuda() ? 24 : 60); i++) {
        scores_case x = {.dtype = (kvf_dtype)(i % 3),
                         .kv_heads = between(&r, 1, 3),
                         .group = i < 9 ? i : between(&r, 1, 8),
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
        a->rounds_bf16 = i % 8 == 5 && !given;
        a->pool = (kvf_pool_kind)test_random_below(&r, 2);
        a->pool_width = 2 * test_random_below(&r, 4) + 1;
        a->group_reduce = (kvf_group_reduce)test_random_below(&r, 3);
        a->heads = i % 2 ? &some : NULL;
        run_scores(&x, seed + i);
    }
}

/* ---- keeping --------------------------------------------------------------------------------- */

/* ids [kv_heads, count], ascending; the last `window` tokens and, if asked, the first `front` are
 * among them. */
typedef struct subset {
    uint32_t length, count, window, front;
} subset;

static uint32_t *choose(test_random *r, uint32_t kv_heads, const subset *x)
{
    uint32_t *ids = must((size_t)kv_heads * x->count * sizeof *ids);
    for (uint32_t h = 0; h < kv_heads; h++) {
        uint32_t *to = ids + h * x->count, n = 0;
        for (uint32_t j = 0; j < x->length; j++) {
            const uint32_t left = x->length - j, needed = x->count - n;
            const uint32_t sure = x->window < needed ? x->window : needed;
            const bool is_sure = j < x->front || left <= sure;
            const uint32_t free_left = left - sure, free_needed = needed - sure;
            if (needed && (is_sure || test_random_below(r, free_left) < free_needed))
                to[n++] = j;
        }
        assert_int_equal(n, x->count);
    }
    return ids;
}

/* A fresh sequence with what `ids` say of tokens of layer 0. */
static void append_only(test_world *w, kvf_sequence *s, const test_tokens *t, const uint32_t *ids,
                        uint32_t count)
{
    const size_t row = t->head_dim * test_dtype_bytes(t->dtype);
    char *k = must(t->kv_heads * row), *v = must(t->kv_heads * row);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t position = 0;
        for (uint32_t h = 0; h < t->kv_heads; h++) {
            const uint32_t id = ids[h * count + i];
            position = id > position ? id : position;
            memcpy(k + h * row, (char *)test_k(t, 0, id) + h * row, row);
            memcpy(v + h * row, (char *)test_v(t, 0, id) + h * row, row);
        }
        test_ok(w,
                kvf_prefill(w->cache,
                            &(kvf_prefill_args){
                                .sequence = s, .tokens = 1, .k = k, .v = v, .positions = &position},
                            w->stream));
        test_wait(w);
    }
    free(k);
    free(v);
}

static void same_layer(test_world *w, const kvf_sequence *a, const kvf_sequence *b)
{
    const kvf_paging *p = &w->cache->dims.paging;
    const uint32_t n = kvf_sequence_length(a, 0);
    test_wait(w);
    assert_int_equal(n, kvf_sequence_length(b, 0));
    assert_int_equal(a->layers[0].sealed, b->layers[0].sealed);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(kvf_sequence_position(a, 0, i), kvf_sequence_position(b, 0, i));
    for (uint32_t h = 0; h < p->kv_heads; h++)
        for (uint32_t i = 0; i < a->layers[0].sealed; i++)
            assert_memory_equal(kvf_page_address(a, 0, h, i), kvf_page_address(b, 0, h, i),
                                kvf_page_bytes(&p->shape));
    assert_true(kvf_page_pool_is_valid(&w->cache->pool));
}

/* Both decode the same tokens; every output must have the same bits. */
static void same_decode(test_world *w, kvf_sequence *a, kvf_sequence *b, const test_tokens *t,
                        uint32_t first, uint32_t steps)
{
    const size_t row = (size_t)t->query_heads * t->head_dim * test_dtype_bytes(t->dtype);
    char *out[2] = {must(row), must(row)};
    for (uint32_t i = 0; i < steps; i++) {
        test_decode(w, a, t, 0, first + i, out[0], NULL);
        test_decode(w, b, t, 0, first + i, out[1], NULL);
        test_wait(w);
        assert_memory_equal(out[0], out[1], row);
    }
    free(out[0]);
    free(out[1]);
}

typedef struct keep_case {
    kvf_cache_config cc;
    subset subset;
    uint32_t chunk, steps;
    uint32_t decoded; /* of the length, by decode steps */
} keep_case;

static void run_keep(const keep_case *x, uint64_t seed)
{
    test_world w;
    test_tokens t;
    test_random r = {seed};
    const uint32_t n = x->subset.length;
    test_tokens_make(
        &t, &x->cc,
        &(test_tokens_spec){.count = n + x->steps, .seed = seed, .sharpness = 2.0f, .topics = 4});
    test_world_open(&w, NULL, &x->cc);
    kvf_sequence *s = test_sequence(&w), *fresh = test_sequence(&w);
    const size_t row = (size_t)t.query_heads * t.head_dim * test_dtype_bytes(t.dtype);
    char *out = must(row);
    test_prefill(&w, s, &t, &(test_range){.count = n - x->decoded, .chunk = x->chunk}, NULL);
    for (uint32_t i = n - x->decoded; i < n; i++)
        test_decode(&w, s, &t, 0, i, out, NULL);
    uint32_t *ids = choose(&r, x->cc.kv_heads, &x->subset);
    void *work = must(kvf_keep_work_bytes(w.cache));
    uint32_t *given = must(x->cc.kv_heads * x->subset.count * sizeof *ids);
    memcpy(given, ids, x->cc.kv_heads * x->subset.count * sizeof *ids);
    test_ok(&w, kvf_sequence_keep(w.cache, s, 0, given, x->subset.count, work, w.stream));
    memset(given, 0xff, x->cc.kv_heads * x->subset.count * sizeof *ids);
    test_wait(&w);
    memset(work, 0xff, kvf_keep_work_bytes(w.cache));
    append_only(&w, fresh, &t, ids, x->subset.count);
    same_layer(&w, s, fresh);
    same_decode(&w, s, fresh, &t, n, x->steps);
    kvf_sequence_destroy(s);
    kvf_sequence_destroy(fresh);
    test_wait(&w);
    assert_int_equal(w.cache->pool.free_count, w.cache->dims.block_count);
    test_world_close(&w);
    test_tokens_free(&t);
    free(out);
    free(ids);
    free(given);
    free(work);
}

static kvf_cache_config config_full(void)
{
    kvf_cache_config cc = test_config_small();
    cc.select = KVF_SELECT_FULL;
    cc.tokens_max = 1024;
    cc.sequences_max = 3;
    cc.observe_window = 8;
    return cc;
}

static void kept_tokens_are_a_fresh_sequence(void **state)
{
    (void)state;
    const uint64_t seed = 4711;
    test_random r = {seed};
    test_seed_print(__func__, seed);
    for (uint32_t i = 0; i < (TEST_SANITIZED || test_on_cuda() ? 16 : 40); i++) {
        keep_case x = {.cc = config_full(), .chunk = between(&r, 16, 128), .steps = 20};
        x.cc.dtype = (kvf_dtype)(i % 3);
        x.cc.kv_heads = between(&r, 1, 3);
        x.cc.query_heads = x.cc.kv_heads * 2;
        x.cc.prefill_chunk_max = between(&r, x.chunk, 200);
        x.cc.transfer = test_transfer(i % 2 ? KVF_TRANSFER_DIRECT : KVF_TRANSFER_GATHER);
        x.subset.length = between(&r, 2, 500);
        x.decoded = i % 5 == 2 ? between(&r, 0, x.subset.length - 1) % 40 : 0;
        x.subset.count = i % 6 == 5 ? x.subset.length : between(&r, 1, x.subset.length);
        x.subset.window = between(&r, 0, 20);
        x.subset.front = i % 3 == 0 ? x.subset.count / 2 : 0;
        if (x.subset.window + x.subset.front > x.subset.count)
            x.subset.window = x.subset.front = 0;
        run_keep(&x, seed + i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_are_what_they_say),
        cmocka_unit_test(kept_tokens_are_a_fresh_sequence),
    };
    return cmocka_run_group_tests_name("retain", tests, NULL, NULL);
}
