/* SPDX-License-Identifier: Apache-2.0 */

/*
 * See prune_run_rig.h. Knows nothing of what a test wants to prove.
 */

#include "prune_run_rig.h"

void rig_open_as(rig *r, const rig_shape *shape)
{
    kvf_cache_config cc;
    model_rig_make(
        r, &(model_shape){.hidden = HIDDEN, .layers = LAYERS, .kv_heads = HEADS, .vocab = VOCAB},
        2);
    kvf_transformer_options options = model_rig_options(r);
    options.chunk_max = CHUNK;
    options.prompt_max = PROMPTS;
    options.batch_max = shape->batch;
    model_rig_transformer(r, &options, &cc);
    cc.tokens_max = shape->tokens;
    cc.sequences_max = shape->sequences;
    cc.tokens_per_step_max = BATCH; /* rows are rows, whoever's they are */
    cc.page_size = PAGE;
    cc.local_tokens = 16;
    cc.budget_tokens = shape->budget;
    cc.select = shape->select;
    cc.observe_window = WINDOW;
    if (shape->on_disk) {
        cc.disk_path = r->directory;
        cc.disk_bundle_bytes = 1;
        cc.host_bytes = 256u << 10;
    }
    model_rig_cache(r, &cc);
}

void rig_open(rig *r, kvf_select select, uint32_t budget)
{
    rig_open_as(r, &(rig_shape){select, budget, BATCH, BATCH, PROMPT + STEPS, false});
}

/* ---- a run and what comes out of it ---- */

uint32_t rig_id(uint32_t sequence, uint32_t index)
{
    return (index * index * 7u + index * 37u + sequence * 11u) % VOCAB;
}

void rig_note_layers(const kvf_sequence *s, outcome *o)
{
    memset(o, 0, sizeof *o);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        o->lengths[layer] = kvf_sequence_length(s, layer);
        for (uint32_t i = 0; i < o->lengths[layer]; i++)
            o->positions[layer][i] = kvf_sequence_position(s, layer, i);
    }
}

void rig_decode(rig *r, kvf_sequence *s, outcome *o)
{
    for (uint32_t step = 0; step < STEPS; step++) {
        const uint32_t id = rig_id(9, step);
        model_rig_decode(r, &s, &id, 1, o->logits[step]);
    }
    kvf_transformer_forget(r->transformer);
}

kvf_prune *rig_open_prune(rig *r, const kvf_prune_config *config)
{
    kvf_prune *prune = NULL;
    kvf_error error;
    if (kvf_prune_open(r->cache, config, &prune, &error) != KVF_OK)
        fail_msg("kvf_prune_open: %s", error.text);
    return prune;
}

kvf_session rig_session(const rig *r, kvf_prune *prune)
{
    return (kvf_session){.runtime = r->runtime,
                         .transformer = r->transformer,
                         .cache = r->cache,
                         .stream = r->stream,
                         .prune = prune};
}

rig_prompt one_prompt(uint32_t sequence, uint32_t length)
{
    rig_prompt p = {.count = length};
    for (uint32_t i = 0; i < length; i++)
        p.ids[i] = rig_id(sequence, i);
    return p;
}

void rig_prefill_pruned(rig *r, kvf_prune *prune, kvf_sequence *s, const uint32_t *ids,
                        uint32_t count)
{
    model_rig_must(r,
                   kvf_transformer_prefill_chunked(r->transformer, r->cache, prune, s, ids, count,
                                                   count, false, r->stream),
                   "kvf_transformer_prefill_chunked");
    model_rig_wait(r);
}

void rig_run_one(rig *r, const kvf_prune_config *config, outcome *out, kvf_prune_stats *stats)
{
    kvf_sequence *s = model_rig_sequence(r);
    kvf_prune *prune = rig_open_prune(r, config);
    const rig_prompt p = one_prompt(0, PROMPT);
    rig_prefill_pruned(r, prune, s, p.ids, p.count);
    if (stats)
        kvf_prune_stats_get(prune, stats);
    rig_note_layers(s, out);
    rig_decode(r, s, out);
    kvf_sequence_destroy(s);
    model_rig_wait(r);
    kvf_prune_close(prune);
}

void rig_run_plain(rig *r, const uint32_t *ids, uint32_t count, outcome *out)
{
    kvf_sequence *s = model_rig_sequence(r);
    model_rig_prefill(r, s, ids, count);
    rig_note_layers(s, out);
    rig_decode(r, s, out);
    kvf_sequence_destroy(s);
}

void outcome_expect_same(const outcome *a, const outcome *b, const char *what)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        if (a->lengths[layer] != b->lengths[layer] ||
            memcmp(a->positions[layer], b->positions[layer], sizeof a->positions[layer]) != 0)
            fail_msg("%s: layer %u holds other tokens (%u and %u)", what, layer, a->lengths[layer],
                     b->lengths[layer]);
    for (uint32_t step = 0; step < STEPS; step++)
        if (memcmp(a->logits[step], b->logits[step], sizeof a->logits[step]) != 0)
            fail_msg("%s: other logits at step %u", what, step);
}

bool outcome_is_same_logits(const outcome *a, const outcome *b)
{
    return memcmp(a->logits, b->logits, sizeof a->logits) == 0;
}

kvf_prune_config rig_config_of(const char *name)
{
    kvf_prune_config config;
    const kvf_prune_policy *policy = kvf_prune_policy_find(name);
    assert_non_null(policy);
    kvf_prune_config_init(&config, policy);
    return config;
}

/* ---- policies of the tests' own ---- */

static void spy_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    spy *s = view->user;
    s->inner->decide(view, answer);
    if (!answer->restart && answer->propagate_count == view->tokens)
        return;
    s->restarts += answer->restart;
    s->count = answer->propagate_count;
    for (uint32_t i = 0; i < s->count; i++)
        s->ids[i] =
            view->positions[answer->propagate_count < view->tokens ? answer->propagate[i] : i];
}

kvf_prune_policy spy_policy(spy *s, const char *name)
{
    s->inner = kvf_prune_policy_find(name);
    assert_non_null(s->inner);
    kvf_prune_policy policy = *s->inner;
    policy.name = "spy";
    policy.decide = spy_decide;
    policy.user = s;
    return policy;
}

uint32_t pick_strided(const kvf_prune_view *view, uint32_t stride, uint32_t *ids)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < view->tokens; i++)
        if (i % stride == 0 || i >= view->tokens - view->window)
            ids[count++] = i;
    return count;
}

kvf_prune_policy own_policy(void (*decide)(const kvf_prune_view *, kvf_prune_answer *), void *user)
{
    return (kvf_prune_policy){.size = sizeof(kvf_prune_policy),
                              .name = "own",
                              .source = "test",
                              .decide = decide,
                              .user = user};
}
