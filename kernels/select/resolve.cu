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

template <bool LENDS>
static __global__ void __launch_bounds__(THREADS)
    resolve_list(const __grid_constant__ kvf_resolve_args a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    kvf_resolve_list<LENDS>(a, blockIdx.x, (kvf_resolve_state *)kvf_shared());
}

extern "C" int kvf_resolve_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_resolve_args *a = (const kvf_resolve_args *)args;
    (void)tasks;
    if (a->lists == 0)
        return cudaSuccess;
    const dim3 grid(a->lists), block(THREADS);
    const size_t shared = kvf_resolve_bytes(a->slots);
    return a->lender ? kvf_cuda_launch_early<resolve_list<true>>(grid, block, shared,
                                                                 (cudaStream_t)stream, *a)
                     : kvf_cuda_launch_early<resolve_list<false>>(grid, block, shared,
                                                                  (cudaStream_t)stream, *a);
}
