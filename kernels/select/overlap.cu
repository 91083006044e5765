/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How static the attention of a layer is, on the GPU; see overlap_ref.c for the meaning.
 *
 * Knows nothing of scores. One block: a thread looks for an id of one list in the other by
 * bisection, all KV heads at once. Runs once in the life of a layer of a sequence. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 512u

static __device__ __forceinline__ bool is_in(const int32_t *ids, uint32_t count, int32_t id)
{
    const uint32_t at = kvf_count_below(ids, count, (uint32_t)id);
    return at < count && ids[at] == id;
}

static __global__ void overlap_kernel(const __grid_constant__ kvf_overlap_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = a.row;
    uint64_t sum = 0;
    for (uint32_t h = 0; h < p->kv_heads; h++)
        for (uint32_t i = threadIdx.x; i < a.a_count[h]; i += blockDim.x)
            sum += is_in(a.b + (size_t)h * a.ids_max, a.b_count[h], a.a[(size_t)h * a.ids_max + i]);
    sum = kvf_block_sum(sum, kvf_shared());
    if (threadIdx.x == 0) {
        const uint32_t page_size = p->shape.page_size;
        const uint32_t tokens = (uint32_t)(sum / p->kv_heads) / page_size * page_size;
        /* Few candidates all overlap, which says nothing yet: a quarter, for now. */
        const uint32_t share = a.a_count[0] < a.rest ? a.rest / 4 : kvf_min_u32(tokens, a.rest);
        row->share[0] = share;
        row->share[1] = (a.rest - share) / page_size;
        a.counters->static_min = kvf_min_u32(a.counters->static_min, share);
        a.counters->static_max = kvf_max_u32(a.counters->static_max, share);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.choose_lists; i += blockDim.x)
        a.choose[i] = kvf_row_choose(p, row);
}

extern "C" int kvf_overlap_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<overlap_kernel>(dim3(1), dim3(THREADS), KVF_BLOCK_SCRATCH * 4,
                                           (cudaStream_t)stream, *(const kvf_overlap_args *)args);
}
