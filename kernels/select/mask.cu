/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chosen tokens into pages and masks, on the GPU; see mask_ref.c for the meaning.
 *
 * Knows nothing of why tokens were chosen. A block per list. The first token of a page gathers the
 * page's mask; how many such tokens come before it, a running sum over the block, is its place.
 * Every token is read twice, from the cache the second time. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 256u

static __global__ void mask_kernel(const __grid_constant__ kvf_mask_args a)
{
    const uint32_t list = blockIdx.x, count = a.token_count[list];
    const int32_t page_size = (int32_t)a.paging.shape.page_size;
    const int32_t *tokens = a.tokens + (size_t)list * a.tokens_max;
    int32_t *ids = a.ids + (size_t)list * a.ids_max;
    uint64_t *masks = a.masks + (size_t)list * a.ids_max;
    uint32_t pages = 0;
    for (uint32_t first = 0; first < count; first += blockDim.x) {
        const uint32_t i = first + threadIdx.x;
        const int32_t page = i < count ? tokens[i] / page_size : -1;
        const bool begins = i < count && (i == 0 || tokens[i - 1] / page_size != page);
        uint32_t more;
        const uint32_t at = pages + kvf_block_scan(begins, &more, kvf_shared());
        if (begins) {
            uint64_t chosen = 0;
            for (uint32_t k = i; k < count && tokens[k] / page_size == page; k++)
                chosen |= UINT64_C(1) << tokens[k] % page_size;
            KVF_ASSERT(at < a.ids_max);
            ids[at] = page;
            masks[at] = ~chosen;
        }
        pages += more;
    }
    if (threadIdx.x == 0)
        a.id_count[list] = pages;
}

extern "C" int kvf_mask_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<mask_kernel>(dim3(tasks), dim3(THREADS), KVF_BLOCK_SCRATCH * 4,
                                        (cudaStream_t)stream, *(const kvf_mask_args *)args);
}
