/* SPDX-License-Identifier: Apache-2.0 */

/*
 * That the pruner obeys a policy: what a step attends to after pruning is compared with dense
 * attention over the tokens that are said to be there.
 *
 * Looks inside for memory: what is reserved, and that nothing is left where a reservation fails.
 */

#include "prune_rig.h"

#include <math.h>

/* Tokens of a layer that `stride` keeps, out of those that it got. */
static uint32_t kept_tokens(const progress *p, uint32_t stride, uint32_t *tokens)
{
    const kvf_prune_view view = {.tokens = p->count, .window = WINDOW};
    const uint32_t count = told_stride_ids(&view, stride, tokens);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = p->tokens[tokens[i]];
    return count;
}

/* Every other token is kept, and goes on from layer 1: lengths, positions and what steps attend to.
 */
TEST(every_other_token_is_evicted)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    uint32_t tokens[LAYERS][PROMPT], count[LAYERS];
    rig_open(&r, &cc, KVF_PRUNE_NOTHING);
    r.config.retention = KVF_RETENTION_EVICT;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        r.told.keep[layer] = 2;
    r.told.propagate[1] = 2;
    rig_prune(&r);
    progress p = rig_begin(&r, PROMPT);
    while (p.layer < LAYERS) {
        const uint32_t layer = p.layer;
        count[layer] = kept_tokens(&p, 2, tokens[layer]);
        rig_fill_layer(&r, &p);
        test_ok(&r.w, rig_prune_layer(&r, &p));
        assert_int_equal(kvf_sequence_length(p.sequence, layer), count[layer]);
        for (uint32_t i = 0; i < count[layer]; i++)
            assert_int_equal(kvf_sequence_position(p.sequence, layer, i), tokens[layer][i]);
    }
    assert_int_equal(count[0], 80 + 3); /* half, and the odd ones of the window */
    assert_int_equal(count[2], 42 + 3);
    for (uint32_t step = 0; step < STEPS; step++)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            rig_expect_attends(&r, p.sequence, layer, tokens[layer], count[layer], step);
            tokens[layer][count[layer]++] = PROMPT + step;
        }
    kvf_prune_stats stats;
    kvf_prune_stats_get(r.prune, &stats);
    assert_int_equal(stats.kept, count[0] + count[1] + count[2] - 3 * STEPS);
    assert_true(stats.retain_ns > 0);
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* With a static set alone, a step attends to what the policy kept, the sink, and what is not sealed
 * yet. Measured or not: a policy may choose by place. */
TEST(what_is_kept_seeds_the_static_set)
{
    static rig r;
    kvf_cache_config cc = rig_cache_config();
    cc.select = KVF_SELECT_STATIC;
    cc.static_ratio = 1.0f;
    static const uint32_t needs[] = {KVF_PRUNE_NOTHING, KVF_PRUNE_SCORES, KVF_PRUNE_SUMS,
                                     KVF_PRUNE_LOGITS};
    for (size_t n = 0; n < sizeof needs / sizeof *needs; n++) {
        rig_open(&r, &cc, needs[n]);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            r.told.keep[layer] = 4;
        rig_prune(&r);
        const progress p = rig_run(&r, PROMPT);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            uint32_t tokens[PROMPT], count = 0;
            /* Sealed before the step's own token joins: it may seal one page more. */
            const uint32_t sealed = (PROMPT + 1 - cc.local_tokens) / cc.page_size * cc.page_size;
            assert_int_equal(kvf_sequence_length(p.sequence, layer), PROMPT);
            for (uint32_t i = 0; i < PROMPT; i++)
                if (i < cc.sink_tokens || i % 4 == 0 || i >= sealed)
                    tokens[count++] = i;
            rig_expect_attends(&r, p.sequence, layer, tokens, count, 0);
        }
        kvf_sequence_destroy(p.sequence);
        rig_close(&r);
    }
}

TEST(restart_empties_the_sequence)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    r.config.retention = KVF_RETENTION_EVICT;
    r.told.keep[0] = 2;
    r.told.propagate[1] = 3;
    r.told.restart_at = 2;
    r.told.restarts = 1;
    rig_prune(&r);
    progress p = rig_begin(&r, PROMPT);
    for (uint32_t layer = 0; layer < 2; layer++) {
        rig_fill_layer(&r, &p);
        test_ok(&r.w, rig_prune_layer(&r, &p));
    }
    const uint32_t first = p.count;
    assert_int_equal(p.layer, 0);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        assert_int_equal(kvf_sequence_length(p.sequence, layer), 0);
    r.told.propagate[1] = 0;
    while (p.layer < LAYERS) {
        rig_fill_layer(&r, &p);
        test_ok(&r.w, rig_prune_layer(&r, &p));
    }
    assert_int_equal(r.told.sights[2].view.pass, 1);
    assert_int_equal(r.told.sights[2].view.prompt, PROMPT);
    assert_int_equal(r.told.sights[2].count, 2); /* state goes on */
    kvf_prune_stats stats;
    kvf_prune_stats_get(r.prune, &stats);
    assert_int_equal(stats.tokens_computed, 2 * PROMPT + LAYERS * first);
    assert_int_equal(stats.chosen_layer, 1);
    assert_int_equal(kvf_sequence_position(p.sequence, 2, first - 1), first - 1);
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* ---- memory ---- */

/* In numbers of fp32 per token and KV head of one layer. */
static double share(const kvf_cache_config *c, size_t bytes)
{
    return (double)bytes / ((double)c->tokens_max * c->kv_heads * sizeof(float));
}

/* Whatever is measured: a few numbers per token of the layer that is looked at, however many
 * queries look. */
TEST(memory_does_not_grow_with_the_window)
{
    static rig r;
    kvf_cache_config cc = rig_cache_config();
    cc.tokens_max = 4096;
    cc.observe_window = 64;
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    static const uint32_t needs[] = {KVF_PRUNE_NOTHING, KVF_PRUNE_SCORES,
                                     KVF_PRUNE_SCORES | KVF_PRUNE_PROFILE, KVF_PRUNE_LOGITS,
                                     KVF_PRUNE_SUMS};
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        r.config.settings.window = 8;
        const kvf_prune_plan b = kvf_prune_measure(r.w.cache, &r.config, needs[i]);
        r.config.settings.window = 64;
        const kvf_prune_plan wide = kvf_prune_measure(r.w.cache, &r.config, needs[i]);
        assert_memory_equal(&b, &wide, sizeof b);
        const size_t heads = cc.tokens_max * cc.query_heads * sizeof(float);
        const size_t row = cc.tokens_max * cc.kv_heads * sizeof(float);
        const size_t sums = needs[i] & KVF_PRUNE_SUMS ? cc.sequences_max * row : 0;
        /* scores, work and sums, one profile per head where a layer needs one, and no pages */
        size_t device = row + (needs[i] ? row : 0) + sums;
        if (needs[i] & KVF_PRUNE_PROFILE)
            device += heads + kvf_round_up(cc.query_heads * sizeof(kvf_prune_profile), 64);
        assert_int_equal(b.device_bytes, device);
        assert_true(share(&cc, b.device_bytes - sums + sums / cc.sequences_max) <= 8.0);
        assert_true(share(&cc, b.device_bytes - sums + sums / cc.sequences_max + b.host_bytes) <=
                    8.0);
    }
    rig_close(&r);
}

static kvf_status open_prune(void *user, kvf_error *error)
{
    rig *r = user;
    const kvf_status status = kvf_prune_open(r->w.cache, &r->config, &r->prune, error);
    assert_true((status == KVF_OK) == (r->prune != NULL));
    kvf_prune_close(r->prune);
    r->prune = NULL;
    return status;
}

TEST(failed_opens_leave_nothing)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES | KVF_PRUNE_PROFILE);
    r.config.retention = KVF_RETENTION_EVICT;
    assert_true(test_refuse_each(r.w.runtime, open_prune, &r) >= 4);
    rig_prune(&r);
    const progress p = rig_run(&r, PROMPT);
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}
