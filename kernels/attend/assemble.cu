/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What each list attends, as spans, on the GPU; see assemble_ref.c for the meaning.
 *
 * Knows nothing of policies. A block per list. Bound: 32 bytes written and some 40 read per span;
 * four atomic additions per list.
 */

#include "assemble.cuh"
#include "cuda_kernels.h"

#define THREADS 128u

static __global__ void assemble_kernel(const __grid_constant__ kvf_assemble_args a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    kvf_assemble_list(a, blockIdx.x, kvf_shared());
}

extern "C" int kvf_assemble_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_assemble_args *a = (const kvf_assemble_args *)args;
    const uint32_t lists = a->rows * a->paging.lists;
    if (tasks == 0 || lists == 0)
        return cudaSuccess;
    const dim3 grid(lists), block(THREADS);
    const size_t scratch = KVF_BLOCK_SCRATCH * sizeof(uint32_t);
    return kvf_cuda_launch_early<assemble_kernel>(grid, block, scratch, (cudaStream_t)stream, *a);
}
