/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Outputs of streaming heads among the others, on the GPU; see scatter_heads_ref.c for the meaning.
 *
 * Knows nothing of attention. A block per output row, a thread per word. Bound: the launch. Exact.
 */

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"

#define THREADS 128u

static __global__ void __launch_bounds__(THREADS)
    scatter_heads_rows(const __grid_constant__ kvf_scatter_heads_args a)
{
    const uint32_t words = a.row_bytes / 4, head_words = a.group * words;
    const size_t row = (size_t)blockIdx.x * a.kv_heads;
    for (uint32_t i = threadIdx.x; i < a.kv_heads * head_words; i += blockDim.x)
        if (a.streaming[i / head_words])
            ((uint32_t *)a.out)[row * head_words + i] =
                ((const uint32_t *)a.from)[row * head_words + i];
    for (uint32_t i = threadIdx.x; a.lse && i < a.kv_heads * a.group; i += blockDim.x)
        if (a.streaming[i / a.group])
            a.lse[row * a.group + i] = a.from_lse[row * a.group + i];
}

extern "C" int kvf_scatter_heads_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<scatter_heads_rows>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream,
                                               *(const kvf_scatter_heads_args *)args);
}
