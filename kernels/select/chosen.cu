/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Lists of chosen pages that no ranking makes, or that are cut after it, on the GPU; see
 * chosen_ref.c for the meaning. Knows nothing of where pages lie.
 */

#include <math.h>

#include "cuda.cuh"
#include "cuda_kernels.h"
#include "paging.cuh"
#include "select.cuh"

/*
 * Pages that the caller wants as scores of pages, on the GPU.
 *
 * Knows nothing of where scores come from. A block per list. Entries that name a page are put in
 * place by a maximum of integers: -INFINITY is a negative one, and places are positive floats,
 * whose order is that of their bits. So the first entry counts, whatever the order of threads.
 * Exact.
 *
 * Bound: latency. A list of 128K tokens in pages of 4 has 32,768 scores, 32 for each thread.
 */

#define CALLER_THREADS 1024u

static __global__ void __launch_bounds__(CALLER_THREADS)
    caller_scores_kernel(const __grid_constant__ kvf_caller_scores_args a)
{
    const uint32_t list = blockIdx.x, head = list % a.paging.lists;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const kvf_row *row = &a.row[list / a.paging.lists];
    const uint32_t pages = kvf_row_sealed_pages(&a.paging, row);
    const size_t first = kvf_caller_scores_first(&a, list);
    float *out = a.out + (size_t)list * a.stride;
    KVF_ASSERT(pages <= a.stride);
    for (uint32_t i = threadIdx.x; i < pages; i += blockDim.x) {
        const bool is_scored = a.scores && i < a.caller_stride;
        out[i] = is_scored && kvf_caller_page_counts(&a.paging, row, head, i) ? a.scores[first + i]
                                                                              : -INFINITY;
    }
    if (a.scores)
        return;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.caller_stride; i += blockDim.x) {
        const uint32_t page = (uint32_t)a.ids[first + i]; /* -1 is none */
        if (kvf_caller_page_counts(&a.paging, row, head, page))
            atomicMax((int *)&out[page], (int)kvf_float_bits((float)(a.caller_stride - i)));
    }
}

KVF_LAUNCHER_EARLY(caller_scores, caller_scores_kernel, tasks, CALLER_THREADS, 0)

/*
 * The newest pages of each list, on the GPU.
 *
 * Knows nothing of scores. A block per list, a thread per id; 4 bytes are written per id. Exact.
 */

#define NEWEST_THREADS 128u

static __global__ void newest_kernel(const __grid_constant__ kvf_newest_args a)
{
    const uint32_t list = blockIdx.x;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const uint32_t sealed = kvf_row_sealed_pages(&a.paging, &a.row[list / a.paging.lists]);
    const uint32_t count = kvf_min_u32(a.choose[list], sealed);
    int32_t *ids = a.ids + (size_t)list * a.ids_max;
    KVF_ASSERT(count <= a.ids_max);
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)
        ids[i] = (int32_t)(sealed - count + i);
    if (threadIdx.x == 0)
        a.id_count[list] = count;
}

KVF_LAUNCHER_EARLY(newest, newest_kernel, tasks, NEWEST_THREADS, 0)

/*
 * One list of ids for every list of a row, on the GPU.
 *
 * Knows nothing of what the ids mean. A block per list, a thread per id. Exact.
 */

#define SPREAD_THREADS 128u

static __global__ void spread_kernel(const __grid_constant__ kvf_spread_args a)
{
    const uint32_t list = blockIdx.x, from = list / a.lists, count = a.from_count[from];
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)
        a.ids[(size_t)list * a.ids_max + i] = a.from[(size_t)from * a.ids_max + i];
    if (threadIdx.x == 0)
        a.id_count[list] = count;
}

KVF_LAUNCHER(spread, spread_kernel, tasks, SPREAD_THREADS, 0)

/*
 * Chosen tokens into pages and masks, on the GPU.
 *
 * Knows nothing of why tokens were chosen. A block per list. The first token of a page gathers the
 * page's mask; how many such tokens come before it, a running sum over the block, is its place.
 * Every token is read twice, from the cache the second time. Exact.
 */

#define MASK_THREADS 256u

static __global__ void mask_kernel(const __grid_constant__ kvf_mask_args a)
{
    const uint32_t list = blockIdx.x, count = a.token_count[list];
    const int32_t page_size = (int32_t)a.paging.shape.page_size;
    const int32_t *tokens = a.tokens + (size_t)list * a.tokens_max;
    int32_t *ids = a.ids + (size_t)list * a.ids_max;
    uint64_t *masks = a.masks + (size_t)list * a.ids_max;
    uint32_t pages = 0;
    for (uint32_t first = 0; first < count; first += blockDim.x) {
        const uint32_t i = first + threadIdx.x;
        const int32_t page = i < count ? tokens[i] / page_size : -1;
        const bool begins = i < count && (i == 0 || tokens[i - 1] / page_size != page);
        uint32_t more;
        const uint32_t at = pages + kvf_block_scan(begins, &more, kvf_shared());
        if (begins) {
            uint64_t chosen = 0;
            for (uint32_t k = i; k < count && tokens[k] / page_size == page; k++)
                chosen |= UINT64_C(1) << tokens[k] % page_size;
            KVF_ASSERT(at < a.ids_max);
            ids[at] = page;
            masks[at] = ~chosen;
        }
        pages += more;
    }
    if (threadIdx.x == 0)
        a.id_count[list] = pages;
}

KVF_LAUNCHER(mask, mask_kernel, tasks, MASK_THREADS, KVF_BLOCK_SCRATCH * 4)

/*
 * The best of chosen pages, as many as there is room for by their tokens, on the GPU.
 *
 * Knows nothing of how pages were chosen. A warp per list, which reads its pages 32 times and once
 * more. Bound: latency. Sums of integers, so exact.
 */

static __device__ __forceinline__ uint32_t tokens_of(const kvf_trim_args *a, uint32_t list,
                                                     int32_t id)
{
    return (uint32_t)__popcll(kvf_trim_live(a, list, id));
}

static __device__ __forceinline__ uint32_t tokens_from(const kvf_trim_args *a, uint32_t list,
                                                       const int32_t *ids, uint32_t count,
                                                       uint32_t key)
{
    uint32_t tokens = 0;
    for (uint32_t i = threadIdx.x; i < count; i += KVF_WARP_LANES)
        if (kvf_trim_key(a, list, ids[i]) >= key)
            tokens += tokens_of(a, list, ids[i]);
    return kvf_warp_sum(tokens);
}

static __global__ void __launch_bounds__(KVF_WARP_LANES)
    trim_kernel(const __grid_constant__ kvf_trim_args a)
{
    const uint32_t list = blockIdx.x;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    int32_t *ids = a.ids + (size_t)list * a.ids_max;
    const uint32_t count = a.id_count[list], room = kvf_trim_room(&a, list);
    uint32_t key = 0, kept = 0;
    if (tokens_from(&a, list, ids, count, 0) <= room)
        return;
#pragma unroll 1
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
        if (tokens_from(&a, list, ids, count, key | bit) > room)
            key |= bit;
    uint32_t tokens = key == UINT32_MAX ? 0 : tokens_from(&a, list, ids, count, key + 1);
#pragma unroll 1
    for (uint32_t base = 0; base < count; base += KVF_WARP_LANES) {
        const uint32_t i = base + threadIdx.x;
        const int32_t id = i < count ? ids[i] : 0;
        const uint32_t own = i < count ? kvf_trim_key(&a, list, id) : 0;
        const bool is_tied = own == key && i < count; /* perhaps without a token */
        const uint32_t tied = is_tied ? tokens_of(&a, list, id) : 0;
        const uint32_t so_far = tokens + kvf_warp_scan(tied); /* by all lanes */
        const bool stays = own > key || (is_tied && so_far <= room);
        const uint32_t flags = __ballot_sync(KVF_FULL_WARP, stays);
        __syncwarp(); /* all lanes have read theirs */
        if (stays)
            ids[kept + (uint32_t)__popc(flags & kvf_lanes_below())] = id;
        kept += (uint32_t)__popc(flags);
        tokens += kvf_warp_sum(tied);
    }
    if (threadIdx.x == 0)
        a.id_count[list] = kept;
}

KVF_LAUNCHER_EARLY(trim, trim_kernel, tasks, KVF_WARP_LANES, 0)

/*
 * How static the attention of a layer is, on the GPU.
 *
 * Knows nothing of scores. One block: a thread looks for an id of one list in the other by
 * bisection, all KV heads at once. Runs once in the life of a layer of a sequence. Exact.
 */

#define OVERLAP_THREADS 512u

static __device__ __forceinline__ bool is_in(const int32_t *ids, uint32_t count, int32_t id)
{
    const uint32_t at = kvf_count_below(ids, count, (uint32_t)id);
    return at < count && ids[at] == id;
}

static __global__ void overlap_kernel(const __grid_constant__ kvf_overlap_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = a.row;
    uint64_t sum = 0;
    for (uint32_t h = 0; h < p->kv_heads; h++)
        for (uint32_t i = threadIdx.x; i < a.a_count[h]; i += blockDim.x)
            sum += is_in(a.b + (size_t)h * a.ids_max, a.b_count[h], a.a[(size_t)h * a.ids_max + i]);
    sum = kvf_block_sum(sum, kvf_shared());
    if (threadIdx.x == 0) {
        const uint32_t page_size = p->shape.page_size;
        const uint32_t tokens = (uint32_t)(sum / p->kv_heads) / page_size * page_size;
        /* Few candidates all overlap, which says nothing yet: a quarter, for now. */
        const uint32_t share = a.a_count[0] < a.rest ? a.rest / 4 : kvf_min_u32(tokens, a.rest);
        row->share[0] = share;
        row->share[1] = (a.rest - share) / page_size;
        a.counters->static_min = kvf_min_u32(a.counters->static_min, share);
        a.counters->static_max = kvf_max_u32(a.counters->static_max, share);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.choose_lists; i += blockDim.x)
        a.choose[i] = kvf_row_choose(p, row);
}

KVF_LAUNCHER(overlap, overlap_kernel, 1, OVERLAP_THREADS, KVF_BLOCK_SCRATCH * 4)
