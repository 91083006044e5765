/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefill chunk by chunk: a chunk goes through all layers before the next one begins.
 *
 * After Bhaskar et al. (PruLong), 2025, section 3. It knows the order of operations, no policy and
 * no device. With patched eviction the prompt's last tokens follow every chunk but the last, at the
 * positions right behind it, as in the published code; those positions come again with the next
 * chunk. Invariant: hidden states hold one chunk and its patch, and the token at place i of the
 * prompt has position first + i whatever was evicted before it.
 */

#include "common/base.h"
#include "transformer_ops.h"

/* A prompt on its way. */
typedef struct chunk_run {
    transformer_step step;
    kvf_prune *prune; /* NULL = nothing is evicted */
    const uint32_t *ids;
    uint32_t count;
    uint32_t chunk;
    uint32_t patch; /* tokens behind every chunk but the last */
} chunk_run;

/* One chunk: `tokens` from place `done` of the prompt on, then `patch`. */
typedef struct chunk_part {
    uint32_t tokens, patch;
} chunk_part;

static kvf_status attend(const transformer_step *s, uint32_t layer)
{
    const transformer_buffers *b = &s->t->buffers;
    const kvf_prefill_args args = {.sequence = s->sequences[0],
                                   .layer = layer,
                                   .tokens = s->rows,
                                   .q = b->q,
                                   .k = b->k,
                                   .v = b->v,
                                   .positions = s->t->positions + s->first,
                                   .out = b->attended};
    return kvf_prefill(s->cache, &args, s->stream);
}

/* All rows through one layer, in operations of chunk_max. The last one stops at its attention. */
static kvf_status run_layer(transformer_step s, uint32_t layer, uint32_t rows)
{
    const uint32_t most = s.t->options.chunk_max;
    for (s.first = 0; s.first < rows; s.first += s.rows) {
        s.rows = rows - s.first < most ? rows - s.first : most;
        KVF_TRY(transformer_project(&s, layer));
        KVF_TRY(attend(&s, layer));
        if (layer + 1 == s.t->model.layers)
            continue;
        KVF_TRY(s.t->ops->output(&s, &s.t->layers[layer]));
        KVF_TRY(transformer_mlp(&s, layer));
    }
    return KVF_OK;
}

static kvf_status start(const chunk_run *r, uint32_t done, const chunk_part *part,
                        uint32_t position)
{
    kvf_transformer *t = r->step.t;
    transformer_step s = r->step;
    for (uint32_t i = 0; i < part->tokens + part->patch; i++)
        t->positions[i] = position + i;
    s.rows = part->tokens;
    KVF_TRY(t->ops->start(&s, r->ids + done, t->positions));
    if (part->patch == 0)
        return KVF_OK;
    s.first = part->tokens;
    s.rows = part->patch;
    return t->ops->start(&s, r->ids + r->count - part->patch, t->positions + part->tokens);
}

static kvf_status run_chunk(const chunk_run *r, uint32_t done, const chunk_part *part,
                            uint32_t position)
{
    const transformer_step *s = &r->step;
    KVF_TRY(start(r, done, part, position));
    for (uint32_t layer = 0; layer < s->t->model.layers; layer++) {
        KVF_TRY(run_layer(*s, layer, part->tokens + part->patch));
        if (r->prune)
            KVF_TRY(kvf_prune_chunk(r->prune, s->sequences[0], layer, part->tokens, part->patch,
                                    s->stream));
    }
    return KVF_OK;
}

static kvf_status run_chunks(const chunk_run *r, uint32_t position)
{
    for (uint32_t done = 0; done < r->count;) {
        const uint32_t rest = r->count - done;
        const chunk_part part = {.tokens = rest < r->chunk ? rest : r->chunk,
                                 .patch = rest > r->chunk ? r->patch : 0};
        if (done > 0) /* ids and positions of the chunk before were read */
            KVF_TRY(kvf_stream_wait(r->step.stream));
        KVF_TRY(run_chunk(r, done, &part, position + done));
        done += part.tokens;
    }
    return KVF_OK;
}

static uint32_t patch_of(const kvf_prune_config *config, uint32_t count, uint32_t chunk)
{
    return config->eviction == KVF_EVICTION_PATCHED && chunk < count ? config->chunk_queries : 0;
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
    const kvf_prune_config *config = prune ? kvf_prune_config_get(prune) : NULL;
    if (!config || config->eviction == KVF_EVICTION_NONE)
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

kvf_status kvf_transformer_prefill_chunked(kvf_transformer *t, kvf_cache *cache, kvf_prune *prune,
                                           kvf_sequence *sequence, const uint32_t *ids,
                                           uint32_t count, uint32_t chunk, kvf_stream *stream)
{
    const kvf_prune_config *config = prune ? kvf_prune_config_get(prune) : NULL;
    const kvf_prompt whole = {.sequence = sequence, .ids = ids, .count = count};
    kvf_error error;
    KVF_TRY(kvf_transformer_chunk_check(t, prune, count, chunk, &error));
    if (config && config->eviction == KVF_EVICTION_NONE)
        return kvf_transformer_prefill_pruned(t, cache, prune, &whole, 1, stream);
    if (!transformer_ids_valid(t, ids, count))
        return KVF_INVALID;
    if (prune)
        KVF_TRY(kvf_prune_begin(prune, sequence, count));
    const uint32_t held = kvf_sequence_length(sequence, 0);
    const chunk_run run = {
        .step = {.t = t, .cache = cache, .sequences = &sequence, .stream = stream},
        .prune = prune,
        .ids = ids,
        .count = count,
        .chunk = chunk,
        .patch = config ? patch_of(config, count, chunk) : 0};
    return run_chunks(&run, held ? kvf_sequence_position(sequence, 0, held - 1) + 1 : 0);
}
