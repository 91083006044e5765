/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SELECT_RESOLVE_CUH
#define KVF_KERNELS_SELECT_RESOLVE_CUH

/*
 * Selected pages of a list to slots by one block, for resolve.cu and for what goes on from there.
 *
 * Knows nothing of bytes. Before and after: slot_of_page and page_of_slot are inverse to each
 * other.
 *
 *   1. ids: hits mark their slot as taken, where what is kept for other lists is marked already;
 *      misses, without those that have a lender, are counted per warp and written in id order.
 *   2. slots: free ones are counted per warp and given away in order, to the first misses.
 *   3. victims, if misses are left: the other slots with {score, page} as a key of 64 bits. Up to
 *      KVF_RESOLVE_KEYS of them are ranked by counting the smaller ones; of more, a radix selection
 *      finds the smallest first, and the rest of the misses takes another turn.
 *   4. ids: slots of the misses.
 *
 * Exactness: integers only; keys differ, because pages do, so the result depends on no order of
 * threads and not on their number, a power of two from 32 to 1024.
 */

#include <math.h>

#include "kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/select.cuh"
#include "cuda/words.cuh"

#define KVF_RESOLVE_KEYS 512u /* that are ranked at once */

/* In shared memory, followed by one bit per slot: taken by a page that stays. */
struct kvf_resolve_state {
    kvf_select_state select;
    uint32_t count[KVF_WARP_LANES];
    uint32_t key_count;
    uint64_t keys[KVF_RESOLVE_KEYS];
    int32_t slots[KVF_RESOLVE_KEYS];
    uint32_t taken[1];
};

struct kvf_resolve_view {
    const int32_t *ids;
    uint32_t count;
    uint32_t slots;
    const float *scores; /* may be NULL */
    int32_t *slot_of_page;
    int32_t *page_of_slot;
    uint32_t *missed;
    kvf_miss *misses;
    const int32_t *lender; /* with LENDS */
};

static __device__ __forceinline__ bool kvf_resolve_taken(const kvf_resolve_state *s, uint32_t slot)
{
    return s->taken[slot / 32] >> slot % 32 & 1;
}

/* The victim that comes first has the largest key. */
static __device__ __forceinline__ uint64_t kvf_resolve_key(const kvf_resolve_view &v, int32_t page)
{
    const float x = v.scores ? v.scores[page] : 0.0f;
    return ~((uint64_t)kvf_order_key(x == x ? x : -INFINITY) << 32 | (uint32_t)page);
}

/* The miss `index` gets the slot of page `old`, or a free slot if that is negative. */
static __device__ __forceinline__ void kvf_resolve_assign(const kvf_resolve_view &v, uint32_t index,
                                                          int32_t slot, int32_t old)
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
static __device__ __forceinline__ uint32_t kvf_resolve_before(const kvf_resolve_state *s,
                                                              uint32_t *all)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t n = lane < blockDim.x / KVF_WARP_LANES ? s->count[lane] : 0;
    *all = kvf_warp_sum(n);
    return kvf_warp_sum(lane < warp ? n : 0);
}

/* The run of consecutive items, of `count`, of this warp. */
static __device__ __forceinline__ void kvf_resolve_run(uint32_t count, uint32_t *begin,
                                                       uint32_t *end)
{
    const uint32_t run = (uint32_t)kvf_round_up(
        kvf_div_ceil_u32(count, blockDim.x / KVF_WARP_LANES), KVF_WARP_LANES);
    *begin = kvf_min_u32(count, threadIdx.x / KVF_WARP_LANES * run);
    *end = kvf_min_u32(count, *begin + run);
}

/* Hits and misses. Returns the number of misses, whose pages are in v.misses, in id order. */
template <bool LENDS>
static __device__ uint32_t kvf_resolve_look_up(kvf_resolve_state *s, const kvf_resolve_view &v,
                                               int32_t *slot_of_id)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    uint32_t begin, end, n = 0, all;
    kvf_resolve_run(v.count, &begin, &end);
    for (uint32_t i = begin + lane; i < end; i += KVF_WARP_LANES) {
        const int32_t slot = v.slot_of_page[v.ids[i]];
        slot_of_id[i] = slot;
        if (LENDS && v.lender[i] >= 0)
            continue;
        n += slot < 0;
        v.missed[i] = slot < 0;
        if (slot >= 0)
            atomicOr(&s->taken[slot / 32], 1u << slot % 32);
    }
    n = kvf_warp_sum(n);
    if (lane == 0)
        s->count[threadIdx.x / KVF_WARP_LANES] = n;
    __syncthreads();
    uint32_t at = kvf_resolve_before(s, &all);
    for (uint32_t base = begin; all && base < end; base += KVF_WARP_LANES) {
        const uint32_t i = base + lane;
        const bool is_miss = i < end && slot_of_id[i] < 0 && !(LENDS && v.lender[i] >= 0);
        const uint32_t flags = __ballot_sync(KVF_FULL_WARP, is_miss);
        if (is_miss)
            v.misses[at + (uint32_t)__popc(flags & kvf_lanes_below())].page = v.ids[i];
        at += (uint32_t)__popc(flags);
    }
    return all;
}

/* Free slots to the first of `wanted` misses, in order of slots. Returns how many got one. */
static __device__ uint32_t kvf_resolve_free(kvf_resolve_state *s, const kvf_resolve_view &v,
                                            uint32_t wanted)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    uint32_t begin, end, n = 0, all;
    kvf_resolve_run(v.slots, &begin, &end);
    for (uint32_t slot = begin + lane; slot < end; slot += KVF_WARP_LANES)
        n += v.page_of_slot[slot] < 0;
    n = kvf_warp_sum(n);
    __syncthreads(); /* everyone has read the counts of the misses, and written their pages */
    if (lane == 0)
        s->count[threadIdx.x / KVF_WARP_LANES] = n;
    __syncthreads();
    uint32_t at = kvf_resolve_before(s, &all);
    for (uint32_t base = begin; n && base < end; base += KVF_WARP_LANES) {
        const uint32_t slot = base + lane;
        const bool is_free = slot < end && v.page_of_slot[slot] < 0;
        const uint32_t flags = __ballot_sync(KVF_FULL_WARP, is_free);
        const uint32_t index = at + (uint32_t)__popc(flags & kvf_lanes_below());
        if (is_free && index < wanted) {
            kvf_resolve_assign(v, index, (int32_t)slot, -1);
            atomicOr(&s->taken[slot / 32], 1u << slot % 32);
        }
        at += (uint32_t)__popc(flags);
    }
    return kvf_min_u32(all, wanted);
}

/* The smallest key that is among the `wanted` largest of the slots that are not taken. */
static __device__ uint64_t kvf_resolve_floor(kvf_resolve_state *s, const kvf_resolve_view &v,
                                             uint32_t wanted)
{
    uint64_t prefix = 0, mask = 0;
    kvf_select_clear(&s->select);
    __syncthreads();
    for (uint32_t top = 64; top > 0;) {
        const uint32_t bits = kvf_min_u32(top, KVF_SELECT_BITS), shift = top - bits;
        const uint32_t digits = (1u << bits) - 1;
        for (uint32_t slot = threadIdx.x; slot < v.slots; slot += blockDim.x) {
            if (kvf_resolve_taken(s, slot))
                continue;
            const uint64_t key = kvf_resolve_key(v, v.page_of_slot[slot]);
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

/* Victims for misses `first` .. `wanted` - 1, at most KVF_RESOLVE_KEYS. Returns how many got one.
 */
static __device__ uint32_t kvf_resolve_victims(kvf_resolve_state *s, const kvf_resolve_view &v,
                                               uint32_t first, uint32_t wanted, bool all_fit)
{
    const uint64_t floor =
        all_fit ? 0 : kvf_resolve_floor(s, v, kvf_min_u32(KVF_RESOLVE_KEYS, wanted - first));
    if (threadIdx.x == 0)
        s->key_count = 0;
    __syncthreads();
    for (uint32_t slot = threadIdx.x; slot < v.slots; slot += blockDim.x) {
        if (kvf_resolve_taken(s, slot))
            continue;
        const uint64_t key = kvf_resolve_key(v, v.page_of_slot[slot]);
        if (key >= floor) {
            const uint32_t at = atomicAdd(&s->key_count, 1u);
            s->keys[at] = key;
            s->slots[at] = (int32_t)slot;
        }
    }
    __syncthreads();
    const uint32_t n = s->key_count;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        const uint64_t key = s->keys[i];
        uint32_t rank = first;
#pragma unroll 8
        for (uint32_t k = 0; k < n; k++)
            rank += s->keys[k] > key;
        if (rank < wanted) {
            const uint32_t slot = (uint32_t)s->slots[i];
            kvf_resolve_assign(v, rank, (int32_t)slot, (int32_t)(uint32_t)~key);
            atomicOr(&s->taken[slot / 32], 1u << slot % 32);
        }
    }
    __syncthreads();
    return kvf_min_u32(n, wanted - first);
}

/* LENDS: there are lenders, and slots that are kept. */
template <bool LENDS>
static __device__ __forceinline__ void kvf_resolve_list(const kvf_resolve_args &a, uint32_t list,
                                                        kvf_resolve_state *s)
{
    const size_t row = (size_t)list * a.ids_max;
    const kvf_resolve_view v = {a.ids + row,
                                a.id_count[list],
                                a.slots,
                                a.scores ? a.scores[list] : NULL,
                                a.slot_of_page[list],
                                a.page_of_slot[list],
                                a.missed + row,
                                a.misses + row,
                                LENDS ? a.lender + row : NULL};
    const uint32_t words = kvf_div_ceil_u32(v.slots, 32);
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x)
        s->taken[i] = LENDS ? a.kept[(size_t)list * words + i] : 0;
    __syncthreads();
    const uint32_t wanted = kvf_resolve_look_up<LENDS>(s, v, a.slot_of_id + row);
    if (threadIdx.x == 0)
        a.miss_count[list] = wanted;
    if (wanted == 0)
        return;
    uint32_t given = kvf_resolve_free(s, v, wanted);
    __syncthreads();
    while (given < wanted) { /* so every free slot is taken */
        const uint32_t victims = v.slots - (v.count - wanted) - given;
        KVF_ASSERT(wanted - given <= victims); /* slots >= count */
        given += kvf_resolve_victims(s, v, given, wanted, victims <= KVF_RESOLVE_KEYS);
    }
    for (uint32_t i = threadIdx.x; i < v.count; i += blockDim.x)
        if (LENDS ? v.missed[i] == 1 : v.missed[i] != 0)
            a.slot_of_id[row + i] = v.slot_of_page[v.ids[i]];
}

/* Bytes of shared memory. */
static inline size_t kvf_resolve_bytes(uint32_t slots)
{
    return sizeof(kvf_resolve_state) + kvf_div_ceil_u32(slots, 32) * sizeof(uint32_t);
}

#endif
