/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages that lists miss into their slots, on the GPU.
 *
 * Knows nothing of who else wants them. PARTS blocks of 8 warps per list, a warp per page, 4 KiB of
 * it in flight. Bound: the link. Exact.
 */

#include "cuda/words.cuh"
#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 256u
#define PARTS   4u
#define WARPS   (THREADS / KVF_WARP_LANES)
#define WORDS   8u /* of 16 bytes, per lane */

static __global__ void __launch_bounds__(THREADS)
    collect_pages(const __grid_constant__ kvf_collect_args a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const kvf_paging *p = &a.paging;
    const uint32_t list = blockIdx.y, head = kvf_list_head(p, list % p->lists);
    const kvf_row *row = &a.row[list / p->lists];
    const uint32_t bytes = (uint32_t)kvf_stored_page_bytes(&p->shape), piece = WORDS * 512;
    const uint32_t first = blockIdx.x * WARPS + threadIdx.x / KVF_WARP_LANES;
    for (uint32_t i = first; row->slots && i < a.miss_count[list]; i += PARTS * WARPS) {
        const kvf_miss miss = a.misses[(size_t)list * a.ids_max + i];
        const char *from = kvf_row_home(p, row, (uint32_t)miss.page, head);
        char *to = kvf_row_slot(p, row, head, (uint32_t)miss.slot);
        for (uint32_t at = 0; at < bytes; at += piece)
            kvf_warp_move<WORDS>(to + at, from + at, kvf_min_u32(bytes - at, piece));
    }
}

extern "C" int kvf_collect_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<collect_pages>(dim3(PARTS, tasks), dim3(THREADS), 0,
                                                (cudaStream_t)stream,
                                                *(const kvf_collect_args *)args);
}
