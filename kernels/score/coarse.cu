/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Coarse ranking on the GPU: centroids of segments, queries against them, and the pages that
 * remain to be scored; see coarse_ref.c for the meaning.
 */

#include "cuda_kernels.h"
#include "paging.cuh"
#include "score/centroids.cuh"
#include "score/score_args.h"

/*
 * Centroids of segments, on the GPU.
 *
 * Knows nothing of keys. A block is one segment of one KV head, a thread one channel of it
 * (centroids.cuh). Bound: a launch, for the few segments of a call. Exactness: the bits of
 * coarse_ref.c.
 */

static __global__ void __launch_bounds__(KVF_GPU_HEAD_DIM_MAX)
    centroids_of(const __grid_constant__ kvf_centroids_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t per_row = p->kv_heads * a.segments, head_dim = p->shape.head_dim;
    const kvf_row *row = &a.row[blockIdx.x / per_row];
    const uint32_t rest = blockIdx.x % per_row, head = rest / a.segments;
    const uint32_t i = kvf_segments(p->block_size, row->sealed_before) + rest % a.segments;
    if (i >= kvf_segments(p->block_size, row->sealed))
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

KVF_LAUNCHER(centroids, centroids_of, tasks, a->paging.shape.head_dim,
             a->paging.shape.head_dim * sizeof(float))

/*
 * Queries against centroids, on the GPU.
 *
 * Knows nothing of what the centroids are of. A thread is one centroid, for all queries of its
 * list, which lie in shared memory; channels go by fours. Plain, no bound claimed. Exactness: the
 * bits of coarse_ref.c.
 */

#define CENTROIDS_PER_BLOCK 128u

/* Products of four signed bytes each, added. */
static __device__ __forceinline__ int32_t add_products(int32_t sum, uint32_t x, uint32_t y)
{
#pragma unroll
    for (uint32_t k = 0; k < 32; k += 8)
        sum += (int32_t)(int8_t)(x >> k) * (int32_t)(int8_t)(y >> k);
    return sum;
}

static __global__ void __launch_bounds__(CENTROIDS_PER_BLOCK)
    score_task(const __grid_constant__ kvf_score_centroids_args a)
{
    const uint32_t list = blockIdx.y, words = a.head_dim / 4, count = a.count[list];
    const uint32_t i = blockIdx.x * CENTROIDS_PER_BLOCK + threadIdx.x;
    uint32_t *const q = (uint32_t *)kvf_shared();
    const uint32_t *from = (const uint32_t *)(const void *)a.q + (size_t)list * a.group * words;
    if (blockIdx.x * CENTROIDS_PER_BLOCK >= count)
        return;
    for (uint32_t k = threadIdx.x; k < a.group * words; k += CENTROIDS_PER_BLOCK)
        q[k] = from[k];
    __syncthreads();
    if (i >= count)
        return;
    const kvf_centroid at = kvf_centroid_at(&a, list, i);
    const uint32_t *centroid = (const uint32_t *)(const void *)at.centroid;
    const float scale = kvf_fp16_to_float(*at.scale);
    for (uint32_t g = 0; g < a.group; g++) {
        const size_t query = (size_t)list * a.group + g;
        int32_t dot = 0;
        for (uint32_t k = 0; k < words; k++)
            dot = add_products(dot, centroid[k], q[g * words + k]);
        a.scores[query * a.stride + i] = __fmul_rn(__fmul_rn((float)dot, scale), a.q_scale[query]);
    }
}

KVF_LAUNCHER(score_centroids, score_task,
             dim3(kvf_div_ceil_u32(a->stride, CENTROIDS_PER_BLOCK), a->lists), CENTROIDS_PER_BLOCK,
             a->group * a->head_dim)

/*
 * Bits of the blocks that stay, on the GPU.
 *
 * Knows nothing of scores. A block of threads is one list; each bisects the ascending ids. Exact.
 */

#define FILTER_THREADS 256u

static __device__ bool is_among(const int32_t *ids, uint32_t count, int32_t id)
{
    uint32_t low = 0;
    while (low < count) {
        const uint32_t middle = low + (count - low) / 2;
        if (ids[middle] == id)
            return true;
        if (ids[middle] < id)
            low = middle + 1;
        else
            count = middle;
    }
    return false;
}

static __global__ void __launch_bounds__(FILTER_THREADS)
    filter_blocks(const __grid_constant__ kvf_filter_args a)
{
    const uint32_t list = blockIdx.x, per = KVF_CENTROID_TOKENS / a.block_size;
    const uint64_t *from = a.from[list];
    if (!from)
        return;
    const uint32_t blocks = a.blocks[list], whole = kvf_segments(a.block_size, blocks) * per;
    for (uint32_t b = threadIdx.x; b < blocks; b += FILTER_THREADS) {
        const bool stays =
            b < per || b >= whole ||
            is_among(a.ids + (size_t)list * a.ids_max, a.id_count[list], (int32_t)(b / per) - 1);
        a.bits[(size_t)list * a.blocks_max + b] = stays ? from[b] : UINT64_MAX;
    }
}

KVF_LAUNCHER(filter, filter_blocks, tasks, FILTER_THREADS, 0)
