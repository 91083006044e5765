/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_ROW_OPS_H
#define KVF_MODEL_ROW_OPS_H

/*
 * The row operations of a transformer layer on a GPU: what layer_ops.h computes on the host, over
 * many rows in one launch.
 *
 * They know shapes and pointers, not models. Every pointer is device memory. Hidden states and
 * matrix products are fp32; what enters a matrix product is rounded to the model's own type. Sums
 * are formed in one fixed order that depends on the shapes alone. A launcher enqueues on `stream`
 * (a cudaStream_t), may be recorded in a graph, and returns a cudaError_t as int.
 */

#include <kvferry/kvferry.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Embedding of every row, and the angles of its rotation. */
typedef struct kvf_row_start_args {
    kvf_dtype dtype; /* of the embedding */
    uint32_t rows;
    uint32_t width;           /* of the hidden state */
    uint32_t half;            /* rotated pairs per head */
    float scaling;            /* of cosine and sine */
    const uint32_t *ids;      /* [rows] */
    const uint32_t *position; /* [rows] */
    const void *embedding;    /* [vocabulary, width] */
    const float *inv_freq;    /* [half] */
    float *hidden;            /* [rows, width] out */
    float *cosine;            /* [rows, half] out */
    float *sine;              /* [rows, half] out */
} kvf_row_start_args;

/* y = x / sqrt(mean(x^2) + eps) * weight */
typedef struct kvf_row_norm_args {
    kvf_dtype dtype; /* of y */
    uint32_t rows;
    uint32_t width;
    float eps;
    const float *x;      /* [rows, width] */
    const float *weight; /* [width] */
    void *y;             /* [rows, width] dtype, out */
} kvf_row_norm_args;

/* Bias, norm of every head where the family has one, rotation; queries, keys and values apart. */
typedef struct kvf_row_rotate_args {
    kvf_dtype dtype; /* of q, k and v */
    uint32_t rows;
    uint32_t query_heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    float eps;
    const float *qkv;        /* [rows, (query_heads + 2 kv_heads) * head_dim] */
    const float *bias;       /* as one row of qkv; may be NULL */
    const float *query_norm; /* [head_dim]; may be NULL */
    const float *key_norm;   /* [head_dim]; may be NULL */
    const float *cosine;     /* [rows, head_dim / 2] */
    const float *sine;       /* [rows, head_dim / 2] */
    void *q;                 /* [rows, query_heads, head_dim] dtype, out */
    void *k;                 /* [rows, kv_heads, head_dim] dtype, out */
    void *v;                 /* [rows, kv_heads, head_dim] dtype, out */
} kvf_row_rotate_args;

/* y = silu(gate) * up */
typedef struct kvf_row_activate_args {
    kvf_dtype dtype; /* of y */
    uint32_t rows;
    uint32_t width;
    const float *gate_up; /* [rows, 2, width] */
    void *y;              /* [rows, width] dtype, out */
} kvf_row_activate_args;

/* to[i] = from[index[i]], row by row; they do not overlap. */
typedef struct kvf_row_gather_args {
    uint32_t rows;
    uint32_t width;
    const uint32_t *index; /* [rows] */
    const float *from;     /* [more than every index, width] */
    float *to;             /* [rows, width] out */
} kvf_row_gather_args;

/* Launches of this thread go to this GPU. */
int kvf_row_use_device(uint32_t ordinal);
/** Load every kernel of this file on it: nothing is left to load when streams are busy. */
int kvf_row_load_kernels(void);
/** kvf_cuda_refuse_early_starts for the kernels of the runner. */
void kvf_row_refuse_early_starts(int more);
int kvf_row_start_cuda(const kvf_row_start_args *args, void *stream);
int kvf_row_norm_cuda(const kvf_row_norm_args *args, void *stream);
int kvf_row_rotate_cuda(const kvf_row_rotate_args *args, void *stream);
int kvf_row_activate_cuda(const kvf_row_activate_args *args, void *stream);
int kvf_row_gather_cuda(const kvf_row_gather_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif
