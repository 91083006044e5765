/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_CODES_CUH
#define KVF_KERNELS_SCORE_CODES_CUH

/*
 * Rotation and sums of codes.h by half a warp per vector, with the bits of the reference.
 *
 * Knows vectors, not whether they are keys or queries. Lane r of the 16 has the channels r, r + 16,
 * .. of its vector in registers: strides below 16 are shuffles, larger ones stay in the lane, and
 * partial sum r is the lane's own. No product is ever fused with a sum.
 */

#include <float.h>

#include "codes.h"
#include "cuda/cuda.cuh"

#define KVF_CODE_WORDS (KVF_GPU_HEAD_DIM_MAX / KVF_CODE_LANES) /* that the longest vector has */

/* Words in the block that word k of a vector is in: the highest bit in which they differ. */
static __device__ __forceinline__ uint32_t kvf_code_block_words(uint32_t k, uint32_t words)
{
    return 1u << (31 - __clz((int)(k ^ words)));
}

/* Channels of this lane; what the vector lacks is 0. */
template <typename T>
static __device__ __forceinline__ void kvf_code_load(float x[KVF_CODE_WORDS], const T *vector,
                                                     uint32_t words)
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        x[k] = k < words ? kvf_to_float(vector[k * KVF_CODE_LANES + lane]) : 0.0f;
}

/* By whole warps. */
static __device__ __forceinline__ void kvf_code_rotate_lanes(float x[KVF_CODE_WORDS],
                                                             uint32_t words)
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++) {
        if (k >= words)
            break;
        x[k] = kvf_bits_float(kvf_float_bits(x[k]) ^ kvf_code_sign(k * KVF_CODE_LANES + lane));
#pragma unroll
        for (uint32_t stride = 1; stride < KVF_CODE_LANES; stride *= 2) {
            const float other = __shfl_xor_sync(KVF_FULL_WARP, x[k], (int)stride);
            x[k] = lane & stride ? __fsub_rn(other, x[k]) : __fadd_rn(x[k], other);
        }
    }
#pragma unroll
    for (uint32_t stride = 1; stride < KVF_CODE_WORDS; stride *= 2)
#pragma unroll
        for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
            if (!(k & stride) && k < words && kvf_code_block_words(k, words) > stride) {
                const float a = x[k], b = x[k + stride];
                x[k] = __fadd_rn(a, b);
                x[k + stride] = __fsub_rn(a, b);
            }
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        if (k < words)
            x[k] = __fmul_rn(x[k], kvf_code_unit(KVF_CODE_LANES * kvf_code_block_words(k, words)));
}

/* The lanes' partial sums; every lane of a vector gets their sum. */
static __device__ __forceinline__ float kvf_code_sum(float part)
{
#pragma unroll
    for (int step = KVF_CODE_LANES / 2; step; step /= 2)
        part = __fadd_rn(part, __shfl_xor_sync(KVF_FULL_WARP, part, step));
    return part;
}

/* Codes of a rotated key: the words of this lane's vector, unless they are NULL; returns its scale.
 * By whole warps. */
static __device__ __forceinline__ uint16_t kvf_code_encode_lanes(uint32_t *words,
                                                                 float x[KVF_CODE_WORDS],
                                                                 uint32_t count, uint32_t head_dim)
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
    float part = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        if (k < count)
            part = __fadd_rn(part, __fmul_rn(x[k], x[k]));
    const float n2 = kvf_code_sum(part);
    const bool is_flat = !(n2 > 0.0f && n2 <= FLT_MAX);
    const float edge = __fmul_rn(KVF_CODE_EDGE, __fsqrt_rn(__fdiv_rn(n2, (float)head_dim)));
    part = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++) {
        if (k >= count)
            break;
        const bool is_near = fabsf(x[k]) < edge, is_below = x[k] < 0.0f;
        uint32_t word = (is_near == is_below) | (is_below ? 0u : 2u);
        part = __fadd_rn(part, __fmul_rn(is_near ? 3.0f : 10.0f, fabsf(x[k])));
        word <<= kvf_code_shift(lane);
#pragma unroll
        for (int step = 1; step < (int)KVF_CODE_LANES; step *= 2)
            word |= __shfl_xor_sync(KVF_FULL_WARP, word, step);
        if (words && lane == k)
            words[k * KVF_CODE_LANES] = is_flat ? KVF_CODE_FLAT : word;
    }
    const float scale = __fdiv_rn(n2, kvf_code_sum(part));
    return is_flat ? 0 : kvf_fp16_from_float(scale < 65504.0f ? scale : 65504.0f);
}

#endif
