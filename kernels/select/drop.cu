/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Slots without the pages that a row has lost, on the GPU; see drop_ref.c for the meaning.
 *
 * Knows nothing of bytes. A block per list, a thread per slot: pages of a list have one slot each,
 * so no two threads write one word. Bound: 4 bytes per slot; the launch is the cost. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 128u

static __global__ void drop_kernel(const __grid_constant__ kvf_drop_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = &a.row[blockIdx.x / p->lists];
    const uint32_t list = blockIdx.x % p->lists, sealed = row->sealed * p->block_size;
    const int32_t pages = (int32_t)kvf_row_sealed_pages(p, row);
    int32_t *slot_of_page = a.slot_of_page + (size_t)blockIdx.x * p->pages_max;
    int32_t *page_of_slot = a.page_of_slot + (size_t)blockIdx.x * a.slots;
    for (uint32_t s = threadIdx.x; s < a.slots; s += blockDim.x) {
        const int32_t page = page_of_slot[s];
        if (page < pages)
            continue;
        slot_of_page[page] = -1;
        page_of_slot[s] = -1;
    }
    if (threadIdx.x == 0 && list % (p->lists / p->kv_heads) == 0 && sealed < p->sink)
        row->store_count[kvf_list_head(p, list)] = sealed;
}

extern "C" int kvf_drop_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<drop_kernel>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream,
                                        *(const kvf_drop_args *)args);
}
