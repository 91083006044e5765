/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bits of the blocks that stay, on the GPU; see filter_ref.c for the meaning.
 *
 * Knows nothing of scores. A block of threads is one list; each bisects the ascending ids. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"
#include "score/score_args.h"

#define THREADS 256u

static __device__ bool is_among(const int32_t *ids, uint32_t count, int32_t id)
{
    uint32_t low = 0;
    while (low < count) {
        const uint32_t middle = low + (count - low) / 2;
        if (ids[middle] == id)
            return true;
        if (ids[middle] < id)
            low = middle + 1;
        else
            count = middle;
    }
    return false;
}

static __global__ void __launch_bounds__(THREADS)
    filter_blocks(const __grid_constant__ kvf_filter_args a)
{
    const uint32_t list = blockIdx.x, per = KVF_CENTROID_TOKENS / a.block_size;
    const uint64_t *from = a.from[list];
    if (!from)
        return;
    const uint32_t blocks = a.blocks[list], whole = kvf_stretches(a.block_size, blocks) * per;
    for (uint32_t b = threadIdx.x; b < blocks; b += THREADS) {
        const bool stays =
            b < per || b >= whole ||
            is_among(a.ids + (size_t)list * a.ids_max, a.id_count[list], (int32_t)(b / per) - 1);
        a.bits[(size_t)list * a.blocks_max + b] = stays ? from[b] : UINT64_MAX;
    }
}

extern "C" int kvf_filter_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<filter_blocks>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream,
                                          *(const kvf_filter_args *)args);
}
