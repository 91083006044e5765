/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Topk, resolve and assemble of every list in one launch, on the GPU.
 *
 * Knows nothing that they do not know. The blocks of a list are those of topk.cuh, each with a part
 * of a long row of scores; the one that writes the ids goes on to slots and spans, so that two
 * launches and what waits between them are saved. Without topk a list has one block.
 *
 * The last block has the row and what was chosen in shared memory, and a page's place at home is
 * asked for together with its slot.
 *
 * Bound: latency, that of the three one after the other: at 128K tokens in pages of 4 a list has
 * 32,768 scores, which 16 blocks read once from the second-level cache; the last one then looks at
 * as many candidates as one had scores. Then 4 dependent round trips to that cache, those of a
 * page's block, its slot and the slot's word, read and changed, and some 20 barriers in all.
 *
 * Exactness: that of its parts.
 */

#include "attend/assemble.cuh"
#include "cuda_kernels.h"
#include "resolve.cuh"
#include "topk.cuh"

#define THREADS  256u  /* without topk */
#define IDS_HELD 2048u /* chosen pages of a list that shared memory has room for */

/* In shared memory, before what is chosen: ids, slots and misses. */
struct select_state {
    kvf_topk_state top;
    kvf_row row;
    uint32_t scratch[KVF_BLOCK_SCRATCH];
};

static __device__ __forceinline__ int32_t *held_ids(void)
{
    return (int32_t *)(kvf_shared() + sizeof(select_state));
}

/* Chosen pages in shared memory; where a list can have more than it has room for, in place. */
static __device__ __forceinline__ kvf_chosen chosen_of(const kvf_select_args &a, uint32_t list,
                                                       uint32_t count)
{
    int32_t *held = held_ids();
    const size_t first = (size_t)list * a.ids_max;
    if (a.ids_max > IDS_HELD)
        return {a.ids + first, a.slot_of_id + first, a.missed + first, count};
    return {a.k ? held : a.ids + first, held + a.ids_max, (uint32_t *)held + 2 * a.ids_max, count};
}

/* A word of the row for each thread: the block that comes last reads it again and again. */
#define ROW_WORDS ((uint32_t)(sizeof(kvf_row) / sizeof(uint32_t)))
static_assert(sizeof(kvf_row) % sizeof(uint32_t) == 0 && ROW_WORDS <= KVF_TOPK_THREADS_MIN,
              "a word per thread");

static __global__ void __launch_bounds__(KVF_TOPK_THREADS_MAX)
    select_list(const __grid_constant__ kvf_select_args a, const __grid_constant__ kvf_topk_grid g)
{
    const uint32_t list = blockIdx.x / g.parts, of_row = list % a.paging.lists;
    const size_t first = (size_t)list * a.ids_max;
    select_state *s = (select_state *)kvf_shared();
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const kvf_row *row = &a.row[list / a.paging.lists];
    const uint32_t word = threadIdx.x < ROW_WORDS ? ((const uint32_t *)row)[threadIdx.x] : 0;
    uint32_t count;
    if (a.k) {
        int32_t *ids = a.ids_max <= IDS_HELD ? held_ids() : a.ids + first;
        count = kvf_topk_list(kvf_select_topk(&a), &s->top, g,
                              [&](uint32_t at, uint32_t i) { ids[at] = (int32_t)i; });
        if (count == UINT32_MAX)
            return;
        if (threadIdx.x == 0)
            a.id_count[list] = count;
    } else {
        count = a.id_count[list];
    }
    const kvf_assemble_args assemble = kvf_select_assemble(&a);
    const kvf_chosen chosen = chosen_of(a, list, count);
    kvf_span span = {};
    if (threadIdx.x < ROW_WORDS)
        ((uint32_t *)&s->row)[threadIdx.x] = word;
    __syncthreads();
    kvf_resolve_list(kvf_select_resolve(&a), &s->row, list, chosen, [&](uint32_t i, uint32_t page) {
        if (i == threadIdx.x) /* loads that wait for nothing */
            kvf_assemble_home(&assemble, &s->row, of_row, page, a.masks ? a.masks[first + i] : 0,
                              &span);
    });
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count && a.ids_max <= IDS_HELD; i += blockDim.x) {
        a.ids[first + i] = chosen.ids[i];
        a.slot_of_id[first + i] = chosen.slot[i];
        a.missed[first + i] = chosen.missed[i];
    }
    kvf_assemble_list(assemble, &s->row, list, chosen, &span, s->scratch);
}

extern "C" int kvf_select_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_select_args *a = (const kvf_select_args *)args;
    const kvf_topk_args top = kvf_select_topk(a);
    const kvf_topk_grid one = {1, THREADS, 0, 0};
    const kvf_topk_grid g = a->k ? kvf_topk_grid_of(&top) : one;
    const size_t held = a->ids_max <= IDS_HELD ? a->ids_max * 3 * sizeof(uint32_t) : 0;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<select_list>(dim3(top.lists * g.parts), dim3(g.threads),
                                              sizeof(select_state) + held, (cudaStream_t)stream, *a,
                                              g);
}
