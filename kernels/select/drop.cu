/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stores without the sink tokens that a row has lost, on the GPU; see drop_ref.c for the meaning. A
 * thread per KV head. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 128u

static __global__ void drop_kernel(const __grid_constant__ kvf_drop_args a, uint32_t tasks)
{
    const kvf_paging *p = &a.paging;
    const uint32_t task = blockIdx.x * THREADS + threadIdx.x;
    if (task >= tasks)
        return;
    const kvf_row *row = &a.row[task / p->kv_heads];
    const uint32_t sealed = row->sealed * p->block_size;
    if (sealed < p->sink)
        row->store_count[task % p->kv_heads] = sealed;
}

extern "C" int kvf_drop_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<drop_kernel>(dim3(kvf_div_ceil_u32(tasks, THREADS)), dim3(THREADS), 0,
                                        (cudaStream_t)stream, *(const kvf_drop_args *)args, tasks);
}
