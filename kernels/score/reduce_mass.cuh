/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_REDUCE_MASS_CUH
#define KVF_KERNELS_SCORE_REDUCE_MASS_CUH

/*
 * Masses of query heads into scores of some pages of a list, by one block, for reduce_mass.cu and
 * for what goes on from there.
 *
 * Knows nothing of codes, nor of what becomes of scores. The block finds the sums of the list's
 * heads anew: eight bytes per tile and head, out of the cache. The factor that the pages of a tile
 * share of a head, the exponential, is found once per tile. Then a thread is eight pages, 16 bytes
 * per head, the first of them asked for before sums are known; a page alone where vectors are not
 * aligned for that. Damaged numbers are made harmless as in reduce_mass_ref.c.
 *
 * Exactness: exp2f and logf in fp32; sums over tiles in a fixed order, over heads in order,
 * whatever the block and its part of the list.
 */

#include <math.h>

#include "cuda/tile.cuh"
#include "score_args.h"

#define KVF_MASS_PAGES 8u  /* of a thread */
#define KVF_TILE_SHIFT 10u /* KVF_SCORE_CODES_TOKENS as a power of two */
#define KVF_MASS_LOG2E 1.44269504f

static_assert(KVF_SCORE_CODES_TOKENS == 1u << KVF_TILE_SHIFT, "tokens of a tile");

/* Vectors of masses are aligned for KVF_MASS_PAGES pages at once. */
static inline bool kvf_masses_are_aligned(const kvf_reduce_mass_args *a)
{
    return (a->pages_max * sizeof *a->mass | (uintptr_t)a->mass) % sizeof(uint4) == 0;
}

/* NaN becomes `least`: fmaxf drops it. */
static __device__ __forceinline__ float kvf_tame(float x, float least, float most)
{
    return fminf(fmaxf(x, least), most);
}

static __device__ __forceinline__ float kvf_tame_top(float x)
{
    return kvf_tame(x, -KVF_REDUCE_TOP_MAX, KVF_REDUCE_TOP_MAX);
}

struct kvf_mass_head {
    float top;   /* M */
    float share; /* 1 / (S * group) */
};

#define KVF_MASS_FRONT 4u /* tiles of a lane that are asked for at once */

/* By one warp. */
static __device__ __forceinline__ kvf_mass_head kvf_find_mass_head(const kvf_reduce_mass_args &a,
                                                                   size_t head, uint32_t tiles)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES,
                   rest = lane + KVF_MASS_FRONT * KVF_WARP_LANES;
    const float *top = a.tile_max + head * a.tiles_max, *sum = a.tile_sum + head * a.tiles_max;
    kvf_mass_head r = {-KVF_REDUCE_TOP_MAX, 0.0f};
    float tops[KVF_MASS_FRONT], sums[KVF_MASS_FRONT], all = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < KVF_MASS_FRONT; k++) {
        const uint32_t i = lane + k * KVF_WARP_LANES;
        tops[k] = i < tiles ? top[i] : -INFINITY;
        sums[k] = i < tiles ? sum[i] : 0.0f;
    }
#pragma unroll
    for (uint32_t k = 0; k < KVF_MASS_FRONT; k++)
        r.top = fmaxf(r.top, kvf_tame_top(tops[k]));
    for (uint32_t i = rest; i < tiles; i += KVF_WARP_LANES)
        r.top = fmaxf(r.top, kvf_tame_top(top[i]));
#pragma unroll
    for (int step = KVF_WARP_LANES / 2; step; step /= 2)
        r.top = fmaxf(r.top, __shfl_xor_sync(KVF_FULL_WARP, r.top, step));
#pragma unroll
    for (uint32_t k = 0; k < KVF_MASS_FRONT; k++)
        all += kvf_tame(sums[k], 0.0f, KVF_REDUCE_MASS_MAX) *
               exp2f((kvf_tame_top(tops[k]) - r.top) * KVF_MASS_LOG2E);
    for (uint32_t i = rest; i < tiles; i += KVF_WARP_LANES)
        all += kvf_tame(sum[i], 0.0f, KVF_REDUCE_MASS_MAX) *
               exp2f((kvf_tame_top(top[i]) - r.top) * KVF_MASS_LOG2E);
#pragma unroll
    for (int step = KVF_WARP_LANES / 2; step; step /= 2)
        all += __shfl_xor_sync(KVF_FULL_WARP, all, step);
    r.share = all < 0.5f ? 0.0f : 1.0f / (all * (float)a.group);
    return r;
}

/* Shared by all pages of a tile for a head: a factor of their masses, or a term beside the
 * logarithm of these. */
template <kvf_group_reduce KIND>
static __device__ __forceinline__ float kvf_find_mass_share(const kvf_reduce_mass_args &a,
                                                            const kvf_mass_head &r, size_t head,
                                                            uint32_t tile)
{
    const float top = kvf_tame_top(a.tile_max[head * a.tiles_max + tile]);
    return KIND == KVF_GROUP_MEAN_SOFTMAX ? exp2f((top - r.top) * KVF_MASS_LOG2E) * r.share : top;
}

/* Masses of N pages for one head. */
template <uint32_t N> struct kvf_masses {
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
static __device__ __forceinline__ uint32_t kvf_find_counting(const kvf_reduce_mass_args &a,
                                                             uint32_t list, uint32_t page,
                                                             uint32_t end)
{
    const uint32_t shift = (a.block_size == 64 ? 6 : 5) - kvf_page_shift(a.page_size);
    const uint64_t *bits = a.bits[list];
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
template <kvf_group_reduce KIND, uint32_t N> struct kvf_page_scores {
    float score[N];
    uint32_t any; /* bit i: a head has a mass of page i */

    __device__ __forceinline__ kvf_page_scores() : any(0)
    {
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            score[i] = KIND == KVF_GROUP_MAX ? -INFINITY : 0.0f;
    }
    __device__ __forceinline__ void add(const kvf_masses<N> &mass, float share)
    {
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            const float raw = mass.get(i);
            any |= (uint32_t)(raw >= 0.0f) << i;
            if (KIND == KVF_GROUP_MEAN_SOFTMAX)
                score[i] += kvf_tame(raw, 0.0f, KVF_REDUCE_MASS_MAX) * share;
            else if (KIND == KVF_GROUP_MAX)
                score[i] =
                    fmaxf(score[i], share + logf(kvf_tame(raw, 0x1p-126f, KVF_REDUCE_MASS_MAX)));
            else
                score[i] += share + logf(kvf_tame(raw, 0x1p-126f, KVF_REDUCE_MASS_MAX));
        }
    }
    __device__ __forceinline__ float get(uint32_t i, uint32_t counting) const
    {
        return any & counting & 1u << i ? score[i] : -INFINITY;
    }
};

#define KVF_MASS_EARLY 4u /* heads whose masses are asked for before sums are known */

/* Shared memory that the block needs for `tiles` tiles. */
static inline size_t kvf_mass_bytes(uint32_t group, size_t tiles)
{
    return group * (sizeof(kvf_mass_head) + tiles * sizeof(float));
}

/* Scores of pages first .. end - 1 of a list of `pages`, by the block; put(page, scores, counting)
 * is told of N at a time, which are of one tile and may go beyond the end. N > 1: vectors of masses
 * are aligned to it, and so is `first`. */
template <kvf_group_reduce KIND, uint32_t N, typename P>
static __device__ __forceinline__ void
kvf_reduce_masses(const kvf_reduce_mass_args &a, uint32_t list, uint32_t pages, uint32_t first,
                  uint32_t end, char *shared, const P &put)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t shift = KVF_TILE_SHIFT - kvf_page_shift(a.page_size);
    const uint32_t tile = first >> shift, tiles = ((end - 1) >> shift) + 1 - tile;
    const size_t head = (size_t)list * a.group;
    const uint16_t *mass = a.mass + head * a.pages_max;
    kvf_mass_head *heads = (kvf_mass_head *)shared;
    float *shares = (float *)(heads + a.group); /* [tiles, group] */
    uint32_t p = first + threadIdx.x * N;
    kvf_masses<N> early[KVF_MASS_EARLY] = {};
#pragma unroll
    for (uint32_t g = 0; g < KVF_MASS_EARLY; g++)
        if (g < a.group && p < end)
            early[g].load(mass + (size_t)g * a.pages_max + p);
    for (uint32_t g = warp; KIND == KVF_GROUP_MEAN_SOFTMAX && g < a.group;
         g += blockDim.x / KVF_WARP_LANES) {
        const kvf_mass_head r = kvf_find_mass_head(a, head + g, kvf_tiles(pages, a.page_size));
        if (lane == 0)
            heads[g] = r;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < tiles * a.group; i += blockDim.x)
        shares[i] = kvf_find_mass_share<KIND>(a, heads[i % a.group], head + i % a.group,
                                              tile + i / a.group);
    __syncthreads();
    for (; p < end; p += blockDim.x * N) {
        const float *share = shares + ((p >> shift) - tile) * a.group;
        const uint32_t counting = kvf_find_counting<N>(a, list, p, end);
        kvf_page_scores<KIND, N> s;
#pragma unroll
        for (uint32_t g = 0; g < KVF_MASS_EARLY; g++)
            if (g < a.group)
                s.add(early[g], share[g]);
#pragma unroll 4
        for (uint32_t g = KVF_MASS_EARLY; g < a.group; g++) {
            kvf_masses<N> one;
            one.load(mass + (size_t)g * a.pages_max + p);
            s.add(one, share[g]);
        }
        const uint32_t next = p + blockDim.x * N;
#pragma unroll
        for (uint32_t g = 0; g < KVF_MASS_EARLY; g++)
            if (g < a.group && next < end)
                early[g].load(mass + (size_t)g * a.pages_max + next);
        put(p, s, counting);
    }
}

#endif
