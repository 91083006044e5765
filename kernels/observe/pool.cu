/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Smoothing of scores along tokens, on the GPU. Knows nothing of heads.
 *
 * A thread per score, grid (count / 256, vectors). Bound: 4 bytes read and 4 written per score; the
 * other width - 1 reads of a window come from the first-level cache. Exactness: the maximum has the
 * bits of pool_ref.c; the average is an fp32 sum in the order of the vector.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"

#define THREADS 256u

static __global__ void __launch_bounds__(THREADS)
    pool_vector(const __grid_constant__ kvf_pool_args a)
{
    const uint32_t j = blockIdx.x * THREADS + threadIdx.x, half_width = a.width / 2;
    if (j >= a.count)
        return;
    const float *in = a.in + (size_t)blockIdx.y * a.stride;
    const uint32_t begin = j > half_width ? j - half_width : 0;
    const uint32_t end = a.count - j > half_width ? j + half_width + 1 : a.count;
    float sum = 0.0f, top = -INFINITY;
    for (uint32_t i = begin; i < end; i++) {
        const float x = in[i];
        sum += x;
        top = x > top ? x : top;
    }
    float *out = a.out + (size_t)blockIdx.y * (a.out_stride ? a.out_stride : a.stride) + j;
    float x = a.average ? sum / (float)a.width : top;
    if (a.scale != 0.0f)
        x *= a.scale;
    if (a.combine == KVF_COMBINE_ADD)
        x += *out;
    else if (a.combine == KVF_COMBINE_MAX)
        x = *out > x ? *out : x;
    *out = x;
}

extern "C" int kvf_pool_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_pool_args *a = (const kvf_pool_args *)args;
    if (a->vectors == 0 || a->count == 0)
        return cudaSuccess;
    return kvf_cuda_launch<pool_vector>(dim3(kvf_div_ceil_u32(a->count, THREADS), a->vectors),
                                        dim3(THREADS), 0, (cudaStream_t)stream, *a);
}
