/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_LINEAR_VECTOR_H
#define KVF_MODEL_LINEAR_VECTOR_H

/*
 * The language of the matrix-vector kernels: the vector of the instruction set that is being
 * built (KVF_LINEAR_VARIANT names the build), or one number in plain C (KVF_LINEAR_PLAIN).
 *
 * It knows lanes, not matrices. Invariant: finish_sums adds vectors and lanes in one order.
 */

#include "linear.h"

#if !defined(KVF_LINEAR_PLAIN)
#include "common/simd.h"

/* As kvf_bf16_from_float. */
static inline void vf_store_bf16(uint16_t *p, vf x)
{
    vu bits;
    memcpy(&bits, &x, sizeof bits);
    const vu is_nan = (vu)((bits & 0x7fffffffu) > 0x7f800000u);
    const vu rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const vu halves = vu_pick(is_nan, bits >> 16 | 0x40u, rounded);
    memcpy(&x, &halves, sizeof x);
    vf_store_low(p, x);
}
#else
#include "common/convert.h"

#include <math.h>

#define KVF_LOG2E         0x1.715476p+0f
#define KVF_ALWAYS_INLINE static inline __attribute__((always_inline, unused))
#define VF_LANES          1u
#define VF_TRANSPOSE      1u
typedef float vf;

static inline vf vf_zero(void)
{
    return 0.0f;
}
static inline vf vf_set(float x)
{
    return x;
}
static inline vf vf_add(vf a, vf b)
{
    return a + b;
}
static inline vf vf_mul(vf a, vf b)
{
    return a * b;
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}
static inline vf vf_load(const float *p)
{
    return *p;
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    return kvf_bf16_to_float(*p);
}
static inline vf vf_load_fp16(const uint16_t *p)
{
    return kvf_fp16_to_float(*p);
}
static inline void vf_store(float *p, vf v)
{
    *p = v;
}
static inline vf vf_max(vf a, vf b)
{
    return a > b ? a : b;
}
static inline vf vf_exp2(vf x)
{
    return exp2f(x);
}
static inline void vf_sum4(float *to, vf a, vf b, vf c, vf d)
{
    to[0] = a;
    to[1] = b;
    to[2] = c;
    to[3] = d;
}
static inline void vf_store_bf16(uint16_t *p, vf v)
{
    *p = kvf_bf16_from_float(v);
}
static inline void vf_transpose_keys(float *to, size_t stride, const void *const *rows,
                                     kvf_dtype dtype, size_t i)
{
    (void)stride;
    *to = kvf_element_get(rows[0], dtype, i);
}
#endif

static inline float vf_sum(vf x)
{
    float sum[4];
    vf_sum4(sum, x, x, x, x);
    return sum[0];
}

/* A result of its sums: vector by vector in their order, then lane by lane. */
static inline float finish_sums(const vf *sum, uint32_t count)
{
    vf all = sum[0];
    for (uint32_t i = 1; i < count; i++)
        all = vf_add(all, sum[i]);
    return vf_sum(all);
}

/*
 * Weights this far ahead are asked for while others are multiplied: prefetchers of the hardware
 * end at a page of memory, and begin anew after it. One core of a Xeon with AVX-512 reads 13.5
 * GB/s of bf16 weights that no cache holds, 10.0 without, 11.3 with 2 KiB.
 */
#define AHEAD_BYTES 4096u
#define LINE_BYTES  64u

/* As an address: it may be beyond the end of the weights. */
static inline void ask_ahead(const void *weight, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += LINE_BYTES)
        __builtin_prefetch((const void *)((uintptr_t)weight + AHEAD_BYTES + i), 0, 2);
}

/*
 * The bits of a result follow, beside the lanes, from: the sums that it is made of. Each takes
 * every so many-th vector of columns. There are as many as 32 numbers have vectors, four at most;
 * of plain numbers two where x is longer than what leaves room in 32 KiB for the row that streams
 * by.
 */
#define KVF_IN_ORDER_COLUMNS_MAX 4096u
#define KVF_SUMS                 (32u / VF_LANES < 4 ? 32u / VF_LANES : 4u)
#define KVF_LONG_SUMS            2u

#define LINEAR_PASTE(a, b)  a##b
#define LINEAR_SYMBOL(a, b) LINEAR_PASTE(a, b)
#define LINEAR_TEXT(a)      #a
#define LINEAR_QUOTE(a)     LINEAR_TEXT(a)

/* The name of something in this build, and of the build. */
#define KVF_LINEAR_SYMBOL(name) LINEAR_SYMBOL(name, KVF_LINEAR_VARIANT)
#define KVF_LINEAR_NAME         LINEAR_QUOTE(KVF_LINEAR_VARIANT)

extern const kvf_linear_kernels KVF_LINEAR_SYMBOL(kvf_linear_kernels_);
extern const kvf_strip_kernel KVF_LINEAR_SYMBOL(kvf_strip_kernel_);
extern const kvf_small_batch_kernel KVF_LINEAR_SYMBOL(kvf_small_batch_kernel_);

#endif
