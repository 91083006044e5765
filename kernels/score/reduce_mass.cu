/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Masses of query heads into scores of pages on the GPU.
 *
 * Knows nothing of codes; reduce_mass.cuh says how. A block is 4 warps and a part of one list.
 *
 * Bound: one read of the masses, 2 * group + 4 bytes per page. The chain of waits: the list's
 * length, its tiles with the first masses, shares; two barriers. Exactness: exp2f and logf in fp32;
 * sums over tiles in a fixed order, over heads in order.
 */

#include "cuda_kernels.h"

#include "score/reduce_mass.cuh"

#define WARPS      4u
#define PART       1024u /* pages of a block, at least */
#define PART_LARGE 8192u /* of lists with many tiles, and of very many lists */
#define BLOCKS     1024u /* beyond that every multiprocessor has several anyway */

/* N > 1: vectors of scores are aligned to it, too. */
template <kvf_group_reduce KIND, uint32_t N>
static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES)
    reduce_mass_pages(const __grid_constant__ kvf_reduce_mass_args a, uint32_t part)
{
    const uint32_t list = blockIdx.y, first = blockIdx.x * part;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const uint32_t pages = a.pages[list];
    if (first >= pages)
        return;
    const uint32_t end = kvf_min_u32(pages, first + part);
    float *scores = a.out + (size_t)list * a.pages_max;
    const auto put = [&](uint32_t p, const kvf_page_scores<KIND, N> &s, uint32_t counting) {
        float *out = scores + p;
        if (N > 1 && p + N <= end) {
#pragma unroll
            for (uint32_t i = 0; i < N; i += 4)
                *(float4 *)(out + i) =
                    make_float4(s.get(i, counting), s.get((i + 1) % N, counting),
                                s.get((i + 2) % N, counting), s.get((i + 3) % N, counting));
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            if (p + i < end)
                out[i] = s.get(i, counting);
    };
    kvf_reduce_masses<KIND, N>(a, list, pages, first, end, kvf_shared(), put);
}

/* Pages of a block: few, so that all multiprocessors have some, while what a block does before its
 * first page is little beside it. */
static uint32_t part_of(const kvf_reduce_mass_args *a)
{
    const uint32_t most = a->group > KVF_SUBGROUP_HEADS ? PART : PART_LARGE; /* shared memory */
    uint32_t part = a->tiles_max > 256 ? most : PART;
    while (part < most && (uint64_t)a->lists * kvf_div_ceil_u32(a->pages_max, part) > BLOCKS)
        part *= 2;
    return part;
}

template <kvf_group_reduce KIND>
static int launch(const kvf_reduce_mass_args *a, cudaStream_t stream)
{
    const uint32_t part = part_of(a);
    const dim3 grid(kvf_div_ceil_u32(a->pages_max, part), a->lists);
    const dim3 block(WARPS * KVF_WARP_LANES);
    const size_t tiles = kvf_div_ceil_u32(part, kvf_tile_pages(a->page_size)) + 1;
    const size_t shared = kvf_mass_bytes(a->group, tiles);
    if (kvf_masses_are_aligned(a) && (uintptr_t)a->out % sizeof(float4) == 0)
        return kvf_cuda_launch_early<reduce_mass_pages<KIND, KVF_MASS_PAGES>>(grid, block, shared,
                                                                              stream, *a, part);
    return kvf_cuda_launch_early<reduce_mass_pages<KIND, 1>>(grid, block, shared, stream, *a, part);
}

extern "C" int kvf_reduce_mass_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_reduce_mass_args *a = (const kvf_reduce_mass_args *)args;
    if (a->lists == 0 || a->pages_max == 0)
        return cudaSuccess;
    switch (a->kind) {
    case KVF_GROUP_MEAN_SOFTMAX:
        return launch<KVF_GROUP_MEAN_SOFTMAX>(a, (cudaStream_t)stream);
    case KVF_GROUP_MAX:
        return launch<KVF_GROUP_MAX>(a, (cudaStream_t)stream);
    default:
        return launch<KVF_GROUP_SUM>(a, (cudaStream_t)stream);
    }
}
