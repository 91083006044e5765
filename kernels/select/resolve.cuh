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

#include "find_slot.cuh"

#define KVF_RESOLVE_SCRATCH sizeof(uint32_t)

/* `scratch`: KVF_RESOLVE_SCRATCH bytes of shared memory. */
static __device__ __forceinline__ void kvf_resolve_list(const kvf_resolve_args &a, uint32_t list,
                                                        void *scratch)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = &a.row[list / p->lists];
    const kvf_slot_tables t = kvf_slot_tables_of(p, row, kvf_list_head(p, list % p->lists));
    const uint32_t count = a.id_count[list], now = row->use;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const size_t first = (size_t)list * a.ids_max;
    uint32_t *voided = (uint32_t *)scratch;
    if (threadIdx.x == 0)
        *voided = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
        const uint32_t page = kvf_row_pool_page(p, row, (uint32_t)a.ids[first + i]);
        const kvf_slot_found found =
            kvf_slot_touch(t, page, now, t.tags ? kvf_row_page_tag(p, row, page) : 0);
        a.slot_of_id[first + i] = (int32_t)found.slot;
        a.missed[first + i] = found.missed;
        if (found.is_voided)
            atomicAdd(voided, 1u);
    }
    __syncthreads();
    for (uint32_t i = warp; i < count; i += blockDim.x / KVF_WARP_LANES) {
        if (a.slot_of_id[first + i] >= 0)
            continue;
        const uint32_t page = kvf_row_pool_page(p, row, (uint32_t)a.ids[first + i]);
        const kvf_slot_found found =
            kvf_slot_give(p, t, page, now, t.tags ? kvf_row_page_tag(p, row, page) : 0);
        __syncwarp(); /* all lanes have read that there was none */
        if (lane == 0) {
            a.slot_of_id[first + i] = (int32_t)found.slot;
            a.missed[first + i] = found.missed;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && *voided)
        atomicAdd((unsigned long long *)&a.counters->pages_voided, (unsigned long long)*voided);
    if (warp)
        return;
    uint32_t misses = 0;
    for (uint32_t base = 0; base < count; base += KVF_WARP_LANES) {
        const uint32_t i = base + lane;
        const bool is_miss = i < count && a.missed[first + i] == 1;
        const uint32_t flags = __ballot_sync(KVF_FULL_WARP, is_miss);
        if (is_miss) {
            kvf_miss *miss =
                &a.misses[first + misses + (uint32_t)__popc(flags & kvf_lanes_below())];
            miss->page = a.ids[first + i];
            miss->slot = a.slot_of_id[first + i];
        }
        misses += (uint32_t)__popc(flags);
    }
    if (lane == 0)
        a.miss_count[list] = misses;
}

#endif
