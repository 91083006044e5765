/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_FILL_H
#define KVF_BENCH_FILL_H

/*
 * Numbers that benchmarks of attention read. It knows bf16 only: what is filled has 16-bit
 * elements.
 */

#include <stddef.h>
#include <stdint.h>

#include "common/random.h"

/* bf16 numbers of magnitude 0.5 to 1, random sign. */
static inline void bench_fill(void *to, size_t bytes, uint64_t seed)
{
    uint64_t *p = to;
    for (size_t i = 0; i < bytes / 8; i++)
        p[i] =
            (kvf_random_next(&seed) & UINT64_C(0x807f807f807f807f)) | UINT64_C(0x3f003f003f003f00);
}

#endif
