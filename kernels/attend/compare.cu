/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sparse against dense results, on the GPU; see compare_ref.c for the meaning.
 *
 * Knows nothing of how either came about. One block: a thread per element for the largest error, a
 * thread per head for the exponentials, which one thread adds in the order of heads. The maximum is
 * exact; a recall differs from the reference's by the rounding of exp().
 */

#include "common/convert.h"
#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 256u

static __global__ void compare_kernel(const __grid_constant__ kvf_compare_args a)
{
    double *shared = (double *)kvf_shared(); /* [THREADS] */
    double worst = 0.0;
    for (size_t i = threadIdx.x; i < (size_t)a.heads * kvf_value_dim(&a.shape); i += blockDim.x) {
        const double x = (double)kvf_element_get(a.out, a.shape.dtype, i);
        const double error = fabs(x - (double)kvf_element_get(a.dense, a.shape.dtype, i));
        if (error > worst)
            worst = error;
    }
    shared[threadIdx.x] = worst;
    __syncthreads();
    for (uint32_t step = THREADS / 2; step; step /= 2) {
        if (threadIdx.x < step && shared[threadIdx.x + step] > shared[threadIdx.x])
            shared[threadIdx.x] = shared[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0 && shared[0] > a.counters->error_max)
        a.counters->error_max = shared[0];
    for (uint32_t first = 0; first < a.heads; first += THREADS) {
        const uint32_t h = first + threadIdx.x;
        __syncthreads();
        if (h < a.heads)
            shared[threadIdx.x] = exp((double)a.lse[h] - (double)a.dense_lse[h]);
        __syncthreads();
        for (uint32_t i = 0; threadIdx.x == 0 && i < kvf_min_u32(THREADS, a.heads - first); i++)
            a.counters->recall_sum += shared[i];
    }
    if (threadIdx.x == 0)
        a.counters->verified += a.heads;
}

KVF_LAUNCHER(compare, compare_kernel, 1, THREADS, THREADS * sizeof(double))
