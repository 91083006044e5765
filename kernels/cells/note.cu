/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tags of the slots that misses got, on the GPU; see note_ref.c for the meaning.
 *
 * Knows nothing of how pages come there. A block per list, a thread per miss. Bound: the launch.
 * Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 64u

static __global__ void __launch_bounds__(THREADS) note_tags(const __grid_constant__ kvf_note_args a)
{
    const kvf_cells *c = a.cells;
    const uint32_t list = blockIdx.x;
    const uint32_t *cell = c->cell + (size_t)(list / c->paging.lists) * c->paging.blocks_max;
    kvf_cell_tag *tags = c->slot_tags + (c->list_page_of_slot[list] - c->page_of_slot);
    for (uint32_t i = threadIdx.x; i < a.miss_count[list]; i += blockDim.x) {
        const kvf_miss miss = a.misses[(size_t)list * a.ids_max + i];
        tags[miss.slot] = kvf_page_tag(c, a.layer, cell, (uint32_t)miss.page);
    }
}

extern "C" int kvf_note_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<note_tags>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream,
                                      *(const kvf_note_args *)args);
}
