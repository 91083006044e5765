/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_CARVE_H
#define KVF_RUNTIME_CARVE_H

/*
 * Arrays one behind the other in one reservation, each at a multiple of 64 bytes. Knows nothing of
 * what they mean. Sums that no machine has are said to be too large instead of overflowing.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Larger than any machine, small enough that sums of it cannot overflow. */
#define KVF_CARVE_MAX (UINT64_C(1) << 56)

typedef struct carver {
    uint64_t total;
    bool is_too_large;
} carver;

/* a * b * c * size bytes; returns the offset. */
static inline uint64_t carve(carver *k, uint64_t a, uint64_t b, uint64_t c, uint64_t size)
{
    const uint64_t factors[] = {a, b, c, size};
    const uint64_t offset = k->total;
    uint64_t bytes = 1;
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        if (factors[i] && bytes > KVF_CARVE_MAX / factors[i]) {
            k->is_too_large = true;
            return 0;
        }
        bytes *= factors[i];
    }
    k->total = offset + (bytes + 63) / 64 * 64;
    k->is_too_large |= k->total > KVF_CARVE_MAX;
    return offset;
}

#endif
