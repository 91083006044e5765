/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Misses of all lists as addresses, on the GPU; see fetch_ref.c for the meaning.
 *
 * Knows nothing of how pages travel. A warp per list, LISTS of them per block. The place of a
 * list's first miss is the number of misses of all lists before it; each block sums those itself,
 * which is a few loads per thread and saves a second launch. Bound: 8 bytes read and 16 written per
 * miss. Exact, in list order.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define LISTS 8u

static __global__ void fetch_kernel(const __grid_constant__ kvf_fetch_args a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const kvf_paging *p = &a.paging;
    const uint32_t lists = a.rows * p->lists, first = blockIdx.x * LISTS;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t list = first + threadIdx.x / KVF_WARP_LANES;
    uint64_t before = 0;
    for (uint32_t l = threadIdx.x; l < first; l += blockDim.x)
        before += a.miss_count[l];
    before = kvf_block_sum(before, kvf_shared());
    if (list >= lists)
        return;
    uint32_t n = (uint32_t)before;
    for (uint32_t l = first; l < list; l++)
        n += a.miss_count[l];
    const uint32_t head = kvf_list_head(p, list % p->lists), count = a.miss_count[list];
    const kvf_row *row = &a.row[list / p->lists];
    for (uint32_t i = lane; i < count; i += KVF_WARP_LANES) {
        const kvf_miss miss = a.misses[(size_t)list * a.ids_max + i];
        a.from[n + i] = kvf_row_home(p, row, (uint32_t)miss.page, head);
        a.to[n + i] = kvf_row_slot(p, row, head, (uint32_t)miss.slot);
    }
    if (list == lists - 1 && lane == 0)
        *a.count = n + count;
}

extern "C" int kvf_fetch_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_fetch_args *a = (const kvf_fetch_args *)args;
    const uint32_t blocks = kvf_div_ceil_u32(a->rows * a->paging.lists, LISTS);
    if (tasks == 0 || blocks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<fetch_kernel>(dim3(blocks), dim3(LISTS * KVF_WARP_LANES),
                                               KVF_BLOCK_SCRATCH * 4, (cudaStream_t)stream, *a);
}
