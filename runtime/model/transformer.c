/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs a transformer: enqueues the operations of every layer in order.
 *
 * It knows the order of operations; shapes were checked at open. Invariant: tasks of one launch
 * write disjoint rows or columns, and every launch reads only what earlier launches of the same
 * stream wrote.
 */

#include "layer_ops.h"
#include "transformer_parts.h"

#include <assert.h>
#include <string.h>

/* Columns of the activation that one task computes. */
#define ACTIVATION_SEGMENT 2048u

typedef struct row_args {
    const kvf_transformer *t;
    const transformer_layer *layer;
    const float *norm; /* weight of a norm */
} row_args;

/* ------------------------------------------------------------------ tasks, one per row */

/* Embedding and angles of one row. */
static void start_task(const void *raw, uint32_t row)
{
    const kvf_transformer *t = ((const row_args *)raw)->t;
    const transformer_buffers *b = &t->buffers;
    size_t hidden = t->model.hidden_size, half = t->rope.count;
    size_t element = kvf_weights_dtype_bytes(t->embedding->dtype);
    const unsigned char *table = t->embedding->data;
    kvf_numbers_widen(table + b->ids[row] * hidden * element, t->embedding->dtype, hidden,
                      b->hidden + row * hidden);
    kvf_rope_angles(t->rope.inv_freq, half, t->rope.attention_scaling, b->positions[row],
                    b->cosine + row * half, b->sine + row * half);
}

static void norm_task(const void *raw, uint32_t row)
{
    const row_args *args = raw;
    const kvf_transformer *t = args->t;
    size_t hidden = t->model.hidden_size;
    kvf_rms_norm(t->buffers.hidden + row * hidden, args->norm, hidden, t->model.norm_eps,
                 t->buffers.normed + row * hidden);
}

/* Norm (where the family has one) and rotation of every head of a row, in place. */
static void rotate_heads(const kvf_transformer *t, float *x, uint32_t heads, const float *norm,
                         uint32_t row)
{
    size_t head_dim = t->model.head_dim, half = t->rope.count;
    const float *cosine = t->buffers.cosine + row * half, *sine = t->buffers.sine + row * half;
    for (uint32_t head = 0; head < heads; head++, x += head_dim) {
        if (norm)
            kvf_rms_norm(x, norm, head_dim, t->model.norm_eps, x);
        kvf_rope_rotate(x, half, cosine, sine);
    }
}

static void store_row(const kvf_transformer *t, void *to, uint32_t row, const float *from,
                      size_t width)
{
    size_t bytes = width * kvf_weights_dtype_bytes(t->model.dtype);
    kvf_numbers_narrow(from, t->model.dtype, width, (unsigned char *)to + row * bytes);
}

static void rope_task(const void *raw, uint32_t row)
{
    const row_args *args = raw;
    const kvf_transformer *t = args->t;
    const transformer_buffers *b = &t->buffers;
    size_t q_width = (size_t)t->model.query_heads * t->model.head_dim;
    size_t kv_width = (size_t)t->model.kv_heads * t->model.head_dim;
    float *q = b->qkv + row * (q_width + 2 * kv_width);
    float *k = q + q_width, *v = k + kv_width;
    rotate_heads(t, q, t->model.query_heads, args->layer->query_norm, row);
    rotate_heads(t, k, t->model.kv_heads, args->layer->key_norm, row);
    store_row(t, b->q, row, q, q_width);
    store_row(t, b->k, row, k, kv_width);
    store_row(t, b->v, row, v, kv_width);
}

static void widen_task(const void *raw, uint32_t row)
{
    const kvf_transformer *t = ((const row_args *)raw)->t;
    size_t width = (size_t)t->model.query_heads * t->model.head_dim;
    size_t bytes = width * kvf_weights_dtype_bytes(t->model.dtype);
    kvf_numbers_widen((const unsigned char *)t->buffers.attended + row * bytes, t->model.dtype,
                      width, t->buffers.attended_wide + row * width);
}

static uint32_t activation_segments(const kvf_transformer *t)
{
    return (t->model.intermediate_size + ACTIVATION_SEGMENT - 1) / ACTIVATION_SEGMENT;
}

/* One task is one segment of one row. */
static void activate_task(const void *raw, uint32_t task)
{
    const kvf_transformer *t = ((const row_args *)raw)->t;
    size_t width = t->model.intermediate_size;
    size_t row = task / activation_segments(t);
    size_t first = task % activation_segments(t) * (size_t)ACTIVATION_SEGMENT;
    size_t count = width - first < ACTIVATION_SEGMENT ? width - first : ACTIVATION_SEGMENT;
    const float *gate = t->buffers.gate_up + row * 2 * width + first;
    kvf_swiglu(gate, gate + width, count, t->buffers.activated + row * width + first);
}

/* ------------------------------------------------------------------------- enqueueing */

/* A step being enqueued. */
typedef struct step {
    kvf_transformer *t;
    kvf_cache *cache;
    kvf_sequence *const *sequences;
    kvf_stream *stream;
    uint32_t rows;
    bool decode; /* a row is a sequence; otherwise a token of sequences[0] */
} step;

static kvf_status launch(const step *s, kvf_task_fn fn, row_args args, uint32_t tasks)
{
    args.t = s->t;
    return kvf_stream_launch(s->stream, fn, &args, sizeof args, tasks);
}

static kvf_status multiply(const step *s, kvf_linear_call call)
{
    call.rows = s->rows;
    return kvf_linear_enqueue(s->t->engine, &call, s->stream);
}

static kvf_status attend(const step *s, uint32_t layer)
{
    const transformer_buffers *b = &s->t->buffers;
    if (s->decode) {
        kvf_decode_args args = {
            .layer = layer,
            .batch = s->rows,
            .sequences = s->sequences,
            .q = b->q,
            .k = b->k,
            .v = b->v,
            .positions = b->positions,
            .out = b->attended,
        };
        return kvf_decode(s->cache, &args, s->stream);
    }
    kvf_prefill_args args = {
        .sequence = s->sequences[0],
        .layer = layer,
        .tokens = s->rows,
        .q = b->q,
        .k = b->k,
        .v = b->v,
        .positions = b->positions,
        .out = b->attended,
    };
    return kvf_prefill(s->cache, &args, s->stream);
}

#define TRY(call)                                                                                  \
    do {                                                                                           \
        kvf_status try_status = (call);                                                            \
        if (try_status != KVF_OK)                                                                  \
            return try_status;                                                                     \
    } while (0)

static kvf_status run_attention(const step *s, uint32_t index)
{
    const transformer_buffers *b = &s->t->buffers;
    const transformer_layer *l = &s->t->layers[index];
    TRY(launch(s, norm_task, (row_args){.norm = l->attention_norm}, s->rows));
    TRY(multiply(s, (kvf_linear_call){.parts = {&l->query, &l->key, &l->value},
                                      .part_count = 3,
                                      .x = b->normed,
                                      .y = b->qkv}));
    TRY(launch(s, rope_task, (row_args){.layer = l}, s->rows));
    return attend(s, index);
}

static kvf_status run_rest(const step *s, uint32_t index)
{
    const transformer_buffers *b = &s->t->buffers;
    const transformer_layer *l = &s->t->layers[index];
    TRY(launch(s, widen_task, (row_args){0}, s->rows));
    TRY(multiply(s, (kvf_linear_call){.parts = {&l->output},
                                      .part_count = 1,
                                      .x = b->attended_wide,
                                      .y = b->hidden,
                                      .accumulate = true}));
    TRY(launch(s, norm_task, (row_args){.norm = l->mlp_norm}, s->rows));
    TRY(multiply(
        s, (kvf_linear_call){
               .parts = {&l->gate, &l->up}, .part_count = 2, .x = b->normed, .y = b->gate_up}));
    TRY(launch(s, activate_task, (row_args){0}, s->rows * activation_segments(s->t)));
    return multiply(s, (kvf_linear_call){.parts = {&l->down},
                                         .part_count = 1,
                                         .x = b->activated,
                                         .y = b->hidden,
                                         .accumulate = true});
}

/* All layers. @p hidden_wanted false leaves the last layer at its attention: no one reads more. */
static kvf_status run_layers(const step *s, bool hidden_wanted)
{
    uint32_t layers = s->t->model.layers;
    TRY(launch(s, start_task, (row_args){0}, s->rows));
    for (uint32_t layer = 0; layer < layers; layer++) {
        TRY(run_attention(s, layer));
        if (hidden_wanted || layer + 1 < layers)
            TRY(run_rest(s, layer));
    }
    return KVF_OK;
}

/* Position of the next token of a sequence. */
static uint32_t next_position(const kvf_sequence *sequence)
{
    uint32_t length = kvf_sequence_length(sequence, 0);
    return length == 0 ? 0 : kvf_sequence_position(sequence, 0, length - 1) + 1;
}

static bool ids_valid(const kvf_transformer *t, const uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] >= t->model.vocab_size)
            return false;
    return true;
}

kvf_status kvf_transformer_prefill(kvf_transformer *t, kvf_cache *cache, kvf_sequence *sequence,
                                   const uint32_t *ids, uint32_t count, kvf_stream *stream)
{
    if (count == 0 || count > t->options.chunk_max || !ids_valid(t, ids, count))
        return KVF_INVALID;
    memcpy(t->buffers.ids, ids, count * sizeof *ids);
    uint32_t first = next_position(sequence);
    for (uint32_t i = 0; i < count; i++)
        t->buffers.positions[i] = first + i;
    step s = {.t = t, .cache = cache, .sequences = &sequence, .stream = stream, .rows = count};
    return run_layers(&s, false);
}

kvf_status kvf_transformer_decode(kvf_transformer *t, kvf_cache *cache,
                                  kvf_sequence *const *sequences, const uint32_t *ids,
                                  uint32_t batch, bool want_logits, kvf_stream *stream)
{
    if (batch == 0 || batch > t->options.batch_max || !ids_valid(t, ids, batch))
        return KVF_INVALID;
    memcpy(t->buffers.ids, ids, batch * sizeof *ids);
    for (uint32_t i = 0; i < batch; i++)
        t->buffers.positions[i] = next_position(sequences[i]);
    step s = {.t = t,
              .cache = cache,
              .sequences = sequences,
              .stream = stream,
              .rows = batch,
              .decode = true};
    TRY(run_layers(&s, want_logits));
    if (!want_logits)
        return KVF_OK;
    TRY(launch(&s, norm_task, (row_args){.norm = t->final_norm}, batch));
    return multiply(&s, (kvf_linear_call){.parts = {&t->head},
                                          .part_count = 1,
                                          .x = t->buffers.normed,
                                          .y = t->buffers.logits});
}

const float *kvf_transformer_logits(const kvf_transformer *t, uint32_t row)
{
    assert(row < t->options.batch_max);
    return t->buffers.logits + (size_t)row * t->model.vocab_size;
}

kvf_status kvf_transformer_check(const kvf_transformer *t, kvf_error *error)
{
    if (!kvf_linear_engine_failed(t->engine))
        return KVF_OK;
    return model_fail(error, KVF_OUT_OF_MEMORY,
                      "oneDNN found no memory for a matrix product; use fewer threads");
}
