/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Numbers in fp32 to the element type of a cache, on the GPU; see narrow_ref.c for the meaning.
 *
 * Knows counts, not shapes. Grid: (parts, jobs); a thread takes four numbers at a time, 16 bytes.
 * Bound: the launch itself in a step, then 6 bytes per number. Bits are those of the reference, but
 * those of a NaN.
 */

#include "cuda_kernels.h"
#include "tile.cuh"

#define THREADS 128u

static __global__ void __launch_bounds__(THREADS)
    narrow_kernel(const __grid_constant__ kvf_narrow_args a)
{
    const kvf_narrow_job *job = &a.jobs[blockIdx.y];
    const size_t first = (size_t)blockIdx.x * KVF_NARROW_NUMBERS;
    const size_t last = first + KVF_NARROW_NUMBERS, end = last < job->count ? last : job->count;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    for (size_t i = first + threadIdx.x * 4; i < end; i += THREADS * 4)
        kvf_store4(job->to, a.dtype, i, *(const float4 *)(job->from + i));
}

KVF_LAUNCHER_EARLY(narrow, narrow_kernel, dim3(a->parts, KVF_NARROW_JOBS), THREADS, 0)
