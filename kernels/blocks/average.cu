/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Centroids of segments that were written, on the GPU; see average_ref.c for the meaning.
 *
 * Knows nothing of keys. A block is KVF_AVERAGE_SEGMENTS segments of a row: a thread per channel
 * (score/centroids.cuh), one segment and head after another. Bound: a word per segment; after a
 * prompt its codes, once. Exact.
 */

#include "cuda_kernels.h"
#include "score/centroids.cuh"

static __global__ void __launch_bounds__(KVF_GPU_HEAD_DIM_MAX)
    average_blocks(const __grid_constant__ kvf_average_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const uint32_t parts = kvf_div_ceil_u32(a.segments_max, KVF_AVERAGE_SEGMENTS);
    const uint32_t number = blockIdx.x / parts, per = kvf_segment_blocks(c);
    const uint32_t first = 1 + blockIdx.x % parts * KVF_AVERAGE_SEGMENTS;
    const uint32_t *physical = c->physical + (size_t)number * c->paging.blocks_max;
    const uint32_t end =
        kvf_min_u32(1 + kvf_physical_ranked(c, number), first + KVF_AVERAGE_SEGMENTS);
    float *const all = (float *)kvf_shared();
    uint32_t *const ours =
        (uint32_t *)(all + a.head_dim); /* physical blocks; UINT32_MAX: another's */
    /* A thread claims a segment, or several where heads are small. */
    for (uint32_t i = first + threadIdx.x; i < end; i += blockDim.x) {
        const uint32_t block = physical[(size_t)i * per];
        const bool is_ours = atomicExch(kvf_physical_is_centroid(c, a.layer, block), 1u) == 0;
        ours[i - first] = is_ours ? block : UINT32_MAX;
    }
    __syncthreads();
    const uint32_t heads = c->paging.kv_heads;
    for (uint32_t i = 0; first < end && i < (end - first) * heads; i++) {
        const uint32_t block = ours[i / heads];
        const uint32_t coarse = c->coarse.number[a.layer * heads + i % heads];
        float x = 0.0f;
        if (block == UINT32_MAX || coarse == UINT32_MAX)
            continue;
        for (uint32_t g = 0; g < KVF_CENTROID_GROUPS; g++)
            x = kvf_centroid_add(x, kvf_segment_group(&a, block, i % heads, g), a.head_dim);
        const size_t at = (size_t)coarse * c->coarse.segments + block / kvf_segment_blocks(c);
        const uint16_t scale = kvf_centroid_end(c->coarse.centroids + at * a.head_dim + threadIdx.x,
                                                x, all, a.head_dim);
        if (threadIdx.x == 0)
            c->coarse.scales[at] = scale;
        __syncthreads(); /* `all` is read */
    }
}

KVF_LAUNCHER(average, average_blocks, tasks, a->head_dim,
             (a->head_dim + KVF_AVERAGE_SEGMENTS) * sizeof(float))
