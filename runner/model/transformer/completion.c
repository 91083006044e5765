/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Completing a pruned prompt; see the header.
 *
 * Row i is the hidden state of token i after the attention of layer - 1 and in front of its MLP:
 * where a pruned prefill gathers. A piece takes rows through that MLP and the attention of `layer`,
 * in the cuts of a plain prefill, so that it gives the same bits. Invariant: rows below `done` are
 * one layer further than the others.
 */

#include "completion.h"

#include "transformer_ops.h"

#include <stdlib.h>
#include <string.h>

struct kvf_completion {
    kvf_hidden *hidden;
    uint32_t tokens_max;
    uint32_t layers;        /* of the model */
    kvf_sequence *sequence; /* NULL = nothing is left */
    kvf_sequence *whole;    /* NULL = not begun */
    uint32_t tokens;
    uint32_t first_layer; /* after the pivot */
    uint32_t layer;       /* that is computed; `layers` = all were */
    uint32_t done;        /* rows of it */
    kvf_runtime *runtime;
    kvf_error lost; /* why the last prompt left nothing; status KVF_OK = it did */
};

static uint64_t row_bytes(const kvf_model_config *model)
{
    return (uint64_t)model->hidden_size * sizeof(float);
}

void kvf_completion_plan(const kvf_model_config *model, uint32_t tokens, bool on_disk,
                         kvf_hidden_plan *plan)
{
    kvf_hidden_plan_make(row_bytes(model), tokens, on_disk, plan);
}

/* ---- open and close ---- */

kvf_status kvf_completion_open(kvf_runtime *runtime, const kvf_model_config *model,
                               uint32_t tokens_max, const char *disk_path, kvf_completion **out,
                               kvf_error *error)
{
    kvf_completion *c = *out = calloc(1, sizeof *c);
    if (!c)
        return model_out_of_memory(error, sizeof *c, "completing prompts");
    c->runtime = runtime;
    c->layers = model->layers;
    c->tokens_max = tokens_max;
    const kvf_status status =
        kvf_hidden_open(runtime, row_bytes(model), tokens_max, disk_path, &c->hidden);
    if (status == KVF_OK)
        return KVF_OK;
    kvf_completion_close(c);
    *out = NULL;
    return model_fail(error, status, "hidden states of %u tokens: %s", tokens_max,
                      kvf_runtime_error(runtime)->text);
}

void kvf_completion_close(kvf_completion *c)
{
    if (!c)
        return;
    kvf_completion_drop(c, NULL);
    kvf_hidden_close(c->hidden);
    free(c);
}

/* ---- what is kept ---- */

void kvf_transformer_keep(kvf_transformer *t, kvf_completion *completion)
{
    t->completion = completion;
}

kvf_status transformer_keep_rows(const transformer_step *s, kvf_sequence *sequence, uint32_t layer)
{
    kvf_completion *c = s->t->completion;
    kvf_completion_drop(c, s->t);
    c->lost = (kvf_error){.status = KVF_OK};
    if (s->rows > c->tokens_max)
        return KVF_OK;
    const kvf_status status =
        kvf_hidden_put(c->hidden, 0, s->rows, transformer_hidden_at(s), s->stream);
    if (status == KVF_SYSTEM) { /* the file: the prompt is answered all the same */
        c->lost = *kvf_runtime_error(c->runtime);
        return KVF_OK;
    }
    KVF_TRY(status);
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

const kvf_error *kvf_completion_lost(const kvf_completion *c)
{
    return c->lost.status == KVF_OK ? NULL : &c->lost;
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
    return kvf_hidden_get(c->hidden, c->done, s->rows, transformer_hidden_at(s), s->stream);
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
    return kvf_hidden_put(c->hidden, c->done, s->rows, transformer_hidden_at(s), s->stream);
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
