/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ATTEND_MERGE_CUH
#define KVF_KERNELS_ATTEND_MERGE_CUH

/*
 * Partial attention results by log-sum-exp: four channels of one query by one thread, for merge.cu
 * and for what ends with it.
 *
 * Knows nothing of spans beyond their number. The addresses that a thread reads do not hang on what
 * it read before, so that 16 splits are on their way at once: at the default budget one round trip
 * to the second-level cache. Exactness: fp32 sums in split order; exp2 of differences that were
 * rounded once, so e^x to |x| * 2^-23 relative.
 */

#include "kernels.h"

#include "cuda/tile.cuh"

/* Splits that a thread asks for before it uses one. nvcc sees no macros in a pragma. */
enum { KVF_MERGE_AHEAD = 16 };

/* Channels column .. column + 3 of query `query` of (list, group), of `splits` splits. partial_o
 * [lists, splits_max, group, value_dim], partial_lse [lists, splits_max, group], out [lists, group,
 * value_dim], lse [lists, group]. */
static __device__ __forceinline__ void kvf_merge_quad(const kvf_merge_args &a, uint32_t splits,
                                                      uint32_t query, uint32_t column,
                                                      uint32_t value_dim)
{
    const uint32_t list = query / a.group, g = query % a.group, step = a.group * value_dim;
    const size_t first = (size_t)list * a.splits_max * a.group + g;
    const float *lse_of = a.partial_lse + first;
    const float *values_of = a.partial_o + first * value_dim + column;
    float top = -INFINITY, sum = 0.0f;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (uint32_t s = KVF_MERGE_AHEAD; s < splits; s++)
        top = fmaxf(top, lse_of[s * a.group]);
#pragma unroll 1
    for (uint32_t base = 0; base < splits; base += KVF_MERGE_AHEAD) {
        float lse[KVF_MERGE_AHEAD];
        float4 x[KVF_MERGE_AHEAD];
#pragma unroll
        for (uint32_t k = 0; k < KVF_MERGE_AHEAD; k++) {
            const uint32_t s = kvf_min_u32(base + k, splits - 1);
            lse[k] = lse_of[s * a.group];
            x[k] = *(const float4 *)(values_of + s * step);
        }
#pragma unroll
        for (uint32_t k = 0; k < KVF_MERGE_AHEAD; k++)
            top = base ? top : fmaxf(top, lse[k]);
#pragma unroll
        for (uint32_t k = 0; k < KVF_MERGE_AHEAD; k++) {
            /* No token: the values mean nothing. */
            const bool is_empty = base + k >= splits || lse[k] == -INFINITY;
            const float weight = is_empty ? 0.0f : kvf_exp2((lse[k] - top) * KVF_CUDA_LOG2E);
            sum += weight;
            o.x = is_empty ? o.x : o.x + weight * x[k].x;
            o.y = is_empty ? o.y : o.y + weight * x[k].y;
            o.z = is_empty ? o.z : o.z + weight * x[k].z;
            o.w = is_empty ? o.w : o.w + weight * x[k].w;
        }
    }
    const float sink = kvf_merge_sink(&a, query);
    if (sink > -INFINITY) {
        const float most = fmaxf(top, sink), factor = kvf_exp2((top - most) * KVF_CUDA_LOG2E);
        sum = sum * factor + kvf_exp2((sink - most) * KVF_CUDA_LOG2E);
        kvf_scale(&o, factor);
        top = most;
    }
    if (sum > 0.0f)
        kvf_scale(&o, 1.0f / sum);
    kvf_store4(a.out, a.shape.dtype, (size_t)query * value_dim + column, o);
    if (a.lse && column == 0)
        a.lse[query] = sum > 0.0f ? top + logf(sum) : -INFINITY;
}

#endif
