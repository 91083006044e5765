/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages that came ahead of need, on the GPU; see ahead_ref.c for the meaning.
 *
 * Knows nothing of how they were foreseen. A warp per list, LISTS of them per block, a thread per
 * id. Two ids never share a slot, but they share words, so bits change by atomics; sums are of
 * integers. Bound: 8 bytes per id; the launch is the cost. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define LISTS 8u

static __global__ void ahead_kernel(const __grid_constant__ kvf_ahead_args a)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t list = blockIdx.x * LISTS + threadIdx.x / KVF_WARP_LANES;
    if (list >= a.lists)
        return;
    const size_t row = (size_t)list * a.ids_max;
    const uint32_t count = a.id_count[list];
    uint32_t *marks = a.marks[list];
    unsigned int n = 0;
    for (uint32_t i = lane; i < count; i += KVF_WARP_LANES) {
        if (a.slot_of_id[row + i] < 0)
            continue;
        const uint32_t slot = (uint32_t)a.slot_of_id[row + i], bit = 1u << slot % 32;
        const uint32_t missed = a.missed[row + i];
        if (a.is_use) {
            const uint32_t was = atomicAnd(&marks[slot / 32], ~bit) & bit;
            n += was && !missed;
        } else if (missed) {
            atomicOr(&marks[slot / 32], bit);
            n++;
        }
    }
    for (uint32_t step = KVF_WARP_LANES / 2; step; step /= 2)
        n += __shfl_xor_sync(KVF_FULL_WARP, n, (int)step);
    if (lane == 0 && n)
        atomicAdd((unsigned long long *)(a.is_use ? &a.counters->pages_ahead_used
                                                  : &a.counters->pages_ahead),
                  (unsigned long long)n);
}

extern "C" int kvf_ahead_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<ahead_kernel>(dim3(kvf_div_ceil_u32(tasks, LISTS)),
                                         dim3(LISTS * KVF_WARP_LANES), 0, (cudaStream_t)stream,
                                         *(const kvf_ahead_args *)args);
}
