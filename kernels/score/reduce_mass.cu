/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Masses of query heads into scores of pages on the GPU.
 *
 * Knows nothing of codes. A block is 4 warps and a part of one list, and finds the sums of its rows
 * anew: eight bytes per tile and head, out of the cache. The factors that the pages of a tile share
 * of a head, the exponential, is found once per tile of the part. Then a thread is eight pages, 16
 * bytes per head, the first of them asked for before sums are known; a page alone where rows are
 * not aligned for that. Damaged numbers are made harmless as in reduce_mass_ref.c.
 *
 * Bound: one read of the masses, 2 * group + 4 bytes per page. The chain of waits: the list's
 * length, its tiles with the first masses, shares; two barriers. Exactness: exp2f and logf in fp32;
 * sums over tiles in a fixed order, over heads in order.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/tile.cuh"

#define WARPS      4u
#define AT_ONCE    8u    /* pages of a thread */
#define PART       1024u /* pages of a block, at least */
#define PART_LARGE 8192u /* of lists with many tiles, and of very many lists */
#define BLOCKS     1024u /* beyond that every multiprocessor has several anyway */
#define TILE_SHIFT 10u   /* KVF_SCORE_CODES_TOKENS as a power of two */
#define LOG2E      1.44269504f

static_assert(KVF_SCORE_CODES_TOKENS == 1u << TILE_SHIFT, "tokens of a tile");

/* NaN becomes `least`: fmaxf drops it. */
static __device__ __forceinline__ float tame(float x, float least, float most)
{
    return fminf(fmaxf(x, least), most);
}

static __device__ __forceinline__ float tame_top(float x)
{
    return tame(x, -KVF_REDUCE_TOP_MAX, KVF_REDUCE_TOP_MAX);
}

struct row {
    float top;   /* M */
    float share; /* 1 / (S * group) */
};

#define FRONT 4u /* tiles of a lane that are asked for at once */

/* By one warp. */
static __device__ __forceinline__ row find_row(const kvf_reduce_mass_args &a, size_t head,
                                               uint32_t tiles)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, rest = lane + FRONT * KVF_WARP_LANES;
    const float *top = a.top + head * a.tiles_max, *sum = a.sum + head * a.tiles_max;
    row r = {-KVF_REDUCE_TOP_MAX, 0.0f};
    float tops[FRONT], sums[FRONT], all = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < FRONT; k++) {
        const uint32_t i = lane + k * KVF_WARP_LANES;
        tops[k] = i < tiles ? top[i] : -INFINITY;
        sums[k] = i < tiles ? sum[i] : 0.0f;
    }
#pragma unroll
    for (uint32_t k = 0; k < FRONT; k++)
        r.top = fmaxf(r.top, tame_top(tops[k]));
    for (uint32_t i = rest; i < tiles; i += KVF_WARP_LANES)
        r.top = fmaxf(r.top, tame_top(top[i]));
#pragma unroll
    for (int step = KVF_WARP_LANES / 2; step; step /= 2)
        r.top = fmaxf(r.top, __shfl_xor_sync(KVF_FULL_WARP, r.top, step));
#pragma unroll
    for (uint32_t k = 0; k < FRONT; k++)
        all +=
            tame(sums[k], 0.0f, KVF_REDUCE_MASS_MAX) * exp2f((tame_top(tops[k]) - r.top) * LOG2E);
    for (uint32_t i = rest; i < tiles; i += KVF_WARP_LANES)
        all += tame(sum[i], 0.0f, KVF_REDUCE_MASS_MAX) * exp2f((tame_top(top[i]) - r.top) * LOG2E);
#pragma unroll
    for (int step = KVF_WARP_LANES / 2; step; step /= 2)
        all += __shfl_xor_sync(KVF_FULL_WARP, all, step);
    r.share = all < 0.5f ? 0.0f : 1.0f / (all * (float)a.group);
    return r;
}

/* Shared by all pages of a tile for a head: a factor of their masses, or a term beside the
 * logarithm of these. */
template <kvf_group_reduce KIND>
static __device__ __forceinline__ float find_share(const kvf_reduce_mass_args &a, const row &r,
                                                   size_t head, uint32_t tile)
{
    const float top = tame_top(a.top[head * a.tiles_max + tile]);
    return KIND == KVF_GROUP_MEAN_SOFTMAX ? exp2f((top - r.top) * LOG2E) * r.share : top;
}

/* Masses of N pages for one head. */
template <uint32_t N> struct masses {
    uint32_t pair[(N + 1) / 2];

    __device__ __forceinline__ void load(const uint16_t *from)
    {
        if (N == 1) {
            pair[0] = *from;
            return;
        }
        const uint4 x = *(const uint4 *)(const void *)from;
        pair[0] = x.x;
        pair[(N > 1) * 1] = x.y;
        pair[(N > 1) * 2] = x.z;
        pair[(N > 1) * 3] = x.w;
    }
    __device__ __forceinline__ float get(uint32_t i) const
    {
        return kvf_bits_float(i % 2 ? pair[i / 2] & 0xffff0000u : pair[i / 2] << 16);
    }
};

/* Bit i: a token of the block of page + i counts. */
template <uint32_t N>
static __device__ __forceinline__ uint32_t find_counting(const kvf_reduce_mass_args &a,
                                                         uint32_t page, uint32_t end)
{
    const uint32_t shift = (a.block_size == 64 ? 6 : 5) - kvf_page_shift(a.page_size);
    const uint64_t *bits = a.bits[blockIdx.y];
    if (N == 1 || (1u << shift) >= N)
        return kvf_block_counts(bits[page >> shift], a.block_size) ? 0xffffffffu : 0;
    uint32_t left = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (page + i < end)
            left |= (uint32_t)kvf_block_counts(bits[(page + i) >> shift], a.block_size) << i;
    return left;
}

/* Scores of N pages of a tile, of which one head is added after the other. */
template <kvf_group_reduce KIND, uint32_t N> struct scores {
    float score[N];
    uint32_t any; /* bit i: a head has a mass of page i */

    __device__ __forceinline__ scores() : any(0)
    {
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            score[i] = KIND == KVF_GROUP_MAX ? -INFINITY : 0.0f;
    }
    __device__ __forceinline__ void add(const masses<N> &mass, float share)
    {
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            const float raw = mass.get(i);
            any |= (uint32_t)(raw >= 0.0f) << i;
            if (KIND == KVF_GROUP_MEAN_SOFTMAX)
                score[i] += tame(raw, 0.0f, KVF_REDUCE_MASS_MAX) * share;
            else if (KIND == KVF_GROUP_MAX)
                score[i] = fmaxf(score[i], share + logf(tame(raw, 0x1p-126f, KVF_REDUCE_MASS_MAX)));
            else
                score[i] += share + logf(tame(raw, 0x1p-126f, KVF_REDUCE_MASS_MAX));
        }
    }
    __device__ __forceinline__ float get(uint32_t i, uint32_t counting) const
    {
        return any & counting & 1u << i ? score[i] : -INFINITY;
    }
};

#define EARLY 4u /* heads whose masses are asked for before sums are known */

/* A thread has N pages of a tile at a time. N > 1: rows of masses and scores are aligned to it. */
template <kvf_group_reduce KIND, uint32_t N>
static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES)
    reduce_mass_pages(const __grid_constant__ kvf_reduce_mass_args a, uint32_t part)
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
    const uint16_t *mass = a.mass + head * a.pages_max;
    row *rows = (row *)kvf_shared();
    float *shares = (float *)(rows + a.group); /* [tiles, group] */
    uint32_t p = first + threadIdx.x * N;
    masses<N> early[EARLY] = {};
#pragma unroll
    for (uint32_t g = 0; g < EARLY; g++)
        if (g < a.group && p < end)
            early[g].load(mass + (size_t)g * a.pages_max + p);
    for (uint32_t g = warp; KIND == KVF_GROUP_MEAN_SOFTMAX && g < a.group; g += WARPS) {
        const row r = find_row(a, head + g, kvf_tiles(pages, a.page_size));
        if (lane == 0)
            rows[g] = r;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < tiles * a.group; i += blockDim.x)
        shares[i] = find_share<KIND>(a, rows[i % a.group], head + i % a.group, tile + i / a.group);
    __syncthreads();
    for (; p < end; p += blockDim.x * N) {
        const float *share = shares + ((p >> shift) - tile) * a.group;
        float *out = a.out + (size_t)list * a.pages_max + p;
        const uint32_t counting = find_counting<N>(a, p, end);
        scores<KIND, N> s;
#pragma unroll
        for (uint32_t g = 0; g < EARLY; g++)
            if (g < a.group)
                s.add(early[g], share[g]);
#pragma unroll 4
        for (uint32_t g = EARLY; g < a.group; g++) {
            masses<N> one;
            one.load(mass + (size_t)g * a.pages_max + p);
            s.add(one, share[g]);
        }
        const uint32_t next = p + blockDim.x * N;
#pragma unroll
        for (uint32_t g = 0; g < EARLY; g++)
            if (g < a.group && next < end)
                early[g].load(mass + (size_t)g * a.pages_max + next);
        if (N > 1 && p + N <= end) {
#pragma unroll
            for (uint32_t i = 0; i < N; i += 4)
                *(float4 *)(out + i) =
                    make_float4(s.get(i, counting), s.get((i + 1) % N, counting),
                                s.get((i + 2) % N, counting), s.get((i + 3) % N, counting));
            continue;
        }
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            if (p + i < end)
                out[i] = s.get(i, counting);
    }
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
    const size_t shared = a->group * (sizeof(row) + tiles * sizeof(float));
    if ((a->pages_max * sizeof *a->mass | (uintptr_t)a->mass | (uintptr_t)a->out) % 16 == 0)
        return kvf_cuda_launch_early<reduce_mass_pages<KIND, AT_ONCE>>(grid, block, shared, stream,
                                                                       *a, part);
    return kvf_cuda_launch_early<reduce_mass_pages<KIND, 1>>(grid, block, shared, stream, *a, part);
}

extern "C" int kvf_reduce_mass_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_reduce_mass_args *a = (const kvf_reduce_mass_args *)args;
    (void)tasks;
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
