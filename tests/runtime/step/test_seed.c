/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Seeding the static set: what is chosen, what is not looked at, when the next refresh comes, and
 * that a full budget stays dense.
 *
 * Looks inside, because pruning does.
 */

#include "retain_world.h"

#include <math.h>

/* Tokens of the static store of one KV head, sink included. */
static uint32_t store_of(const test_world *w, const kvf_sequence *s, uint32_t head,
                         const uint32_t **index)
{
    const kvf_row row = kvf_call_row(s->layers[0].kv_group, &s->layers[0]);
    const kvf_paging *p = &w->cache->kv_groups[0].dims.paging;
    const uint32_t *count = test_seen(row.static_count + head, sizeof *count);
    *index =
        test_seen(row.static_ids + head * kvf_static_room(p), kvf_static_room(p) * sizeof **index);
    return *count;
}

typedef struct seed_case {
    float ratio;
    uint32_t append_only; /* no queries are kept */
    uint32_t arena;
} seed_case;

static void run_seed(const seed_case *x, uint64_t seed)
{
    test_world w;
    test_tokens t;
    test_random r = {seed};
    kvf_cache_config cc = test_config_small();
    cc.budget_tokens = 128;
    cc.static_ratio = x->ratio;
    cc.refresh_interval = 9;
    cc.tokens_max = 400;
    cc.transfer = test_transfer(x->arena ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT);
    const uint32_t n = 301, wanted = 11, steps = 9;
    open_world(&w, &cc, x->arena);
    test_tokens_make(&t, &cc,
                     &(test_tokens_spec){.count = n + steps + 1, .seed = seed, .sharpness = 2.0f});
    kvf_sequence *s = test_sequence(&w);
    test_prefill(&w, s, &t, &(test_range){.count = n, .chunk = 100, .append_only = x->append_only},
                 NULL);
    const uint32_t end = s->layers[0].extent.sealed * kvf_cache_memory(w.cache)->block_size;
    float *scores = test_scratch(cc.kv_heads * n * sizeof *scores);
    unsigned char *is_in = test_scratch(cc.kv_heads * n);
    for (uint32_t i = 0; i < cc.kv_heads * n; i++) /* sink and window change nothing */
        scores[i] = i % n < cc.sink_tokens || i % n >= end ? 1e9f : -INFINITY;
    for (uint32_t i = 0; i < cc.kv_heads * wanted; i++) {
        const uint32_t at =
            i % cc.kv_heads * n + cc.sink_tokens + test_random_below(&r, end - cc.sink_tokens);
        scores[at] = -1.0f - (float)(i % 3);
        is_in[at] = 1;
    }
    scores[cc.sink_tokens + 1] = is_in[cc.sink_tokens + 1] ? -1.0f : NAN;
    test_ok(&w, kvf_sequence_seed(w.cache, s, 0, scores, w.stream));
    test_wait(&w);
    memset(scores, 0xff, cc.kv_heads * n * sizeof *scores);
    for (uint32_t h = 0; h < cc.kv_heads; h++) {
        const uint32_t *index, count = store_of(&w, s, h, &index);
        uint32_t expected = cc.sink_tokens;
        for (uint32_t i = 0; i < n; i++)
            if (is_in[h * n + i])
                assert_int_equal(index[expected++], i);
        assert_int_equal(count, expected);
    }
    kvf_stats before, after;
    float *out = test_scratch(cc.query_heads * cc.head_dim * 4);
    kvf_cache_stats(w.cache, &before);
    for (uint32_t i = 0; i <= steps; i++) {
        test_decode(&w, s, &t, 0, n + i, out, NULL);
        test_wait(&w);
        kvf_cache_stats(w.cache, &after);
        assert_int_equal(after.refreshes - before.refreshes, i == steps);
    }
    test_close(&w, &t);
}

TEST(a_seed_is_the_static_set)
{
    const uint64_t seed = test_seed(310);
    static const seed_case cases[] = {
        {0.25f, 0, 0}, {0.25f, 1, 1}, {1.0f, 0, 1}, {0.25f, 0, 1}, {KVF_STATIC_RATIO_AUTO, 1, 0},
    };
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++)
        run_seed(&cases[i], seed + i);
}

/* Every token in the budget: whatever is seeded, attention is dense. */
TEST(a_seed_with_full_budget_is_dense)
{
    const uint64_t seed = test_seed(77);
    const float ratios[] = {0.5f, 1.0f, KVF_STATIC_RATIO_AUTO};
    for (uint32_t i = 0; i < 3; i++) {
        test_world w;
        test_tokens t;
        test_random r = {seed + i};
        kvf_cache_config cc = test_config_small();
        cc.static_ratio = ratios[i];
        cc.budget_tokens = 512;
        cc.verify_interval = 1;
        const uint32_t n = 200, steps = 20;
        open_world(&w, &cc, 0);
        test_tokens_make(&t, &cc,
                         &(test_tokens_spec){.count = n + steps, .seed = seed, .sharpness = 2.0f});
        kvf_sequence *s = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = n, .chunk = 100}, NULL);
        float *scores = test_scratch(cc.kv_heads * n * sizeof *scores);
        float *out = test_scratch(cc.query_heads * cc.head_dim * 4);
        for (uint32_t k = 0; k < cc.kv_heads * n; k++)
            scores[k] = (float)test_random_below(&r, 20);
        test_ok(&w, kvf_sequence_seed(w.cache, s, 0, scores, w.stream));
        for (uint32_t k = 0; k < steps; k++)
            test_decode(&w, s, &t, 0, n + k, out, NULL);
        test_wait(&w);
        kvf_stats stats;
        kvf_cache_stats(w.cache, &stats);
        assert_true(stats.recall_sum > 0.9999 * (double)stats.verified);
        assert_true(stats.verified > 0 && stats.error_max < 1e-4);
        test_close(&w, &t);
    }
}
