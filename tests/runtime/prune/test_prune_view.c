/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The pruner's view for a policy: scores, profiles, raw products and sums, compared with a
 * restatement in double.
 */

#include "prune_rig.h"

#include <math.h>

#include "naive_scores.h"

/* Queries first .. count-1 of these tokens over the first `candidates`, maximum over `width`, mean
 * over the group. */
static void expect_scores(const rig *r, const sight *s, const progress *p, uint32_t first,
                          uint32_t width)
{
    const uint32_t n = s->view.candidates;
    const kvf_scores_args a = {.layer = s->view.layer,
                               .window = p->count - first,
                               .first = first,
                               .candidates = n,
                               .pool = KVF_POOL_MAX,
                               .pool_width = width,
                               .group_reduce = KVF_GROUP_MEAN_SOFTMAX};
    double want[KV_HEADS * PROMPT], heads[HEADS * PROMPT];
    naive_token_scores(&r->t, p->tokens, &a, want, heads);
    for (uint32_t i = 0; i < KV_HEADS * n; i++) {
        const double got = (double)s->scores[i];
        /* A sum of up to 160 probabilities in fp32. */
        if (!(fabs(got - want[i]) <= 2e-5 * (want[i] + 1.0)))
            fail_msg("layer %u, KV head %u, token %u: score %g, should be %g", s->view.layer, i / n,
                     i % n, got, want[i]);
    }
}

static void expect_view(const sight *s, uint32_t layer, const progress *p, uint32_t candidates)
{
    assert_int_equal(s->view.layer, layer);
    assert_int_equal(s->view.layers, LAYERS);
    assert_int_equal(s->view.kv_heads, KV_HEADS);
    assert_int_equal(s->view.query_heads, HEADS);
    assert_int_equal(s->view.tokens, p->count);
    assert_int_equal(s->view.prompt, PROMPT);
    assert_int_equal(s->view.window, WINDOW);
    assert_int_equal(s->view.candidates, candidates);
    assert_int_equal(s->view.scores != NULL, candidates > 0);
    assert_memory_equal(s->positions, p->positions, p->count * sizeof *p->positions);
}

/* Layer by layer, with what went on at layer 1; twice, for state is zeroed. */
TEST(policies_see_what_the_header_says)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    r.told.keep[0] = 5;
    r.told.propagate[1] = 2;
    r.config.settings.pool = KVF_POOL_MAX;
    r.config.settings.pool_width = 3;
    rig_prune(&r);
    for (uint32_t again = 0; again < 2; again++) {
        r.told.calls = 0;
        progress p = rig_begin(&r, PROMPT);
        while (p.layer < LAYERS) {
            const uint32_t layer = p.layer;
            const progress before = p;
            rig_fill_layer(&r, &p);
            test_ok(&r.w, rig_prune_layer(&r, &p));
            const sight *s = &r.told.sights[layer];
            expect_view(s, layer, &before, before.count - WINDOW);
            assert_int_equal(s->count, layer);
            assert_int_equal(s->has_profile, 0);
            expect_scores(&r, s, &before, before.count - WINDOW, 3);
        }
        assert_int_equal(r.told.calls, LAYERS);
        assert_in_range(p.count, PROMPT / 2, PROMPT / 2 + WINDOW);
        kvf_sequence_destroy(p.sequence);
    }
    rig_close(&r);
}

TEST(profile_comes_with_scores_and_alone)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    for (uint32_t with = 0; with < 2; with++) {
        rig_open(&r, &cc, KVF_PRUNE_PROFILE | (with ? KVF_PRUNE_SCORES : 0));
        rig_prune(&r);
        const progress p = rig_run(&r, PROMPT);
        const sight *s = &r.told.sights[1];
        assert_int_equal(s->view.candidates, with ? PROMPT - WINDOW : 0);
        assert_int_equal(s->has_profile, 1);
        enum { SCORED = PROMPT - WINDOW };
        const kvf_scores_args args = {
            .layer = 1, .window = WINDOW, .first = SCORED, .candidates = SCORED, .pool_width = 1};
        double out[KV_HEADS * SCORED], heads[HEADS * SCORED];
        naive_token_scores(&r.t, p.tokens, &args, out, heads);
        for (uint32_t head = 0; head < HEADS; head++) {
            const double *a = heads + head * SCORED;
            double sum = 0.0, entropy = 0.0;
            for (uint32_t j = 0; j < SCORED; j++)
                sum += a[j];
            for (uint32_t j = 0; j < SCORED; j++)
                entropy -= a[j] > 0.0 ? a[j] / sum * log(a[j] / sum) : 0.0;
            assert_true(fabs(entropy - (double)s->profile[head].entropy) < 1e-3);
        }
        kvf_sequence_destroy(p.sequence);
        rig_close(&r);
    }
}

TEST(logits_are_products_of_the_last_query)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_LOGITS);
    r.config.settings.group_reduce = KVF_GROUP_SUM;
    r.config.settings.pool_width = 5; /* not pooled, whatever this says */
    rig_prune(&r);
    const progress p = rig_run(&r, PROMPT);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const sight *s = &r.told.sights[layer];
        expect_view(s, layer, &p, PROMPT);
        const kvf_scores_args a = {.layer = layer,
                                   .is_raw = 1,
                                   .window = 1,
                                   .first = PROMPT - 1,
                                   .candidates = PROMPT,
                                   .pool_width = 1,
                                   .group_reduce = KVF_GROUP_SUM};
        double want[KV_HEADS * PROMPT], heads[HEADS * PROMPT];
        naive_token_scores(&r.t, p.tokens, &a, want, heads);
        for (uint32_t i = 0; i < KV_HEADS * PROMPT; i++)
            assert_true(fabs(want[i] - (double)s->scores[i]) < 1e-3);
    }
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* Two prompts whose chunks and layers alternate; each has sums of its own. */
TEST(sums_are_of_all_queries)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SUMS);
    r.told.propagate[0] = 3;
    rig_prune(&r);
    progress a = rig_begin(&r, PROMPT), b = rig_begin(&r, PROMPT);
    while (a.layer < LAYERS) {
        const progress before = a;
        const uint32_t layer = a.layer;
        for (uint32_t first = 0; first < a.count; first += CHUNK) {
            rig_fill_chunk(&r, &a, first, CHUNK, true);
            rig_fill_chunk(&r, &b, first, CHUNK, true);
        }
        r.told.calls = 0;
        test_ok(&r.w, rig_prune_layer(&r, &a));
        test_ok(&r.w, rig_prune_layer(&r, &b));
        for (uint32_t i = 0; i < 2; i++) {
            expect_view(&r.told.sights[i], layer, &before, before.count);
            expect_scores(&r, &r.told.sights[i], &before, 0, 1);
        }
        assert_memory_equal(r.told.sights[0].scores, r.told.sights[1].scores,
                            KV_HEADS * before.count * sizeof(float));
    }
    kvf_prune_stats stats;
    kvf_prune_stats_get(r.prune, &stats);
    assert_int_equal(stats.prompts, 2);
    assert_int_equal(stats.tokens_full, 2 * LAYERS * PROMPT);
    assert_int_equal(stats.tokens_computed, 2 * (PROMPT + (LAYERS - 1) * a.count));
    assert_true(stats.observe_ns > 0);
    kvf_sequence_destroy(a.sequence);
    kvf_sequence_destroy(b.sequence);
    rig_close(&r);
}

/* A window as long as what goes on leaves nothing to look at, and nothing to drop. */
TEST(nothing_before_the_window_is_no_score)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES | KVF_PRUNE_PROFILE);
    r.told.propagate[0] = PROMPT; /* token 0 and the window */
    rig_prune(&r);
    const progress p = rig_run(&r, WINDOW + 1);
    assert_int_equal(p.count, WINDOW + 1);
    const progress q = rig_run(&r, WINDOW);
    assert_int_equal(r.told.calls, 2 * LAYERS);
    assert_int_equal(r.told.sights[LAYERS].view.candidates, 0);
    assert_null(r.told.sights[LAYERS].view.scores);
    assert_int_equal(r.told.sights[LAYERS].has_profile, 0);
    kvf_sequence_destroy(p.sequence);
    kvf_sequence_destroy(q.sequence);
    rig_close(&r);
}
