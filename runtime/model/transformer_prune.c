/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefill with pruning: prompts of different lengths through the layers, each shortened where its
 * policy says so.
 *
 * It knows the order of operations, no policy and no device. The prompts lie one behind the other
 * in the hidden states. A layer first attends with all of a prompt's rows, then the policy looks at
 * it, then the rows that go on are gathered, and only they go through the MLP: every row is
 * computed alone, so that this order changes no bit. A prompt is cut into chunks by itself, so
 * what lies beside it does not matter either. Invariant: row i of a prompt is the token of
 * positions[first + i]; before a restart that is its index in the prompt.
 */

#include "transformer_ops.h"

#include <string.h>

#include "common/base.h"

/* A pruned prefill on its way. */
typedef struct prune_run {
    kvf_transformer *t;
    kvf_cache *cache;
    kvf_prune *prune; /* NULL = nothing is pruned */
    const kvf_prompt *prompts;
    kvf_stream *stream;
    bool completes; /* the last layer goes on to its end, for the last row */
} prune_run;

static transformer_step step_of(const prune_run *r, uint32_t index)
{
    return (transformer_step){.t = r->t,
                              .cache = r->cache,
                              .sequences = &r->prompts[index].sequence,
                              .stream = r->stream,
                              .first = r->t->prompts[index].first,
                              .rows = r->t->prompts[index].count};
}

/* The chunk of a prompt that follows `s`; false after the last. */
static bool next_chunk(const transformer_prompt *p, uint32_t chunk_max, transformer_step *s)
{
    const uint32_t end = p->first + p->count;
    s->first += s->rows;
    s->rows = end - s->first < chunk_max ? end - s->first : chunk_max;
    return s->rows > 0;
}

static kvf_status attend(const prune_run *r, const transformer_step *s, uint32_t layer)
{
    const transformer_buffers *b = &r->t->buffers;
    const kvf_prefill_args args = {.sequence = s->sequences[0],
                                   .layer = layer,
                                   .tokens = s->rows,
                                   .q = b->q,
                                   .k = b->k,
                                   .v = b->v,
                                   .positions = r->t->positions + s->first,
                                   .out = b->attended};
    KVF_TRY(kvf_prefill(r->cache, &args, r->stream));
    return r->prune ? kvf_prune_append(r->prune, &args, r->stream) : KVF_OK;
}

/* All rows of a prompt; of the last layer nobody reads more than keys and values. */
static kvf_status run_attention(const prune_run *r, uint32_t index, uint32_t layer)
{
    const transformer_prompt *p = &r->t->prompts[index];
    const bool ends = layer + 1 == r->t->model.layers && !r->completes;
    transformer_step s = step_of(r, index);
    s.rows = 0;
    while (next_chunk(p, r->t->options.chunk_max, &s)) {
        KVF_TRY(transformer_project(&s, layer));
        KVF_TRY(attend(r, &s, layer));
        if (!ends)
            KVF_TRY(r->t->ops->output(&s, &r->t->layers[layer]));
    }
    return KVF_OK;
}

static kvf_status run_mlp(const prune_run *r, uint32_t index, uint32_t layer)
{
    const transformer_prompt *p = &r->t->prompts[index];
    transformer_step s = step_of(r, index);
    s.rows = 0;
    if (layer + 1 == r->t->model.layers) {
        s.first = p->first + p->count - 1;
        s.rows = 1;
        return r->completes ? transformer_mlp(&s, layer) : KVF_OK;
    }
    while (next_chunk(p, r->t->options.chunk_max, &s))
        KVF_TRY(transformer_mlp(&s, layer));
    return KVF_OK;
}

/* Only the rows of `propagate` go on. */
static kvf_status shorten(const prune_run *r, uint32_t index, const kvf_prune_result *result)
{
    transformer_prompt *p = &r->t->prompts[index];
    uint32_t *positions = r->t->positions + p->first, *rows = r->t->index + p->first;
    for (uint32_t i = 0; i < result->propagate_count; i++) {
        rows[i] = p->first + result->propagate[i];
        positions[i] = positions[result->propagate[i]];
    }
    p->count = result->propagate_count;
    const transformer_step s = step_of(r, index);
    return r->t->ops->gather(&s, rows);
}

/* The chosen tokens from the embedding on, as a prompt of their own. */
static kvf_status start_over(const prune_run *r, uint32_t index, const kvf_prune_result *result)
{
    transformer_prompt *p = &r->t->prompts[index];
    uint32_t *positions = r->t->positions + p->first, *ids = r->t->index + p->first;
    for (uint32_t i = 0; i < result->propagate_count; i++)
        ids[i] = r->prompts[index].ids[positions[result->propagate ? result->propagate[i] : i]];
    for (uint32_t i = 0; i < result->propagate_count; i++)
        positions[i] = i;
    p->count = result->propagate_count;
    p->layer = 0;
    const transformer_step s = step_of(r, index);
    return r->t->ops->start(&s, ids, positions);
}

static kvf_status run_layer(const prune_run *r, uint32_t index)
{
    transformer_prompt *p = &r->t->prompts[index];
    const uint32_t layer = p->layer++;
    kvf_prune_result result = {0};
    KVF_TRY(run_attention(r, index, layer));
    if (r->prune)
        KVF_TRY(kvf_prune_layer(r->prune, r->prompts[index].sequence, layer, r->stream, &result));
    if (result.restart)
        return start_over(r, index, &result);
    if (result.propagate && p->layer < r->t->model.layers)
        KVF_TRY(shorten(r, index, &result));
    return run_mlp(r, index, layer);
}

static uint32_t lowest_layer(const kvf_transformer *t, uint32_t batch)
{
    uint32_t lowest = t->model.layers;
    for (uint32_t i = 0; i < batch; i++)
        if (t->prompts[i].layer < lowest)
            lowest = t->prompts[i].layer;
    return lowest;
}

/* A prompt that started over is behind and catches up alone. */
static kvf_status run_layers(const prune_run *r, uint32_t batch)
{
    for (uint32_t layer = 0; layer < r->t->model.layers; layer = lowest_layer(r->t, batch))
        for (uint32_t i = 0; i < batch; i++)
            if (r->t->prompts[i].layer == layer)
                KVF_TRY(run_layer(r, i));
    return KVF_OK;
}

static kvf_status start(const prune_run *r, uint32_t index, uint32_t first)
{
    const kvf_prompt *prompt = &r->prompts[index];
    r->t->prompts[index] = (transformer_prompt){.first = first, .count = prompt->count};
    for (uint32_t i = 0; i < prompt->count; i++)
        r->t->positions[first + i] = i;
    const transformer_step s = step_of(r, index);
    return r->t->ops->start(&s, prompt->ids, r->t->positions + first);
}

static bool fits(const kvf_transformer *t, const kvf_prompt *prompts, uint32_t batch)
{
    uint64_t rows = 0;
    if (batch == 0 || batch > t->options.batch_max)
        return false;
    for (uint32_t i = 0; i < batch; i++) {
        rows += prompts[i].count;
        if (prompts[i].count == 0 || rows > kvf_transformer_prompt_max(t) ||
            !transformer_ids_valid(t, prompts[i].ids, prompts[i].count))
            return false;
    }
    return true;
}

static kvf_status prefill(const prune_run *r, uint32_t batch)
{
    if (!fits(r->t, r->prompts, batch))
        return KVF_INVALID;
    for (uint32_t i = 0; r->prune && i < batch; i++)
        KVF_TRY(kvf_prune_begin(r->prune, r->prompts[i].sequence, r->prompts[i].count));
    for (uint32_t i = 0, first = 0; i < batch; first += r->prompts[i++].count)
        KVF_TRY(start(r, i, first));
    return run_layers(r, batch);
}

kvf_status kvf_transformer_prefill_pruned(kvf_transformer *t, kvf_cache *cache, kvf_prune *prune,
                                          const kvf_prompt *prompts, uint32_t batch,
                                          kvf_stream *stream)
{
    const prune_run run = {
        .t = t, .cache = cache, .prune = prune, .prompts = prompts, .stream = stream};
    return prefill(&run, batch);
}

kvf_status kvf_transformer_hidden(kvf_transformer *t, kvf_cache *cache, kvf_prune *prune,
                                  const kvf_prompt *prompt, float *hidden, kvf_stream *stream)
{
    const prune_run run = {.t = t,
                           .cache = cache,
                           .prune = prune,
                           .prompts = prompt,
                           .stream = stream,
                           .completes = true};
    KVF_TRY(prefill(&run, 1));
    transformer_step s = step_of(&run, 0);
    s.first += s.rows - 1;
    s.rows = 1;
    return t->ops->read_hidden(&s, hidden);
}
