/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CUDA_PRODUCTS_H
#define KVF_MODEL_CUDA_PRODUCTS_H

/*
 * The matrix products of a transformer on a GPU: which kernel serves which rows and weights.
 *
 * Rows of a batch go through small_batch_gemm.cu; rows of a prompt through cuBLAS. It knows weights
 * and rows, not layers. Invariant: nothing here waits.
 */

#include "matmul_cublas.h"
#include "small_batch_gemm.h"
#include "transformer_ops.h"

static inline kvf_status launched(int status)
{
    return status == 0 ? KVF_OK : KVF_DEVICE_FAILED;
}

/* Matrices that share x and lie one after the other. */
typedef struct cuda_weights {
    const kvf_linear *parts[KVF_LINEAR_PARTS_MAX];
    uint32_t count;
} cuda_weights;

/* Whether a step's products are thin ones, whose ends do more. */
bool cuda_is_small_batch(const transformer_step *s, const cuda_weights *w);
kvf_small_batch_gemm cuda_small_batch(const transformer_step *s, const cuda_weights *w,
                                      const void *x);

/* y = x W^T, or +=. x [rows, inputs] of the model's type, y [rows, all outputs] */
kvf_status cuda_multiply(kvf_cublas *cublas, const transformer_step *s, const cuda_weights *w,
                         const void *x, float *y, bool accumulate);

#endif
