/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Selected pages to slots, on the GPU; tables and lists are those of resolve_ref.c.
 *
 * Knows nothing of bytes. One block of 256 threads per list. Before and after: slot_of_page and
 * page_of_slot are inverse to each other.
 *
 *   1. ids: hits mark their slot as taken; misses are counted per warp and written in id order.
 *   2. slots: free ones are counted per warp and given away in order, to the first misses.
 *   3. victims, if misses are left: the other slots with {score, page} as a key of 64 bits. Up to
 *      KEYS of them are ranked by counting the smaller ones; of more, a radix selection finds the
 *      smallest KEYS first, and the rest of the misses takes another turn.
 *   4. ids: slots of the misses.
 *
 * Bound: latency. Per list 12 bytes per id and 8 per slot are read, and 4 to 24 written per id; the
 * chain is id -> slot -> barrier -> page -> score -> barriers -> tables, 4 dependent round trips to
 * the second-level cache and 6 to 9 barriers. Ranking n victims costs n * n / 256 comparisons per
 * thread: 64 for 128 slots, 1024 at the most, 8 bytes of shared memory each, the same for a whole
 * warp.
 *
 * Exactness: integers only; keys differ, because pages do, so the result depends on no order of
 * threads.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/select.cuh"
#include "cuda/words.cuh"

#define THREADS 256u
#define WARPS   (THREADS / KVF_WARP_LANES)
#define KEYS    512u /* that are ranked at once */

/* In shared memory, followed by one bit per slot: taken by a page that is selected. */
struct state {
    kvf_select_state select;
    uint32_t count[WARPS];
    uint32_t key_count;
    uint64_t keys[KEYS];
    int32_t slots[KEYS];
    uint32_t taken[1];
};

struct list_view {
    const int32_t *ids;
    uint32_t count;
    uint32_t slots;
    const float *scores; /* may be NULL */
    int32_t *slot_of_page;
    int32_t *page_of_slot;
    uint32_t *missed;
    kvf_miss *misses;
};

static __device__ __forceinline__ bool is_taken(const state *s, uint32_t slot)
{
    return s->taken[slot / 32] >> slot % 32 & 1;
}

/* The victim that comes first has the largest key. */
static __device__ __forceinline__ uint64_t key_of(const list_view &v, int32_t page)
{
    const float x = v.scores ? v.scores[page] : 0.0f;
    return ~((uint64_t)kvf_order_key(x == x ? x : -INFINITY) << 32 | (uint32_t)page);
}

/* The miss `index` gets the slot of page `old`, or a free slot if that is negative. */
static __device__ __forceinline__ void assign(const list_view &v, uint32_t index, int32_t slot,
                                              int32_t old)
{
    const int32_t page = v.misses[index].page;
    if (old >= 0)
        v.slot_of_page[old] = -1;
    v.page_of_slot[slot] = page;
    v.slot_of_page[page] = slot;
    v.misses[index].slot = slot;
}

/* Flags of lanes in order: *before this lane in the block so far, and how many so far in all. A
 * warp has a run of consecutive items, whose total it has put into s->count. */
static __device__ __forceinline__ uint32_t count_before(const state *s, uint32_t *all)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t n = lane < WARPS ? s->count[lane] : 0;
    *all = kvf_warp_sum(n);
    return kvf_warp_sum(lane < warp ? n : 0);
}

/* The run of consecutive items, of `count`, of this warp. */
static __device__ __forceinline__ void run_of_warp(uint32_t count, uint32_t *begin, uint32_t *end)
{
    const uint32_t run = (uint32_t)kvf_round_up(kvf_div_ceil_u32(count, WARPS), KVF_WARP_LANES);
    *begin = kvf_min_u32(count, threadIdx.x / KVF_WARP_LANES * run);
    *end = kvf_min_u32(count, *begin + run);
}

/* Hits and misses. Returns the number of misses, whose pages are in v.misses, in id order. */
static __device__ uint32_t look_up(state *s, const list_view &v, int32_t *slot_of_id)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    uint32_t begin, end, n = 0, all;
    run_of_warp(v.count, &begin, &end);
    for (uint32_t i = begin + lane; i < end; i += KVF_WARP_LANES) {
        const int32_t slot = v.slot_of_page[v.ids[i]];
        n += slot < 0;
        v.missed[i] = slot < 0;
        slot_of_id[i] = slot;
        if (slot >= 0)
            atomicOr(&s->taken[slot / 32], 1u << slot % 32);
    }
    n = kvf_warp_sum(n);
    if (lane == 0)
        s->count[threadIdx.x / KVF_WARP_LANES] = n;
    __syncthreads();
    uint32_t at = count_before(s, &all);
    for (uint32_t base = begin; all && base < end; base += KVF_WARP_LANES) {
        const uint32_t i = base + lane;
        const bool is_miss = i < end && slot_of_id[i] < 0;
        const uint32_t flags = __ballot_sync(KVF_FULL_WARP, is_miss);
        if (is_miss)
            v.misses[at + (uint32_t)__popc(flags & kvf_lanes_below())].page = v.ids[i];
        at += (uint32_t)__popc(flags);
    }
    return all;
}

/* Free slots to the first of `wanted` misses, in order of slots. Returns how many got one. */
static __device__ uint32_t give_free(state *s, const list_view &v, uint32_t wanted)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    uint32_t begin, end, n = 0, all;
    run_of_warp(v.slots, &begin, &end);
    for (uint32_t slot = begin + lane; slot < end; slot += KVF_WARP_LANES)
        n += v.page_of_slot[slot] < 0;
    n = kvf_warp_sum(n);
    __syncthreads(); /* everyone has read the counts of the misses, and written their pages */
    if (lane == 0)
        s->count[threadIdx.x / KVF_WARP_LANES] = n;
    __syncthreads();
    uint32_t at = count_before(s, &all);
    for (uint32_t base = begin; n && base < end; base += KVF_WARP_LANES) {
        const uint32_t slot = base + lane;
        const bool is_free = slot < end && v.page_of_slot[slot] < 0;
        const uint32_t flags = __ballot_sync(KVF_FULL_WARP, is_free);
        const uint32_t index = at + (uint32_t)__popc(flags & kvf_lanes_below());
        if (is_free && index < wanted) {
            assign(v, index, (int32_t)slot, -1);
            atomicOr(&s->taken[slot / 32], 1u << slot % 32);
        }
        at += (uint32_t)__popc(flags);
    }
    return kvf_min_u32(all, wanted);
}

/* The smallest key that is among the `wanted` largest of the slots that are not taken. */
static __device__ uint64_t find_floor(state *s, const list_view &v, uint32_t wanted)
{
    uint64_t prefix = 0, mask = 0;
    kvf_select_clear(&s->select);
    __syncthreads();
    for (uint32_t top = 64; top > 0;) {
        const uint32_t bits = kvf_min_u32(top, KVF_SELECT_BITS), shift = top - bits;
        const uint32_t digits = (1u << bits) - 1;
        for (uint32_t slot = threadIdx.x; slot < v.slots; slot += THREADS) {
            if (is_taken(s, slot))
                continue;
            const uint64_t key = key_of(v, v.page_of_slot[slot]);
            if ((key & mask) == prefix)
                atomicAdd(&s->select.bins[(uint32_t)(key >> shift) & digits], 1u);
        }
        __syncthreads();
        if (kvf_select_digit(&s->select, wanted) == 0)
            break;
        prefix |= (uint64_t)s->select.digit << shift;
        mask |= (uint64_t)digits << shift;
        wanted = s->select.left;
        if (wanted == s->select.held)
            break;
        top = shift;
    }
    return prefix;
}

/* Victims for misses `first` .. `wanted` - 1, at most KEYS. Returns how many got one. */
static __device__ uint32_t give_victims(state *s, const list_view &v, uint32_t first,
                                        uint32_t wanted, bool all_fit)
{
    const uint64_t floor = all_fit ? 0 : find_floor(s, v, kvf_min_u32(KEYS, wanted - first));
    if (threadIdx.x == 0)
        s->key_count = 0;
    __syncthreads();
    for (uint32_t slot = threadIdx.x; slot < v.slots; slot += THREADS) {
        if (is_taken(s, slot))
            continue;
        const uint64_t key = key_of(v, v.page_of_slot[slot]);
        if (key >= floor) {
            const uint32_t at = atomicAdd(&s->key_count, 1u);
            s->keys[at] = key;
            s->slots[at] = (int32_t)slot;
        }
    }
    __syncthreads();
    const uint32_t n = s->key_count;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        const uint64_t key = s->keys[i];
        uint32_t rank = first;
#pragma unroll 8
        for (uint32_t k = 0; k < n; k++)
            rank += s->keys[k] > key;
        if (rank < wanted) {
            const uint32_t slot = (uint32_t)s->slots[i];
            assign(v, rank, (int32_t)slot, (int32_t)(uint32_t)~key);
            atomicOr(&s->taken[slot / 32], 1u << slot % 32);
        }
    }
    __syncthreads();
    return kvf_min_u32(n, wanted - first);
}

static __global__ void __launch_bounds__(THREADS)
    resolve_list(const __grid_constant__ kvf_resolve_args a)
{
    const uint32_t list = blockIdx.x;
    const size_t row = (size_t)list * a.ids_max;
    const list_view v = {a.ids + row,
                         a.id_count[list],
                         a.slots,
                         a.scores ? a.scores[list] : NULL,
                         a.slot_of_page[list],
                         a.page_of_slot[list],
                         a.missed + row,
                         a.misses + row};
    state *s = (state *)kvf_shared();
    for (uint32_t i = threadIdx.x; i < kvf_div_ceil_u32(v.slots, 32); i += THREADS)
        s->taken[i] = 0;
    __syncthreads();
    const uint32_t wanted = look_up(s, v, a.slot_of_id + row);
    if (threadIdx.x == 0)
        a.miss_count[list] = wanted;
    if (wanted == 0)
        return;
    uint32_t given = give_free(s, v, wanted);
    __syncthreads();
    while (given < wanted) { /* so every free slot is taken */
        const uint32_t victims = v.slots - (v.count - wanted) - given;
        KVF_ASSERT(wanted - given <= victims); /* slots >= count */
        given += give_victims(s, v, given, wanted, victims <= KEYS);
    }
    for (uint32_t i = threadIdx.x; i < v.count; i += THREADS)
        if (v.missed[i])
            a.slot_of_id[row + i] = v.slot_of_page[v.ids[i]];
}

extern "C" int kvf_resolve_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_resolve_args *a = (const kvf_resolve_args *)args;
    const size_t shared = sizeof(state) + kvf_div_ceil_u32(a->slots, 32) * sizeof(uint32_t);
    (void)tasks;
    if (a->lists == 0)
        return cudaSuccess;
    return kvf_cuda_launch<resolve_list>(dim3(a->lists), dim3(THREADS), shared,
                                         (cudaStream_t)stream, *a);
}
