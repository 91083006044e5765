/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages that the caller wants as scores of pages, on the GPU; see given_ref.c for the meaning.
 *
 * Knows nothing of where scores come from. A block per list. Entries that name a page are put in
 * place by a maximum of integers: -INFINITY is a negative one, and places are positive floats,
 * whose order is that of their bits. So the first entry counts, whatever the order of threads.
 * Exact.
 *
 * Bound: latency. A list of 128K tokens in pages of 4 has 32,768 scores, 32 for each thread.
 */

#include <math.h>

#include "cuda.cuh"
#include "cuda_kernels.h"

#define THREADS 1024u

static __global__ void __launch_bounds__(THREADS)
    given_kernel(const __grid_constant__ kvf_given_args a)
{
    const uint32_t list = blockIdx.x, head = list % a.paging.lists;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const kvf_row *row = &a.row[list / a.paging.lists];
    const uint32_t pages = kvf_row_sealed_pages(&a.paging, row);
    const size_t first = kvf_given_first(&a, list);
    float *out = a.out + (size_t)list * a.stride;
    KVF_ASSERT(pages <= a.stride);
    for (uint32_t i = threadIdx.x; i < pages; i += blockDim.x) {
        const bool is_given = a.scores && i < a.given_stride;
        out[i] =
            is_given && kvf_given_counts(&a.paging, row, head, i) ? a.scores[first + i] : -INFINITY;
    }
    if (a.scores)
        return;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.given_stride; i += blockDim.x) {
        const uint32_t page = (uint32_t)a.ids[first + i]; /* -1 is none */
        if (kvf_given_counts(&a.paging, row, head, page))
            atomicMax((int *)&out[page], (int)kvf_float_bits((float)(a.given_stride - i)));
    }
}

extern "C" int kvf_given_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<given_kernel>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream,
                                               *(const kvf_given_args *)args);
}
