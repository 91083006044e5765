/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_TRANSFORMER_OPS_H
#define KVF_MODEL_TRANSFORMER_OPS_H

/*
 * A device's operations for a transformer, in one table: transformer_host.c and
 * transformer_cuda.c.
 *
 * transformer.c and transformer_prefill.c know the order of operations and no device; a device
 * knows operations and no order. Invariant: an operation only enqueues, and reads only what earlier
 * operations of the same stream wrote.
 */

#include "common/carve.h"
#include "transformer_parts.h"

/* Some rows on their way: row i is row first + i of the hidden states. */
typedef struct transformer_step {
    kvf_transformer *t;
    kvf_stream *stream;
    uint32_t first;
    uint32_t rows;
    bool separate; /* rows are of a batch: none changes a bit of another */
} transformer_step;

struct transformer_ops {
    /* ids and positions (host, [rows], copied) to hidden states and angles. The work of an earlier
     * start of these rows is done. */
    kvf_status (*start)(const transformer_step *s, const uint32_t *ids, const uint32_t *positions);
    /* hidden -> normed */
    kvf_status (*norm)(const transformer_step *s, const float *weight);
    /* normed -> q, k, v, rotated */
    kvf_status (*project)(const transformer_step *s, const transformer_layer *layer);
    /* attended -> hidden +=; then what `norm` does with this weight, unless it is NULL */
    kvf_status (*output)(const transformer_step *s, const transformer_layer *layer,
                         const float *norm);
    /* normed -> hidden +=; then likewise */
    kvf_status (*mlp)(const transformer_step *s, const transformer_layer *layer, const float *norm);
    /* Row first + i of hidden states and angles becomes row index[i] (host, [rows], copied), for
     * all i; ascending, index[i] >= first + i. The stream was waited for. */
    kvf_status (*gather)(const transformer_step *s, const uint32_t *index);
    /* Row `first` of the hidden states to the host; waits. */
    kvf_status (*read_hidden)(const transformer_step *s, float *out);
    /* normed -> logits */
    kvf_status (*logits)(const transformer_step *s);
    /* Logits of a row, readable by the host after a wait. */
    const float *(*logits_row)(const kvf_transformer *t, uint32_t row);
    /* Whether all products since open were done; NULL = they were. */
    kvf_status (*check)(const kvf_transformer *t, kvf_error *error);
    /* After weights are bound: what else the device needs. */
    kvf_status (*open)(kvf_transformer *t, kvf_error *error);
    void (*close)(kvf_transformer *t);
    /* Bytes reserved at open; device memory of its own for weights not included. */
    uint64_t (*bytes)(const kvf_transformer_options *options, uint32_t threads);
    /* 1: a decode step can be recorded. Then ids and positions are taken from fixed places. */
    uint32_t can_record;
    /* 1: buffers are host memory. */
    uint32_t is_host;
};

extern const transformer_ops transformer_host_ops;
#if KVF_HAVE_CUDA
extern const transformer_ops transformer_cuda_ops;
#endif

/* transformer_prefill.c: hidden states to queries, keys and values; MLP with its norm. */
kvf_status transformer_project(const transformer_step *s, uint32_t layer);
kvf_status transformer_mlp(const transformer_step *s, uint32_t layer);

/* completion.c: rows of a whole prompt, of which deeper layers than this one get fewer. */
kvf_status transformer_keep_rows(const transformer_step *s, kvf_sequence *sequence, uint32_t layer);

/* transformer.c: whether all ids are tokens; position of a sequence's next token. */
bool transformer_ids_valid(const kvf_transformer *t, const uint32_t *ids, uint32_t count);
uint32_t transformer_next_position(const kvf_sequence *sequence);

/* Where the hidden states of a step begin. */
static inline float *transformer_hidden_at(const transformer_step *s)
{
    return s->t->buffers.hidden + (size_t)s->first * s->t->model.hidden_size;
}

static inline uint32_t transformer_query_width(const kvf_model_config *m)
{
    return m->query_heads * m->head_dim;
}

static inline uint32_t transformer_kv_width(const kvf_model_config *m)
{
    return m->kv_heads * m->head_dim;
}

/* Rows of one operation. */
static inline uint32_t transformer_rows(const kvf_transformer_options *options)
{
    return options->chunk_max > options->batch_max ? options->chunk_max : options->batch_max;
}

/* Rows of hidden states. */
static inline uint32_t transformer_hidden_rows(const kvf_transformer_options *options)
{
    const uint32_t rows = transformer_rows(options);
    return options->prompt_max > rows ? options->prompt_max : rows;
}

/* Floats of gate_up, which also takes rows on their way (gather). */
static inline size_t transformer_scratch_floats(const kvf_transformer_options *options)
{
    const kvf_model_config *m = options->model;
    const size_t mlp = (size_t)transformer_rows(options) * 2 * m->intermediate_size;
    const size_t row = (size_t)m->hidden_size + m->head_dim;
    return mlp > row ? mlp : row;
}

/* The buffers that every device has; `normed` and `activated`, the operands of matrix products,
 * have elements of @p own bytes. */
void transformer_lay_out(const kvf_transformer_options *options, size_t own, kvf_carver *k,
                         transformer_buffers *b);

#endif
