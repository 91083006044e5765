/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_FUZZ_HEAP_H
#define KVF_TESTS_FUZZ_HEAP_H

/*
 * Fuzz targets and memory: one allocation fails, which the input chooses.
 */

#include "heap.h"

/** Half of the inputs never see a failure. */
static inline int64_t fuzz_heap_choose(const uint8_t *data, size_t size)
{
    size_t sum = size;
    for (size_t i = 0; i < size; i++)
        sum = sum * 31 + data[i];
    return sum % 2 == 0 ? 0 : (int64_t)(sum / 2 % 96);
}

/** The first call of a target: what fails for want of memory says so. */
static inline void fuzz_heap_told(const heap *h, kvf_status status)
{
    if (h->failed && status != KVF_OUT_OF_MEMORY)
        abort();
}

/** A condition that must hold whatever the input. */
static inline void fuzz_require(int condition)
{
    if (!condition)
        abort();
}

#endif
