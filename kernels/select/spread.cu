/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One list of ids for every list of a row, on the GPU; see spread_ref.c for the meaning.
 *
 * Knows nothing of what the ids mean. A block per list, a thread per id. Exact.
 */

#include "cuda.cuh"
#include "cuda_kernels.h"

#define THREADS 128u

static __global__ void spread_kernel(const __grid_constant__ kvf_spread_args a)
{
    const uint32_t list = blockIdx.x, from = list / a.lists, count = a.from_count[from];
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)
        a.ids[(size_t)list * a.ids_max + i] = a.from[(size_t)from * a.ids_max + i];
    if (threadIdx.x == 0)
        a.id_count[list] = count;
}

extern "C" int kvf_spread_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<spread_kernel>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream,
                                          *(const kvf_spread_args *)args);
}
