/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_GGUF_TYPES_H
#define KVF_MODEL_GGUF_TYPES_H

/*
 * The element types of GGUF files, and what their blocks stand for.
 *
 * It knows blocks, not tensors or files. Invariant: numbers are computed in fp32 in the order of
 * the format's own Python package, without fused operations, so they have its bits.
 */

#include <stddef.h>
#include <stdint.h>

/** Numbers of the largest block; every type's divides it. */
#define GGUF_BLOCK_MAX 256u

/** Places in tables by type: quantised ones, and all plain numbers. */
typedef enum gguf_index {
    GGUF_PLAIN,
    GGUF_Q4_0,
    GGUF_Q4_1,
    GGUF_Q5_0,
    GGUF_Q5_1,
    GGUF_Q8_0,
    GGUF_Q4_K,
    GGUF_Q5_K,
    GGUF_Q6_K,
    GGUF_TYPES,
} gguf_index;

typedef struct gguf_type {
    const char *name;
    uint32_t id;      /* in the file */
    uint32_t numbers; /* of a block */
    uint32_t bytes;   /* of a block */
    /* The numbers of @p count blocks, one behind the other. */
    void (*widen)(const char *blocks, size_t count, float *to);
    gguf_index index;
} gguf_type;

/** NULL if it is not supported. */
const gguf_type *gguf_type_find(uint32_t id);

/** The name of any type that is known to exist, or "unknown". */
const char *gguf_type_name(uint32_t id);

/** The names of those that are supported, for messages. */
#define GGUF_TYPE_NAMES "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K"

#endif
