/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_WEIGHTS_H
#define KVF_MODEL_WEIGHTS_H

/*
 * The weights of a model, mapped read-only: `model.safetensors` of a directory, or the shards that
 * `model.safetensors.index.json` names; or a GGUF file, or all parts of one that is split.
 *
 * Everything a header says is checked before the first byte of data is offered: it knows files and
 * shapes, not what a tensor is for. Tensors have Hugging Face's names. Invariant: every tensor
 * handed out lies inside its mapping or in memory of its own, overlaps no other, is aligned to its
 * element, and has bytes = product of shape x element size. Tensors that a GGUF
 * file holds in another type than the model's, or in another order, are widened or put in order by
 * kvf_weights_load, in memory of its own. The model's type is F32, F16 or BF16 if all matrices of
 * the file are of it, else BF16. Vectors stay in their type.
 *
 * A file that another process truncates while it is mapped kills this one with SIGBUS; nothing
 * short of copying the weights prevents that.
 */

#include "model_memory.h"

#define KVF_TENSOR_RANK_MAX 8u

typedef struct kvf_tensor {
    const char *name; /**< borrowed from the weights */
    kvf_dtype dtype;  /**< KVF_BF16, KVF_FP16 or KVF_FP32 */
    uint32_t rank;    /**< 0 = a scalar */
    uint64_t shape[KVF_TENSOR_RANK_MAX];
    const void *data; /**< row-major, aligned to the element, read-only; NULL = to be loaded */
    uint64_t bytes;
} kvf_tensor;

typedef struct kvf_weights kvf_weights;

/**
 * Map the weights of a model and check all their headers.
 *
 * @param model  a directory or a GGUF file; of one that is split, the first part
 * @return KVF_OK; KVF_SYSTEM if a file is missing or cannot be mapped (named); KVF_CORRUPT if a
 *         header contradicts itself or the file (tensor and value named); KVF_UNSUPPORTED for an
 *         element type other than BF16, F16 and F32, in a GGUF file other than those of
 *         gguf.h; KVF_OUT_OF_MEMORY
 *
 * Thread: any; the weights are read-only once loaded and may be shared then.
 */
KVF_CHECKED kvf_status kvf_weights_open(const char *model, kvf_weights **out, kvf_error *error);

/** As kvf_weights_open for one file image in memory, which stays the caller's and must outlive it.
 */
KVF_CHECKED kvf_status kvf_weights_open_memory(const void *bytes, size_t size, kvf_weights **out,
                                               kvf_error *error);

/**
 * Make the data of a tensor of these weights; does nothing where they are there.
 *
 * @param threads  that widen it, at least 1; the numbers do not depend on it
 * @return KVF_OK; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_weights_load(const kvf_tensor *tensor, uint32_t threads,
                                        kvf_error *error);

void kvf_weights_close(kvf_weights *weights);

/** How many tensors there are, and the bytes of all of them once loaded. */
size_t kvf_weights_count(const kvf_weights *weights);
uint64_t kvf_weights_bytes(const kvf_weights *weights);

/** The part of these bytes that takes memory of its own: tensors that are widened or put in order.
 */
uint64_t kvf_weights_own_bytes(const kvf_weights *weights);

/** Tensor @p index in name order; index < count. Borrowed. */
const kvf_tensor *kvf_weights_at(const kvf_weights *weights, size_t index);

/** A tensor in the file, whether or not it is loaded: its numbers in the file's type.
 * @return [@p bytes] borrowed */
const void *kvf_weights_source(const kvf_tensor *tensor, uint64_t *bytes);

/** Borrowed, or NULL if there is no tensor of this name. */
const kvf_tensor *kvf_weights_get(const kvf_weights *weights, const char *name);

/**
 * Find a tensor and check its shape.
 *
 * @param shape  [rank]; what the model needs
 * @return KVF_OK; KVF_CORRUPT naming the tensor when it is missing, or naming both shapes
 */
KVF_CHECKED kvf_status kvf_weights_find(const kvf_weights *weights, const char *name, uint32_t rank,
                                        const uint64_t *shape, const kvf_tensor **out,
                                        kvf_error *error);

#endif
