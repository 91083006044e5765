/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_NUMBER_FORMATS_H
#define KVF_MODEL_NUMBER_FORMATS_H

/*
 * Single numbers between fp32 and the element types of weights and caches.
 *
 * It knows bits, not arrays. Invariant: widening is exact; narrowing rounds to nearest, ties to
 * even, keeps NaN a NaN and overflows to infinity. (The library has its own; a client of the public
 * API cannot see it.)
 */

#include <kvferry/kvferry.h>
#include <string.h>

static inline uint32_t number_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float number_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float number_from_bf16(uint16_t h)
{
    return number_float((uint32_t)h << 16);
}

static inline uint16_t number_to_bf16(float x)
{
    uint32_t u = number_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float number_from_fp16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) /* infinity, NaN */
        return number_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x400u)
        return number_float(sign | ((magnitude << 13) + 0x38000000u));
    float x = (float)magnitude * 0x1p-24f; /* subnormal: exact */
    return sign ? -x : x;
}

static inline uint16_t number_to_fp16(float x)
{
    uint32_t u = number_bits(x);
    uint32_t sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (u >> 13 & 0x3ffu));
    if (u >= 0x477ff000u) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7c00u);
    if (u >= 0x38800000u) {
        u += 0xfffu + ((u >> 13) & 1u);
        return (uint16_t)(sign | ((u - 0x38000000u) >> 13));
    }
    /* Subnormal: adding 0.5 aligns the last place of fp16 with that of fp32 and rounds. */
    uint32_t rounded = number_bits(number_float(u) + 0.5f);
    return (uint16_t)(sign | (rounded - 0x3f000000u));
}

/** Element @p index of an array of @p dtype. */
static inline float number_load(const void *array, kvf_dtype dtype, size_t index)
{
    if (dtype == KVF_FP32)
        return ((const float *)array)[index];
    uint16_t h = ((const uint16_t *)array)[index];
    return dtype == KVF_BF16 ? number_from_bf16(h) : number_from_fp16(h);
}

static inline void number_store(void *array, kvf_dtype dtype, size_t index, float x)
{
    if (dtype == KVF_FP32)
        ((float *)array)[index] = x;
    else
        ((uint16_t *)array)[index] = dtype == KVF_BF16 ? number_to_bf16(x) : number_to_fp16(x);
}

#endif
