/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ELEMENT_H
#define KVF_KERNELS_ELEMENT_H

/*
 * Whether elements are numbers, for references. Knows bytes and their type.
 */

#include <stdbool.h>

#include "common/convert.h"

/* Exponent all ones, for `bytes` of elements; a loop without branches, so that it is vectorised. */
static inline bool kvf_has_no_finite(const void *data, size_t bytes, kvf_dtype dtype)
{
    uint32_t bad = 0;
    if (dtype == KVF_FP32) {
        const uint32_t *x = data;
        for (size_t i = 0; i < bytes / 4; i++)
            bad |= (x[i] & 0x7f800000u) == 0x7f800000u;
        return bad != 0;
    }
    const uint16_t *x = data;
    const uint16_t exponent = dtype == KVF_BF16 ? 0x7f80 : 0x7c00;
    for (size_t i = 0; i < bytes / 2; i++)
        bad |= (x[i] & exponent) == exponent;
    return bad != 0;
}

#endif
