/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The best of chosen pages, as many as there is room for by their tokens, on the GPU; see
 * trim_ref.c for the meaning.
 *
 * Knows nothing of how pages were chosen. A warp per list, which reads its pages 32 times and once
 * more. Bound: latency. Sums of integers, so exact.
 */

#include "cuda_kernels.h"
#include "select.cuh"

static __device__ __forceinline__ uint32_t tokens_of(const kvf_trim_args *a, uint32_t list,
                                                     int32_t id)
{
    return (uint32_t)__popcll(kvf_trim_live(a, list, id));
}

static __device__ __forceinline__ uint32_t tokens_from(const kvf_trim_args *a, uint32_t list,
                                                       const int32_t *ids, uint32_t count,
                                                       uint32_t key)
{
    uint32_t tokens = 0;
    for (uint32_t i = threadIdx.x; i < count; i += KVF_WARP_LANES)
        if (kvf_trim_key(a, list, ids[i]) >= key)
            tokens += tokens_of(a, list, ids[i]);
    return kvf_warp_sum(tokens);
}

static __global__ void __launch_bounds__(KVF_WARP_LANES)
    trim_kernel(const __grid_constant__ kvf_trim_args a)
{
    const uint32_t list = blockIdx.x;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    int32_t *ids = a.ids + (size_t)list * a.ids_max;
    const uint32_t count = a.id_count[list], room = kvf_trim_room(&a, list);
    uint32_t key = 0, kept = 0;
    if (tokens_from(&a, list, ids, count, 0) <= room)
        return;
#pragma unroll 1
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
        if (tokens_from(&a, list, ids, count, key | bit) > room)
            key |= bit;
    uint32_t tokens = key == UINT32_MAX ? 0 : tokens_from(&a, list, ids, count, key + 1);
#pragma unroll 1
    for (uint32_t base = 0; base < count; base += KVF_WARP_LANES) {
        const uint32_t i = base + threadIdx.x;
        const int32_t id = i < count ? ids[i] : 0;
        const uint32_t own = i < count ? kvf_trim_key(&a, list, id) : 0;
        const bool is_tied = own == key && i < count; /* perhaps without a token */
        const uint32_t tied = is_tied ? tokens_of(&a, list, id) : 0;
        const uint32_t so_far = tokens + kvf_warp_scan(tied); /* by all lanes */
        const bool stays = own > key || (is_tied && so_far <= room);
        const uint32_t flags = __ballot_sync(KVF_FULL_WARP, stays);
        __syncwarp(); /* all lanes have read theirs */
        if (stays)
            ids[kept + (uint32_t)__popc(flags & kvf_lanes_below())] = id;
        kept += (uint32_t)__popc(flags);
        tokens += kvf_warp_sum(tied);
    }
    if (threadIdx.x == 0)
        a.id_count[list] = kept;
}

extern "C" int kvf_trim_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<trim_kernel>(dim3(tasks), dim3(KVF_WARP_LANES), 0,
                                              (cudaStream_t)stream, *(const kvf_trim_args *)args);
}
