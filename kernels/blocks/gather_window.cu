/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tails of streaming heads, and their spans, on the GPU; see gather_window_ref.c for the meaning.
 *
 * Knows nothing of other heads. A block is 4 warps and a KV head of a row: a warp per token. Bound:
 * counts of writes, 4 bytes per token of a tail, and in decoding one token across the link per
 * head. Exact.
 */

#include "bring_token.cuh"
#include "cuda_kernels.h"

#define THREADS 128u
#define SHARED  (KVF_BLOCK_SCRATCH * sizeof(uint32_t))
#define WARPS   (THREADS / KVF_WARP_LANES)

/* A warp brings token `t` of a span, unless it is there; 1 in its first lane if it was not. */
template <bool is_quantized>
static __device__ __forceinline__ uint32_t bring(const kvf_gather_window_args &a, uint32_t block,
                                                 uint32_t head, const kvf_span &span, uint32_t t,
                                                 kvf_physical_tag *tag)
{
    const kvf_physical_blocks *c = a.blocks;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const kvf_physical_tag wanted = kvf_physical_tag_of(c, a.layer, block, t, 1);
    const bool is_there = span.skip >> t & 1 || kvf_physical_tag_is(tag, wanted);
    __syncwarp();
    if (is_there)
        return 0;
    kvf_bring_token<is_quantized>(c, kvf_physical_page(c, a.layer, block, head, t), t,
                                  (char *)(uintptr_t)span.page +
                                      t * kvf_token_bytes(&c->paging.shape));
    if (lane == 0)
        *tag = wanted;
    return lane == 0;
}

template <bool is_quantized>
static __global__ void __launch_bounds__(THREADS, is_quantized ? 3 : 8)
    gather_window_heads(const __grid_constant__ kvf_gather_window_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t number = blockIdx.x / a.kv_heads, head = blockIdx.x % a.kv_heads;
    const uint32_t one = c->streaming.number[a.layer * a.kv_heads + head];
    const kvf_row *row = &c->row[number];
    const uint32_t *physical = c->physical + (size_t)number * p->blocks_max;
    const uint32_t count = one ? kvf_ring_spans(&c->streaming.ring, row->length) : 0;
    const size_t tail = (size_t)c->region[number] * c->streaming.heads + (one ? one - 1 : 0);
    /* Without tails only to count from: spans get other pages below. */
    char *blocks = c->streaming.tails
                       ? c->streaming.tails + tail * kvf_tail_blocks(c) * kvf_run_bytes(p)
                       : kvf_physical_home(c, a.layer, 0);
    uint64_t sums = 0; /* brought << 32 | attended */
    if (threadIdx.x == 0)
        a.span_count[blockIdx.x] = count;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t page = kvf_tail_page(c, row->length, i);
        kvf_span span = kvf_ring_span(&c->streaming.ring, blocks, row->length, 0, i);
        const size_t first = tail * kvf_tail_tokens(c) +
                             (size_t)kvf_ring_block(&c->streaming.ring, page) * p->block_size;
        if (!c->streaming.tails)
            span.page = kvf_physical_home(c, a.layer, physical[page]) + head * kvf_run_bytes(p);
        for (uint32_t t = threadIdx.x / KVF_WARP_LANES; c->streaming.tails && t < span.count;
             t += WARPS)
            sums += (uint64_t)bring<is_quantized>(a, physical[page], head, span, t,
                                                  &c->streaming.tags[first + t])
                    << 32;
        if (threadIdx.x != 0)
            continue;
        sums += (uint32_t)__popcll(kvf_live_bits(span.count, span.skip));
        a.spans[(size_t)blockIdx.x * a.spans_max + i] = span;
    }
    sums = kvf_block_sum(sums, kvf_shared());
    if (threadIdx.x != 0 || count == 0)
        return;
    kvf_counter_add(&c->counters[a.layer].tokens_brought, sums >> 32);
    kvf_counter_add(&c->counters[a.layer].tokens_attended, (uint32_t)sums);
}

extern "C" int kvf_gather_window_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_gather_window_args *a = (const kvf_gather_window_args *)args;
    const dim3 grid(tasks), block(THREADS);
    if (tasks == 0)
        return cudaSuccess;
    if (a->pages != KVF_PAGES_NATIVE)
        return kvf_cuda_launch<gather_window_heads<true>>(grid, block, SHARED, (cudaStream_t)stream,
                                                          *a);
    return kvf_cuda_launch<gather_window_heads<false>>(grid, block, SHARED, (cudaStream_t)stream,
                                                       *a);
}
