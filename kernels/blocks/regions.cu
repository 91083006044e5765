/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Regions are filled with tokens of their rows, on the GPU; see regions_ref.c for the meaning.
 *
 * Knows nothing of policies. Exact.
 */

#include "cuda_kernels.h"
#include "move/quantized.cuh"

#define THREADS 128u
#define SHARED  (KVF_BLOCK_SCRATCH * sizeof(uint32_t))
#define WARPS   (THREADS / KVF_WARP_LANES)

/* Token `token` of a physical block, which is in `page`. Half of the warp dequantizes, and half
 * repeats it.
 * */
template <bool is_quantized>
static __device__ __forceinline__ void copy_token(const kvf_physical_blocks *c, const char *page,
                                                  uint32_t token, char *to)
{
    const kvf_shape *s = &c->paging.shape;
    const uint32_t t = token % s->page_size, lane = threadIdx.x % KVF_WARP_LANES;
    if constexpr (is_quantized) {
        quantized_token_back(s, page, t, to, lane >= KVF_CODE_LANES);
        return;
    }
    const size_t bytes = kvf_token_bytes(s);
    const char *from = (const char *)kvf_page_key(s, page, t);
    for (size_t i = lane * sizeof(uint4); i < bytes; i += KVF_WARP_LANES * sizeof(uint4))
        *(uint4 *)(to + i) = *(const uint4 *)(from + i);
}

/* ---- validate: a block is 4 warps and a KV head of a row. A lane looks at a token, and a warp
 * brings those that its lanes found new, one after the other. The longest path of one that finds
 * nothing is three loads that wait for each other: the row beside its region and the description, a
 * tag beside the physical block, the count of writes. Bound: those; in decoding one token across
 * the link per head. ---- */

/* Tokens of a KV head of a row that a region has: `sinks`, then those from `first` on. */
typedef struct region_tokens {
    const kvf_row *row;
    kvf_physical_tag *tags;
    uint32_t head, sinks, first, count;
} region_tokens;

static __device__ __forceinline__ uint32_t region_token(const region_tokens *r, uint32_t i)
{
    return i < r->sinks ? i : r->first + i - r->sinks;
}

static __device__ __forceinline__ kvf_physical_tag *region_tag(const kvf_paging *p,
                                                               const region_tokens *r, uint32_t i)
{
    const uint32_t ring = p->ring_blocks * p->block_size;
    return r->tags + (i < r->sinks ? i : p->sink + region_token(r, i) % ring);
}

static __device__ __forceinline__ char *region_place(const kvf_paging *p, const region_tokens *r,
                                                     uint32_t i)
{
    const uint32_t t = region_token(r, i);
    if (i < r->sinks)
        return kvf_static_token(p, r->row->static_kv, r->head, t);
    return kvf_row_run(p, r->row, t / p->block_size, r->head) +
           t % p->block_size * kvf_token_bytes(&p->shape);
}

/* Tokens of a region that lanes of the warp have, from `first` on. Returns how many were new. */
template <bool is_quantized>
static __device__ __forceinline__ uint32_t bring_new(const kvf_validate_args &a,
                                                     const uint32_t *physical,
                                                     const region_tokens *r, uint32_t first)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, own = first + lane;
    const uint32_t t = region_token(r, own), in_block = t % p->block_size;
    kvf_physical_tag *tag = NULL, wanted = {0, 0};
    uint32_t block = 0;
    bool is_new = false;
    if (own < r->count) {
        tag = region_tag(p, r, own);
        block = physical[t / p->block_size];
        wanted = kvf_physical_tag_of(c, a.layer, block, in_block, 1);
        is_new = !kvf_physical_tag_is(tag, wanted);
    }
    const uint32_t all = __ballot_sync(KVF_FULL_WARP, is_new);
    for (uint32_t left = all; left; left &= left - 1) {
        const uint32_t i = (uint32_t)__ffs((int)left) - 1;
        const uint32_t from = __shfl_sync(KVF_FULL_WARP, block, (int)i);
        const uint32_t token = __shfl_sync(KVF_FULL_WARP, in_block, (int)i);
        copy_token<is_quantized>(c, kvf_physical_page(c, a.layer, from, r->head, token), token,
                                 region_place(p, r, first + i));
    }
    if (is_new)
        *tag = wanted;
    return (uint32_t)__popc(all);
}

template <bool is_quantized>
static __global__ void __launch_bounds__(THREADS, is_quantized ? 4 : 8)
    validate_regions(const __grid_constant__ kvf_validate_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t number = blockIdx.x / a.kv_heads, head = blockIdx.x % a.kv_heads;
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES * KVF_WARP_LANES;
    const kvf_row row = a.row[number]; /* all loads that need no other one are before the return */
    const uint32_t *physical = c->physical + (size_t)number * p->blocks_max;
    const size_t tags = kvf_region_head(c, a.region[number], a.layer, head) * kvf_region_tokens(p);
    const uint32_t sinks = a.static_count[blockIdx.x];
    region_tokens r = {&row, c->token_tags + tags, head, sinks, row.sealed * p->block_size, sinks};
    if (blockIdx.x == 0 && threadIdx.x == 0)
        ++*c->clock;
    if (row.length == 0 || kvf_row_is_idle(&row, head))
        return;
    r.count += row.ring ? row.length - r.first : 0;
    uint32_t brought = 0;
    for (uint32_t first = warp; first < r.count; first += THREADS)
        brought += bring_new<is_quantized>(a, physical, &r, first);
    if (brought && threadIdx.x == warp)
        kvf_counter_add(&c->counters[a.layer].tokens_brought, brought);
}

extern "C" int kvf_validate_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_validate_args *a = (const kvf_validate_args *)args;
    const dim3 grid(tasks), block(THREADS);
    if (a->pages != KVF_PAGES_NATIVE)
        return kvf_cuda_launch<validate_regions<true>>(grid, block, 0, (cudaStream_t)stream, *a);
    return kvf_cuda_launch<validate_regions<false>>(grid, block, 0, (cudaStream_t)stream, *a);
}

/* ---- gather_window: a block is 4 warps and a KV head of a row, a warp per token. Bound: counts of
 * writes, 4 bytes per token of a tail, and in decoding one token across the link per head. ---- */

/* A warp brings a token of a physical block to `to`, unless it is there; 1 in its first lane if it
 * was not. */
template <bool is_quantized>
static __device__ __forceinline__ uint32_t bring(const kvf_physical_blocks *c, uint32_t layer,
                                                 uint32_t block, uint32_t head, uint32_t token,
                                                 kvf_physical_tag *tag, char *to)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const kvf_physical_tag wanted = kvf_physical_tag_of(c, layer, block, token, 1);
    const bool is_there = kvf_physical_tag_is(tag, wanted);
    __syncwarp();
    if (is_there)
        return 0;
    copy_token<is_quantized>(c, kvf_physical_page(c, layer, block, head, token), token, to);
    if (lane == 0)
        *tag = wanted;
    return lane == 0;
}

template <bool is_quantized>
static __global__ void __launch_bounds__(THREADS, is_quantized ? 3 : 7)
    gather_window_heads(const __grid_constant__ kvf_gather_window_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t number = blockIdx.x / a.kv_heads, head = blockIdx.x % a.kv_heads;
    const kvf_shape *s = &a.ring.shape; /* of runs */
    const uint32_t token = (uint32_t)kvf_token_bytes(s), run = s->page_size * token;
    const uint32_t one = c->streaming.number[a.layer * a.kv_heads + head];
    const kvf_row *row = &c->row[number];
    const uint32_t *physical = c->physical + (size_t)number * p->blocks_max;
    const uint32_t count = one ? kvf_ring_spans(&a.ring, row->length) : 0;
    const size_t tail = kvf_tail_block(&a, c->region[number], one);
    /* Without tails only to count from: spans get other pages below. */
    char *blocks =
        c->streaming.tails ? c->streaming.tails + tail * run : kvf_physical_home(c, a.layer, 0);
    uint64_t sums = 0; /* brought << 32 | attended */
    if (threadIdx.x == 0)
        a.span_count[blockIdx.x] = count;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t page = kvf_tail_page(&a.ring, row->length, i);
        kvf_span span = kvf_ring_span(&a.ring, blocks, row->length, 0, i);
        const size_t first = (tail + kvf_ring_block(&a.ring, page)) * p->block_size;
        if (!c->streaming.tails)
            span.page = kvf_physical_home(c, a.layer, physical[page]) + head * run;
        for (uint32_t t = threadIdx.x / KVF_WARP_LANES; c->streaming.tails && t < span.count;
             t += WARPS)
            if (!(span.skip >> t & 1)) /* the same for a whole warp */
                sums += (uint64_t)bring<is_quantized>(c, a.layer, physical[page], head, t,
                                                      &c->streaming.tags[first + t],
                                                      (char *)(uintptr_t)span.page + t * token)
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
    if (a->pages != KVF_PAGES_NATIVE)
        return kvf_cuda_launch<gather_window_heads<true>>(grid, block, SHARED, (cudaStream_t)stream,
                                                          *a);
    return kvf_cuda_launch<gather_window_heads<false>>(grid, block, SHARED, (cudaStream_t)stream,
                                                       *a);
}

/* ---- scatter_heads: a block per output row, a thread per word. Bound: the launch. ---- */

static __global__ void __launch_bounds__(THREADS)
    scatter_heads_rows(const __grid_constant__ kvf_scatter_heads_args a)
{
    const uint32_t words = a.value_bytes / 4, head_words = a.group * words;
    const size_t row = (size_t)blockIdx.x * a.kv_heads;
    for (uint32_t i = threadIdx.x; i < a.kv_heads * head_words; i += blockDim.x)
        if (a.streaming[i / head_words])
            ((uint32_t *)a.out)[row * head_words + i] =
                ((const uint32_t *)a.from)[row * head_words + i];
    for (uint32_t i = threadIdx.x; a.lse && i < a.kv_heads * a.group; i += blockDim.x)
        if (a.streaming[i / a.group])
            a.lse[row * a.group + i] = a.from_lse[row * a.group + i];
}

KVF_LAUNCHER(scatter_heads, scatter_heads_rows, tasks, THREADS, 0)
