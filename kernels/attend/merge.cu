/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Merge of partial attention results by log-sum-exp, on the GPU; see merge_ref.c for the meaning.
 *
 * Knows nothing of spans beyond their number. A thread owns four channels of one row of (list,
 * group) and walks the splits in order, so there is no barrier and no order to choose. Grid: rows x
 * head_dim / 4 threads, THREADS a block. Bound: the bytes of the partial results, read once, 4 *
 * head_dim + 4 per split and row. Exactness: fp32 sums in split order; exp2 of differences that
 * were rounded once, so e^x to |x| * 2^-23 relative.
 */

#include "cuda_kernels.h"
#include "tile.cuh"

#define THREADS 128u

/* partial_o [lists, splits_max, group, head_dim], partial_lse [lists, splits_max, group],
 * out [lists, group, head_dim], lse [lists, group]. */
static __global__ void __launch_bounds__(THREADS)
    merge_rows(const __grid_constant__ kvf_merge_args a)
{
    const uint32_t quads = a.shape.head_dim / 4;
    const uint32_t at = blockIdx.x * THREADS + threadIdx.x;
    const uint32_t row = at / quads, column = at % quads * 4;
    if (row >= a.lists * a.group)
        return;
    const uint32_t list = row / a.group, g = row % a.group;
    const uint32_t splits = kvf_div_ceil_u32(a.span_count[list], a.split);
    const size_t first = (size_t)list * a.splits_max * a.group + g;
    float top = -INFINITY, sum = 0.0f;
    for (uint32_t s = 0; s < splits; s++)
        top = fmaxf(top, a.partial_lse[first + (size_t)s * a.group]);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint32_t s = 0; s < splits; s++) {
        const size_t part = first + (size_t)s * a.group;
        const float lse = a.partial_lse[part];
        if (lse == -INFINITY)
            continue; /* its values mean nothing */
        const float weight = kvf_exp2((lse - top) * KVF_CUDA_LOG2E);
        sum += weight;
        kvf_add_scaled(&o, weight, a.partial_o + part * a.shape.head_dim + column);
    }
    if (sum > 0.0f)
        kvf_scale(&o, 1.0f / sum);
    kvf_store4(a.out, a.shape.dtype, (size_t)row * a.shape.head_dim + column, o);
    if (a.lse && column == 0)
        a.lse[row] = sum > 0.0f ? top + logf(sum) : -INFINITY;
}

extern "C" int kvf_merge_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_merge_args *a = (const kvf_merge_args *)args;
    (void)tasks;
    const uint32_t threads = a->lists * a->group * (a->shape.head_dim / 4);
    if (threads == 0)
        return cudaSuccess;
    return kvf_cuda_launch<merge_rows>(dim3(kvf_div_ceil_u32(threads, THREADS)), dim3(THREADS), 0,
                                       (cudaStream_t)stream, *a);
}
