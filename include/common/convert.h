/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_CONVERT_H
#define KVF_COMMON_CONVERT_H

/*
 * Scalar conversions between fp32 and the element types of a cache.
 *
 * This file knows bits, not shapes. To bf16 and fp16 it rounds to nearest, ties to even, keeps NaN
 * a NaN and overflows to infinity; the `down` and `up` forms round towards -inf and +inf, so that
 * an interval that is stored in bf16 contains the interval that was meant. Widening is exact.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <kvferry/kvferry.h>

#include "common/base.h"

KVF_INLINE uint32_t kvf_float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

KVF_INLINE float kvf_bits_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Integers that order like numbers, and back; -0 equals +0. Not for NaN. */
KVF_INLINE int32_t kvf_float_order(float x)
{
    const uint32_t u = kvf_float_bits(x + 0.0f);
    return (int32_t)(u ^ (u >> 31) * 0x7fffffffu);
}

KVF_INLINE float kvf_order_float(int32_t order)
{
    const uint32_t u = (uint32_t)order;
    return kvf_bits_float(u ^ (u >> 31) * 0x7fffffffu);
}

KVF_INLINE float kvf_bf16_to_float(uint16_t h)
{
    return kvf_bits_float((uint32_t)h << 16);
}

KVF_INLINE uint16_t kvf_bf16_from_float(float x)
{
    uint32_t u = kvf_float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* The largest bf16 that is <= x; -inf below the smallest finite one. */
KVF_INLINE uint16_t kvf_bf16_down(float x)
{
    uint32_t u = kvf_float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u >> 31 ? u + 0xffffu : u) >> 16);
}

/* The smallest bf16 that is >= x; +inf above the largest finite one. */
KVF_INLINE uint16_t kvf_bf16_up(float x)
{
    uint32_t u = kvf_float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u >> 31 ? u : u + 0xffffu) >> 16);
}

KVF_INLINE float kvf_fp16_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) /* infinity, NaN */
        return kvf_bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x400u)
        return kvf_bits_float(sign | ((magnitude << 13) + 0x38000000u));
    float x = (float)magnitude * 0x1p-24f; /* subnormal: exact */
    return sign ? -x : x;
}

KVF_INLINE uint16_t kvf_fp16_from_float(float x)
{
    uint32_t u = kvf_float_bits(x);
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
    if (u < 0x33000000u) /* under half of the smallest subnormal */
        return (uint16_t)sign;
    uint32_t shift = 126u - (u >> 23); /* 14 .. 24 */
    uint32_t mantissa = (u & 0x7fffffu) | 0x800000u;
    uint32_t middle = 1u << (shift - 1);
    uint32_t kept = mantissa >> shift;
    uint32_t lost = mantissa & ((1u << shift) - 1u);
    kept += lost > middle || (lost == middle && (kept & 1u));
    return (uint16_t)(sign | kept);
}

KVF_INLINE size_t kvf_dtype_bytes(kvf_dtype dtype)
{
    return dtype == KVF_FP32 ? 4 : 2;
}

/* Element i of an array of `dtype`. */
KVF_INLINE float kvf_element_get(const void *base, kvf_dtype dtype, size_t i)
{
    if (dtype == KVF_FP32)
        return ((const float *)base)[i];
    uint16_t h = ((const uint16_t *)base)[i];
    return dtype == KVF_BF16 ? kvf_bf16_to_float(h) : kvf_fp16_to_float(h);
}

/* `count` elements from the first on, in fp32. */
KVF_INLINE void kvf_elements_get(float *to, const void *from, kvf_dtype dtype, size_t count)
{
    const uint16_t *h = (const uint16_t *)from;
    if (dtype == KVF_FP32)
        memcpy(to, from, count * sizeof *to);
    for (size_t i = 0; dtype == KVF_BF16 && i < count; i++)
        to[i] = kvf_bf16_to_float(h[i]);
    for (size_t i = 0; dtype == KVF_FP16 && i < count; i++)
        to[i] = kvf_fp16_to_float(h[i]);
}

KVF_INLINE void kvf_element_set(void *base, kvf_dtype dtype, size_t i, float x)
{
    if (dtype == KVF_FP32)
        ((float *)base)[i] = x;
    else
        ((uint16_t *)base)[i] = dtype == KVF_BF16 ? kvf_bf16_from_float(x) : kvf_fp16_from_float(x);
}

/* Numbers whose magnitude is below it are finite in `dtype`; others are not, or are none. */
KVF_INLINE float kvf_rounds_below(kvf_dtype dtype)
{
    return dtype == KVF_BF16   ? 0x1.ffp127f /* half a step above the largest */
           : dtype == KVF_FP16 ? 65520.0f
                               : INFINITY;
}

/* An fp32 number as it comes back when it is stored in `dtype`. */
KVF_INLINE float kvf_element_round(kvf_dtype dtype, float x)
{
    uint32_t element;
    kvf_element_set(&element, dtype, 0, x);
    return kvf_element_get(&element, dtype, 0);
}

#endif
