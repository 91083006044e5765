/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CUDA_TILE_CUH
#define KVF_KERNELS_CUDA_TILE_CUH

/*
 * Tiles of keys, values and queries in shared memory, and the warp matrix products on them.
 *
 * Knows the fragments of one matrix product and nothing of pages or softmax. A tile in shared
 * memory has lines of D 16-bit elements and a pad of 16 bytes: D is a multiple of 16, so a line is
 * an odd number of 16-byte pieces, and the eight lines that one matrix load reads at a time lie in
 * eight different groups of banks. In the fragment of a product D[16,8] lane 4 * g + i holds lines
 * g and g + 8 of columns 2i and 2i + 1, here called (line half 0 or 1, pair member 0 or 1), as
 * element 2 * half + member.
 */

#include "cap.h"
#include "common/convert.h"
#include "cuda.cuh"
#include "kernels.h"

#define KVF_CUDA_LOG2E 1.4426950408889634f
#define KVF_CUDA_LN2   0.6931471805599453f

/* Bytes from one line of a tile to the next. */
template <uint32_t D> struct kvf_tile {
    static const uint32_t pieces = D / 8; /* of 16 bytes, in a line */
    static const uint32_t stride = 2 * D + 16;
    static const uint32_t steps = D / 16;                    /* products over the channels */
    static const uint32_t value_dim = KVF_GPU_VALUE_DIM(D);  /* in a line of the same stride */
    static const uint32_t token_bytes = 2 * (D + value_dim); /* of a key and its value, in a page */
};

/* a * b, never fused with an addition: a logit that is its query's maximum must cancel exactly. */
static __device__ __forceinline__ float kvf_times(float a, float b)
{
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

/* 2^x to 2 units in the last place; 0 for what is below the normal numbers. */
static __device__ __forceinline__ float kvf_exp2(float x)
{
#if defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

/* 1 / x to 1 unit in the last place; 0 for infinity. */
static __device__ __forceinline__ float kvf_reciprocal(float x)
{
#if defined(__CUDA_ARCH__)
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}

/* A logit under a cap, in any unit that both have: the odd series near 0, elsewhere 1 - 2 / (1 +
 * e^2x). To 1e-6, relative. */
static __device__ __forceinline__ float kvf_cap_logit(float s, float cap)
{
    const float x = s * kvf_reciprocal(cap), x2 = x * x;
    const float far = 1.0f - 2.0f * kvf_reciprocal(1.0f + kvf_exp2(x * (2.0f * KVF_CUDA_LOG2E)));
    const float p =
        ((62.0f / 2835.0f * x2 - 17.0f / 315.0f) * x2 + 2.0f / 15.0f) * x2 - 1.0f / 3.0f;
    return s > -INFINITY ? kvf_times(x2 < 0.35f * 0.35f ? p * x2 * x + x : far, cap) : s;
}

/* Binary logarithm of a page size: comparisons, because an instruction that finds the bit is worked
 * out before loops and takes a register through them. */
static __device__ __forceinline__ uint32_t kvf_page_shift(uint32_t page_size)
{
    if (page_size < 8)
        return page_size / 2;
    return page_size == 8 ? 3 : page_size == 16 ? 4 : page_size == 32 ? 5 : 6;
}

/* blockIdx.z, asked for anew at every call, for the same reason. */
static __device__ __forceinline__ uint32_t kvf_block_z(void)
{
#if defined(__CUDA_ARCH__)
    uint32_t z;
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(z));
    return z;
#else
    return blockIdx.z;
#endif
}

/* The number that is subtracted for a maximum: nothing was seen while it is -infinity. */
static __device__ __forceinline__ float kvf_finite_top(float top)
{
    return top == -INFINITY ? 0.0f : top;
}

/* Two numbers, rounded to nearest, in one word; `a` in the low half. */
template <typename T> static __device__ __forceinline__ uint32_t kvf_pair(float a, float b);
template <> __device__ __forceinline__ uint32_t kvf_pair<kvf_bf16>(float a, float b)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    return word;
}
template <> __device__ __forceinline__ uint32_t kvf_pair<kvf_half>(float a, float b)
{
    const __half2 pair = __floats2half2_rn(a, b);
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    return word;
}

template <typename T> static __device__ __forceinline__ float2 kvf_unpair(uint32_t word);
template <> __device__ __forceinline__ float2 kvf_unpair<kvf_bf16>(uint32_t word)
{
    return make_float2(kvf_bits_float(word << 16), kvf_bits_float(word & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 kvf_unpair<kvf_half>(uint32_t word)
{
    __half_raw low, high;
    low.x = (unsigned short)(word & 0xffffu);
    high.x = (unsigned short)(word >> 16);
    return make_float2(__half2float(__half(low)), __half2float(__half(high)));
}

/* The rest that kvf_pair lost, as a pair: together they hold 17 bits of a bf16 pair, 22 of fp16. */
template <typename T>
static __device__ __forceinline__ uint32_t kvf_pair_rest(uint32_t rounded, float a, float b)
{
    const float2 kept = kvf_unpair<T>(rounded);
    return kvf_pair<T>(a - kept.x, b - kept.y);
}

/* Address, for this lane, of the 16 x 16 tile that begins at (line, column): lines as they lie.
 * Loads an A fragment, or with the transposing load the B fragments of columns 0..7 and 8..15. */
template <uint32_t D>
static __device__ __forceinline__ const char *kvf_tile_lines(const char *tile, uint32_t line,
                                                             uint32_t column, uint32_t lane)
{
    return tile + (line + lane % 16) * kvf_tile<D>::stride + (column + lane / 16 * 8) * 2;
}

/* The same for a tile whose lines are the columns of B (keys): B fragments of lines 0..7, 8..15. */
template <uint32_t D>
static __device__ __forceinline__ const char *kvf_tile_keys(const char *tile, uint32_t line,
                                                            uint32_t column, uint32_t lane)
{
    return tile + (line + lane / 16 * 8 + lane % 8) * kvf_tile<D>::stride +
           (column + lane / 8 % 2 * 8) * 2;
}

/* A word of two elements of a vector in global memory, zero if that does not exist. */
static __device__ __forceinline__ uint32_t kvf_line_word(const void *line, uint32_t element,
                                                         bool exists)
{
    return exists ? *(const uint32_t *)((const char *)line + element * 2) : 0u;
}

/* Maximum and sum over the four lanes that share a line of a fragment. */
static __device__ __forceinline__ float kvf_quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(KVF_FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(KVF_FULL_WARP, x, 2));
}

static __device__ __forceinline__ float kvf_quad_sum(float x)
{
    x += __shfl_xor_sync(KVF_FULL_WARP, x, 1);
    return x + __shfl_xor_sync(KVF_FULL_WARP, x, 2);
}

static __device__ __forceinline__ void kvf_add_scaled(float4 *sum, float weight, const float *v)
{
    const float4 x = *(const float4 *)v;
    sum->x += weight * x.x;
    sum->y += weight * x.y;
    sum->z += weight * x.z;
    sum->w += weight * x.w;
}

static __device__ __forceinline__ void kvf_scale(float4 *x, float factor)
{
    x->x *= factor;
    x->y *= factor;
    x->z *= factor;
    x->w *= factor;
}

/* Four consecutive elements of an array of dtype, at element `at`; aligned to their size. */
static __device__ __forceinline__ void kvf_store4(void *base, kvf_dtype dtype, size_t at, float4 x)
{
    if (dtype == KVF_FP32) {
        *(float4 *)((float *)base + at) = x;
        return;
    }
    uint2 words;
    words.x = dtype == KVF_BF16 ? kvf_pair<kvf_bf16>(x.x, x.y) : kvf_pair<kvf_half>(x.x, x.y);
    words.y = dtype == KVF_BF16 ? kvf_pair<kvf_bf16>(x.z, x.w) : kvf_pair<kvf_half>(x.z, x.w);
    *(uint2 *)((uint16_t *)base + at) = words;
}

#endif
