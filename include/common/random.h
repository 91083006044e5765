/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_RANDOM_H
#define KVF_COMMON_RANDOM_H

/*
 * Random numbers from one word of state, the same on every machine: splitmix64. Not for secrets.
 * Any state is a good seed.
 */

#include <stdint.h>

#include "common/base.h"

KVF_INLINE uint64_t kvf_random_next(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* 0 .. count - 1. */
static inline uint32_t kvf_random_below(uint64_t *state, uint32_t count)
{
    return (uint32_t)((kvf_random_next(state) >> 32) * count >> 32);
}

/* 53 bits in [0, 1). */
static inline double kvf_random_unit(uint64_t *state)
{
    return (double)(kvf_random_next(state) >> 11) * 0x1p-53;
}

/* Roughly normal, mean 0, deviation 1: the sum of twelve uniform numbers. No libm is involved. */
static inline float kvf_random_normal(uint64_t *state)
{
    float sum = -6.0f;
    for (int i = 0; i < 6; i++) {
        const uint64_t bits = kvf_random_next(state);
        sum += (float)(bits >> 40) * 0x1p-24f + (float)(bits & 0xffffffu) * 0x1p-24f;
    }
    return sum;
}

#endif
