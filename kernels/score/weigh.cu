/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What queries weigh the tokens of a tile with, on the GPU, by int8 tensor cores.
 *
 * Knows nothing of keys, nor of other tiles. A block is 8 warps and one tile of one list, or of the
 * lists that have it in common; blocks past the end of a list, and of lists whose tile another
 * block weighs, leave at once. A warp takes a code group at a time: the rows of A are 16
 * tokens, and a lane's words go from memory into fragments without a shuffle. Lane 4g + c loads 16
 * bytes, the words 4s + c of the four tokens 4g .. 4g + 3, and looks up four levels at a time, a
 * nibble each; the order of channels that this gives is the order in which the queries, columns of
 * B, lie in shared memory. What a warp reads next is on its way through a ring of its own in shared
 * memory meanwhile.
 *
 * A lane ends with four consecutive tokens of two heads per code group. With pages of 4 to 32
 * tokens and 8 heads at most they stay in registers until the tile's largest is known, and become
 * masses there: four tokens are a page or a part of one. Otherwise logits go to shared memory, and
 * behind a barrier every warp weighs 128 tokens of each head. Where logits stay in registers the
 * ring has room for the whole tile, 34 KiB at head_dim 128: it is read once, all of it on its way
 * at once, and what has it in common takes turns, as many heads as a product has columns: two forks
 * of a group of four cost the products of one. Otherwise each list reads it again, out of the
 * cache.
 *
 * Bound: one read of the codes, 34 bytes per token at head_dim 128, and 2 bytes written per page
 * and head. There, per code group and warp: 2 loads of 512 bytes, 72 operations to unpack, 8
 * products of 16 x 8 x 32, and behind these with pages of 4 about 155 instructions for scales,
 * largest, exponentials and masses of up to 8 heads: 39 threads' instructions per logit of 4 heads,
 * 19 of 8. What hangs on each other: the list's length, its blocks, codes, two barriers.
 *
 * Exactness: logits and largest have the bits of weigh_ref.c; weights are 2^x to 2 units in the
 * last place, added over a page by halving, over a tile in a fixed order, whatever is beside them.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/tile.cuh"
#include "score/codes.h"

#define WARPS  8u
#define GROUPS (KVF_WEIGH_TOKENS / KVF_CODE_TOKENS)
#define TURNS  (KVF_WEIGH_TOKENS / (WARPS * KVF_WARP_LANES)) /* tokens of a lane, in the end */
#define HEADS  8u                                            /* columns of a product */
#define RING   4u                    /* spans of four words that a warp has on their way */
#define SCALES (KVF_CODE_TOKENS * 2) /* bytes */
#define LOG2E  1.44269504f
#define LEVELS 0x0a03fdf6u /* -10, -3, 3, 10 */

#define NO_ROW  0xffffffffu
#define NO_LIST 0xffffffffu

struct tile {
    uint32_t codes;  /* the list whose codes are looked at */
    uint32_t first;  /* token */
    uint32_t tokens; /* a multiple of page_size */
};

/* What the columns of a product are: the heads of `count` lists, from that of task l on. */
struct columns {
    uint32_t l;
    uint32_t count;
};

static __device__ __forceinline__ uint32_t list_of(const kvf_weigh_args &a, const columns &c,
                                                   uint32_t column)
{
    return kvf_weigh_list(&a, c.l + column / a.group * a.row_lists);
}

/* Of q, top, sum and mass. */
static __device__ __forceinline__ uint32_t row_of(const kvf_weigh_args &a, const columns &c,
                                                  uint32_t column)
{
    return column < c.count * a.group ? list_of(a, c, column) * a.group + column % a.group : NO_ROW;
}

/* What lane 4h + c needs of B for column h and the words 4s + c: four channels per register, in the
 * order that unpack() gives. */
static __device__ void prepare_queries(const kvf_weigh_args &a, uint4 *to, const columns &columns,
                                       uint32_t spans, uint32_t head_blocks)
{
    const uint32_t all = spans * head_blocks * KVF_WARP_LANES;
    for (uint32_t i = threadIdx.x; i < all; i += blockDim.x) {
        const uint32_t lane = i % KVF_WARP_LANES, block = i / KVF_WARP_LANES % head_blocks;
        const uint32_t word = i / KVF_WARP_LANES / head_blocks * 4 + lane % 4;
        const uint32_t row = row_of(a, columns, block * HEADS + lane / 4);
        const uint32_t channel = word * KVF_CODE_LANES;
        uint32_t part[4] = {};
        if (row != NO_ROW && channel < a.head_dim)
            for (uint32_t k = 0; k < 16; k++) {
                /* 0 8 1 9, 2 10 3 11, 4 12 5 13, 6 14 7 15 */
                const uint32_t from = k / 4 * 2 + k % 4 / 2 + k % 2 * 8;
                part[k / 4] |= (uint32_t)(uint8_t)a.q[(size_t)row * a.head_dim + channel + from]
                               << (k % 4 * 8);
            }
        to[i] = make_uint4(part[0], part[1], part[2], part[3]);
    }
}

/* Levels of a word: of channels 0 8 1 9, 2 10 3 11, 4 12 5 13 and 6 14 7 15. */
static __device__ __forceinline__ void unpack(uint32_t word, uint32_t level[4])
{
    const uint32_t low = word & 0x33333333u, high = word >> 2 & 0x33333333u;
    level[0] = __byte_perm(LEVELS, 0, low);
    level[1] = __byte_perm(LEVELS, 0, low >> 16);
    level[2] = __byte_perm(LEVELS, 0, high);
    level[3] = __byte_perm(LEVELS, 0, high >> 16);
}

/* sum[pair][head block] += levels of four tokens, two in each pair, times queries. */
template <uint32_t HEAD_BLOCKS>
static __device__ __forceinline__ void multiply(int32_t sum[2][HEAD_BLOCKS][4], uint4 words,
                                                const uint4 *queries)
{
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (uint32_t pair = 0; pair < 2; pair++) {
        uint32_t x[4], y[4];
        unpack(word[2 * pair], x);
        unpack(word[2 * pair + 1], y);
        const uint32_t near[4] = {x[0], y[0], x[1], y[1]}, far[4] = {x[2], y[2], x[3], y[3]};
#pragma unroll
        for (uint32_t h = 0; h < HEAD_BLOCKS; h++) {
            const uint4 q = queries[h * KVF_WARP_LANES];
            const uint32_t first[2] = {q.x, q.y}, second[2] = {q.z, q.w};
            kvf_mma_s8(sum[pair][h], near, first);
            kvf_mma_s8(sum[pair][h], far, second);
        }
    }
}

/* Bit t: token t of code group `index` of the tile does not count for the list, of those that there
 * are. */
static __device__ __forceinline__ uint32_t skip_bits(const kvf_weigh_args &a, const tile &t,
                                                     uint32_t list, uint32_t index)
{
    const uint32_t token = t.first + index * KVF_CODE_TOKENS;
    const uint64_t bits = a.bits[list][token / 32 >> (a.block_size == 64)];
    return (uint32_t)(bits >> (token & (a.block_size - 1)));
}

/* The same, with the tokens that there are not. */
static __device__ __forceinline__ uint32_t skipped(const kvf_weigh_args &a, const tile &t,
                                                   uint32_t list, uint32_t index)
{
    const uint32_t left = t.tokens - index * KVF_CODE_TOKENS;
    const uint32_t past = left < KVF_CODE_TOKENS ? 0xffffffffu << left : 0;
    return skip_bits(a, t, list, index) | past;
}

/* Four logits per head of this lane: heads 2c and 2c + 1 of every block. */
template <uint32_t HEAD_BLOCKS>
static __device__ __forceinline__ void store_logits(const kvf_weigh_args &a, const tile &t,
                                                    uint32_t list, float *logits, uint32_t index,
                                                    uint2 scales, int32_t sum[2][HEAD_BLOCKS][4])
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, token = lane / 4 * 4;
    const uint32_t skip = skipped(a, t, list, index) >> token;
    const float2 low = kvf_unpair<kvf_half>(scales.x), high = kvf_unpair<kvf_half>(scales.y);
    const float scale[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (uint32_t h = 0; h < HEAD_BLOCKS; h++)
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            const uint32_t head = h * HEADS + lane % 4 * 2 + k;
            float s[4];
            if (head >= a.group)
                continue;
            const float q_scale = a.q_scale[list * a.group + head];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                s[i] = __fmul_rn(__fmul_rn((float)sum[i / 2][h][i % 2 * 2 + k], scale[i]), q_scale);
                s[i] = skip >> i & 1 ? -INFINITY : s[i];
            }
            *(float4 *)(logits + (size_t)head * KVF_WEIGH_TOKENS + index * KVF_CODE_TOKENS +
                        token) = make_float4(s[0], s[1], s[2], s[3]);
        }
}

/* The tokens of the warp for one head become weights; returns their largest. */
static __device__ __forceinline__ float largest(const float *s)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    float top = -INFINITY;
#pragma unroll
    for (uint32_t i = 0; i < TURNS; i++)
        top = fmaxf(top, s[i * KVF_WARP_LANES + lane]);
#pragma unroll
    for (int step = KVF_WARP_LANES / 2; step; step /= 2)
        top = fmaxf(top, __shfl_xor_sync(KVF_FULL_WARP, top, step));
    return top;
}

/* Masses of the warp's pages for one head, from logits `s`; returns their sum, in every lane. */
static __device__ __forceinline__ float store_masses(const kvf_weigh_args &a, const tile &t,
                                                     uint16_t *mass, const float *s, uint32_t token,
                                                     float top)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    float weight[TURNS], all = 0.0f;
    uint32_t counts[TURNS];
#pragma unroll
    for (uint32_t i = 0; i < TURNS; i++) {
        const float x = s[i * KVF_WARP_LANES + lane];
        counts[i] = __ballot_sync(KVF_FULL_WARP, x != -INFINITY);
        weight[i] = kvf_exp2((x - top) * LOG2E);
        for (uint32_t step = 1; step < a.page_size && step < KVF_WARP_LANES; step *= 2)
            weight[i] += __shfl_xor_sync(KVF_FULL_WARP, weight[i], (int)step);
    }
    const uint32_t lanes = kvf_min_u32(a.page_size, KVF_WARP_LANES);
    const uint32_t page_mask = (0xffffffffu >> (KVF_WARP_LANES - lanes)) << (lane & ~(lanes - 1));
    const bool is_wide = a.page_size > KVF_WARP_LANES;
#pragma unroll
    for (uint32_t i = 0; i < TURNS; i++) {
        const uint32_t at = token + i * KVF_WARP_LANES + lane;
        const bool is_first = (lane & (lanes - 1)) == 0 && !(is_wide && i % 2);
        const float sum = is_wide ? weight[i] + weight[i ^ 1] : weight[i];
        const uint32_t any = (is_wide ? counts[i] | counts[i ^ 1] : counts[i]) & page_mask;
        if (is_first && at < t.tokens) {
            mass[at >> kvf_page_shift(a.page_size)] = kvf_bf16_from_float(any ? sum : -1.0f);
            all += sum;
        }
    }
#pragma unroll
    for (int step = KVF_WARP_LANES / 2; step; step /= 2)
        all += __shfl_xor_sync(KVF_FULL_WARP, all, step);
    return all;
}

/* Behind a barrier: logits of all heads are in shared memory, and `parts` has room for two numbers
 * per head and warp. */
static __device__ void weigh_heads(const kvf_weigh_args &a, const tile &t, uint32_t list,
                                   const float *logits, float *parts)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t token = warp * TURNS * KVF_WARP_LANES;
    float *tops = parts, *sums = parts + (size_t)a.group * WARPS;
    for (uint32_t h = 0; h < a.group; h++) {
        const float top = largest(logits + (size_t)h * KVF_WEIGH_TOKENS + token);
        if (lane == 0)
            tops[h * WARPS + warp] = top;
    }
    __syncthreads();
    for (uint32_t h = 0; h < a.group; h++) {
        const size_t row = (size_t)list * a.group + h;
        float top = -INFINITY;
        for (uint32_t w = 0; w < WARPS; w++)
            top = fmaxf(top, tops[h * WARPS + w]);
        const float sum = store_masses(
            a, t, a.mass + row * a.pages_max + (t.first >> kvf_page_shift(a.page_size)),
            logits + (size_t)h * KVF_WEIGH_TOKENS + token, token, top == -INFINITY ? 0.0f : top);
        if (lane == 0)
            sums[h * WARPS + warp] = sum;
        if (threadIdx.x == 0)
            a.top[row * a.tiles_max + t.first / KVF_WEIGH_TOKENS] = top;
    }
    __syncthreads();
    for (uint32_t h = threadIdx.x; h < a.group; h += blockDim.x) {
        float sum = 0.0f;
        for (uint32_t w = 0; w < WARPS; w++)
            sum += sums[h * WARPS + w];
        a.sum[((size_t)list * a.group + h) * a.tiles_max + t.first / KVF_WEIGH_TOKENS] = sum;
    }
}

/* ---- the ring: the lanes' 16 bytes of each span, then the scales, of a code group ---- */

template <uint32_t SPANS> struct ring {
    static const uint32_t slots = RING / SPANS;
    static const uint32_t scales = SPANS * KVF_WARP_LANES * sizeof(uint4);
    static const uint32_t slot_bytes = scales + SCALES;
    static_assert(slots > 0 && SCALES == 4 * sizeof(uint4), "four lanes bring the scales");
};

/* Tokens lane / 4 * 4 .. + 3 of the group, and the words 4s + lane % 4 of each; zeros without a
 * look at memory where none of them counts for `list`, if it is one. */
template <uint32_t SPANS>
static __device__ __forceinline__ void ask(char *slot, const kvf_weigh_args &a, const tile &t,
                                           uint32_t index, uint32_t list)
{
    const kvf_code_group group = kvf_weigh_group(&a, t.codes, t.first + index * KVF_CODE_TOKENS);
    const uint32_t head_dim = a.head_dim;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const bool counts = list == NO_LIST || skip_bits(a, t, list, index) != 0xffffffffu;
#pragma unroll
    for (uint32_t s = 0; s < SPANS; s++) {
        const uint32_t word = s * 4 + lane % 4;
        const bool is_there = word < head_dim / KVF_CODE_LANES;
        kvf_async_copy16(slot + (s * KVF_WARP_LANES + lane) * sizeof(uint4),
                         group.words +
                             4 * kvf_code_word(head_dim, lane / 4 * 4, is_there ? word : 0),
                         is_there && counts ? 16 : 0);
    }
    if (lane < 4)
        kvf_async_copy16(slot + ring<SPANS>::scales + lane * sizeof(uint4),
                         group.scales + lane * sizeof(uint4), counts ? 16 : 0);
}

/* Ask for the warp's first code groups: warp, warp + WARPS, ... of the tile's `groups`. */
template <uint32_t SPANS>
static __device__ __forceinline__ void begin_groups(const kvf_weigh_args &a, const tile &t,
                                                    uint32_t list, uint32_t groups, char *slots)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES;
    for (uint32_t k = 0; k < ring<SPANS>::slots; k++) {
        if (warp + k * WARPS < groups)
            ask<SPANS>(slots + k * ring<SPANS>::slot_bytes, a, t, warp + k * WARPS, list);
        kvf_async_commit();
    }
}

/* Words and scales of the warp's k-th group, which there is; a later one takes its place. */
template <uint32_t SPANS>
static __device__ __forceinline__ uint2 take_group(const kvf_weigh_args &a, const tile &t,
                                                   uint32_t list, uint32_t groups, char *slots,
                                                   uint32_t k, uint4 x[SPANS])
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t later = warp + (k + ring<SPANS>::slots) * WARPS;
    char *slot = slots + k % ring<SPANS>::slots * ring<SPANS>::slot_bytes;
    kvf_async_wait<(int)ring<SPANS>::slots - 1>();
    __syncwarp();
#pragma unroll
    for (uint32_t s = 0; s < SPANS; s++)
        x[s] = ((const uint4 *)slot)[s * KVF_WARP_LANES + lane];
    const uint2 scales = ((const uint2 *)(slot + ring<SPANS>::scales))[lane / 4];
    __syncwarp();
    if (later < groups)
        ask<SPANS>(slot, a, t, later, list);
    kvf_async_commit();
    return scales;
}

/* Logits of the code groups warp, warp + WARPS, ... of a tile that has `groups` of them. */
template <uint32_t HEAD_BLOCKS, uint32_t SPANS>
static __device__ __forceinline__ void weigh_groups(const kvf_weigh_args &a, const tile &t,
                                                    const columns &columns, const uint4 *queries,
                                                    float *logits, char *slots)
{
    const uint32_t list = list_of(a, columns, 0);
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t groups = kvf_div_ceil_u32(t.tokens, KVF_CODE_TOKENS);
    begin_groups<SPANS>(a, t, list, groups, slots);
    prepare_queries(a, (uint4 *)queries, columns, SPANS, HEAD_BLOCKS);
    __syncthreads();
    for (uint32_t i = warp, k = 0; i < GROUPS; i += WARPS, k++) {
        if (i >= groups) {
            for (uint32_t h = 0; h < a.group; h++)
                logits[(size_t)h * KVF_WEIGH_TOKENS + i * KVF_CODE_TOKENS + lane] = -INFINITY;
            continue;
        }
        uint4 x[SPANS];
        const uint2 scales = take_group<SPANS>(a, t, list, groups, slots, k, x);
        int32_t sum[2][HEAD_BLOCKS][4] = {};
#pragma unroll
        for (uint32_t s = 0; s < SPANS; s++)
            multiply<HEAD_BLOCKS>(sum, x[s], queries + s * HEAD_BLOCKS * KVF_WARP_LANES + lane);
        store_logits<HEAD_BLOCKS>(a, t, list, logits, i, scales, sum);
    }
}

/* ---- logits that stay in registers: pages of 4 to 32 tokens, 8 heads at most ---- */

/* Of a lane: four tokens of each of its warp's code groups, for columns 2c and 2c + 1. */
struct held {
    float s[TURNS][2][4]; /* -INFINITY: does not count */
};

/* Ask for all code groups of the warp, or for those in which a token of `list` counts. */
template <uint32_t SPANS>
static __device__ __forceinline__ void begin_tile(const kvf_weigh_args &a, const tile &t,
                                                  uint32_t list, uint32_t groups, char *slots)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES;
#pragma unroll
    for (uint32_t k = 0; k < TURNS; k++) {
        if (warp + k * WARPS < groups)
            ask<SPANS>(slots + k * ring<SPANS>::slot_bytes, a, t, warp + k * WARPS, list);
        kvf_async_commit();
    }
}

/* Words and scales of the warp's k-th group, which there is; they stay. Those of all groups before
 * it were looked at. */
template <uint32_t SPANS>
static __device__ __forceinline__ uint2 look_at_group(const char *slots, uint32_t k, uint4 x[SPANS])
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const char *slot = slots + k * ring<SPANS>::slot_bytes;
    kvf_async_wait<(int)TURNS - 1>();
    __syncwarp();
#pragma unroll
    for (uint32_t s = 0; s < SPANS; s++)
        x[s] = ((const uint4 *)slot)[s * KVF_WARP_LANES + lane];
    kvf_async_commit();
    return ((const uint2 *)(slot + ring<SPANS>::scales))[lane / 4];
}

/* Skipped tokens of the k-th code group of the warp, in lane 8k + n of the columns' n-th list. */
static __device__ __forceinline__ uint32_t held_skips(const kvf_weigh_args &a, const tile &t,
                                                      const columns &columns, uint32_t groups)
{
    static_assert(TURNS * HEADS == KVF_WARP_LANES, "a word for each lane");
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, n = lane % HEADS;
    const uint32_t group = threadIdx.x / KVF_WARP_LANES + lane / HEADS * WARPS;
    return n < columns.count && group < groups
               ? skipped(a, t, list_of(a, columns, n * a.group), group)
               : 0xffffffffu;
}

/* The largest of the warp's tokens for both columns, in the four lanes of the first tokens. */
template <uint32_t SPANS>
static __device__ __forceinline__ float2 hold_logits(const kvf_weigh_args &a, const tile &t,
                                                     const columns &columns, held *to,
                                                     uint4 *queries, const char *slots)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t token = lane / 4 * 4;
    const uint32_t groups = kvf_div_ceil_u32(t.tokens, KVF_CODE_TOKENS);
    const uint32_t skips = held_skips(a, t, columns, groups);
    float q_scale[2], top[2] = {-INFINITY, -INFINITY};
    uint32_t from[2]; /* the lane that has skipped tokens of the first group */
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t column = lane % 4 * 2 + h, row = row_of(a, columns, column);
        from[h] = column / a.group;
        q_scale[h] = row != NO_ROW ? a.q_scale[row] : 0.0f;
    }
    prepare_queries(a, queries, columns, SPANS, 1);
    __syncthreads();
#pragma unroll
    for (uint32_t k = 0; k < TURNS; k++) {
        uint4 x[SPANS] = {};
        uint2 scales = {};
        int32_t sum[2][1][4] = {};
        if (warp + k * WARPS < groups)
            scales = look_at_group<SPANS>(slots, k, x);
#pragma unroll
        for (uint32_t s = 0; s < SPANS; s++)
            multiply<1>(sum, x[s], queries + s * KVF_WARP_LANES + lane);
        const float2 low = kvf_unpair<kvf_half>(scales.x), high = kvf_unpair<kvf_half>(scales.y);
        const float scale[4] = {low.x, low.y, high.x, high.y};
        const uint32_t skip[2] = {
            __shfl_sync(KVF_FULL_WARP, skips, (int)(k * HEADS + from[0])),
            __shfl_sync(KVF_FULL_WARP, skips, (int)(k * HEADS + from[1])),
        };
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t h = i / 4, n = i % 4;
            const float s =
                __fmul_rn(__fmul_rn((float)sum[n / 2][0][n % 2 * 2 + h], scale[n]), q_scale[h]);
            to->s[k][h][n] = skip[h] >> (token + n) & 1 ? -INFINITY : s;
            top[h] = fmaxf(top[h], to->s[k][h][n]);
        }
    }
#pragma unroll
    for (int step = 4; step < (int)KVF_WARP_LANES; step *= 2) {
        top[0] = fmaxf(top[0], __shfl_xor_sync(KVF_FULL_WARP, top[0], step));
        top[1] = fmaxf(top[1], __shfl_xor_sync(KVF_FULL_WARP, top[1], step));
    }
    return make_float2(top[0], top[1]);
}

/* Masses of the warp's pages for one of the lane's columns; returns their sum over the lanes that
 * have the same columns. */
template <uint32_t PAGE>
static __device__ __forceinline__ float hold_masses(const held &from, const tile &t, uint32_t h,
                                                    float base, kvf_bf16 *mass)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t token = lane / 4 * 4;
    float sum = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < TURNS; k++) {
        const float *s = from.s[k][h];
        float e[4], top = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
#pragma unroll
        for (uint32_t n = 0; n < 4; n++)
            e[n] = kvf_exp2((s[n] - base) * LOG2E);
        float weight = (e[0] + e[1]) + (e[2] + e[3]);
#pragma unroll
        for (uint32_t step = 4; step < PAGE; step *= 2) {
            weight += __shfl_xor_sync(KVF_FULL_WARP, weight, (int)step);
            top = fmaxf(top, __shfl_xor_sync(KVF_FULL_WARP, top, (int)step));
        }
        const uint32_t at = (warp + k * WARPS) * KVF_CODE_TOKENS + token;
        if (token % PAGE != 0 || at >= t.tokens)
            continue;
        sum += weight;
        if (mass)
            mass[at / PAGE] = kvf_from_float<kvf_bf16>(top == -INFINITY ? -1.0f : weight);
    }
#pragma unroll
    for (int step = 4; step < (int)KVF_WARP_LANES; step *= 2)
        sum += __shfl_xor_sync(KVF_FULL_WARP, sum, step);
    return sum;
}

/* parts [2, HEADS, WARPS]: largest and sum of every warp. What a call leaves in shared memory, the
 * next one may write behind its first barrier. */
template <uint32_t PAGE, uint32_t SPANS>
static __device__ __forceinline__ void weigh_held(const kvf_weigh_args &a, const tile &t,
                                                  const columns &columns, uint4 *queries,
                                                  float *parts, const char *slots)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t column = lane % 4 * 2;
    float *tops = parts + column * WARPS, *sums = tops + HEADS * WARPS;
    held logits;
    const float2 own = hold_logits<SPANS>(a, t, columns, &logits, queries, slots);
    if (lane < 4) {
        tops[warp] = own.x;
        tops[WARPS + warp] = own.y;
    }
    __syncthreads();
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        float top = -INFINITY;
#pragma unroll
        for (uint32_t w = 0; w < WARPS; w++)
            top = fmaxf(top, tops[h * WARPS + w]);
        const uint32_t row = row_of(a, columns, column + h);
        const bool is_row = row != NO_ROW;
        kvf_bf16 *mass = (kvf_bf16 *)a.mass + (size_t)row * a.pages_max + t.first / PAGE;
        const float sum =
            hold_masses<PAGE>(logits, t, h, top == -INFINITY ? 0.0f : top, is_row ? mass : nullptr);
        if (lane < 4)
            sums[h * WARPS + warp] = sum;
        if (threadIdx.x < 4 && is_row)
            a.top[(size_t)row * a.tiles_max + t.first / KVF_WEIGH_TOKENS] = top;
    }
    __syncthreads();
    if (threadIdx.x < 4)
        for (uint32_t h = 0; h < 2 && column + h < columns.count * a.group; h++) {
            float sum = 0.0f;
            for (uint32_t w = 0; w < WARPS; w++)
                sum += sums[h * WARPS + w];
            a.sum[(size_t)row_of(a, columns, column + h) * a.tiles_max +
                  t.first / KVF_WEIGH_TOKENS] = sum;
        }
}

/* The block's tile; false if it is none, or another block weighs it. */
static __device__ __forceinline__ bool find_tile(const kvf_weigh_args &a, tile *t,
                                                 uint32_t *sharers)
{
    const uint32_t first = blockIdx.x * KVF_WEIGH_TOKENS, list = kvf_weigh_list(&a, blockIdx.y);
    const uint32_t all = a.pages[list] * a.page_size;
    *sharers = kvf_weigh_sharers(&a, blockIdx.y, blockIdx.x);
    *t = {list, first, kvf_min_u32(KVF_WEIGH_TOKENS, all - first)};
    return *sharers && first < all;
}

/* SPANS * 4 words of a token at most. */
template <uint32_t HEAD_BLOCKS, uint32_t SPANS>
static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES, HEAD_BLOCKS == 2 ? 2 : 3)
    weigh_tile(const __grid_constant__ kvf_weigh_args a)
{
    tile t;
    uint32_t sharers;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (!find_tile(a, &t, &sharers))
        return;
    uint4 *queries = (uint4 *)kvf_shared();
    float *logits = (float *)(queries + SPANS * HEAD_BLOCKS * KVF_WARP_LANES);
    float *parts = logits + (size_t)a.group * KVF_WEIGH_TOKENS;
    char *slots = (char *)(parts + (size_t)a.group * 2 * WARPS) +
                  threadIdx.x / KVF_WARP_LANES * ring<SPANS>::slots * ring<SPANS>::slot_bytes;
    for (uint32_t i = 0; i < sharers; i++) {
        const columns one = {blockIdx.y + i * a.row_lists, 1};
        weigh_groups<HEAD_BLOCKS, SPANS>(a, t, one, queries, logits, slots);
        __syncthreads();
        weigh_heads(a, t, list_of(a, one, 0), logits, parts);
        __syncthreads();
    }
}

template <uint32_t PAGE, uint32_t SPANS>
static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES, SPANS == 2 ? 3 : 2)
    weigh_pages(const __grid_constant__ kvf_weigh_args a)
{
    tile t;
    uint32_t sharers;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (!find_tile(a, &t, &sharers))
        return;
    uint4 *queries = (uint4 *)kvf_shared();
    float *parts = (float *)(queries + SPANS * KVF_WARP_LANES);
    char *slots = (char *)(parts + 2 * HEADS * WARPS) +
                  threadIdx.x / KVF_WARP_LANES * TURNS * ring<SPANS>::slot_bytes;
    begin_tile<SPANS>(a, t, sharers == 1 ? t.codes : NO_LIST,
                      kvf_div_ceil_u32(t.tokens, KVF_CODE_TOKENS), slots);
    for (uint32_t i = 0, most = HEADS / a.group; i < sharers; i += most) {
        const columns some = {blockIdx.y + i * a.row_lists, kvf_min_u32(sharers - i, most)};
        weigh_held<PAGE, SPANS>(a, t, some, queries, parts, slots);
    }
}

template <uint32_t PAGE, uint32_t SPANS>
static int launch_pages(const kvf_weigh_args *a, cudaStream_t stream)
{
    const size_t shared = SPANS * KVF_WARP_LANES * sizeof(uint4) +
                          2 * HEADS * WARPS * sizeof(float) +
                          (size_t)WARPS * TURNS * ring<SPANS>::slot_bytes;
    return kvf_cuda_launch_early<weigh_pages<PAGE, SPANS>>(
        dim3(a->tiles_max, a->lists), dim3(WARPS * KVF_WARP_LANES), shared, stream, *a);
}

template <uint32_t HEAD_BLOCKS, uint32_t SPANS>
static int launch(const kvf_weigh_args *a, cudaStream_t stream)
{
    const size_t shared = SPANS * HEAD_BLOCKS * KVF_WARP_LANES * sizeof(uint4) +
                          (size_t)a->group * (KVF_WEIGH_TOKENS + 2 * WARPS) * sizeof(float) +
                          (size_t)WARPS * ring<SPANS>::slots * ring<SPANS>::slot_bytes;
    return kvf_cuda_launch_early<weigh_tile<HEAD_BLOCKS, SPANS>>(
        dim3(a->tiles_max, a->lists), dim3(WARPS * KVF_WARP_LANES), shared, stream, *a);
}

template <uint32_t SPANS> static int launch_any(const kvf_weigh_args *a, cudaStream_t stream)
{
    if (a->group > HEADS)
        return launch<2, SPANS>(a, stream);
    switch (a->page_size) {
    case 4:
        return launch_pages<4, SPANS>(a, stream);
    case 8:
        return launch_pages<8, SPANS>(a, stream);
    case 16:
        return launch_pages<16, SPANS>(a, stream);
    case 32:
        return launch_pages<32, SPANS>(a, stream);
    }
    return launch<1, SPANS>(a, stream);
}

extern "C" int kvf_weigh_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_weigh_args *a = (const kvf_weigh_args *)args;
    (void)tasks;
    if (a->lists == 0 || a->tiles_max == 0)
        return cudaSuccess;
    return a->head_dim <= 128 ? launch_any<2>(a, (cudaStream_t)stream)
                              : launch_any<4>(a, (cudaStream_t)stream);
}
