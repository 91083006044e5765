/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SELECT_RESOLVE_CUH
#define KVF_KERNELS_SELECT_RESOLVE_CUH

/*
 * Chosen pages of a list to slots by one block, for resolve.cu and for what goes on from there.
 *
 * Knows nothing of bytes. Lists do this at once, without waiting for each other (find_slot.cuh).
 *
 *   1. a thread per id: hits say that this call uses them, so that nobody takes their slots.
 *   2. a warp per miss: the slot that was used longest ago of 32, in one look.
 *   3. one warp writes the misses that are the list's own, in id order.
 */

#include "kernels.h"

#include "cuda/paging.cuh"
#include "find_slot.cuh"

/* Writes slot and missed of what is chosen, which the block sees after, and the list's misses.
 * look(i, page) before a page's slot is looked for. */
template <typename F>
static __device__ __forceinline__ void kvf_resolve_list(const kvf_choices &a, const kvf_row *row,
                                                        uint32_t list, const kvf_chosen &chosen,
                                                        const F &look)
{
    const kvf_paging *p = &a.paging;
    const kvf_slot_tables t = kvf_slot_tables_of(p, row, kvf_list_head(p, list % p->lists));
    const uint32_t now = row->use;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    kvf_miss *misses = a.misses + (size_t)list * a.ids_max;
    uint32_t voided = 0;
    bool is_miss = false;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < chosen.count; i += blockDim.x) {
        look(i, (uint32_t)chosen.ids[i]);
        const uint32_t page = kvf_row_pool_page(p, row, (uint32_t)chosen.ids[i]);
        const kvf_slot_found found =
            kvf_slot_touch(t, page, now, t.tags ? kvf_row_page_tag(p, row, page) : 0);
        chosen.slot[i] = (int32_t)found.slot;
        chosen.missed[i] = found.missed;
        is_miss = is_miss || found.missed == 1;
        voided += found.is_voided;
    }
    if (voided)
        kvf_counter_add(&a.counters->pages_voided, voided);
    if (!__syncthreads_or(is_miss)) {
        if (threadIdx.x == 0)
            a.miss_count[list] = 0;
        return;
    }
#pragma unroll 1
    for (uint32_t i = warp; i < chosen.count; i += blockDim.x / KVF_WARP_LANES) {
        if (chosen.slot[i] >= 0)
            continue;
        const uint32_t page = kvf_row_pool_page(p, row, (uint32_t)chosen.ids[i]);
        const kvf_slot_found found =
            kvf_slot_give(p, t, page, now, t.tags ? kvf_row_page_tag(p, row, page) : 0);
        __syncwarp(); /* all lanes have read that there was none */
        if (lane == 0) {
            chosen.slot[i] = (int32_t)found.slot;
            chosen.missed[i] = found.missed;
        }
    }
    __syncthreads();
    if (warp)
        return;
    uint32_t count = 0;
#pragma unroll 1
    for (uint32_t base = 0; base < chosen.count; base += KVF_WARP_LANES) {
        const uint32_t i = base + lane;
        const bool is_own = i < chosen.count && chosen.missed[i] == 1;
        const uint32_t flags = __ballot_sync(KVF_FULL_WARP, is_own);
        if (is_own)
            misses[count + (uint32_t)__popc(flags & kvf_lanes_below())] = {chosen.ids[i],
                                                                           chosen.slot[i]};
        count += (uint32_t)__popc(flags);
    }
    if (lane == 0)
        a.miss_count[list] = count;
}

#endif
