/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_MATMUL_CUBLAS_H
#define KVF_MODEL_MATMUL_CUBLAS_H

/*
 * The part of cuBLAS that the runner uses. The library is looked up when it is needed, so that
 * the command starts on machines without it.
 *
 * It knows dense matrices in device memory, not models. Invariant: a product only enqueues on the
 * stream of the handle, with the workspace given at open, so that it can be recorded.
 */

#include "model_memory.h"

typedef struct kvf_cublas kvf_cublas;

/** Device memory, as much as cuBLAS asks for on Hopper. */
#define KVF_CUBLAS_WORKSPACE_BYTES ((size_t)32 << 20)

/**
 * @param workspace  device memory of KVF_CUBLAS_WORKSPACE_BYTES; lives as long as the handle
 * @param path       the library or its folder; NULL = looked for
 * @return KVF_OK; KVF_UNSUPPORTED if there is no cuBLAS, with the way to get it
 */
KVF_CHECKED kvf_status kvf_cublas_open(void *workspace, const char *path, kvf_cublas **out,
                                       kvf_error *error);
void kvf_cublas_close(kvf_cublas *cublas);

/** y = x W^T, or y += x W^T; sums in fp32. */
typedef struct kvf_cublas_product {
    kvf_dtype dtype;    /**< of x and weight */
    uint32_t rows;      /**< of x and y */
    uint32_t outputs;   /**< rows of weight */
    uint32_t inputs;    /**< columns of weight and x */
    const void *weight; /**< [outputs, inputs] */
    const void *x;      /**< [rows, inputs] */
    float *y;           /**< [rows, outputs] */
    uint32_t y_stride;  /**< floats from a row of y to the next */
    bool accumulate;
} kvf_cublas_product;

/** @param stream  a cudaStream_t. @return KVF_OK or KVF_DEVICE_FAILED */
KVF_CHECKED kvf_status kvf_cublas_multiply(kvf_cublas *cublas, const kvf_cublas_product *product,
                                           void *stream);

/*
 * Where cuBLAS may lie: where the loader looks, in the Python environment in use, which brings its
 * own beside PyTorch, or in a CUDA toolkit. Knows nothing of what is called in it.
 */

/**
 * Load cuBLAS 13 or 12.
 *
 * @param path  the library, or a folder that has it; NULL = look for it
 * @return a handle for dlsym and dlclose; NULL if there is none
 */
void *kvf_cublas_find(const char *path);

/** The same, in Python environments alone: the active one, then those of PATH. */
void *kvf_cublas_find_of_python(void);

#endif
