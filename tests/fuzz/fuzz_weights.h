/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_FUZZ_WEIGHTS_H
#define KVF_TESTS_FUZZ_WEIGHTS_H

/*
 * Helpers of targets whose input is a file of weights: the input as an aligned image, and what
 * holds for every tensor. Knows no format.
 */

#include "fuzz_heap.h"
#include "watched_heap.h"
#include "weights.h"

#include <string.h>

/** The input, aligned as a mapping is; freed with free. NULL if there is no memory. */
static inline void *fuzz_weights_image(const uint8_t *data, size_t size)
{
    void *image = NULL;
    if (posix_memalign(&image, 16, size != 0 ? size : 1) != 0)
        return NULL;
    if (size != 0)
        memcpy(image, data, size);
    return image;
}

/** A loaded tensor has the bytes of its shape, and all can be read. */
static inline void fuzz_weights_read(const kvf_tensor *tensor)
{
    uint64_t product = kvf_dtype_bytes(tensor->dtype);
    for (uint32_t i = 0; i < tensor->rank; i++)
        product *= tensor->shape[i];
    fuzz_require(product == tensor->bytes);
    volatile char sum = 0;
    for (uint64_t i = 0; i < tensor->bytes; i++)
        sum = (char)(sum ^ ((const char *)tensor->data)[i]);
    (void)sum;
}

#endif
