/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A transformer's operations on the host device: rows as tasks of a launch, products through
 * linear.h.
 *
 * It knows operations, not their order. Weights are used where the file is mapped. Invariant: tasks
 * of one launch write disjoint rows or columns.
 */

#include "host_parts.h"
#include "layer_ops.h"

#include <stdlib.h>
#include <string.h>

/* Columns of hidden states or angles that one task moves. */
#define GATHER_SEGMENT 256u

/* ---- tasks, one per row ---- */

/* Embedding and angles of one row. */
static void start_task(const void *raw, uint32_t task)
{
    const row_args *args = raw;
    const kvf_transformer *t = args->t;
    const transformer_buffers *b = &t->buffers;
    const size_t row = args->first + task;
    size_t hidden = t->model.hidden_size, half = t->rope.count;
    const kvf_linear *embedding = &t->embedding;
    const char *from =
        (const char *)embedding->weight + b->ids[row] * kvf_linear_row_bytes(embedding);
    float *to = b->hidden + row * hidden;
    kvf_numbers_widen(from, embedding->dtype, hidden, to);
    kvf_rope_angles(t->rope.inv_freq, half, t->rope.attention_scaling, b->positions[row],
                    b->cosine + row * half, b->sine + row * half);
}

static void norm_task(const void *raw, uint32_t row)
{
    const row_args *args = raw;
    const kvf_transformer *t = args->t;
    size_t hidden = t->model.hidden_size;
    kvf_rms_norm(t->buffers.hidden + (args->first + row) * hidden, args->norm, hidden,
                 t->model.norm_eps, (float *)t->buffers.normed + row * hidden);
}

/* Norm (where the family has one) and rotation of every head of a row, in place. */
static void rotate_heads(const row_args *args, float *x, uint32_t heads, const float *norm,
                         uint32_t row)
{
    const kvf_transformer *t = args->t;
    size_t head_dim = t->model.head_dim, half = t->rope.count;
    const transformer_buffers *b = &t->buffers;
    const size_t angle = (args->first + row) * half;
    const float *cosine = b->cosine + angle, *sine = b->sine + angle;
    for (uint32_t head = 0; head < heads; head++, x += head_dim) {
        if (norm)
            kvf_rms_norm(x, norm, head_dim, t->model.norm_eps, x);
        kvf_rope_rotate(x, half, cosine, sine);
    }
}

static void store_row(const kvf_transformer *t, void *to, uint32_t row, const float *from,
                      size_t width)
{
    const size_t first = row * width;
    if (t->model.dtype == KVF_BF16)
        host_of(t)->kernels->round(from, width, (uint16_t *)to + first);
    else
        kvf_numbers_narrow(from, t->model.dtype, width,
                           (unsigned char *)to + first * kvf_dtype_bytes(t->model.dtype));
}

static void rotate_task(const void *raw, uint32_t row)
{
    const row_args *args = raw;
    const kvf_transformer *t = args->t;
    const transformer_buffers *b = &t->buffers;
    size_t q_width = transformer_query_width(&t->model);
    size_t kv_width = transformer_kv_width(&t->model);
    float *q = b->qkv + row * (q_width + 2 * kv_width);
    float *k = q + q_width, *v = k + kv_width;
    rotate_heads(args, q, t->model.query_heads, args->layer->query_norm, row);
    rotate_heads(args, k, t->model.kv_heads, args->layer->key_norm, row);
    store_row(t, b->q, row, q, q_width);
    store_row(t, b->k, row, k, kv_width);
    store_row(t, b->v, row, v, kv_width);
}

static void widen_task(const void *raw, uint32_t row)
{
    const kvf_transformer *t = ((const row_args *)raw)->t;
    size_t width = transformer_query_width(&t->model);
    size_t bytes = width * kvf_dtype_bytes(t->model.dtype);
    host_of(t)->kernels->widen[t->model.dtype]((const unsigned char *)t->buffers.attended +
                                                   row * bytes,
                                               width, host_of(t)->attended_wide + row * width);
}

#define GATHERED 3u

/* Arrays of rows that are gathered together. */
typedef struct gather_args {
    float *base[GATHERED]; /* at the first row */
    uint32_t width[GATHERED];
    uint32_t segments[GATHERED];
    uint32_t first, rows;
    const uint32_t *index; /* [rows] */
} gather_args;

/* One task is one segment of columns of one array, row after row: no row moves up. */
static void gather_task(const void *raw, uint32_t task)
{
    const gather_args *args = raw;
    uint32_t i = 0;
    for (; task >= args->segments[i]; i++)
        task -= args->segments[i];
    const size_t width = args->width[i], column = (size_t)task * GATHER_SEGMENT;
    const size_t count = width - column < GATHER_SEGMENT ? width - column : GATHER_SEGMENT;
    float *base = args->base[i] + column;
    for (uint32_t row = 0; row < args->rows; row++) {
        const size_t from = args->index[row] - args->first;
        if (from != row)
            memcpy(base + row * width, base + from * width, count * sizeof *base);
    }
}

/* ---- enqueueing ---- */

static kvf_status host_start(const transformer_step *s, const uint32_t *ids,
                             const uint32_t *positions)
{
    memcpy(s->t->buffers.ids + s->first, ids, s->rows * sizeof *ids);
    memcpy(s->t->buffers.positions + s->first, positions, s->rows * sizeof *positions);
    return host_launch(s, start_task, (row_args){0}, s->rows);
}

static kvf_status host_gather(const transformer_step *s, const uint32_t *index)
{
    const transformer_buffers *b = &s->t->buffers;
    const uint32_t hidden = s->t->model.hidden_size, half = s->t->rope.count;
    const size_t angle = (size_t)s->first * half;
    gather_args args = {
        .base = {transformer_hidden_at(s), b->cosine + angle, b->sine + angle},
        .width = {hidden, half, half},
        .first = s->first,
        .rows = s->rows,
        .index = b->ids + s->first,
    };
    uint32_t tasks = 0;
    for (uint32_t i = 0; i < GATHERED; i++)
        tasks += args.segments[i] = (args.width[i] + GATHER_SEGMENT - 1) / GATHER_SEGMENT;
    memcpy(b->ids + s->first, index, s->rows * sizeof *index);
    return kvf_stream_launch(s->stream, gather_task, &args, sizeof args, tasks);
}

static kvf_status host_read_hidden(const transformer_step *s, float *out)
{
    KVF_TRY(kvf_stream_wait(s->stream));
    memcpy(out, transformer_hidden_at(s), s->t->model.hidden_size * sizeof *out);
    return KVF_OK;
}

static kvf_status host_norm(const transformer_step *s, const float *weight)
{
    return host_launch(s, norm_task, (row_args){.norm = weight}, s->rows);
}

static kvf_status host_project(const transformer_step *s, const transformer_layer *l)
{
    const transformer_buffers *b = &s->t->buffers;
    KVF_TRY(host_multiply(s, (kvf_linear_call){.parts = {&l->query, &l->key, &l->value},
                                               .part_count = 3,
                                               .x = b->normed,
                                               .y = b->qkv}));
    return host_launch(s, rotate_task, (row_args){.layer = l}, s->rows);
}

/* hidden += x W^T, and the norm of that. */
static kvf_status add(const transformer_step *s, const kvf_linear *linear, const float *x,
                      const float *norm)
{
    KVF_TRY(host_multiply(s, (kvf_linear_call){.parts = {linear},
                                               .part_count = 1,
                                               .x = x,
                                               .y = transformer_hidden_at(s),
                                               .accumulate = true}));
    return norm ? host_norm(s, norm) : KVF_OK;
}

static kvf_status host_output(const transformer_step *s, const transformer_layer *l,
                              const float *norm)
{
    KVF_TRY(host_launch(s, widen_task, (row_args){0}, s->rows));
    return add(s, &l->output, host_of(s->t)->attended_wide, norm);
}

static kvf_status host_mlp(const transformer_step *s, const transformer_layer *l, const float *norm)
{
    const transformer_buffers *b = &s->t->buffers;
    KVF_TRY(host_multiply(
        s, (kvf_linear_call){
               .parts = {&l->gate, &l->up}, .part_count = 2, .x = b->normed, .y = b->gate_up}));
    KVF_TRY(host_activate(s));
    return add(s, &l->down, b->activated, norm);
}

static kvf_status host_logits(const transformer_step *s)
{
    return host_multiply(s, (kvf_linear_call){.parts = {&s->t->head},
                                              .part_count = 1,
                                              .x = s->t->buffers.normed,
                                              .y = s->t->buffers.logits});
}

static const float *host_logits_row(const kvf_transformer *t, uint32_t row)
{
    return t->buffers.logits + (size_t)row * t->model.vocab_size;
}

static kvf_status host_check(const kvf_transformer *t, kvf_error *error)
{
    if (!kvf_linear_engine_failed(host_of(t)->engine))
        return KVF_OK;
    return model_fail(error, KVF_OUT_OF_MEMORY,
                      "oneDNN found no memory for a matrix product; use fewer threads");
}

/* ---- open and close ---- */

/* Lay the buffers out from @p base on, which may be NULL. @return bytes */
static size_t lay_out(const kvf_transformer_options *options, void *base, transformer_buffers *b,
                      host_part *part)
{
    const size_t all = transformer_hidden_rows(options);
    const size_t q = transformer_query_width(options->model);
    kvf_carver k = {.base = base};
    KVF_CARVE(&k, b->ids, all);
    KVF_CARVE(&k, b->positions, all);
    KVF_CARVE(&k, part->attended_wide, transformer_rows(options), q);
    transformer_lay_out(options, sizeof(float), &k, b);
    return k.bytes;
}

static kvf_linear_limits linear_limits(const kvf_transformer_options *options)
{
    const kvf_model_config *m = options->model;
    uint32_t widest = m->hidden_size;
    if (widest < m->intermediate_size)
        widest = m->intermediate_size;
    if (widest < transformer_query_width(m))
        widest = transformer_query_width(m);
    return (kvf_linear_limits){
        .rows_max = transformer_rows(options),
        .inputs_max = widest,
        .isa_mask = KVF_ISA_ALL,
        .bf16 = options->bf16,
    };
}

static uint64_t host_bytes(const kvf_transformer_options *options, uint32_t threads)
{
    transformer_buffers unused;
    host_part part;
    kvf_linear_limits limits = linear_limits(options);
    return lay_out(options, NULL, &unused, &part) + kvf_linear_engine_bytes(&limits, threads);
}

static kvf_status host_open(kvf_transformer *t, kvf_error *error)
{
    const kvf_transformer_options *options = &t->options;
    host_part *part = calloc(1, sizeof *part);
    if (!part)
        return model_out_of_memory(error, sizeof *part, "the transformer");
    t->device = part;
    kvf_linear_limits limits = linear_limits(options);
    part->kernels = kvf_linear_kernels_choose(limits.isa_mask);
    KVF_TRY(kvf_linear_engine_open(options->runtime, &limits, &part->engine, error));
    size_t bytes = lay_out(options, NULL, &t->buffers, part);
    if (kvf_memory_alloc(options->runtime, bytes, &part->reservation) != KVF_OK)
        return model_out_of_memory(error, bytes, "the hidden states of a chunk");
    lay_out(options, part->reservation, &t->buffers, part);
    return KVF_OK;
}

static void host_close(kvf_transformer *t)
{
    host_part *part = t->device;
    if (!part)
        return;
    kvf_memory_free(t->options.runtime, part->reservation);
    kvf_linear_engine_close(part->engine);
    free(part);
}

const transformer_ops transformer_host_ops = {
    .start = host_start,
    .norm = host_norm,
    .project = host_project,
    .output = host_output,
    .mlp = host_mlp,
    .gather = host_gather,
    .read_hidden = host_read_hidden,
    .logits = host_logits,
    .logits_row = host_logits_row,
    .check = host_check,
    .open = host_open,
    .close = host_close,
    .bytes = host_bytes,
    .is_host = 1,
};
