/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_SMALL_BATCH_GEMM_H
#define KVF_MODEL_SMALL_BATCH_GEMM_H

/*
 * Matrix products of a few rows on a GPU, with what a layer does to them: y = x W^T, where reading
 * W once is all that takes time.
 *
 * It knows shapes and pointers, all of device memory. Weights are bf16 or fp16 as x is; sums are
 * fp32. Invariant: a row's bits follow
 * from its x and W alone, however many rows there are. A launcher enqueues on `stream` (a
 * cudaStream_t), may be recorded, and returns a cudaError_t as int.
 */

#include "row_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_SMALL_BATCH_NORM_ROWS 8u /* with a norm after the product */

typedef struct kvf_small_batch_gemm {
    kvf_dtype dtype; /**< of x and W: bf16 or fp16 */
    uint32_t rows;   /**< W is read once for 64 of them */
    uint32_t inputs; /**< multiple of 8 */
    uint32_t outputs;
    const void *weight; /**< W [outputs, inputs], 16-byte aligned */
    const void *x;      /**< [rows, inputs], 16-byte aligned */
} kvf_small_batch_gemm;

/** y = x W^T, or += where @p accumulate. y [rows, outputs] */
int kvf_small_batch_gemm_cuda(const kvf_small_batch_gemm *product, float *y, uint32_t accumulate,
                              void *stream);

/** y = silu(gate) * up, which are halves of x W^T: kvf_swiglu. y [rows, outputs / 2] dtype */
int kvf_small_batch_swiglu_cuda(const kvf_small_batch_gemm *product, void *y, void *stream);

/** y += x W^T of at most KVF_SMALL_BATCH_NORM_ROWS rows, then the norm, whose x is y and whose bits
 * are those of kvf_row_norm_cuda. @p arrived: a word, 0 before and after */
int kvf_small_batch_add_norm_cuda(const kvf_small_batch_gemm *product, float *y,
                                  const kvf_row_norm_args *norm, uint32_t *arrived, void *stream);

/** Whether heads of this size can have a norm after the product: none share a block. */
static inline uint32_t kvf_small_batch_norms_heads(uint32_t head_dim)
{
    return head_dim % 16 == 0;
}

/** As kvf_row_rotate_cuda, with x W^T for qkv, which is written where heads have norms and
 * else not used. @p arrived: a word per head of queries, keys and values, 0 before and after */
int kvf_small_batch_rotate_cuda(const kvf_small_batch_gemm *product,
                                const kvf_row_rotate_args *heads, uint32_t *arrived, void *stream);

#ifdef __cplusplus
}
#endif

#endif
