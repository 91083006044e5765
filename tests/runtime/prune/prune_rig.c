/* SPDX-License-Identifier: Apache-2.0 */

/*
 * See prune_rig.h. Knows nothing of what a test wants to prove.
 */

#include "prune_rig.h"

#include <math.h>

#include "naive_scores.h"

/* ---- a policy that does as it is told ---- */

uint32_t told_stride_ids(const kvf_prune_view *view, uint32_t stride, uint32_t *ids)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < view->tokens; i++)
        if (i % stride == 0 || i >= view->tokens - view->window)
            ids[count++] = i;
    return count;
}

static void told_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    told *t = view->user;
    uint32_t *count = view->state;
    assert_int_equal(answer->keep_count, view->tokens); /* preset: keep and propagate all */
    assert_int_equal(answer->propagate_count, view->tokens);
    assert_int_equal(answer->restart, 0);
    if (t->calls < 2 * LAYERS) {
        sight *s = &t->sights[t->calls];
        s->view = *view;
        s->count = *count;
        memcpy(s->positions, view->positions, view->tokens * sizeof *s->positions);
        s->has_profile = view->profile != NULL;
        if (view->scores)
            memcpy(s->scores, view->scores,
                   (size_t)view->kv_heads * view->candidates * sizeof *s->scores);
        if (view->profile)
            memcpy(s->profile, view->profile, view->query_heads * sizeof *s->profile);
    }
    t->calls++;
    ++*count;
    const uint32_t keep = t->keep[view->layer], propagate = t->propagate[view->layer];
    for (uint32_t h = 0; keep && h < view->kv_heads; h++) {
        uint32_t kept = told_stride_ids(view, keep, answer->keep);
        answer->keep_count = kept;
        memmove(answer->keep + (size_t)h * kept, answer->keep, kept * sizeof *answer->keep);
    }
    if (propagate)
        answer->propagate_count = told_stride_ids(view, propagate, answer->propagate);
    answer->restart = t->restart_at == view->layer + 1 && view->pass < t->restarts;
    answer->is_chosen = answer->restart;
    if (t->nonsense)
        t->nonsense(view, answer);
}

/* `beta` means nothing to this policy, so it carries what to measure. */
static uint32_t told_needs(const kvf_prune_view *view)
{
    return view->settings->beta & 0xffu;
}

static size_t told_state_bytes(const kvf_prune_settings *settings, const kvf_prune_shape *shape)
{
    (void)settings;
    (void)shape;
    return sizeof(uint32_t);
}

static kvf_prune_policy told_policy(told *t)
{
    return (kvf_prune_policy){.size = sizeof(kvf_prune_policy),
                              .name = "told",
                              .source = "test",
                              .state_bytes = told_state_bytes,
                              .needs_at = told_needs,
                              .decide = told_decide,
                              .user = t};
}

/* ---- a world with a pruner ---- */

kvf_cache_config rig_cache_config(void)
{
    kvf_cache_config c = test_config_small();
    c.layers = LAYERS;
    c.tokens_max = TOKENS;
    c.prefill_chunk_max = CHUNK;
    c.sequences_max = 2;
    c.observe_window = WINDOW;
    return c;
}

void rig_open(rig *r, const kvf_cache_config *cc, uint32_t needs)
{
    const test_tokens_spec spec = {
        .count = TOKENS, .seed = test_seed(PRUNE_SEED), .sharpness = 2.0f};
    memset(r, 0, sizeof *r);
    test_world_open(&r->w, NULL, cc);
    test_tokens_make(&r->t, cc, &spec);
    r->policy = told_policy(&r->told);
    kvf_prune_config_init(&r->config, &r->policy);
    r->config.settings.window = WINDOW;
    r->config.settings.beta = needs | 0x100u;
    test_rows_open(&r->chunk, cc, CHUNK);
}

void rig_prune(rig *r)
{
    kvf_error error;
    if (kvf_prune_open(r->w.cache, &r->config, &r->prune, &error) != KVF_OK)
        fail_msg("kvf_prune_open: %s", error.text);
}

void rig_close(rig *r)
{
    test_wait(&r->w);
    kvf_prune_close(r->prune);
    test_tokens_free(&r->t);
    test_world_close(&r->w);
    test_rows_close(&r->chunk);
}

progress rig_begin(rig *r, uint32_t count)
{
    progress p = {.sequence = test_sequence(&r->w), .count = count};
    for (uint32_t i = 0; i < count; i++)
        p.tokens[i] = p.positions[i] = i;
    test_ok(&r->w, kvf_prune_begin(r->prune, p.sequence, count));
    return p;
}

kvf_prefill_args rig_chunk_args(rig *r, const progress *p, uint32_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        test_rows_put(&r->chunk, i, &r->t, p->layer, p->tokens[first + i]);
    return (kvf_prefill_args){.sequence = p->sequence,
                              .layer = p->layer,
                              .tokens = count,
                              .q = r->chunk.q,
                              .k = r->chunk.k,
                              .v = r->chunk.v,
                              .positions = p->positions + first,
                              .out = r->chunk.out};
}

void rig_fill_chunk(rig *r, const progress *p, uint32_t first, uint32_t chunk, bool appends)
{
    const uint32_t rest = p->count - first, n = rest < chunk ? rest : chunk;
    const kvf_prefill_args args = rig_chunk_args(r, p, first, n);
    test_ok(&r->w, kvf_prefill(r->w.cache, &args, r->w.stream));
    if (appends)
        test_ok(&r->w, kvf_prune_append(r->prune, &args, r->w.stream));
    test_wait(&r->w); /* the chunk's buffers are used again */
}

void rig_fill_layer(rig *r, const progress *p)
{
    for (uint32_t first = 0; first < p->count; first += CHUNK)
        rig_fill_chunk(r, p, first, CHUNK, true);
}

/* The next move after a result. */
static void go_on(progress *p, const kvf_prune_result *result)
{
    for (uint32_t i = 0; result->propagate && i < result->propagate_count; i++) {
        p->tokens[i] = p->tokens[result->propagate[i]];
        p->positions[i] = p->positions[result->propagate[i]];
    }
    p->count = result->propagate_count;
    p->layer++;
    for (uint32_t i = 0; result->restart && i < p->count; i++)
        p->positions[i] = i;
    if (result->restart)
        p->layer = 0;
}

kvf_status rig_prune_layer(rig *r, progress *p)
{
    kvf_prune_result result;
    const kvf_status status =
        kvf_prune_layer(r->prune, p->sequence, p->layer, r->w.stream, &result);
    if (status == KVF_OK)
        go_on(p, &result);
    return status;
}

progress rig_run(rig *r, uint32_t count)
{
    progress p = rig_begin(r, count);
    while (p.layer < LAYERS) {
        rig_fill_layer(r, &p);
        test_ok(&r->w, rig_prune_layer(r, &p));
    }
    return p;
}

/* ---- steps ---- */

void rig_expect_attends(rig *r, kvf_sequence *s, uint32_t layer, const uint32_t *tokens,
                        uint32_t count, uint32_t step)
{
    float *got = test_scratch(HEADS * DIM * sizeof *got);
    const kvf_scores_args args = {
        .layer = layer, .window = 1, .first = count, .candidates = count + 1, .pool_width = 1};
    double out[KV_HEADS * TOKENS], heads[HEADS * TOKENS];
    uint32_t all[TOKENS];
    memcpy(all, tokens, count * sizeof *all);
    all[count] = PROMPT + step;
    test_decode(&r->w, s, &r->t, layer, PROMPT + step, got, NULL);
    test_wait(&r->w);
    naive_token_scores(&r->t, all, &args, out, heads);
    for (uint32_t i = 0; i < HEADS * DIM; i++) {
        const double *weights = heads + i / DIM * args.candidates;
        double want = 0.0;
        for (uint32_t j = 0; j <= count; j++)
            want += weights[j] * (double)((const float *)test_v(
                                     &r->t, layer, all[j]))[i / DIM / GROUP * DIM + i % DIM];
        const double off = fabs(want - (double)got[i]);
        if (!(off <= test_tolerance(KVF_FP32)))
            fail_msg("layer %u, head %u, channel %u: off by %g", layer, i / DIM, i % DIM, off);
    }
}
