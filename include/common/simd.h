/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_SIMD_H
#define KVF_COMMON_SIMD_H

/*
 * One vector of fp32 for every instruction set, chosen by what the compiler was told to use.
 *
 * This file knows lanes and element types, no kernels. `KVF_SIMD` is the suffix of the variant that
 * is being built. There is no arithmetic shortcut here: fma is fused where the hardware has it and
 * rounded twice where it has not (SSE2), and max and min return their SECOND operand if the first
 * is NaN, on every instruction set.
 *
 * Paired order: vf_load2 reads 2 x VF_LANES elements as two vectors in the order that is cheapest.
 * For bf16 that is even elements, then odd ones (a shift and a mask; widening in order costs a
 * shuffle more); otherwise the first half, then the second. A dot product does not care as long as
 * both sides use it; sums over tokens are put in order once, by vf_store2.
 */

#include "common/convert.h"

#define KVF_SIMD_PASTE_(a, b) a##b
#define KVF_SIMD_PASTE(a, b)  KVF_SIMD_PASTE_(a, b)
#define KVF_SIMD_NAME(op)     KVF_SIMD_PASTE(kvf_##op##_, KVF_SIMD)

#define KVF_ALWAYS_INLINE static inline __attribute__((always_inline, unused))

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__SSE2__)
#include "simd_sse2.h"
#elif defined(__ARM_NEON)
#include "simd_neon.h"
#else
#error "no vector unit known here; build the references only"
#endif

/* Integers of the same width; C operators work on both, and comparisons give all ones or 0. */
typedef int32_t vi __attribute__((vector_size(4 * VF_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * VF_LANES)));

KVF_ALWAYS_INLINE vf vf_zero(void)
{
    return (vf){0};
}

/* By a difference, which leaves -0 as it is. */
KVF_ALWAYS_INLINE vf vf_set(float x)
{
    return x - (vf){0};
}

KVF_ALWAYS_INLINE vf vf_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

KVF_ALWAYS_INLINE void vf_store(float *p, vf x)
{
    memcpy(p, &x, sizeof x);
}

KVF_ALWAYS_INLINE vf vf_add(vf a, vf b)
{
    return a + b;
}

KVF_ALWAYS_INLINE vf vf_sub(vf a, vf b)
{
    return a - b;
}

KVF_ALWAYS_INLINE vf vf_mul(vf a, vf b)
{
    return a * b;
}

KVF_ALWAYS_INLINE vf vf_abs(vf a)
{
    return (vf)((vu)a & 0x7fffffffu);
}

/* 2^n as a float, for the n that was rounded by adding VF_ROUND; n = -127 gives zero. */
KVF_ALWAYS_INLINE vf vf_power_of_two(vf shifted)
{
    return (vf)((vu)shifted << 23);
}

KVF_ALWAYS_INLINE vu vu_set(uint32_t x)
{
    return (vu){0} + x;
}

KVF_ALWAYS_INLINE vu vu_load(const void *p)
{
    vu x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* VF_LANES bytes. */
KVF_ALWAYS_INLINE vu vu_load_u8(const uint8_t *p)
{
    return (vu)vf_bytes(p);
}

KVF_ALWAYS_INLINE void vu_store(void *p, vu x)
{
    memcpy(p, &x, sizeof x);
}

/* a where the mask is all ones, b where it is 0. */
KVF_ALWAYS_INLINE vu vu_pick(vu mask, vu a, vu b)
{
    return (mask & a) | (~mask & b);
}

/* The largest lane, of numbers. */
KVF_ALWAYS_INLINE float vf_largest(vf x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x);
#else
    float most = x[0];
    for (uint32_t i = 1; i < VF_LANES; i++)
        most = x[i] > most ? x[i] : most;
    return most;
#endif
}

/* Elements that vf_load2 reads; arrays in local buffers are padded to a multiple of it. */
#define VF_PAIR (2u * VF_LANES)

typedef struct vf2 {
    vf a;
    vf b;
} vf2;

/* Pairs of bf16: even elements, then odd ones. */
KVF_ALWAYS_INLINE vf2 vf_split_bf16(vu x)
{
    return (vf2){(vf)(x << 16), (vf)(x & 0xffff0000u)};
}

/* Elements i .. i + VF_LANES - 1 in order. */
KVF_ALWAYS_INLINE vf vf_load_as(const void *base, kvf_dtype dtype, size_t i)
{
    if (dtype == KVF_FP32)
        return vf_load((const float *)base + i);
    if (dtype == KVF_BF16)
        return vf_load_bf16((const uint16_t *)base + i);
    return vf_load_fp16((const uint16_t *)base + i);
}

#if VF_TRANSPOSE == VF_LANES
/* Columns i .. i + VF_TRANSPOSE - 1 of VF_TRANSPOSE rows of keys: to[c * stride + r] is of row r.
 */
KVF_ALWAYS_INLINE void vf_transpose_keys(float *to, size_t stride, const void *const *rows,
                                         kvf_dtype dtype, size_t i)
{
    vf row[VF_TRANSPOSE];
    for (uint32_t r = 0; r < VF_TRANSPOSE; r++)
        row[r] = vf_load_as(rows[r], dtype, i);
    vf_transpose(to, stride, row);
}
#endif

/*
 * Elements i .. i + VF_PAIR - 1 in paired order, of which the first `left` exist. head_dim is a
 * multiple of 16, so only a vector of 16 lanes can meet less than a pair; what is missing reads as
 * zero.
 */
KVF_ALWAYS_INLINE vf2 vf_load2(const void *base, kvf_dtype dtype, size_t i, uint32_t left)
{
#if VF_LANES == 16
    if (left < VF_PAIR) {
        vf2 half = {.b = vf_zero()};
        if (dtype == KVF_BF16)
            half = vf_split_bf16((vu)vf_half_bf16((const uint16_t *)base + i));
        else
            half.a = vf_load_as(base, dtype, i);
        return half;
    }
#else
    (void)left;
#endif
    vf2 x;
    if (dtype == KVF_BF16)
        return vf_split_bf16(vu_load((const uint16_t *)base + i));
    x.a = vf_load_as(base, dtype, i);
    x.b = vf_load_as(base, dtype, i + VF_LANES);
    return x;
}

/* The inverse of paired order: VF_PAIR floats, in order. */
KVF_ALWAYS_INLINE void vf_store2(float *to, kvf_dtype dtype, vf2 x)
{
    if (dtype == KVF_BF16) {
        vf_store_zip(to, x.a, x.b);
    } else {
        vf_store(to, x.a);
        vf_store(to + VF_LANES, x.b);
    }
}

/* Round to nearest and store `count` floats, a multiple of 16, as `dtype`. */
KVF_ALWAYS_INLINE void vf_round_array(void *to, kvf_dtype dtype, const float *from, uint32_t count)
{
    if (dtype == KVF_FP32)
        memcpy(to, from, count * sizeof *from);
    else if (dtype == KVF_BF16)
        for (uint32_t i = 0; i < count; i++)
            ((uint16_t *)to)[i] = kvf_bf16_from_float(from[i]);
    else
        for (uint32_t i = 0; i < count; i += VF_LANES)
            vf_store_fp16((uint16_t *)to + i, vf_load(from + i));
}

/* Widen `count` elements, a multiple of 16, in order. */
KVF_ALWAYS_INLINE void vf_widen_array(float *to, const void *from, kvf_dtype dtype, uint32_t count)
{
    for (uint32_t i = 0; i < count; i += VF_LANES)
        vf_store(to + i, vf_load_as(from, dtype, i));
}

#define KVF_LOG2E 0x1.715476p+0f
#define KVF_LN2   0x1.62e430p-1f

/* Rounds what is added to it to a whole number, and leaves that number + 127 in its lowest bits. */
#define VF_ROUND (0x1.8p23f + 127.0f)

/*
 * 2^x for x <= 127. Relative error <= 1.6e-7 over the whole range with fused fma and 3e-7 without;
 * 2^0 is exactly 1; x < -126.5 gives 0; NaN stays NaN. x = n + f with |f| <= 1/2, and a polynomial
 * of degree 5 for 2^f, fitted for the least relative error with its constant term held at 1.
 */
KVF_ALWAYS_INLINE vf vf_exp2(vf x)
{
    const vf magic = vf_set(VF_ROUND);
    x = vf_max(vf_set(-127.0f), x); /* in this order, for NaN to pass */
    vf shifted = vf_add(x, magic);
    vf f = vf_sub(x, vf_sub(shifted, magic));
    vf p = vf_set(0x1.5bba14p-10f);
    p = vf_fma(p, f, vf_set(0x1.3cea88p-7f));
    p = vf_fma(p, f, vf_set(0x1.c6b752p-5f));
    p = vf_fma(p, f, vf_set(0x1.ebf9bcp-3f));
    p = vf_fma(p, f, vf_set(0x1.62e42ap-1f));
    p = vf_fma(p, f, vf_set(1.0f));
    return vf_mul(p, vf_power_of_two(shifted));
}

/* tanh x to 5e-7, relative: the odd series near 0, elsewhere 1 - 2 / (1 + e^2x). NaN stays NaN. */
KVF_ALWAYS_INLINE vf vf_tanh(vf x)
{
    const vf one = vf_set(1.0f), x2 = vf_mul(x, x);
    const vf e = vf_exp2(vf_min(vf_set(126.0f), vf_mul(x, vf_set(2.0f * KVF_LOG2E))));
    const vf far = vf_sub(one, vf_set(2.0f) / vf_add(one, e));
    vf p = vf_set(62.0f / 2835.0f);
    p = vf_fma(p, x2, vf_set(-17.0f / 315.0f));
    p = vf_fma(p, x2, vf_set(2.0f / 15.0f));
    p = vf_fma(p, x2, vf_set(-1.0f / 3.0f));
    const vf near = vf_fma(vf_mul(p, x2), x, x);
    return (vf)vu_pick((vu)(x2 < vf_set(0.35f * 0.35f)), (vu)near, (vu)far);
}

/*
 * e^x for x <= 0, to 3e-6 beside what the rounding of x * log2 e makes; e^0 is exactly 1, and
 * -infinity gives 0, and so may what is below 2^-125. Numbers only.
 */
KVF_ALWAYS_INLINE vf vf_exp_coarse(vf x)
{
    const vf unit = vf_set(KVF_LOG2E);
#if defined(VF_HAVE_SCALE)
    const vf y = vf_mul(x, unit), f = vf_above_floor(y);
    vf p = vf_set(0x1.b7f734p-7f);
    p = vf_fma(p, f, vf_set(0x1.abf868p-5f));
    p = vf_fma(p, f, vf_set(0x1.ee2452p-3f));
    p = vf_fma(p, f, vf_set(0x1.62d6c6p-1f));
    p = vf_fma(p, f, vf_set(1.0f));
    return vf_scale(p, y);
#else
    const vf magic = vf_set(VF_ROUND);
    x = vf_max(x, vf_set(-88.0f));
    const vf shifted = vf_fma(x, unit, magic), f = vf_fma(x, unit, vf_sub(magic, shifted));
    vf p = vf_set(0x1.3a02ccp-7f);
    p = vf_fma(p, f, vf_set(0x1.c9fc46p-5f));
    p = vf_fma(p, f, vf_set(0x1.ec0378p-3f));
    p = vf_fma(p, f, vf_set(0x1.62e12cp-1f));
    p = vf_fma(p, f, vf_set(1.0f));
    return vf_mul(p, vf_power_of_two(shifted));
#endif
}

/*
 * Holds a vector in a register: else the compiler folds its load into every use, and loads are what
 * limits a loop in which each operand is used twice.
 */
#if defined(__x86_64__)
#define VF_KEEP(x) __asm__("" : "+x"(x))
#else
#define VF_KEEP(x) (void)(x)
#endif

#endif
