/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_TRANSFORMER_PARTS_H
#define KVF_MODEL_TRANSFORMER_PARTS_H

/*
 * What transformer_open.c builds and transformer.c runs: weights bound by role, buffers by shape.
 *
 * Nobody else includes it. Invariant: rows_max >= any number of rows enqueued, and every buffer is
 * one slice of the single reservation.
 */

#include "transformer.h"

typedef struct transformer_layer {
    const float *attention_norm; /* [hidden] */
    const float *mlp_norm;       /* [hidden] */
    const float *query_norm;     /* [head_dim], or NULL */
    const float *key_norm;       /* [head_dim], or NULL */
    kvf_linear query, key, value, output;
    kvf_linear gate, up, down;
} transformer_layer;

/* R = rows_max, q = query_heads x head_dim, kv = kv_heads x head_dim. */
typedef struct transformer_buffers {
    uint32_t *ids;        /* [R] */
    uint32_t *positions;  /* [R] */
    float *cosine;        /* [R, head_dim / 2] */
    float *sine;          /* [R, head_dim / 2] */
    float *hidden;        /* [R, hidden] */
    float *normed;        /* [R, hidden] */
    float *qkv;           /* [R, q + 2 kv] */
    void *q;              /* [R, q] of the model's dtype, as the next three */
    void *k;              /* [R, kv] */
    void *v;              /* [R, kv] */
    void *attended;       /* [R, q] */
    float *attended_wide; /* [R, q] */
    float *gate_up;       /* [R, 2 intermediate] */
    float *activated;     /* [R, intermediate] */
    float *logits;        /* [batch_max, vocab] */
} transformer_buffers;

struct kvf_transformer {
    kvf_transformer_options options;
    kvf_model_config model;
    kvf_rope_table rope;
    uint32_t rows_max;
    kvf_linear_engine *engine;
    transformer_layer *layers; /* [model.layers] */
    float *vectors;            /* norms and biases, widened */
    const kvf_tensor *embedding;
    const float *final_norm;
    kvf_linear head;
    transformer_buffers buffers;
    void *reservation;
    uint64_t weight_bytes;
};

#endif
