/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_GGUF_H
#define KVF_MODEL_GGUF_H

/*
 * GGUF files: metadata and the places of tensors.
 *
 * It knows the container, not what a field or a tensor is for. Invariant: what is handed out was
 * checked against the file: strings and arrays lie inside it, keys are distinct, every tensor is of
 * a known type, lies inside the file, and is aligned.
 */

#include "model_memory.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/*
 * The element types of GGUF files, and what their blocks stand for.
 *
 * It knows blocks, not tensors or files. Invariant: numbers are computed in fp32 in the order of
 * the format's own Python package, without fused operations, so they have its bits.
 */

/** Numbers of the largest block; every type's divides it. */
#define GGUF_BLOCK_MAX 32u

typedef struct gguf_type {
    const char *name;
    uint32_t id;      /* in the file */
    uint32_t numbers; /* of a block */
    uint32_t bytes;   /* of a block */
    /* The numbers of @p count consecutive blocks. */
    void (*widen)(const char *blocks, size_t count, float *to);
} gguf_type;

/** NULL if it is not supported. */
const gguf_type *gguf_type_find(uint32_t id);

/** The name of any type that is known to exist, or "unknown". */
const char *gguf_type_name(uint32_t id);

/** The names of those that are supported, for messages. */
#define GGUF_TYPE_NAMES "F32, F16, BF16, Q4_0, Q4_1 and Q8_0"

#define GGUF_RANK_MAX 4u

typedef struct gguf gguf;

/** Text in the file, not zero-terminated; it may hold anything. */
typedef struct gguf_string {
    const char *bytes;
    size_t size;
} gguf_string;

/** Types of values, as in the file. */
typedef enum gguf_kind {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
} gguf_kind;

typedef struct gguf_value {
    gguf_kind kind;
    gguf_kind inner; /* of an array */
    uint64_t count;  /* of an array */
    union {
        uint64_t natural; /* U8, U16, U32, U64 */
        int64_t integer;  /* I8, I16, I32, I64 */
        double real;      /* F32, F64 */
        bool flag;
        gguf_string string;
        const char *elements; /* of an array: see gguf_element */
    } as;
} gguf_value;

typedef struct gguf_field {
    gguf_string key;
    gguf_value value;
} gguf_field;

typedef struct gguf_tensor {
    gguf_string name;
    const gguf_type *type;
    uint32_t rank;                 /* 1 … GGUF_RANK_MAX */
    uint64_t shape[GGUF_RANK_MAX]; /* row-major, the reverse of the file's order; none is 0 */
    const char *data;              /* aligned to 8 bytes */
    uint64_t bytes;
} gguf_tensor;

/** Whether a model is a GGUF file as opposed to a directory: a regular file is taken for one, and
 * so is what is not there and is called one. */
bool gguf_is_file(const char *model);
/** Whether the bytes start like one. */
bool gguf_is_image(const void *bytes, size_t size);

/**
 * Map a file.
 *
 * @return KVF_OK; KVF_SYSTEM for a file that cannot be mapped; KVF_CORRUPT and KVF_UNSUPPORTED name
 *         file, field or tensor, value and fix; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status gguf_open(const char *path, gguf **out, kvf_error *error);

/** As gguf_open for one image, aligned to 8 bytes, which stays the caller's and must outlive it. */
KVF_CHECKED kvf_status gguf_open_memory(const void *bytes, size_t size, gguf **out,
                                        kvf_error *error);
void gguf_close(gguf *self);

/** The file's name without its folders, for messages. */
const char *gguf_name(const gguf *self);

/** NULL if there is no such field. */
const gguf_value *gguf_find(const gguf *self, const char *key);

/**
 * The element at @p at, which starts as value->as.elements and moves on to the next one.
 * No arrays of arrays are ever handed out.
 */
gguf_value gguf_element(const gguf_value *array, const char **at);

/** Whether a value is an integer, not negative, in @p out. */
bool gguf_natural(const gguf_value *value, uint64_t *out);

size_t gguf_tensor_count(const gguf *self);
const gguf_tensor *gguf_tensor_at(const gguf *self, size_t index);
/** NULL if there is none. */
const gguf_tensor *gguf_tensor_find(const gguf *self, const char *name);

bool gguf_string_is(gguf_string string, const char *text);

#endif
