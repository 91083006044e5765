/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Completing a pruned prompt; see the header.
 *
 * Row i is the hidden state of token i behind the attention of layer - 1 and in front of its MLP:
 * where a pruned prefill gathers. A piece takes rows through that MLP and the attention of `layer`,
 * in the cuts of a plain prefill, so that it gives the same bits. Invariant: rows below `done` are
 * one layer further than the others.
 */

#include "completion.h"

#include "transformer_ops.h"

#include <stdlib.h>
#include <string.h>

/* Of one reservation: pinned memory comes in pieces below 1 GiB. */
#define SEGMENT_BYTES ((size_t)512 << 20)

typedef struct segment {
    void *host;   /* as it is freed */
    char *device; /* as copies see it */
} segment;

struct kvf_completion {
    kvf_runtime *runtime;
    size_t row_bytes;
    uint32_t tokens_max;
    uint32_t layers;       /* of the model */
    uint32_t segment_rows; /* of each segment but the last */
    uint32_t segment_count;
    segment *segments;
    kvf_sequence *sequence; /* NULL = nothing is left */
    kvf_sequence *whole;    /* NULL = not begun */
    uint32_t tokens;
    uint32_t first_layer; /* behind the pivot */
    uint32_t layer;       /* that is computed; `layers` = all were */
    uint32_t done;        /* rows of it */
};

static size_t row_bytes(const kvf_model_config *model)
{
    return model->hidden_size * sizeof(float);
}

uint64_t kvf_completion_bytes(const kvf_model_config *model, uint32_t tokens)
{
    return (uint64_t)tokens * row_bytes(model);
}

/* ---- open and close ---- */

static kvf_status take_segments(kvf_completion *c)
{
    for (uint32_t i = 0; i < c->segment_count; i++) {
        const uint32_t rest = c->tokens_max - i * c->segment_rows;
        const uint32_t rows = rest < c->segment_rows ? rest : c->segment_rows;
        void *device = NULL;
        KVF_TRY(kvf_pinned_alloc(c->runtime, rows * c->row_bytes, &c->segments[i].host, &device));
        c->segments[i].device = device;
    }
    return KVF_OK;
}

kvf_status kvf_completion_open(kvf_runtime *runtime, const kvf_model_config *model,
                               uint32_t tokens_max, kvf_completion **out, kvf_error *error)
{
    kvf_completion *c = *out = calloc(1, sizeof *c);
    if (!c)
        return model_out_of_memory(error, sizeof *c, "completing prompts");
    c->runtime = runtime;
    c->row_bytes = row_bytes(model);
    c->layers = model->layers;
    c->tokens_max = tokens_max;
    c->segment_rows = (uint32_t)(SEGMENT_BYTES / c->row_bytes);
    c->segment_count = (tokens_max + c->segment_rows - 1) / c->segment_rows;
    c->segments = calloc(c->segment_count + 1u, sizeof *c->segments);
    kvf_status status = KVF_OUT_OF_MEMORY;
    if (c->segments)
        status = take_segments(c);
    if (status == KVF_OK)
        return KVF_OK;
    kvf_completion_close(c);
    *out = NULL;
    return model_fail(error, status, "no memory for hidden states of %u tokens (%llu bytes): %s",
                      tokens_max, (unsigned long long)kvf_completion_bytes(model, tokens_max),
                      kvf_runtime_error(runtime)->text);
}

void kvf_completion_close(kvf_completion *c)
{
    if (!c)
        return;
    kvf_completion_drop(c, NULL);
    for (uint32_t i = 0; c->segments && i < c->segment_count; i++)
        kvf_pinned_free(c->runtime, c->segments[i].host);
    free(c->segments);
    free(c);
}

/* ---- what is kept ---- */

/* Rows first ... of the completion, from or to the hidden states of a step. */
static kvf_status move_rows(const kvf_completion *c, const transformer_step *s, uint32_t first,
                            bool keeps)
{
    char *hidden = (char *)transformer_hidden_at(s);
    for (uint32_t i = 0; i < s->rows;) {
        const uint32_t at = (first + i) % c->segment_rows, rest = s->rows - i;
        const uint32_t room = c->segment_rows - at, rows = rest < room ? rest : room;
        char *kept = c->segments[(first + i) / c->segment_rows].device + at * c->row_bytes;
        char *own = hidden + i * c->row_bytes;
        KVF_TRY(kvf_memory_copy(s->stream, keeps ? kept : own, keeps ? own : kept,
                                rows * c->row_bytes));
        i += rows;
    }
    return KVF_OK;
}

void kvf_transformer_keep(kvf_transformer *t, kvf_completion *completion)
{
    t->completion = completion;
}

kvf_status transformer_keep_rows(const transformer_step *s, kvf_sequence *sequence, uint32_t layer)
{
    kvf_completion *c = s->t->completion;
    kvf_completion_drop(c, s->t);
    if (s->rows > c->tokens_max)
        return KVF_OK;
    KVF_TRY(move_rows(c, s, 0, true));
    c->sequence = sequence;
    c->tokens = s->rows;
    c->first_layer = c->layer = layer + 1;
    c->done = 0;
    return kvf_stream_wait(s->stream);
}

void kvf_completion_drop(kvf_completion *c, kvf_transformer *t)
{
    if (t && c->whole)
        kvf_transformer_forget(t);
    kvf_sequence_destroy(c->whole);
    c->whole = c->sequence = NULL;
}

const kvf_sequence *kvf_completion_of(const kvf_completion *c)
{
    return c->sequence;
}

uint32_t kvf_completion_tokens(const kvf_completion *c)
{
    return c->tokens;
}

uint64_t kvf_completion_rows(const kvf_completion *c)
{
    return c->sequence ? (uint64_t)(c->layers - c->first_layer) * c->tokens : 0;
}

uint64_t kvf_completion_left(const kvf_completion *c)
{
    return c->sequence ? (uint64_t)(c->layers - c->layer) * c->tokens - c->done : 0;
}

/* ---- a piece ---- */

/* Angles for their positions, and in place of embeddings what was kept. */
static kvf_status bring_rows(const kvf_completion *c, const transformer_step *s)
{
    kvf_transformer *t = s->t;
    memset(t->index, 0, s->rows * sizeof *t->index);
    for (uint32_t i = 0; i < s->rows; i++)
        t->positions[i] = c->done + i;
    KVF_TRY(t->ops->start(s, t->index, t->positions));
    return move_rows(c, s, c->done, false);
}

static kvf_status compute(const kvf_completion *c, const transformer_step *s, kvf_cache *cache)
{
    const transformer_buffers *b = &s->t->buffers;
    const kvf_prefill_args args = {.sequence = c->whole,
                                   .layer = c->layer,
                                   .tokens = s->rows,
                                   .q = b->q,
                                   .k = b->k,
                                   .v = b->v,
                                   .positions = s->t->positions,
                                   .out = b->attended};
    KVF_TRY(bring_rows(c, s));
    KVF_TRY(transformer_mlp(s, c->layer - 1));
    KVF_TRY(transformer_project(s, c->layer));
    KVF_TRY(kvf_prefill(cache, &args, s->stream));
    if (c->layer + 1 == c->layers)
        return KVF_OK;
    KVF_TRY(s->t->ops->output(s, &s->t->layers[c->layer], NULL));
    return move_rows(c, s, c->done, true);
}

/* After an error the sequence is what pruning left. */
static kvf_status settle(kvf_completion *c, kvf_transformer *t, kvf_stream *stream,
                         kvf_status status)
{
    const kvf_status waited = kvf_stream_wait(stream);
    if (status == KVF_OK)
        status = waited;
    if (status != KVF_OK)
        kvf_completion_drop(c, t);
    return status;
}

static kvf_status step(kvf_completion *c, kvf_transformer *t, kvf_cache *cache, kvf_stream *stream)
{
    const uint32_t rest = c->tokens - c->done, most = t->options.chunk_max;
    const transformer_step s = {.t = t, .stream = stream, .rows = rest < most ? rest : most};
    if (!c->whole)
        KVF_TRY(
            kvf_complete_begin(cache, c->sequence, c->first_layer, c->tokens, stream, &c->whole));
    KVF_TRY(compute(c, &s, cache));
    c->done += s.rows;
    if (c->done < c->tokens)
        return KVF_OK;
    c->done = 0;
    c->layer++;
    return KVF_OK;
}

kvf_status kvf_completion_step(kvf_completion *c, kvf_transformer *t, kvf_cache *cache,
                               kvf_stream *stream)
{
    return settle(c, t, stream, step(c, t, cache, stream));
}

static kvf_status finish(kvf_completion *c, kvf_transformer *t, kvf_cache *cache,
                         const uint32_t *ids, uint32_t count, kvf_stream *stream)
{
    const uint32_t most = kvf_transformer_prompt_max(t);
    for (uint32_t done = 0; done < count;) {
        const uint32_t rest = count - done, piece = rest < most ? rest : most;
        KVF_TRY(kvf_transformer_prefill(t, cache, c->whole, ids + done, piece, stream));
        KVF_TRY(kvf_stream_wait(stream));
        done += piece;
    }
    kvf_transformer_forget(t);
    KVF_TRY(kvf_complete_end(cache, c->sequence, c->whole, stream));
    c->whole = c->sequence = NULL;
    return KVF_OK;
}

kvf_status kvf_completion_end(kvf_completion *c, kvf_transformer *t, kvf_cache *cache,
                              const uint32_t *ids, uint32_t count, kvf_stream *stream)
{
    return settle(c, t, stream, finish(c, t, cache, ids, count, stream));
}
