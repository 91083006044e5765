/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The k largest of a list's scores, on the GPU; the ids are those of topk_ref.c, and topk.cuh says
 * how.
 *
 * Knows nothing of what the ids mean.
 *
 * Bound: a list's scores are read once from memory, and 3 to 4 times more from the first-level
 * cache (from the second level above about 48,000 scores of a block), at most 64 bytes per clock:
 * 4096 scores are 16 KiB, or 256 clocks per turn, and 1M of 512 are 2048 and then 1024. At most 13
 * barriers, twice; at 4096 scores the launch, one round trip to memory and these barriers are the
 * time, not the bytes. Additions to bins are of one constant, which the hardware combines within a
 * warp, so that equal scores cost nothing extra.
 */

#include "cuda_kernels.h"
#include "topk.cuh"

static __global__ void __launch_bounds__(KVF_TOPK_THREADS_MAX)
    top_of_list(const __grid_constant__ kvf_topk_args a, const __grid_constant__ kvf_topk_grid g)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const uint32_t list = blockIdx.x / g.parts;
    int32_t *ids = a.ids + (size_t)list * a.ids_max;
    const uint32_t taken =
        kvf_topk_list(a, (kvf_topk_state *)kvf_shared(), g, kvf_topk_scores_of(a, g),
                      [&](uint32_t at, uint32_t i) { ids[at] = (int32_t)i; });
    if (taken != UINT32_MAX && threadIdx.x == 0)
        a.id_count[list] = taken;
}

extern "C" int kvf_topk_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_topk_args *a = (const kvf_topk_args *)args;
    const kvf_topk_grid g = kvf_topk_grid_of(a);
    return kvf_cuda_launch_early<top_of_list>(dim3(a->lists * g.parts), dim3(g.threads),
                                              sizeof(kvf_topk_state), (cudaStream_t)stream, *a, g);
}
