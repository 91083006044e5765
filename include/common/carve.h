/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_CARVE_H
#define KVF_COMMON_CARVE_H

/*
 * Arrays one after the other in one reservation. The same code plans and carves: over a base of
 * NULL every array is NULL and only `bytes` grows; over a reservation of that many bytes every
 * array gets its place. So a plan and what is carved cannot disagree.
 *
 * Knows nothing of what the arrays mean. Each begins at a multiple of 64 bytes from the base; one
 * without elements is NULL. Sums never overflow: what no machine has stays too large, and cannot
 * be allocated.
 */

#include <stddef.h>
#include <stdint.h>

#define KVF_CARVE_ALIGN 64u
/* More than any machine has; sums of several such cannot overflow. */
#define KVF_CARVE_MAX   (UINT64_C(1) << 56)

typedef struct kvf_carver {
    char *base;
    uint64_t bytes; /* so far, a multiple of KVF_CARVE_ALIGN; above KVF_CARVE_MAX: too large */
} kvf_carver;

/* The next array of a shape, with elements of `size` bytes. */
static inline void *kvf_carve(kvf_carver *carver, size_t size, const uint64_t *shape, size_t rank)
{
    const uint64_t offset = carver->bytes;
    uint64_t bytes = size;
    for (size_t i = 0; i < rank; i++) {
        if (shape[i] && bytes > KVF_CARVE_MAX / shape[i]) {
            carver->bytes = 2 * KVF_CARVE_MAX;
            return NULL;
        }
        bytes *= shape[i];
    }
    if (offset > KVF_CARVE_MAX)
        return NULL;
    carver->bytes += (bytes + KVF_CARVE_ALIGN - 1) / KVF_CARVE_ALIGN * KVF_CARVE_ALIGN;
    return carver->base && bytes ? carver->base + offset : NULL;
}

/* KVF_CARVE(&carver, tables->scores, rows, pages): room for scores[rows][pages]. `array` is a
 * typed pointer, evaluated once; void * converts to it without a cast. KVF_CARVE_OF is for elements
 * whose size is known at run time only. */
#define KVF_CARVE(carver, array, ...) KVF_CARVE_OF(carver, array, sizeof *(array), __VA_ARGS__)
#define KVF_CARVE_OF(carver, array, size, ...)                                                     \
    ((array) = kvf_carve((carver), (size), (const uint64_t[]){__VA_ARGS__},                        \
                         sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t)))

#endif
