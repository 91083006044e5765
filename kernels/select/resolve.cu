/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chosen pages to slots, on the GPU; resolve_ref.c says what, and resolve.cuh how.
 *
 * Knows nothing of bytes. One block of 256 threads per list.
 *
 * Bound: latency. The chain of a hit is id -> block -> slot -> word -> swap, 5 dependent round
 * trips to the second-level cache; a miss has 4 more: 32 words at once, two swaps and a fence. A
 * block has eight misses under way.
 */

#include "cuda_kernels.h"
#include "resolve.cuh"

#define THREADS 256u
#define BLOCKS  4u /* of a multiprocessor, at least: registers for what a warp holds of a bucket */

static __global__ void __launch_bounds__(THREADS, BLOCKS)
    resolve_list(const __grid_constant__ kvf_choices a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const kvf_chosen chosen = kvf_chosen_of(a, blockIdx.x, a.id_count[blockIdx.x]);
    kvf_resolve_list(a, &a.row[blockIdx.x / a.paging.lists], blockIdx.x, chosen,
                     [](uint32_t, uint32_t) {});
}

KVF_LAUNCHER_EARLY(resolve, resolve_list, a->rows * a->paging.lists, THREADS, 0)
