/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CUDA_PRODUCTS_H
#define KVF_MODEL_CUDA_PRODUCTS_H

/*
 * The matrix products of a transformer on a GPU: which kernel serves which rows and weights.
 *
 * Rows of a batch go through thin_product.cu; rows of a prompt through cuBLAS, for which blocks of
 * a file are widened panel by panel. It knows weights and rows, not layers. Invariant: products of
 * one struct are on one stream, for they share its panel.
 */

#include "matmul_cublas.h"
#include "thin_product.h"
#include "transformer_ops.h"

typedef struct cuda_products {
    kvf_cublas *cublas;
    void *panel; /* device memory, or NULL if no weights are blocks */
    size_t panel_bytes;
} cuda_products;

/* Bytes of a panel for any matrix of the model. */
size_t cuda_panel_bytes(const kvf_model_config *model);

/* Up to KVF_THIN_PARTS_MAX matrices that share x; without blocks they lie one after the other. */
typedef struct cuda_weights {
    const kvf_linear *parts[KVF_THIN_PARTS_MAX];
    uint32_t count;
} cuda_weights;

/* Whether a step's products are thin ones, whose ends do more. */
bool cuda_is_thin(const transformer_step *s, const cuda_weights *w);
kvf_thin_product cuda_thin(const transformer_step *s, const cuda_weights *w, const void *x);

/* y = x W^T, or +=. x [rows, inputs] of the model's type, y [rows, all outputs] */
kvf_status cuda_multiply(const cuda_products *p, const transformer_step *s, const cuda_weights *w,
                         const void *x, float *y, bool accumulate);

#endif
