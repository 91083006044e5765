/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ATTEND_MERGE_CUH
#define KVF_KERNELS_ATTEND_MERGE_CUH

/*
 * Partial attention results by log-sum-exp: four channels of one row by one thread, for merge.cu
 * and for what ends with it.
 *
 * Knows nothing of spans beyond their number. What a thread reads does not hang on what it read
 * before, so that eight splits are on their way at once: at the default budget 3 round trips to
 * the second-level cache for the sums of all, and 3 for their values. Exactness: fp32 sums in split
 * order; exp2 of differences that were rounded once, so e^x to |x| * 2^-23 relative.
 */

#include "kernels.h"

#include "cuda/tile.cuh"

/* Splits whose values a thread asks for before it uses one. nvcc sees no macros in a pragma. */
enum { KVF_MERGE_AHEAD = 8 };

/* Channels column .. column + 3 of row `row` of (list, group). partial_o [lists, splits_max, group,
 * head_dim], partial_lse [lists, splits_max, group], out [lists, group, head_dim], lse [lists,
 * group]. */
static __device__ __forceinline__ void kvf_merge_quad(const kvf_merge_args &a, uint32_t row,
                                                      uint32_t column)
{
    const uint32_t list = row / a.group, g = row % a.group;
    const uint32_t splits = kvf_div_ceil_u32(a.span_count[list], a.split);
    const size_t first = (size_t)list * a.splits_max * a.group + g;
    float top = -INFINITY, sum = 0.0f;
#pragma unroll KVF_MERGE_AHEAD
    for (uint32_t s = 0; s < splits; s++)
        top = fmaxf(top, a.partial_lse[first + (size_t)s * a.group]);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll KVF_MERGE_AHEAD
    for (uint32_t s = 0; s < splits; s++) {
        const size_t part = first + (size_t)s * a.group;
        const float lse = a.partial_lse[part];
        const float4 x = *(const float4 *)(a.partial_o + part * a.shape.head_dim + column);
        const bool is_empty = lse == -INFINITY; /* then the values mean nothing */
        const float weight = is_empty ? 0.0f : kvf_exp2((lse - top) * KVF_CUDA_LOG2E);
        sum += weight;
        o.x = is_empty ? o.x : o.x + weight * x.x;
        o.y = is_empty ? o.y : o.y + weight * x.y;
        o.z = is_empty ? o.z : o.z + weight * x.z;
        o.w = is_empty ? o.w : o.w + weight * x.w;
    }
    if (sum > 0.0f)
        kvf_scale(&o, 1.0f / sum);
    kvf_store4(a.out, a.shape.dtype, (size_t)row * a.shape.head_dim + column, o);
    if (a.lse && column == 0)
        a.lse[row] = sum > 0.0f ? top + logf(sum) : -INFINITY;
}

#endif
