/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Masses of query heads into scores of pages on the GPU.
 *
 * Knows nothing of codes. A block is 8 warps and a part of one list, and finds the sums of its
 * rows anew: eight bytes per tile and head, out of the cache. What the pages of a tile share of a
 * head, the exponential, is found once per tile of the part. Then a thread is a page: two bytes per
 * head. Damaged numbers are made harmless as in fold_ref.c.
 *
 * Bound: one read of the masses, 2 * group + 4 bytes per page. What hangs on each other: the list's
 * length, largest of the tiles, their sums, masses; three barriers. Exactness: exp2f and logf in
 * fp32; sums over tiles in a fixed order, over heads in order.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/tile.cuh"

#define WARPS      8u
#define PART       1024u /* pages of a block, at least */
#define PART_LARGE 8192u /* of lists with many tiles, and of very many lists */
#define BLOCKS     1024u /* beyond that every multiprocessor has several anyway */
#define TILE_SHIFT 10u   /* KVF_WEIGH_TOKENS as a power of two */
#define LOG2E      1.44269504f

static_assert(KVF_WEIGH_TOKENS == 1u << TILE_SHIFT, "tokens of a tile");

/* NaN becomes `least`: fmaxf drops it. */
static __device__ __forceinline__ float tame(float x, float least, float most)
{
    return fminf(fmaxf(x, least), most);
}

static __device__ __forceinline__ float tame_top(float x)
{
    return tame(x, -KVF_FOLD_TOP_MAX, KVF_FOLD_TOP_MAX);
}

struct row {
    float top;   /* M */
    float share; /* 1 / (S * group) */
};

/* By one warp. */
static __device__ __forceinline__ row find_row(const kvf_fold_args &a, size_t head, uint32_t tiles)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const float *top = a.top + head * a.tiles_max, *sum = a.sum + head * a.tiles_max;
    row r = {-KVF_FOLD_TOP_MAX, 0.0f};
    float all = 0.0f;
    for (uint32_t i = lane; i < tiles; i += KVF_WARP_LANES)
        r.top = fmaxf(r.top, tame_top(top[i]));
#pragma unroll
    for (int step = KVF_WARP_LANES / 2; step; step /= 2)
        r.top = fmaxf(r.top, __shfl_xor_sync(KVF_FULL_WARP, r.top, step));
    for (uint32_t i = lane; i < tiles; i += KVF_WARP_LANES)
        all += tame(sum[i], 0.0f, KVF_FOLD_MASS_MAX) * exp2f((tame_top(top[i]) - r.top) * LOG2E);
#pragma unroll
    for (int step = KVF_WARP_LANES / 2; step; step /= 2)
        all += __shfl_xor_sync(KVF_FULL_WARP, all, step);
    r.share = all < 0.5f ? 0.0f : 1.0f / (all * (float)a.group);
    return r;
}

/* What all pages of a tile have of a head: a factor of their masses, or a term beside the logarithm
 * of these. */
template <kvf_group_reduce KIND>
static __device__ __forceinline__ float find_share(const kvf_fold_args &a, const row &r,
                                                   size_t head, uint32_t tile)
{
    const float top = tame_top(a.top[head * a.tiles_max + tile]);
    return KIND == KVF_GROUP_MEAN_SOFTMAX ? exp2f((top - r.top) * LOG2E) * r.share : top;
}

/* shares [group], of the page's tile. */
template <kvf_group_reduce KIND>
static __device__ __forceinline__ float fold_page(const kvf_fold_args &a, const float *shares,
                                                  uint32_t page)
{
    const uint16_t *mass = a.mass + (size_t)blockIdx.y * a.group * a.pages_max + page;
    float sum = 0.0f, best = -INFINITY;
    bool any = false;
#pragma unroll 4
    for (uint32_t g = 0; g < a.group; g++, mass += a.pages_max) {
        const float raw = kvf_bf16_to_float(*mass);
        float one;
        any |= raw >= 0.0f;
        if (KIND == KVF_GROUP_MEAN_SOFTMAX)
            one = tame(raw, 0.0f, KVF_FOLD_MASS_MAX) * shares[g];
        else
            one = shares[g] + logf(tame(raw, 0x1p-126f, KVF_FOLD_MASS_MAX));
        best = fmaxf(best, one);
        sum += one;
    }
    return !any ? -INFINITY : KIND == KVF_GROUP_MAX ? best : sum;
}

/* Whether a token of the page's block counts. */
static __device__ __forceinline__ bool block_counts(const kvf_fold_args &a, uint32_t page)
{
    const uint32_t shift = a.block_size == 64 ? 6 : 5;
    const uint64_t bits = a.bits[blockIdx.y][page >> (shift - kvf_page_shift(a.page_size))];
    return kvf_block_counts(bits, a.block_size);
}

template <kvf_group_reduce KIND>
static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES)
    fold_pages(const __grid_constant__ kvf_fold_args a, uint32_t part)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t list = blockIdx.y, first = blockIdx.x * part;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const uint32_t pages = a.pages[list];
    if (first >= pages)
        return;
    const uint32_t end = kvf_min_u32(pages, first + part);
    const uint32_t shift = TILE_SHIFT - kvf_page_shift(a.page_size);
    const uint32_t tile = first >> shift, tiles = ((end - 1) >> shift) + 1 - tile;
    const size_t head = (size_t)list * a.group;
    row *rows = (row *)kvf_shared();
    float *shares = (float *)(rows + a.group); /* [tiles, group] */
    for (uint32_t g = warp; KIND == KVF_GROUP_MEAN_SOFTMAX && g < a.group; g += WARPS) {
        const row r = find_row(a, head + g, kvf_tiles(pages, a.page_size));
        if (lane == 0)
            rows[g] = r;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < tiles * a.group; i += blockDim.x)
        shares[i] = find_share<KIND>(a, rows[i % a.group], head + i % a.group, tile + i / a.group);
    __syncthreads();
    for (uint32_t p = first + threadIdx.x; p < end; p += blockDim.x)
        a.out[(size_t)list * a.pages_max + p] =
            block_counts(a, p) ? fold_page<KIND>(a, shares + ((p >> shift) - tile) * a.group, p)
                               : -INFINITY;
}

/* Pages of a block: few, so that all multiprocessors have some, while what a block does before its
 * first page is little beside it. */
static uint32_t part_of(const kvf_fold_args *a)
{
    uint32_t part = a->tiles_max > 256 ? PART_LARGE : PART;
    while (part < PART_LARGE && (uint64_t)a->lists * kvf_div_ceil_u32(a->pages_max, part) > BLOCKS)
        part *= 2;
    return part;
}

extern "C" int kvf_fold_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_fold_args *a = (const kvf_fold_args *)args;
    const uint32_t part = part_of(a);
    const dim3 grid(kvf_div_ceil_u32(a->pages_max, part), a->lists);
    const dim3 block(WARPS * KVF_WARP_LANES);
    const size_t tiles = kvf_div_ceil_u32(part, kvf_tile_pages(a->page_size)) + 1;
    const size_t shared = a->group * (sizeof(row) + tiles * sizeof(float));
    (void)tasks;
    if (a->lists == 0 || a->pages_max == 0)
        return cudaSuccess;
    switch (a->kind) {
    case KVF_GROUP_MEAN_SOFTMAX:
        return kvf_cuda_launch_early<fold_pages<KVF_GROUP_MEAN_SOFTMAX>>(
            grid, block, shared, (cudaStream_t)stream, *a, part);
    case KVF_GROUP_MAX:
        return kvf_cuda_launch_early<fold_pages<KVF_GROUP_MAX>>(grid, block, shared,
                                                                (cudaStream_t)stream, *a, part);
    default:
        return kvf_cuda_launch_early<fold_pages<KVF_GROUP_SUM>>(grid, block, shared,
                                                                (cudaStream_t)stream, *a, part);
    }
}
