/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_CENTROIDS_CUH
#define KVF_KERNELS_SCORE_CENTROIDS_CUH

/*
 * The centroid of a segment from its code groups, by a block of head_dim threads; see
 * centroid_key.h for the meaning.
 *
 * Knows nothing of where groups and centroids lie. A thread is one channel. Exactness: the bits of
 * centroid_key.h.
 */

#include <float.h>

#include "paging.cuh"
#include "score/codes.h"
#include "score/score_args.h"

/* The sum and the keys of a group in one channel, as codes have them. */
static __device__ __forceinline__ float kvf_centroid_add(float x, const kvf_code_group &group,
                                                         uint32_t head_dim)
{
    const uint32_t shift = kvf_code_shift(threadIdx.x % KVF_CODE_LANES);
    const uint32_t *words = (const uint32_t *)(const void *)group.words;
    const uint16_t *scales = (const uint16_t *)(const void *)group.scales;
#pragma unroll 4
    for (uint32_t t = 0; t < KVF_CODE_TOKENS; t++) {
        const uint32_t word = words[kvf_code_word(head_dim, t, threadIdx.x / KVF_CODE_LANES)];
        const uint32_t code = word >> shift & 3;
        const float level = code == 0 ? -10.0f : code == 1 ? -3.0f : code == 2 ? 3.0f : 10.0f;
        x = __fadd_rn(x, __fmul_rn(kvf_fp16_to_float(scales[t]), level));
    }
    return x;
}

/* From the sum of a segment, the thread's channel to *centroid; returns the scale, in all threads.
 * `all` is shared memory for head_dim numbers, which nobody reads any more. */
static __device__ __forceinline__ uint16_t kvf_centroid_end(int8_t *centroid, float x, float *all,
                                                            uint32_t head_dim)
{
    float largest = 0.0f;
    x = __fmul_rn(x, 1.0f / KVF_CENTROID_TOKENS);
    all[threadIdx.x] = fabsf(x);
    __syncthreads();
    for (uint32_t k = 0; k < head_dim; k++)
        largest = fmaxf(largest, all[k]);
    const float unit = __fdiv_rn(127.0f, largest), scale = __fdiv_rn(largest, 127.0f);
    const bool is_flat = !(unit <= FLT_MAX);
    /* Adding 1.5 * 2^23 rounds to an integer, in the low bits. */
    const float y = __fadd_rn(__fmul_rn(x, unit), 0x1.8p23f);
    *centroid = is_flat ? 0 : (int8_t)kvf_float_bits(y);
    return is_flat ? 0 : kvf_fp16_from_float(scale < 65504.0f ? scale : 65504.0f);
}

#endif
