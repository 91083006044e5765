/* SPDX-License-Identifier: Apache-2.0 */

/*
 * NaN for rows that are bad, on the GPU; see fill_nan_ref.c for the meaning.
 *
 * Knows nothing of why they are. A block per row. Bound: the launch. Exact.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"

#define THREADS 128u

static __global__ void __launch_bounds__(THREADS)
    fill_nan_rows(const __grid_constant__ kvf_fill_nan_args a)
{
    const kvf_query_chunk bad = kvf_rows_to_fill(&a, blockIdx.x);
    const size_t first = (size_t)bad.first * a.heads, count = (size_t)bad.tokens * a.heads;
    for (size_t i = threadIdx.x; i < count * a.value_dim; i += blockDim.x)
        kvf_element_set(a.out, a.dtype, first * a.value_dim + i, NAN);
    for (size_t i = threadIdx.x; a.lse && i < count; i += blockDim.x)
        a.lse[first + i] = NAN;
}

KVF_LAUNCHER(fill_nan, fill_nan_rows, tasks, THREADS, 0)
