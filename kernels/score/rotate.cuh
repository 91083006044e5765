/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_ROTATE_CUH
#define KVF_KERNELS_SCORE_ROTATE_CUH

/*
 * A rotated query in int8 by half a warp, with the bits of rotate_ref.c.
 *
 * Knows nothing of heads or lists.
 */

#include <float.h>

#include "codes.cuh"
#include "score_args.h"

/* Query `mine` of y and y_scale, from channels that kvf_code_load has loaded; not stored if there
 * is no such query. By whole warps. */
static __device__ __forceinline__ void kvf_rotate_query(const kvf_rotate_args &a,
                                                        float x[KVF_CODE_WORDS], uint32_t mine)
{
    const uint32_t words = a.head_dim / KVF_CODE_LANES, lane = threadIdx.x % KVF_CODE_LANES;
    uint32_t top = 0; /* bits, whose order is that of magnitudes; NaN is above all numbers */
    kvf_code_rotate_lanes(x, words);
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        if (k < words)
            top = kvf_max_u32(top, kvf_float_bits(x[k]) & 0x7fffffffu);
#pragma unroll
    for (int step = 1; step < (int)KVF_CODE_LANES; step *= 2)
        top = kvf_max_u32(top, __shfl_xor_sync(KVF_FULL_WARP, top, step));
    const float largest = kvf_bits_float(top), unit = __fdiv_rn(127.0f, largest);
    const bool is_flat = !(largest <= FLT_MAX && unit <= FLT_MAX);
    if (mine >= a.queries)
        return;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        if (k < words) {
            /* Adding 1.5 * 2^23 rounds to an integer, in the low bits. */
            const float y = __fadd_rn(__fmul_rn(x[k], unit), 0x1.8p23f);
            a.y[(size_t)mine * a.head_dim + k * KVF_CODE_LANES + lane] =
                is_flat ? 0 : (int8_t)kvf_float_bits(y);
        }
    const float scale = __fmul_rn(__fdiv_rn(largest, 127.0f), a.scale);
    if (lane == 0)
        a.y_scale[mine] =
            is_flat ? 0.0f : (scale < KVF_QUERY_SCALE_MAX ? scale : KVF_QUERY_SCALE_MAX);
}

#endif
