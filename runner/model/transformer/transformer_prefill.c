/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefill: rows of hidden states through all layers, one layer after the other.
 *
 * There is one driver. A plain prompt is one chunk without a pruner; chunk by chunk, the driver
 * runs once per chunk. A layer first attends with all rows of a prompt, then the policy looks at
 * it, then the rows that go on are gathered, and only they go through the MLP.
 *
 * It knows the order of operations, no policy and no device. Every row is computed alone.
 * Invariant: row i is the token of positions[i].
 *
 * Chunked eviction is after Bhaskar et al. (PruLong), 2025, section 3. With patched eviction the
 * prompt's last tokens follow every chunk but the last, at the positions right after it, as in the
 * published code; the next chunk uses those positions again.
 */

#include "transformer_ops.h"

/* A prefill on its way. */
typedef struct prefill_run {
    kvf_transformer *t;
    kvf_cache *cache;
    kvf_prune *prune; /* NULL = nothing is pruned */
    const kvf_prompt *prompt;
    kvf_stream *stream;
    bool evicts;    /* the pruner evicts from chunks; else it decides layer by layer */
    uint32_t done;  /* tokens of earlier chunks, */
    uint32_t chunk; /* of this one */
    uint32_t total; /* and of the prompt */
    bool completes; /* the last layer goes on to its end, for the last row */
} prefill_run;

static transformer_step step_of(const prefill_run *r)
{
    return (transformer_step){.t = r->t, .stream = r->stream, .rows = r->t->prompt.count};
}

/* ---- whether to go on ---- */

void kvf_transformer_watch(kvf_transformer *t, kvf_prefill_progress_fn progress, void *user)
{
    t->watch.progress = progress;
    t->watch.user = user;
}

bool kvf_transformer_stopped(const kvf_transformer *t)
{
    return t->watch.stopped;
}

/* In front of an operation on the rows from s->first on, of a prompt in a layer. */
static kvf_status ask(const prefill_run *r, const transformer_prompt *p, const transformer_step *s,
                      uint32_t layer)
{
    transformer_watch *w = &r->t->watch;
    const uint32_t gone = s->first;
    if (!w->progress || (layer == 0 && gone == 0))
        return KVF_OK;
    KVF_TRY(kvf_stream_wait(r->stream));
    const double share = (layer + (double)gone / p->count) / r->t->model.layers;
    w->stopped = !w->progress(w->user, r->done + (uint32_t)(share * r->chunk), r->total);
    return KVF_OK;
}

/* ---- one layer ---- */

kvf_status transformer_project(const transformer_step *s, uint32_t layer)
{
    const transformer_layer *l = &s->t->layers[layer];
    KVF_TRY(s->t->ops->norm(s, l->attention_norm));
    return s->t->ops->project(s, l);
}

kvf_status transformer_mlp(const transformer_step *s, uint32_t layer)
{
    const transformer_layer *l = &s->t->layers[layer];
    KVF_TRY(s->t->ops->norm(s, l->mlp_norm));
    return s->t->ops->mlp(s, l, NULL);
}

/* The operation that follows `s` in a prompt's rows; false after the last. */
static bool next_rows(const transformer_prompt *p, transformer_step *s)
{
    const uint32_t rest = p->count - s->first - s->rows;
    const uint32_t most = s->t->options.chunk_max;
    s->first += s->rows;
    s->rows = rest < most ? rest : most;
    return s->rows > 0;
}

static kvf_status attend(const prefill_run *r, const transformer_step *s, uint32_t layer)
{
    const transformer_buffers *b = &r->t->buffers;
    const kvf_prefill_args args = {.sequence = r->prompt->sequence,
                                   .layer = layer,
                                   .tokens = s->rows,
                                   .q = b->q,
                                   .k = b->k,
                                   .v = b->v,
                                   .positions = r->t->positions + s->first,
                                   .out = b->attended};
    KVF_TRY(kvf_prefill(r->cache, &args, r->stream));
    return r->prune && !r->evicts ? kvf_prune_append(r->prune, &args, r->stream) : KVF_OK;
}

/* All rows of a prompt; of the last layer only keys and values are read, and the last row where it
 * goes on. */
static kvf_status run_attention(const prefill_run *r, uint32_t layer)
{
    const transformer_prompt *p = &r->t->prompt;
    const bool is_last = layer + 1 == r->t->model.layers;
    transformer_step s = step_of(r);
    s.rows = 0;
    while (next_rows(p, &s)) {
        const bool has_end = s.first + s.rows == p->count;
        KVF_TRY(ask(r, p, &s, layer));
        if (r->t->watch.stopped)
            return KVF_OK;
        KVF_TRY(transformer_project(&s, layer));
        KVF_TRY(attend(r, &s, layer));
        if (!is_last || (r->completes && has_end))
            KVF_TRY(r->t->ops->output(&s, &r->t->layers[layer], NULL));
    }
    return KVF_OK;
}

static transformer_step last_row(const prefill_run *r)
{
    transformer_step s = step_of(r);
    s.first += s.rows - 1;
    s.rows = 1;
    return s;
}

static kvf_status run_mlp(const prefill_run *r, uint32_t layer)
{
    const transformer_prompt *p = &r->t->prompt;
    transformer_step s = last_row(r);
    if (layer + 1 == r->t->model.layers)
        return r->completes ? transformer_mlp(&s, layer) : KVF_OK;
    s = step_of(r);
    s.rows = 0;
    while (next_rows(p, &s))
        KVF_TRY(transformer_mlp(&s, layer));
    return KVF_OK;
}

/* Rows of the pivot, the first layer that hands fewer on. */
static kvf_status keep_rows(const prefill_run *r, uint32_t layer)
{
    const transformer_step s = step_of(r);
    if (!r->t->completion || s.rows < r->prompt->count)
        return KVF_OK;
    return transformer_keep_rows(&s, r->prompt->sequence, layer);
}

/* Only the rows of `propagate` go on. */
static kvf_status shorten(const prefill_run *r, const kvf_prune_result *result)
{
    transformer_prompt *p = &r->t->prompt;
    uint32_t *positions = r->t->positions, *rows = r->t->index;
    for (uint32_t i = 0; i < result->propagate_count; i++) {
        rows[i] = result->propagate[i];
        positions[i] = positions[result->propagate[i]];
    }
    p->count = result->propagate_count;
    const transformer_step s = step_of(r);
    return r->t->ops->gather(&s, rows);
}

/* The chosen tokens from the embedding on, as a prompt of their own. Until then a row's position is
 * its index in the prompt. */
static kvf_status start_over(const prefill_run *r, const kvf_prune_result *result)
{
    transformer_prompt *p = &r->t->prompt;
    uint32_t *positions = r->t->positions, *ids = r->t->index;
    for (uint32_t i = 0; i < result->propagate_count; i++)
        ids[i] = r->prompt->ids[positions[result->propagate ? result->propagate[i] : i]];
    for (uint32_t i = 0; i < result->propagate_count; i++)
        positions[i] = i;
    p->count = result->propagate_count;
    p->layer = 0;
    const transformer_step s = step_of(r);
    return r->t->ops->start(&s, ids, positions);
}

static kvf_status run_layer(const prefill_run *r)
{
    transformer_prompt *p = &r->t->prompt;
    kvf_sequence *sequence = r->prompt->sequence;
    const uint32_t layer = p->layer++;
    kvf_prune_result result = {0};
    KVF_TRY(run_attention(r, layer));
    if (r->t->watch.stopped)
        return KVF_OK;
    if (r->evicts)
        KVF_TRY(
            kvf_prune_chunk(r->prune, sequence, layer, p->count - p->patch, p->patch, r->stream));
    else if (r->prune)
        KVF_TRY(kvf_prune_layer(r->prune, sequence, layer, r->stream, &result));
    if (result.restart)
        return start_over(r, &result);
    if (result.propagate && p->layer < r->t->model.layers) {
        KVF_TRY(keep_rows(r, layer));
        KVF_TRY(shorten(r, &result));
    }
    return run_mlp(r, layer);
}

/* ---- all layers ---- */

static kvf_status run_layers(const prefill_run *r)
{
    while (r->t->prompt.layer < r->t->model.layers && !r->t->watch.stopped)
        KVF_TRY(run_layer(r));
    return KVF_OK;
}

/* `count` more rows of hidden states for a prompt: these ids, at positions from `position` on. */
static kvf_status add_rows(const prefill_run *r, const uint32_t *ids, uint32_t count,
                           uint32_t position)
{
    transformer_prompt *p = &r->t->prompt;
    transformer_step s = step_of(r);
    s.first += p->count;
    s.rows = count;
    for (uint32_t i = 0; i < count; i++)
        r->t->positions[s.first + i] = position + i;
    p->count += count;
    return count ? r->t->ops->start(&s, ids, r->t->positions + s.first) : KVF_OK;
}

/* ---- a whole prompt, layer by layer ---- */

static kvf_status prefill_whole(prefill_run *r)
{
    const kvf_prompt *p = r->prompt;
    r->t->watch.stopped = false;
    if (p->count == 0 || p->count > kvf_transformer_prompt_max(r->t) ||
        !transformer_ids_valid(r->t, p->ids, p->count))
        return KVF_INVALID;
    r->chunk = r->total = p->count;
    if (r->prune)
        KVF_TRY(kvf_prune_begin(r->prune, p->sequence, p->count));
    r->t->prompt = (transformer_prompt){0};
    KVF_TRY(add_rows(r, p->ids, p->count, 0));
    return run_layers(r);
}

kvf_status kvf_transformer_hidden(kvf_transformer *t, kvf_cache *cache, kvf_prune *prune,
                                  const kvf_prompt *prompt, float *hidden, kvf_stream *stream)
{
    prefill_run run = {.t = t,
                       .cache = cache,
                       .prune = prune,
                       .prompt = prompt,
                       .stream = stream,
                       .completes = true};
    KVF_TRY(prefill_whole(&run));
    const transformer_step s = last_row(&run);
    return t->ops->read_hidden(&s, hidden);
}

/* The prompt's last token, as row 0 of a step. */
static kvf_status finish(const prefill_run *r)
{
    transformer_step s = last_row(r);
    if (!r->completes || r->t->watch.stopped)
        return KVF_OK;
    s.separate = true;
    KVF_TRY(r->t->ops->norm(&s, r->t->final_norm));
    return r->t->ops->logits(&s);
}

/* ---- one prompt, chunk by chunk ---- */

static const kvf_prune_config *eviction_of(const kvf_prune *prune)
{
    const kvf_prune_config *config = prune ? kvf_prune_config_get(prune) : NULL;
    return config && config->eviction != KVF_EVICTION_NONE ? config : NULL;
}

/* Tokens after every chunk but the last. */
static uint32_t patch_of(const kvf_prune_config *config, uint32_t count, uint32_t chunk)
{
    const bool patches = config && config->eviction == KVF_EVICTION_PATCHED && chunk < count;
    return patches ? config->chunk_queries : 0;
}

kvf_status kvf_transformer_chunk_check(const kvf_transformer *t, const kvf_prune *prune,
                                       uint32_t count, uint32_t chunk, kvf_error *error)
{
    const uint32_t rows_max = kvf_transformer_prompt_max(t);
    if (chunk == 0 || chunk > rows_max)
        return model_fail(error, KVF_INVALID, "chunk = %u: must be 1 to %u tokens", chunk,
                          rows_max);
    if (count == 0)
        return model_fail(error, KVF_INVALID, "the prompt is empty; it needs at least one token");
    const kvf_prune_config *config = eviction_of(prune);
    if (!config)
        return KVF_OK;
    const uint32_t queries = config->chunk_queries, patch = patch_of(config, count, chunk);
    if (queries > count)
        return model_fail(error, KVF_INVALID,
                          "chunk_queries = %u is longer than the prompt of %u tokens; lower it, or "
                          "do not evict from such a prompt",
                          queries, count);
    if (patch > chunk)
        return model_fail(error, KVF_INVALID,
                          "chunk = %u: the patch of chunk_queries = %u tokens is longer; take "
                          "longer chunks, or lower chunk_queries",
                          chunk, queries);
    if (patch > rows_max - chunk)
        return model_fail(error, KVF_INVALID,
                          "chunk = %u: with the patch of %u tokens that is more than %u at once; "
                          "take chunks of at most %u",
                          chunk, patch, rows_max, rows_max > patch ? rows_max - patch : 1);
    return KVF_OK;
}

/* `tokens` from place `done` of the prompt on, then the patch. */
static kvf_status run_chunk(const prefill_run *r, uint32_t done, uint32_t tokens, uint32_t patch,
                            uint32_t position)
{
    const kvf_prompt *prompt = r->prompt;
    r->t->prompt = (transformer_prompt){.patch = patch};
    KVF_TRY(add_rows(r, prompt->ids + done, tokens, position));
    KVF_TRY(add_rows(r, prompt->ids + prompt->count - patch, patch, position + tokens));
    return run_layers(r);
}

kvf_status kvf_transformer_prefill_chunked(kvf_transformer *t, kvf_cache *cache, kvf_prune *prune,
                                           kvf_sequence *sequence, const uint32_t *ids,
                                           uint32_t count, uint32_t chunk, bool want_logits,
                                           kvf_stream *stream)
{
    const kvf_prompt prompt = {.sequence = sequence, .ids = ids, .count = count};
    const kvf_prune_config *eviction = eviction_of(prune);
    prefill_run run = {.t = t,
                       .cache = cache,
                       .prune = prune,
                       .prompt = &prompt,
                       .stream = stream,
                       .evicts = eviction,
                       .completes = want_logits};
    kvf_error error;
    t->watch.stopped = false;
    KVF_TRY(kvf_transformer_chunk_check(t, prune, count, chunk, &error));
    if (prune && !eviction) {
        KVF_TRY(prefill_whole(&run));
        return finish(&run);
    }
    if (!transformer_ids_valid(t, ids, count))
        return KVF_INVALID;
    if (prune)
        KVF_TRY(kvf_prune_begin(prune, sequence, count));
    const uint32_t position = transformer_next_position(sequence);
    run.total = count;
    for (uint32_t done = 0, tokens; done < count && !t->watch.stopped; done += tokens) {
        tokens = count - done < chunk ? count - done : chunk;
        const uint32_t patch = done + tokens < count ? patch_of(eviction, count, chunk) : 0;
        if (done > 0) /* ids and positions of the chunk before were read */
            KVF_TRY(kvf_stream_wait(stream));
        run.done = done;
        run.chunk = tokens;
        run.completes = want_logits && done + tokens == count;
        KVF_TRY(run_chunk(&run, done, tokens, patch, position + done));
    }
    return finish(&run);
}

kvf_status kvf_transformer_prefill(kvf_transformer *t, kvf_cache *cache, kvf_sequence *sequence,
                                   const uint32_t *ids, uint32_t count, kvf_stream *stream)
{
    return kvf_transformer_prefill_chunked(t, cache, NULL, sequence, ids, count, count, false,
                                           stream);
}
