/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Regions are validated against rows, on the GPU; see validate_ref.c for the meaning.
 *
 * Knows nothing of policies. A block is 4 warps and a KV head of a row: a warp per token. Bound: in
 * decoding one token across the link per head. Exact.
 */

#include "bring_token.cuh"
#include "cuda_kernels.h"

#define THREADS 128u
#define SHARED  (KVF_BLOCK_SCRATCH * sizeof(uint32_t))
#define WARPS   (THREADS / KVF_WARP_LANES)

/* A warp brings token `token` of the row to `to`, unless it is there; 1 in its first lane if it was
 * not. */
template <bool is_quantized>
static __device__ __forceinline__ uint32_t bring(const kvf_validate_args &a,
                                                 const uint32_t *physical, uint32_t head,
                                                 uint32_t token, kvf_physical_tag *tag, char *to)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t block = token / p->block_size, t = token % p->block_size;
    const kvf_physical_tag wanted = kvf_physical_tag_of(c, a.layer, physical[block], t, 1);
    const bool is_there = kvf_physical_tag_is(tag, wanted);
    __syncwarp();
    if (is_there)
        return 0;
    kvf_bring_token<is_quantized>(c, kvf_physical_page(c, a.layer, physical[block], head, t), t,
                                  to);
    if (lane == 0)
        *tag = wanted;
    return lane == 0;
}

template <bool is_quantized>
static __global__ void __launch_bounds__(THREADS, is_quantized ? 4 : 8)
    validate_regions(const __grid_constant__ kvf_validate_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t number = blockIdx.x / a.kv_heads, head = blockIdx.x % a.kv_heads;
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES;
    const kvf_row *row = &c->row[number];
    const uint32_t *physical = c->physical + (size_t)number * p->blocks_max;
    if (blockIdx.x == 0 && threadIdx.x == 0)
        ++*c->clock;
    if (row->length == 0 || kvf_row_is_idle(row, head))
        return;
    kvf_physical_tag *tags =
        c->token_tags + kvf_region_head(c, c->region[number], a.layer, head) * kvf_region_tokens(p);
    uint64_t brought = 0;
    for (uint32_t t = warp; t < row->store_count[head]; t += WARPS)
        brought += bring<is_quantized>(a, physical, head, t, &tags[t],
                                       kvf_store_token(p, row->store, head, t));
    for (uint32_t t = row->sealed * p->block_size + warp; row->ring && t < row->length; t += WARPS)
        brought += bring<is_quantized>(a, physical, head, t,
                                       &tags[p->sink + t % (p->ring_blocks * p->block_size)],
                                       kvf_row_run(p, row, t / p->block_size, head) +
                                           t % p->block_size * kvf_token_bytes(&p->shape));
    brought = kvf_block_sum(brought, kvf_shared());
    if (threadIdx.x == 0)
        kvf_counter_add(&c->counters[a.layer].tokens_brought, brought);
}

extern "C" int kvf_validate_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_validate_args *a = (const kvf_validate_args *)args;
    const dim3 grid(tasks), block(THREADS);
    if (tasks == 0)
        return cudaSuccess;
    if (a->pages != KVF_PAGES_NATIVE)
        return kvf_cuda_launch<validate_regions<true>>(grid, block, SHARED, (cudaStream_t)stream,
                                                       *a);
    return kvf_cuda_launch<validate_regions<false>>(grid, block, SHARED, (cudaStream_t)stream, *a);
}
