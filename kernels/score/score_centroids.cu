/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Queries against centroids, on the GPU.
 *
 * Knows nothing of what the centroids are of. A thread is one centroid, for all queries of its
 * list, which lie in shared memory; channels go by fours. Plain, no bound claimed. Exactness: the
 * bits of score_centroids_ref.c.
 */

#include "cuda_kernels.h"
#include "paging.cuh"
#include "score/score_args.h"

#define THREADS 128u

/* Products of four signed bytes each, added. */
static __device__ __forceinline__ int32_t add_products(int32_t sum, uint32_t x, uint32_t y)
{
#pragma unroll
    for (uint32_t k = 0; k < 32; k += 8)
        sum += (int32_t)(int8_t)(x >> k) * (int32_t)(int8_t)(y >> k);
    return sum;
}

static __global__ void __launch_bounds__(THREADS)
    score_task(const __grid_constant__ kvf_score_centroids_args a)
{
    const uint32_t list = blockIdx.y, words = a.head_dim / 4, count = a.count[list];
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    uint32_t *const q = (uint32_t *)kvf_shared();
    const uint32_t *from = (const uint32_t *)(const void *)a.q + (size_t)list * a.group * words;
    if (blockIdx.x * THREADS >= count)
        return;
    for (uint32_t k = threadIdx.x; k < a.group * words; k += THREADS)
        q[k] = from[k];
    __syncthreads();
    if (i >= count)
        return;
    const kvf_centroid at = kvf_centroid_at(&a, list, i);
    const uint32_t *centroid = (const uint32_t *)(const void *)at.centroid;
    const float scale = kvf_fp16_to_float(*at.scale);
    for (uint32_t g = 0; g < a.group; g++) {
        const size_t row = (size_t)list * a.group + g;
        int32_t dot = 0;
        for (uint32_t k = 0; k < words; k++)
            dot = add_products(dot, centroid[k], q[g * words + k]);
        a.scores[row * a.stride + i] = __fmul_rn(__fmul_rn((float)dot, scale), a.q_scale[row]);
    }
}

extern "C" int kvf_score_centroids_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_score_centroids_args *a = (const kvf_score_centroids_args *)args;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<score_task>(dim3(kvf_div_ceil_u32(a->stride, THREADS), a->lists),
                                       dim3(THREADS), a->group * a->head_dim, (cudaStream_t)stream,
                                       *a);
}
