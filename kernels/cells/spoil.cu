/* SPDX-License-Identifier: Apache-2.0 */

/*
 * NaN for rows that are bad, on the GPU; see spoil_ref.c for the meaning.
 *
 * Knows nothing of why they are. A block per output row. Bound: the launch. Exact.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"

#define THREADS 128u

static __global__ void __launch_bounds__(THREADS)
    spoil_rows(const __grid_constant__ kvf_spoil_args a)
{
    const size_t elements = (size_t)a.heads * a.head_dim, row = blockIdx.x;
    if (!kvf_is_spoilt(&a, blockIdx.x))
        return;
    for (size_t i = threadIdx.x; i < elements; i += blockDim.x)
        kvf_element_set(a.out, a.dtype, row * elements + i, NAN);
    for (uint32_t h = threadIdx.x; a.lse && h < a.heads; h += blockDim.x)
        a.lse[row * a.heads + h] = NAN;
}

extern "C" int kvf_spoil_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<spoil_rows>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream,
                                       *(const kvf_spoil_args *)args);
}
