/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Topk, resolve and assemble of every list in one launch, on the GPU.
 *
 * Knows nothing that they do not know. The blocks of a list are those of topk.cuh, each with a part
 * of a long row of scores; the one that writes the ids goes on to slots and spans, so that two
 * launches and what waits between them are saved. Without topk a list has one block.
 *
 * Bound: latency, that of the three one behind the other: at 128K tokens in pages of 4 a list has
 * 32,768 scores, which 8 blocks read once from the second-level cache; the last one then looks at
 * eight times as many candidates as are taken. Then some 12 dependent round trips to that cache
 * and about 30 barriers.
 *
 * Exactness: that of its parts.
 */

#include "attend/assemble.cuh"
#include "cuda_kernels.h"
#include "resolve.cuh"
#include "topk.cuh"

#define THREADS 256u /* without topk */

static __global__ void __launch_bounds__(KVF_TOPK_THREADS_MAX)
    select_list(const __grid_constant__ kvf_select_args a, uint32_t parts)
{
    const uint32_t list = blockIdx.x / parts;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (a.k) {
        if (!kvf_topk_list(kvf_select_topk(&a), (kvf_topk_state *)kvf_shared(), parts))
            return;
        __syncthreads();
    }
    kvf_resolve_list(kvf_select_resolve(&a), list, kvf_shared());
    __syncthreads();
    kvf_assemble_list(kvf_select_assemble(&a), list, kvf_shared());
}

extern "C" int kvf_select_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_select_args *a = (const kvf_select_args *)args;
    const kvf_topk_args top = kvf_select_topk(a);
    const uint32_t longest = kvf_min_u32(a->stride, a->work_stride);
    const uint32_t parts = a->k ? kvf_topk_parts(&top, longest) : 1;
    const uint32_t threads = a->k ? kvf_topk_threads(&top, longest, parts) : THREADS;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<select_list>(dim3(top.lists * parts), dim3(threads),
                                              sizeof(kvf_topk_state), (cudaStream_t)stream, *a,
                                              parts);
}
