/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Centroids of stretches, on the GPU; see centroids_ref.c for the meaning.
 *
 * Knows nothing of keys. A block is one stretch of one KV head, a thread one channel of it
 * (centroids.cuh). Bound: a launch, for the few stretches of a call. Exactness: the bits of
 * centroids_ref.c.
 */

#include "cuda_kernels.h"
#include "score/centroids.cuh"

static __global__ void __launch_bounds__(KVF_GPU_HEAD_DIM_MAX)
    centroids_of(const __grid_constant__ kvf_centroids_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t per_row = p->kv_heads * a.stretches, head_dim = p->shape.head_dim;
    const kvf_row *row = &a.row[blockIdx.x / per_row];
    const uint32_t rest = blockIdx.x % per_row, head = rest / a.stretches;
    const uint32_t i = kvf_stretches(p->block_size, row->sealed_before) + rest % a.stretches;
    if (i >= kvf_stretches(p->block_size, row->sealed))
        return;
    float x = 0.0f;
    for (uint32_t g = 0; g < KVF_CENTROID_GROUPS; g++)
        x = kvf_centroid_add(
            x, kvf_row_group(p, row, head, i * KVF_CENTROID_TOKENS + g * KVF_CODE_TOKENS),
            head_dim);
    const uint16_t scale = kvf_centroid_end(kvf_row_centroid(p, row, head, i) + threadIdx.x, x,
                                            (float *)kvf_shared(), head_dim);
    if (threadIdx.x == 0)
        *kvf_row_centroid_scale(p, row, head, i) = scale;
}

extern "C" int kvf_centroids_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_centroids_args *a = (const kvf_centroids_args *)args;
    const uint32_t head_dim = a->paging.shape.head_dim;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<centroids_of>(dim3(tasks), dim3(head_dim), head_dim * sizeof(float),
                                         (cudaStream_t)stream, *a);
}
