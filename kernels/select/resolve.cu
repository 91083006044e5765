/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Selected pages to slots, on the GPU; tables and lists are those of resolve_ref.c, and resolve.cuh
 * says how.
 *
 * Knows nothing of bytes. One block of 256 threads per list.
 *
 * Bound: latency. Per list 12 bytes per id and 8 per slot are read, and 4 to 24 written per id; the
 * chain is id -> slot -> barrier -> page -> score -> barriers -> tables, 4 dependent round trips to
 * the second-level cache and 6 to 9 barriers. Ranking n victims costs n * n / 256 comparisons per
 * thread: 64 for 128 slots, 1024 at the most, 8 bytes of shared memory each, the same for a whole
 * warp.
 */

#include "cuda_kernels.h"
#include "resolve.cuh"

#define THREADS 256u

static __global__ void __launch_bounds__(THREADS)
    resolve_list(const __grid_constant__ kvf_resolve_args a)
{
    kvf_resolve_list(a, blockIdx.x, (kvf_resolve_state *)kvf_shared());
}

extern "C" int kvf_resolve_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_resolve_args *a = (const kvf_resolve_args *)args;
    (void)tasks;
    if (a->lists == 0)
        return cudaSuccess;
    return kvf_cuda_launch<resolve_list>(dim3(a->lists), dim3(THREADS), kvf_resolve_bytes(a->slots),
                                         (cudaStream_t)stream, *a);
}
