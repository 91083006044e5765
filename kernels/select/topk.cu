/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The k largest of a row, on the GPU; the ids are those of topk_ref.c, and topk.cuh says how.
 *
 * Knows nothing of what the ids mean.
 *
 * Bound: a row is read once from memory, and 3 to 4 times more from the first-level cache (from the
 * second level above about 48,000 scores of a block), at most 64 bytes per clock: 4096 scores are
 * 16 KiB, or 256 clocks per turn, and 1M of 512 are 2048 and then 1024. At most 13 barriers, twice;
 * at 4096 scores the launch, one round trip to memory and these barriers are the time, not the
 * bytes. Additions to bins are of one constant, which the hardware combines within a warp, so that
 * equal scores cost nothing extra.
 */

#include "cuda_kernels.h"
#include "topk.cuh"

static __global__ void __launch_bounds__(KVF_TOPK_THREADS_MAX)
    top_of_list(const __grid_constant__ kvf_topk_args a, uint32_t parts_max)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    (void)kvf_topk_list(a, (kvf_topk_state *)kvf_shared(), parts_max);
}

extern "C" int kvf_topk_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_topk_args *a = (const kvf_topk_args *)args;
    const uint32_t longest = kvf_min_u32(a->stride, a->work_stride);
    const uint32_t parts = kvf_topk_parts(a, longest);
    (void)tasks;
    if (a->lists == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<top_of_list>(
        dim3(a->lists * parts), dim3(kvf_topk_threads(a, longest, parts)), sizeof(kvf_topk_state),
        (cudaStream_t)stream, *a, parts);
}
