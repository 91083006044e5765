/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A miss list for a thread of the host. Knows nothing of who moves the pages.
 *
 * One block of 256 threads; thread t copies entries t, t + 256, ... from device memory to mapped
 * host memory: 16 bytes of posted writes per page that missed, against 16 KiB that the page itself
 * takes. Bound: the latency of one launch and one write over the link. Exact.
 *
 * Invariant: the barrier puts every list entry before the release store of the word `request`.
 */

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"

#define PUBLISH_THREADS 256u

static __global__ void publish(const __grid_constant__ kvf_publish_args a)
{
    const uint32_t n = *a.count;
    const bool is_others = n == 0 || (n >= a.low && n < a.high);
    if (!is_others && n <= a.list_max)
        for (uint32_t i = threadIdx.x; i < n; i += PUBLISH_THREADS) {
            a.out_from[i] = a.from[i];
            a.out_to[i] = a.to[i];
        }
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    *a.out_count = is_others ? 0 : n;
    if (is_others)
        kvf_store_release_system(a.done, a.ticket);
    kvf_store_release_system(a.request, a.ticket);
}

KVF_LAUNCHER(publish, publish, 1, PUBLISH_THREADS, 0)
