/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefill once, load often; see eval_prefill.h. The order of operations is that of
 * transformer_prefill.c, chunk by chunk.
 */

#include "eval_prefill.h"

#include "transformer_ops.h"

#include <stdlib.h>

static size_t kv_bytes(const eval_machine *m)
{
    return (size_t)transformer_kv_width(&m->model) * kvf_dtype_bytes(m->model.dtype);
}

static size_t q_bytes(const eval_machine *m)
{
    return (size_t)transformer_query_width(&m->model) * kvf_dtype_bytes(m->model.dtype);
}

static void *at_layer(void *base, uint32_t layer, uint32_t rows, uint32_t row, size_t bytes)
{
    return (char *)base + ((size_t)layer * rows + row) * bytes;
}

/* ---- make ---- */

/* Rows `first` ... of a layer, as they are in the transformer's buffers, to where they are kept. */
static kvf_status keep(const eval_machine *m, const eval_prefill *p, const transformer_step *s,
                       uint32_t layer, uint32_t first)
{
    const transformer_buffers *b = &s->t->buffers;
    const uint32_t from = p->tokens - p->queries; /* the first whose query is kept */
    const uint32_t skip = first < from ? kvf_min_u32(from - first, s->rows) : 0;
    KVF_TRY(kvf_memory_copy(m->stream, at_layer(p->k, layer, p->tokens, first, kv_bytes(m)), b->k,
                            s->rows * kv_bytes(m)));
    KVF_TRY(kvf_memory_copy(m->stream, at_layer(p->v, layer, p->tokens, first, kv_bytes(m)), b->v,
                            s->rows * kv_bytes(m)));
    if (skip == s->rows)
        return KVF_OK;
    return kvf_memory_copy(m->stream,
                           at_layer(p->q, layer, p->queries, first + skip - from, q_bytes(m)),
                           (const char *)b->q + skip * q_bytes(m), (s->rows - skip) * q_bytes(m));
}

static kvf_status run_layer(const eval_machine *m, const eval_prefill *p, const transformer_step *s,
                            uint32_t layer, uint32_t first, kvf_cache *cache,
                            kvf_sequence *sequence)
{
    const transformer_buffers *b = &s->t->buffers;
    const kvf_prefill_args args = {.sequence = sequence,
                                   .layer = layer,
                                   .tokens = s->rows,
                                   .q = b->q,
                                   .k = b->k,
                                   .v = b->v,
                                   .out = b->attended};
    KVF_TRY(transformer_project(s, layer));
    KVF_TRY(keep(m, p, s, layer, first));
    KVF_TRY(kvf_prefill(cache, &args, m->stream));
    KVF_TRY(s->t->ops->output(s, &s->t->layers[layer], NULL));
    return transformer_mlp(s, layer);
}

static kvf_status run_chunk(const eval_machine *m, const eval_prefill *p, const uint32_t *ids,
                            uint32_t first, kvf_cache *cache, kvf_sequence *sequence)
{
    const transformer_step s = {
        .t = m->transformer, .stream = m->stream, .rows = kvf_min_u32(m->chunk, p->tokens - first)};
    uint32_t *positions = m->transformer->positions;
    for (uint32_t i = 0; i < s.rows; i++)
        positions[i] = first + i;
    KVF_TRY(m->transformer->ops->start(&s, ids + first, positions));
    for (uint32_t layer = 0; layer < m->model.layers; layer++)
        KVF_TRY(run_layer(m, p, &s, layer, first, cache, sequence));
    return kvf_stream_wait(m->stream);
}

static kvf_status run_all(const eval_machine *m, const eval_prefill *p, const uint32_t *ids,
                          kvf_cache *cache, kvf_error *error)
{
    kvf_sequence *sequence = NULL;
    kvf_status status = kvf_sequence_create(cache, &sequence);
    for (uint32_t at = 0; status == KVF_OK && at < p->tokens; at += m->chunk)
        status = run_chunk(m, p, ids, at, cache, sequence);
    const kvf_status waited = kvf_stream_wait(m->stream);
    kvf_sequence_destroy(sequence);
    status = status == KVF_OK ? waited : status;
    return status == KVF_OK ? KVF_OK
                            : model_fail(error, status, "%s", kvf_runtime_error(m->runtime)->text);
}

kvf_status eval_prefill_make(const eval_machine *m, const uint32_t *ids, uint32_t count,
                             eval_prefill *out, kvf_error *error)
{
    const kvf_transformer_options geometry = {
        .model = &m->model, .runtime = m->runtime, .chunk_max = m->chunk};
    const uint32_t layers = m->model.layers;
    *out = (eval_prefill){.tokens = count, .queries = kvf_min_u32(count, EVAL_QUERIES)};
    out->k = malloc(layers * count * kv_bytes(m));
    out->v = malloc(layers * count * kv_bytes(m));
    out->q = malloc(layers * out->queries * q_bytes(m));
    if (!out->k || !out->v || !out->q)
        return model_out_of_memory(error, 2 * layers * count * kv_bytes(m), "keys and values");
    kvf_cache_config cc;
    kvf_cache *cache = NULL;
    kvf_cache_config_init(&cc);
    kvf_transformer_geometry(&geometry, &cc);
    cc.select = KVF_SELECT_FULL;
    cc.tokens_max = count;
    KVF_TRY(kvf_cache_open(m->runtime, &cc, &cache, error));
    const kvf_status status = run_all(m, out, ids, cache, error);
    kvf_cache_close(cache);
    return status;
}

void eval_prefill_free(eval_prefill *kept)
{
    free(kept->k);
    free(kept->v);
    free(kept->q);
}

/* ---- load ---- */

kvf_status eval_prefill_load(const eval_machine *m, const eval_prefill *p, kvf_cache *cache,
                             kvf_sequence *sequence)
{
    const uint32_t most = kvf_cache_settings(cache)->prefill_chunk_max;
    const uint32_t from = p->tokens - p->queries;
    for (uint32_t layer = 0; layer < m->model.layers; layer++) {
        for (uint32_t first = 0, rows; first < p->tokens; first += rows) {
            const bool asks = first >= from;
            rows = kvf_min_u32(most, (asks ? p->tokens : from) - first);
            const kvf_prefill_args args = {
                .sequence = sequence,
                .layer = layer,
                .tokens = rows,
                .q = asks ? at_layer(p->q, layer, p->queries, first - from, q_bytes(m)) : NULL,
                .k = at_layer(p->k, layer, p->tokens, first, kv_bytes(m)),
                .v = at_layer(p->v, layer, p->tokens, first, kv_bytes(m)),
                .out = asks ? m->unused : NULL};
            KVF_TRY(kvf_prefill(cache, &args, m->stream));
        }
    }
    return kvf_stream_wait(m->stream);
}
