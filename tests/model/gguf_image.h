/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_GGUF_IMAGE_H
#define KVF_TESTS_GGUF_IMAGE_H

/*
 * Writes GGUF files: field by field and tensor by tensor, or a whole model from its directory.
 *
 * It knows the format on its own, so that a mistake of the reader is not repeated here. Invariant:
 * what was added in order is what a file holds in that order.
 */

#include "gguf.h"
#include "model_config.h"
#include "weights.h"

/** Zero-initialise; freed by gguf_image_free. Failed allocations fail the test. */
typedef struct gguf_image {
    kvf_text fields, tensors, data;
    uint64_t field_count, tensor_count;
    uint32_t alignment; /* 0 = 32, and no field says so */
} gguf_image;

/** Types of tensors and of values, by the file's numbers. */
enum { IMAGE_F32 = 0, IMAGE_F16 = 1, IMAGE_Q4_0 = 2, IMAGE_Q8_0 = 8, IMAGE_BF16 = 30 };

void gguf_image_u32(gguf_image *image, const char *key, uint32_t value);
void gguf_image_f32(gguf_image *image, const char *key, float value);
void gguf_image_flag(gguf_image *image, const char *key, bool value);
void gguf_image_text(gguf_image *image, const char *key, const char *value);
/** A field whose value is given as it is in the file, after its type. */
void gguf_image_raw(gguf_image *image, const char *key, uint32_t kind, const void *bytes,
                    size_t size);
void gguf_image_texts(gguf_image *image, const char *key, const char *const *texts, uint64_t count);
void gguf_image_i32s(gguf_image *image, const char *key, const int32_t *numbers, uint64_t count);

/** @param shape  [rank] row-major, as weights have it */
void gguf_image_tensor(gguf_image *image, const char *name, uint32_t type, uint32_t rank,
                       const uint64_t *shape, const void *bytes, size_t size);

/** The file so far, in @p out, which is freed with free. */
void *gguf_image_make(const gguf_image *image, size_t *size);
void gguf_image_write(const gguf_image *image, const char *directory, const char *name);
void gguf_image_free(gguf_image *image);

/** Fields and tensors of a model: vectors in F32, matrices in @p type, one of the plain
 * three, which must hold them exactly. Rows are in the order of the format. */
void gguf_image_model(gguf_image *image, const kvf_model_config *config, kvf_weights *weights,
                      uint32_t type);

/** Random blocks of a type, freed with free: the highest exponent bit of every scale is 0, so that
 * all numbers are finite. */
char *gguf_image_blocks(const gguf_type *type, size_t count);

#endif
