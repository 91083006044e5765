/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The newest pages of each list, on the GPU; see newest_ref.c for the meaning.
 *
 * Knows nothing of scores. A block per list, a thread per id; 4 bytes are written per id. Exact.
 */

#include "cuda.cuh"
#include "cuda_kernels.h"

#define THREADS 128u

static __global__ void newest_kernel(const __grid_constant__ kvf_newest_args a)
{
    const uint32_t list = blockIdx.x;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const uint32_t sealed = kvf_row_sealed_pages(&a.paging, &a.row[list / a.paging.lists]);
    const uint32_t count = kvf_min_u32(a.choose[list], sealed);
    int32_t *ids = a.ids + (size_t)list * a.ids_max;
    KVF_ASSERT(count <= a.ids_max);
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)
        ids[i] = (int32_t)(sealed - count + i);
    if (threadIdx.x == 0)
        a.id_count[list] = count;
}

extern "C" int kvf_newest_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<newest_kernel>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream,
                                                *(const kvf_newest_args *)args);
}
