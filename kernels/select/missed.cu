/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The bytes of pages that have a slot without them, on the GPU; see missed_ref.c for the meaning.
 * Knows nothing of how slots were found for misses.
 */

#include "cuda/words.cuh"
#include "cuda_kernels.h"
#include "find_slot.cuh"
#include "paging.cuh"

/*
 * Misses of all lists as addresses, on the GPU.
 *
 * Knows nothing of how pages travel. A warp per list, FETCH_LISTS of them per block. The place of a
 * list's first miss is the number of misses of all lists before it; each block sums those itself,
 * which is a few loads per thread and saves a second launch. Bound: 8 bytes read and 16 written per
 * miss. Exact, in list order.
 */

#define FETCH_LISTS 8u

static __global__ void fetch_kernel(const __grid_constant__ kvf_fetch_args a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const kvf_choices &c = a.choices;
    const kvf_paging *p = &c.paging;
    const uint32_t lists = c.rows * p->lists, first = blockIdx.x * FETCH_LISTS;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t list = first + threadIdx.x / KVF_WARP_LANES;
    uint64_t before = 0;
    for (uint32_t l = threadIdx.x; l < first; l += blockDim.x)
        before += c.miss_count[l];
    before = kvf_block_sum(before, kvf_shared());
    if (list >= lists)
        return;
    uint32_t n = (uint32_t)before;
    for (uint32_t l = first; l < list; l++)
        n += c.miss_count[l];
    const uint32_t head = kvf_list_head(p, list % p->lists), count = c.miss_count[list];
    const kvf_row *row = &c.row[list / p->lists];
    for (uint32_t i = lane; i < count; i += KVF_WARP_LANES) {
        const kvf_miss miss = c.misses[(size_t)list * c.ids_max + i];
        a.from[n + i] = kvf_row_home(p, row, (uint32_t)miss.page, head);
        a.to[n + i] = kvf_row_slot(p, row, head, (uint32_t)miss.slot);
    }
    if (list == lists - 1 && lane == 0)
        *a.count = n + count;
}

extern "C" int kvf_fetch_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_fetch_args *a = (const kvf_fetch_args *)args;
    const uint32_t lists = a->choices.rows * a->choices.paging.lists;
    const uint32_t blocks = kvf_div_ceil_u32(lists, FETCH_LISTS);
    if (blocks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<fetch_kernel>(dim3(blocks), dim3(FETCH_LISTS * KVF_WARP_LANES),
                                               KVF_BLOCK_SCRATCH * 4, (cudaStream_t)stream, *a);
}

/*
 * Pages that lists miss into their slots, on the GPU.
 *
 * Knows nothing of who else wants them. COLLECT_PARTS blocks of 8 warps per list, a warp per page,
 * 4 KiB of it in flight. Bound: the link. Exact.
 */

#define COLLECT_THREADS 256u
#define COLLECT_PARTS   4u
#define COLLECT_WARPS   (COLLECT_THREADS / KVF_WARP_LANES)
#define COLLECT_WORDS   8u /* of 16 bytes, per lane */

static __global__ void __launch_bounds__(COLLECT_THREADS)
    collect_pages(const __grid_constant__ kvf_choices a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const kvf_paging *p = &a.paging;
    const uint32_t list = blockIdx.y, head = kvf_list_head(p, list % p->lists);
    const kvf_row *row = &a.row[list / p->lists];
    const uint32_t bytes = (uint32_t)kvf_stored_page_bytes(&p->shape), piece = COLLECT_WORDS * 512;
    const uint32_t first = blockIdx.x * COLLECT_WARPS + threadIdx.x / KVF_WARP_LANES;
    for (uint32_t i = first; row->slots && i < a.miss_count[list];
         i += COLLECT_PARTS * COLLECT_WARPS) {
        const kvf_miss miss = a.misses[(size_t)list * a.ids_max + i];
        const char *from = kvf_row_home(p, row, (uint32_t)miss.page, head);
        char *to = kvf_row_slot(p, row, head, (uint32_t)miss.slot);
        for (uint32_t at = 0; at < bytes; at += piece)
            kvf_warp_move<COLLECT_WORDS>(to + at, from + at, kvf_min_u32(bytes - at, piece));
    }
}

KVF_LAUNCHER_EARLY(collect, collect_pages, dim3(COLLECT_PARTS, tasks), COLLECT_THREADS, 0)

/*
 * Pages of sealed blocks into slots, on the GPU.
 *
 * Knows nothing of what else sealing does. A block of threads per run, a warp per page: its slot,
 * then its bytes. Pages of one launch differ, so no two warps want the same one; what a warp took
 * nobody else of the launch takes. Bound: bytes, from device memory to device memory; quantized
 * pages come back from the pool, over the link.
 */

#define ADMIT_THREADS 256u
#define ADMIT_WORDS   4u /* of 16 bytes, per lane */

static __device__ __forceinline__ void admit_page(const kvf_admit_args &a, const kvf_row *row,
                                                  uint32_t head, uint32_t block, uint32_t number)
{
    const kvf_paging *p = &a.paging;
    const kvf_slot_tables t = kvf_slot_tables_of(p, row, head);
    const uint32_t page = kvf_row_sealing(row, block) * p->block_pages + number;
    const uint32_t slot = kvf_slot_admit(p, t, page, row->use);
    if (slot == UINT32_MAX || !row->slots)
        return;
    const uint32_t bytes = (uint32_t)kvf_stored_page_bytes(&p->shape);
    const char *from = kvf_admit_from(p, row, head, block, number);
    char *to = kvf_row_slot(p, row, head, slot);
    for (uint32_t at = 0; at < bytes; at += ADMIT_WORDS * KVF_WARP_LANES * 16)
        kvf_warp_move<ADMIT_WORDS>(to + at, from + at,
                                   kvf_min_u32(bytes - at, ADMIT_WORDS * KVF_WARP_LANES * 16));
}

static __global__ void __launch_bounds__(ADMIT_THREADS)
    admit_runs(const __grid_constant__ kvf_admit_args a)
{
    const kvf_row *row = &a.row[blockIdx.z];
    const uint32_t block = row->sealed_before + blockIdx.x;
    if (block >= row->sealed)
        return;
    for (uint32_t i = threadIdx.x / KVF_WARP_LANES; i < a.paging.block_pages;
         i += ADMIT_THREADS / KVF_WARP_LANES)
        admit_page(a, row, blockIdx.y, block, i);
}

extern "C" int kvf_admit_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_admit_args *a = (const kvf_admit_args *)args;
    if (a->count == 0)
        return cudaSuccess;
    return kvf_cuda_launch<admit_runs>(dim3(a->count, a->paging.kv_heads, a->rows),
                                       dim3(ADMIT_THREADS), 0, (cudaStream_t)stream, *a);
}
