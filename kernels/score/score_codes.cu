/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The weights that queries give the tokens of a tile, on the GPU, by int8 tensor cores.
 *
 * Knows nothing of keys, nor of other tiles. A block is one tile of one list, or of the lists that
 * have it in common; blocks past the end of a list, and of lists whose tile another block scores,
 * leave at once. A warp takes a code group at a time: the lines of A are 16 tokens. Lane 4g + c has
 * 16 bytes of shared memory, the words 4s + c of the four tokens 4g .. 4g + 3, and looks up four
 * levels at a time, a nibble each; the order of channels that this gives is the order in which the
 * queries, columns of B, are. Words come to shared memory as they lie in device memory.
 *
 * A lane ends with four consecutive tokens of two heads per product. With pages of 4 to 32 tokens
 * and 8 heads at most they stay in registers until the tile's largest is known, and become masses
 * there: four tokens are a page or a part of one. A block is 4 warps of 8 code groups then, side by
 * side, all of them on their way at once, 32 KiB at head_dim 128; where they are and what is
 * skipped is looked up for all 8 together, and queries are in registers. A list of four heads or
 * less, alone, uses the eight columns for two code groups: the one's queries are zeros in four of
 * them, and the other's in the rest, so that no lane scores what nobody asked for. Codes in
 * common are read once and take turns, as many heads as a product has columns: two forks of a group
 * of four cost the products of one. Otherwise, and under a cap, a block is 8 warps, logits go to
 * shared memory, and after a barrier every warp scores 128 tokens of each head; each list reads
 * the tile again, out of the cache.
 *
 * Bound: one read of the codes, 34 bytes per token at head_dim 128, and 2 bytes written per page
 * and head. Dependent steps: the list's length, its blocks, codes, two barriers. Times of an
 * H200 are in docs/design/gpu.md.
 *
 * Exactness: logits and largest have the bits of score_codes_ref.c; weights are 2^x to 2 units in
 * the last place, added over a page by halving, over a tile in a fixed order, whatever is beside
 * them.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/tile.cuh"
#include "score/codes.h"

#define WARPS      8u
#define GROUPS     (KVF_SCORE_CODES_TOKENS / KVF_CODE_TOKENS)
#define TURNS      (KVF_SCORE_CODES_TOKENS / (WARPS * KVF_WARP_LANES)) /* tokens of a lane */
#define HEADS      8u                                                  /* columns of a product */
#define RING       4u                    /* spans of four words that a warp has on their way */
#define SCALES     (KVF_CODE_TOKENS * 2) /* bytes */
#define LOG2E      1.44269504f
#define LEVELS     0x0a03fdf6u              /* -10, -3, 3, 10 */
#define HELD_WARPS 4u                       /* of a block whose logits stay in registers */
#define OWN        (GROUPS / HELD_WARPS)    /* code groups of such a warp, side by side */
#define SKIPS      (KVF_WARP_LANES / HEADS) /* code groups of which a warp keeps a word per list */
/* As an integer and as a float: with a sum that begins at the one, the sum is the difference of
 * floats to the other, exact up to 2^22. */
#define ZERO_BITS  0x4b400000
#define ZERO       12582912.0f

#define NO_QUERY 0xffffffffu

struct tile {
    uint32_t codes;  /* the list whose codes are looked at */
    uint32_t first;  /* token */
    uint32_t tokens; /* a multiple of page_size */
};

/* The columns of a product: the heads of `count` lists, from that of task l on. */
struct columns {
    uint32_t l;
    uint32_t count;
};

static __device__ __forceinline__ uint32_t list_of(const kvf_score_codes_args &a, const columns &c,
                                                   uint32_t column)
{
    return kvf_score_codes_list(&a, c.l + column / a.sub.count * a.row_lists);
}

/* The query in q, tile_max, tile_sum and mass. */
static __device__ __forceinline__ uint32_t query_of(const kvf_score_codes_args &a, const columns &c,
                                                    uint32_t column)
{
    return column < c.count * a.sub.count ? list_of(a, c, column) * a.group + column % a.sub.count
                                          : NO_QUERY;
}

/* Lane 4h + c's part of B for column h and the words 4s + c: four channels per register, in the
 * order that unpack() gives: 0 8 1 9, 2 10 3 11, 4 12 5 13, 6 14 7 15. Zeros for no query. */
static __device__ __forceinline__ uint4 query_part(const kvf_score_codes_args &a, uint32_t query,
                                                   uint32_t word)
{
    uint4 x = {};
    if (query != NO_QUERY && word < a.head_dim / KVF_CODE_LANES)
        x = *(const uint4 *)(a.q + (size_t)query * a.head_dim + word * KVF_CODE_LANES);
    return make_uint4(__byte_perm(x.x, x.z, 0x5140), __byte_perm(x.x, x.z, 0x7362),
                      __byte_perm(x.y, x.w, 0x5140), __byte_perm(x.y, x.w, 0x7362));
}

static __device__ void prepare_queries(const kvf_score_codes_args &a, uint4 *to,
                                       const columns &columns, uint32_t spans, uint32_t head_blocks)
{
    const uint32_t all = spans * head_blocks * KVF_WARP_LANES;
    for (uint32_t i = threadIdx.x; i < all; i += blockDim.x) {
        const uint32_t lane = i % KVF_WARP_LANES, block = i / KVF_WARP_LANES % head_blocks;
        const uint32_t word = i / KVF_WARP_LANES / head_blocks * 4 + lane % 4;
        to[i] = query_part(a, query_of(a, columns, block * HEADS + lane / 4), word);
    }
}

/* The levels that the low four nibbles of `codes` name, which are below 4. */
static __device__ __forceinline__ uint32_t look_up(uint32_t codes, uint32_t table)
{
#if defined(__CUDA_ARCH__)
    uint32_t levels;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(levels) : "r"(table), "r"(codes));
    return levels;
#else
    return __byte_perm(table, 0, codes);
#endif
}

/* Levels of a word: of channels 0 8 1 9, 2 10 3 11, 4 12 5 13 and 6 14 7 15. */
static __device__ __forceinline__ void unpack(uint32_t word, uint32_t table, uint32_t level[4])
{
    const uint32_t low = word & 0x33333333u, high = word >> 2 & 0x33333333u;
    level[0] = look_up(low, table);
    level[1] = look_up(low >> 16, table);
    level[2] = look_up(high, table);
    level[3] = look_up(high >> 16, table);
}

/* sum[pair][head block] += levels of four tokens, two in each pair, times queries, which lie
 * `stride` apart. */
template <uint32_t HEAD_BLOCKS>
static __device__ __forceinline__ void multiply(int32_t sum[2][HEAD_BLOCKS][4], uint4 words,
                                                uint32_t table, const uint4 *queries,
                                                uint32_t stride)
{
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (uint32_t pair = 0; pair < 2; pair++) {
        uint32_t x[4], y[4];
        unpack(word[2 * pair], table, x);
        unpack(word[2 * pair + 1], table, y);
        const uint32_t near[4] = {x[0], y[0], x[1], y[1]}, far[4] = {x[2], y[2], x[3], y[3]};
#pragma unroll
        for (uint32_t h = 0; h < HEAD_BLOCKS; h++) {
            const uint4 q = queries[h * stride];
            const uint32_t first[2] = {q.x, q.y}, second[2] = {q.z, q.w};
            kvf_mma_s8(sum[pair][h], near, first);
            kvf_mma_s8(sum[pair][h], far, second);
        }
    }
}

/* Bit t: token t of code group `index` of the tile does not count for the list, of those that there
 * are. */
static __device__ __forceinline__ uint32_t skip_bits(const kvf_score_codes_args &a, const tile &t,
                                                     uint32_t list, uint32_t index)
{
    const uint32_t token = t.first + index * KVF_CODE_TOKENS;
    const uint64_t bits = a.bits[list][token / 32 >> (a.block_size == 64)];
    return (uint32_t)(bits >> (token & (a.block_size - 1)));
}

/* Tokens that code group `index` of the tile does not have. */
static __device__ __forceinline__ uint32_t past_end(const tile &t, uint32_t index)
{
    const uint32_t first = index * KVF_CODE_TOKENS, left = t.tokens > first ? t.tokens - first : 0;
    return left < KVF_CODE_TOKENS ? 0xffffffffu << left : 0;
}

/* Tokens that do not count, with those that there are not. */
static __device__ __forceinline__ uint32_t skipped(const kvf_score_codes_args &a, const tile &t,
                                                   uint32_t list, uint32_t index)
{
    return skip_bits(a, t, list, index) | past_end(t, index);
}

/* Four logits per head of this lane: heads 2c and 2c + 1 of every block. */
template <uint32_t HEAD_BLOCKS, bool CAPPED>
static __device__ __forceinline__ void store_logits(const kvf_score_codes_args &a, const tile &t,
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
            if (head >= a.sub.count)
                continue;
            const float q_scale = a.q_scale[list * a.group + head];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                s[i] = __fmul_rn(__fmul_rn((float)sum[i / 2][h][i % 2 * 2 + k], scale[i]), q_scale);
                s[i] = CAPPED ? kvf_cap_logit(s[i], a.cap) : s[i];
                s[i] = skip >> i & 1 ? -INFINITY : s[i];
            }
            *(float4 *)(logits + (size_t)head * KVF_SCORE_CODES_TOKENS + index * KVF_CODE_TOKENS +
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
static __device__ __forceinline__ float store_masses(const kvf_score_codes_args &a, const tile &t,
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
static __device__ void score_codes_heads(const kvf_score_codes_args &a, const tile &t,
                                         uint32_t list, const float *logits, float *parts)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t token = warp * TURNS * KVF_WARP_LANES;
    float *tops = parts, *sums = parts + (size_t)a.sub.count * WARPS;
    for (uint32_t h = 0; h < a.sub.count; h++) {
        const float top = largest(logits + (size_t)h * KVF_SCORE_CODES_TOKENS + token);
        if (lane == 0)
            tops[h * WARPS + warp] = top;
    }
    __syncthreads();
    for (uint32_t h = 0; h < a.sub.count; h++) {
        const size_t query = (size_t)list * a.group + h;
        float top = -INFINITY;
        for (uint32_t w = 0; w < WARPS; w++)
            top = fmaxf(top, tops[h * WARPS + w]);
        const float sum = store_masses(
            a, t, a.mass + query * a.pages_max + (t.first >> kvf_page_shift(a.page_size)),
            logits + (size_t)h * KVF_SCORE_CODES_TOKENS + token, token,
            top == -INFINITY ? 0.0f : top);
        if (lane == 0)
            sums[h * WARPS + warp] = sum;
        if (threadIdx.x == 0)
            a.tile_max[query * a.tiles_max + t.first / KVF_SCORE_CODES_TOKENS] = top;
    }
    __syncthreads();
    for (uint32_t h = threadIdx.x; h < a.sub.count; h += blockDim.x) {
        float sum = 0.0f;
        for (uint32_t w = 0; w < WARPS; w++)
            sum += sums[h * WARPS + w];
        const size_t query = (size_t)list * a.group + h;
        a.tile_sum[query * a.tiles_max + t.first / KVF_SCORE_CODES_TOKENS] = sum;
    }
}

/* ---- words of a code group in shared memory ----
 * As they lie in memory, but for the order of 16 bytes in 128: neither lanes that copy nor lanes
 * that read meet in a bank. A copy takes neighbouring bytes by neighbouring lanes, or each lane
 * would fetch a sector of its own, half of it for nothing. */

static __device__ __forceinline__ uint32_t swizzle(uint32_t piece)
{
    return (piece ^ (piece >> 3 & 1) << 1) * (uint32_t)sizeof(uint4);
}

/* Ask for the words of a group, if it counts. Else `to` keeps what it has, which does no harm:
 * every nibble names a level, and no token of the group has a weight. */
template <uint32_t SPANS>
static __device__ __forceinline__ void copy_words(char *to, const char *words, uint32_t head_dim,
                                                  bool counts)
{
    constexpr uint32_t span = KVF_WARP_LANES * sizeof(uint4);
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    to += swizzle(lane);
    words += lane * sizeof(uint4);
#pragma unroll
    for (uint32_t i = 0; i < SPANS; i++)
        kvf_async_copy16_if(counts && i * KVF_WARP_LANES + lane < head_dim / 2, to + i * span,
                            words + i * span);
}

/* Where word 4 * span + lane % 4 of the tokens lane / 4 * 4 .. + 3 is; any word of theirs where
 * head_dim has no such one. */
static __device__ __forceinline__ uint32_t word_place(uint32_t head_dim, uint32_t span)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, word = span * 4 + lane % 4;
    return swizzle((uint32_t)kvf_code_word(head_dim, lane / 4 * 4,
                                           word < head_dim / KVF_CODE_LANES ? word : 0) /
                   4);
}

/* ---- the ring: words, then the scales, of a code group ---- */

template <uint32_t SPANS> struct ring {
    static const uint32_t slots = RING / SPANS;
    static const uint32_t scales = SPANS * KVF_WARP_LANES * sizeof(uint4);
    static const uint32_t slot_bytes = scales + SCALES;
    static_assert(slots > 0 && SCALES == 4 * sizeof(uint4), "four lanes bring the scales");
};

/* Words and scales of the group; zeros without a look at memory where none of its tokens counts for
 * `list`. */
template <uint32_t SPANS>
static __device__ __forceinline__ void ask(char *slot, const kvf_score_codes_args &a, const tile &t,
                                           uint32_t index, uint32_t list)
{
    const kvf_code_group group =
        kvf_score_codes_group(&a, t.codes, t.first + index * KVF_CODE_TOKENS);
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const bool counts = skip_bits(a, t, list, index) != 0xffffffffu;
    copy_words<SPANS>(slot, group.words, a.head_dim, counts);
    if (lane < 4)
        kvf_async_copy16(slot + ring<SPANS>::scales + lane * sizeof(uint4),
                         group.scales + lane * sizeof(uint4), counts ? 16 : 0);
}

/* Ask for the warp's first code groups: warp, warp + WARPS, ... of the tile's `groups`. */
template <uint32_t SPANS>
static __device__ __forceinline__ void begin_groups(const kvf_score_codes_args &a, const tile &t,
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
static __device__ __forceinline__ uint2 take_group(const kvf_score_codes_args &a, const tile &t,
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
        x[s] = *(const uint4 *)(slot + word_place(a.head_dim, s));
    const uint2 scales = ((const uint2 *)(slot + ring<SPANS>::scales))[lane / 4];
    __syncwarp();
    if (later < groups)
        ask<SPANS>(slot, a, t, later, list);
    kvf_async_commit();
    return scales;
}

/* Logits of the code groups warp, warp + WARPS, ... of a tile that has `groups` of them. */
template <uint32_t HEAD_BLOCKS, uint32_t SPANS, bool CAPPED>
static __device__ __forceinline__ void
score_codes_groups(const kvf_score_codes_args &a, const tile &t, const columns &columns,
                   const uint4 *queries, float *logits, char *slots)
{
    const uint32_t list = list_of(a, columns, 0);
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t groups = kvf_div_ceil_u32(t.tokens, KVF_CODE_TOKENS), table = kvf_kept(LEVELS);
    begin_groups<SPANS>(a, t, list, groups, slots);
    prepare_queries(a, (uint4 *)queries, columns, SPANS, HEAD_BLOCKS);
    __syncthreads();
    for (uint32_t i = warp, k = 0; i < GROUPS; i += WARPS, k++) {
        if (i >= groups) {
            for (uint32_t h = 0; h < a.sub.count; h++)
                logits[(size_t)h * KVF_SCORE_CODES_TOKENS + i * KVF_CODE_TOKENS + lane] = -INFINITY;
            continue;
        }
        uint4 x[SPANS];
        const uint2 scales = take_group<SPANS>(a, t, list, groups, slots, k, x);
        int32_t sum[2][HEAD_BLOCKS][4] = {};
#pragma unroll
        for (uint32_t s = 0; s < SPANS; s++)
            multiply<HEAD_BLOCKS>(sum, x[s], table,
                                  queries + s * HEAD_BLOCKS * KVF_WARP_LANES + lane,
                                  KVF_WARP_LANES);
        store_logits<HEAD_BLOCKS, CAPPED>(a, t, list, logits, i, scales, sum);
    }
}

/* ---- logits that stay in registers: pages of 4 to 32 tokens, 8 heads at most ---- */

/* How the eight columns of a product are used. PAIRED: a list of at most four heads, twice, so that
 * a step is two code groups of the warp: columns 0 .. 3 are of the first, 4 .. 7 of the second, the
 * others' queries being zeros. Else a step is one code group, of up to eight heads of some lists.
 * A lane has four tokens of two heads per step either way. */
template <bool PAIRED> struct steps {
    static const uint32_t count = PAIRED ? OWN / 2 : OWN;
    static const uint32_t groups = OWN / count;
};

/* The share of a tile that one warp has, from code group `first` on. */
struct own {
    uint32_t first;
    uint32_t skips[OWN]; /* bit t: token t does not count for the list whose codes are looked at */
    char *slots;         /* [OWN][spans][lanes] 16 bytes */
};

/* The lane's columns are this one and the next. */
template <bool PAIRED> static __device__ __forceinline__ uint32_t lane_column()
{
    return threadIdx.x % (PAIRED ? 2 : 4) * 2;
}

/* The lane's code group of a step, from the warp's first on. */
template <bool PAIRED> static __device__ __forceinline__ uint32_t lane_group(uint32_t step)
{
    return PAIRED ? step * 2 + threadIdx.x % 4 / 2 : step;
}

/* The k-th code group of the warp, as lanes k, k + OWN and so on know it. */
struct found_group {
    uint64_t words, scales; /* addresses */
    uint32_t skip;          /* bit t: token t does not count, or is not there */
};

/* The groups of the warp, whose first is o->first: all loads at once, and each address by one
 * lane. */
static __device__ __forceinline__ found_group find_groups(const kvf_score_codes_args &a,
                                                          const tile &t, const uint32_t *blocks,
                                                          const uint64_t *bits, const char *codes,
                                                          own *o)
{
    const uint32_t k = o->first + threadIdx.x % OWN, index = t.first / KVF_CODE_TOKENS + k;
    const uint32_t shift = a.block_size == 64 ? 1 : 0, token = index * KVF_CODE_TOKENS;
    const bool is_there = k * KVF_CODE_TOKENS < t.tokens;
    const uint32_t block = is_there ? blocks[index >> shift] : 0;
    const uint32_t skip =
        is_there ? ((const uint32_t *)(const void *)bits)[index << (1 - shift)] : 0xffffffffu;
    const kvf_code_group group =
        a.physical ? kvf_score_codes_physical_group(&a, t.codes, block, token)
                   : kvf_group_of_block(codes, block, a.head_dim, a.block_size, token);
    const found_group g = {(uint64_t)(size_t)group.words, (uint64_t)(size_t)group.scales,
                           skip | past_end(t, k)};
#pragma unroll
    for (uint32_t i = 0; i < OWN; i++)
        o->skips[i] = __shfl_sync(KVF_FULL_WARP, g.skip, (int)i);
    return g;
}

/* The address that lane k has, in all lanes. */
static __device__ __forceinline__ const char *address_of(uint64_t address, uint32_t k)
{
    return (const char *)(size_t)__shfl_sync(KVF_FULL_WARP, address, (int)k);
}

/* Ask for the words of the warp's code groups, and load scales of the lane's tokens: without a look
 * at memory where there is no group, or where none of its tokens counts if `is_alone`: scales are
 * zeros then. */
template <uint32_t SPANS, bool PAIRED>
static __device__ __forceinline__ void begin_tile(const kvf_score_codes_args &a, const own &o,
                                                  const found_group &g, bool is_alone,
                                                  uint32_t left, uint2 scales[])
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t counts = __ballot_sync(KVF_FULL_WARP, lane < kvf_min_u32(left, OWN) &&
                                                             (!is_alone || g.skip != 0xffffffffu));
#pragma unroll
    for (uint32_t i = 0; i < steps<PAIRED>::count; i++) {
        const uint32_t k = lane_group<PAIRED>(i);
        const uint2 *from = (const uint2 *)(const void *)address_of(g.scales, k);
        scales[i] = counts >> k & 1 ? from[lane / 4] : make_uint2(0, 0);
    }
#pragma unroll
    for (uint32_t k = 0; k < OWN; k++) {
        const char *from = address_of(g.words, k);
        copy_words<SPANS>(o.slots + k * SPANS * KVF_WARP_LANES * sizeof(uint4), from, a.head_dim,
                          counts >> k & 1);
        if ((k + 1) % steps<PAIRED>::groups == 0)
            kvf_async_commit();
    }
}

/* Bytes of q, top, sum and mass. */
template <bool PAIRED>
static __device__ __forceinline__ uint32_t query_of(const kvf_score_codes_args &a,
                                                    const columns &columns, uint32_t column)
{
    if (!PAIRED)
        return query_of(a, columns, column);
    return column < a.sub.count ? columns.l * a.group + column : NO_QUERY;
}

/* Lists with codes in common: skipped tokens of the warp's code group 4i + k, in lane 8k + n of
 * the columns' n-th list. */
static __device__ __forceinline__ uint32_t held_skips(const kvf_score_codes_args &a, const tile &t,
                                                      const columns &columns, uint32_t first,
                                                      uint32_t i)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, n = lane % HEADS;
    const uint32_t group = first + i * SKIPS + lane / HEADS;
    return n < columns.count && group * KVF_CODE_TOKENS < t.tokens
               ? skipped(a, t, list_of(a, columns, n * a.sub.count), group)
               : 0xffffffffu;
}

/* Skipped tokens of the lane's code group of a step, for its columns. */
template <bool PAIRED> struct lane_skips {
    uint32_t of_lists[OWN / SKIPS]; /* held_skips() */
    uint32_t from[2];               /* the lane that has those of step 0 */

    __device__ __forceinline__ lane_skips(const kvf_score_codes_args &a, const tile &t,
                                          const columns &columns, const own &o)
    {
        if constexpr (!PAIRED) {
#pragma unroll
            for (uint32_t i = 0; i < OWN / SKIPS; i++)
                of_lists[i] = held_skips(a, t, columns, o.first, i);
#pragma unroll
            for (uint32_t h = 0; h < 2; h++)
                from[h] = (lane_column<PAIRED>() + h) / a.sub.count;
        }
    }
    __device__ __forceinline__ uint32_t get(const own &o, uint32_t step, uint32_t h) const
    {
        const uint32_t first = o.skips[step * steps<PAIRED>::groups];
        const uint32_t last = o.skips[step * steps<PAIRED>::groups + PAIRED];
        if (PAIRED)
            return lane_group<PAIRED>(step) % 2 ? last : first;
        return __shfl_sync(KVF_FULL_WARP, of_lists[step / SKIPS],
                           (int)(step % SKIPS * HEADS + from[h]));
    }
    /* False: none in the step. The same in all lanes. */
    __device__ __forceinline__ bool any(const own &o, uint32_t step) const
    {
        return !PAIRED || (o.skips[step * 2] | o.skips[step * 2 + 1]) != 0;
    }
};

/* sum = products of the warp's k-th code group, which is there, with the lane's part of B. */
template <uint32_t SPANS>
static __device__ __forceinline__ void
multiply_group(int32_t sum[2][1][4], const char *slots, uint32_t k, uint32_t table,
               const uint32_t place[SPANS], const uint4 queries[SPANS])
{
    const char *at = slots + k * SPANS * KVF_WARP_LANES * sizeof(uint4);
#pragma unroll
    for (uint32_t s = 0; s < SPANS; s++)
        multiply<1>(sum, *(const uint4 *)(at + place[s]), table, &queries[s], 1);
}

/* The lane's part of queries: of B, and scales of its columns. */
template <uint32_t SPANS, bool PAIRED> struct held_queries {
    uint4 part[1 + PAIRED][SPANS];
    float scale[2];

    __device__ __forceinline__ held_queries(const kvf_score_codes_args &a, const columns &columns)
    {
        const uint32_t lane = threadIdx.x % KVF_WARP_LANES, column = lane / 4;
        uint32_t query = query_of<PAIRED>(a, columns, PAIRED ? column % 4 : column);
#pragma unroll
        for (uint32_t i = 0; i < SPANS; i++) {
            const uint32_t word = i * 4 + lane % 4;
            part[0][i] = query_part(a, PAIRED && column >= 4 ? NO_QUERY : query, word);
            if (PAIRED)
                part[PAIRED][i] = query_part(a, column < 4 ? NO_QUERY : query, word);
        }
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            query = query_of<PAIRED>(a, columns, lane_column<PAIRED>() + h);
            scale[h] = query != NO_QUERY ? a.q_scale[query] : 0.0f;
        }
    }
};

/* Logits of a step, of which `scales` and `skip` are the lane's. */
template <bool PAIRED>
static __device__ __forceinline__ void
hold_step(float s[2][4], const int32_t sum[2][1][4], uint2 scales, const float q_scale[2],
          const lane_skips<PAIRED> &skips, const own &o, uint32_t step, float top[2])
{
    const uint32_t token = threadIdx.x % KVF_WARP_LANES / 4 * 4;
    const float2 low = kvf_unpair<kvf_half>(scales.x), high = kvf_unpair<kvf_half>(scales.y);
    const float scale[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (uint32_t h = 0; h < 2; h++)
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) {
            const float dot =
                __fsub_rn(kvf_bits_float((uint32_t)sum[n / 2][0][n % 2 * 2 + h]), ZERO);
            s[h][n] = __fmul_rn(__fmul_rn(dot, scale[n]), q_scale[h]);
        }
    if (skips.any(o, step)) {
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            const uint32_t skip = skips.get(o, step, h) >> token;
#pragma unroll
            for (uint32_t n = 0; n < 4; n++)
                s[h][n] = skip >> n & 1 ? -INFINITY : s[h][n];
        }
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; h++)
#pragma unroll
        for (uint32_t n = 0; n < 4; n++)
            top[h] = fmaxf(top[h], s[h][n]);
}

/* Over the lanes that have the same columns. */
template <bool PAIRED> static __device__ __forceinline__ float lanes_max(float x)
{
#pragma unroll
    for (int step = PAIRED ? 2 : 4; step < (int)KVF_WARP_LANES; step *= 2)
        x = fmaxf(x, __shfl_xor_sync(KVF_FULL_WARP, x, step));
    return x;
}

/* Logits of the warp, and the largest of both columns. */
template <uint32_t SPANS, bool PAIRED>
static __device__ __forceinline__ void
hold_logits(const kvf_score_codes_args &a, const own &o, const held_queries<SPANS, PAIRED> &q,
            const uint2 scales[], const lane_skips<PAIRED> &skips, float s[][2][4], float top[2])
{
    const uint32_t table = kvf_kept(LEVELS);
    uint32_t place[SPANS];
    top[0] = top[1] = -INFINITY;
#pragma unroll
    for (uint32_t i = 0; i < SPANS; i++)
        place[i] = word_place(a.head_dim, i);
#pragma unroll
    for (uint32_t i = 0; i < steps<PAIRED>::count; i++) {
        int32_t sum[2][1][4];
#pragma unroll
        for (uint32_t k = 0; k < 8; k++)
            sum[k / 4][0][k % 4] = ZERO_BITS;
        kvf_async_wait<(int)steps<PAIRED>::count - 1>();
        __syncwarp();
        kvf_async_commit();
#pragma unroll
        for (uint32_t k = 0; k < steps<PAIRED>::groups; k++)
            multiply_group<SPANS>(sum, o.slots, i * steps<PAIRED>::groups + k, table, place,
                                  q.part[k]);
        hold_step<PAIRED>(s[i], sum, scales[i], q.scale, skips, o, i, top);
    }
    top[0] = lanes_max<PAIRED>(top[0]);
    top[1] = lanes_max<PAIRED>(top[1]);
}

/* Masses of the warp's pages for one of the lane's columns; returns their sum over the lanes that
 * have the same columns: those of its even and of its odd code groups first, whatever a step is. */
template <uint32_t PAGE, bool PAIRED>
static __device__ __forceinline__ float hold_masses(const float s[][2][4], const tile &t,
                                                    const own &o, const lane_skips<PAIRED> &skips,
                                                    uint32_t h, float base, kvf_bf16 *mass)
{
    const uint32_t token = threadIdx.x % KVF_WARP_LANES / 4 * 4;
    const bool is_first = token % PAGE == 0;
    float sum[2] = {};
#pragma unroll
    for (uint32_t i = 0; i < steps<PAIRED>::count; i++) {
        float e[4];
#pragma unroll
        for (uint32_t n = 0; n < 4; n++)
            e[n] = kvf_exp2((s[i][h][n] - base) * LOG2E);
        float weight = (e[0] + e[1]) + (e[2] + e[3]);
#pragma unroll
        for (uint32_t step = 4; step < PAGE; step *= 2)
            weight += __shfl_xor_sync(KVF_FULL_WARP, weight, (int)step);
        if (is_first)
            sum[PAIRED ? 0 : i % 2] += weight;
        if (skips.any(o, i)) {
            const uint32_t left = ~skips.get(o, i, h) >> token;
            weight = left & 0xffffffffu >> (32 - PAGE) ? weight : -1.0f;
        }
        const uint32_t at = (o.first + lane_group<PAIRED>(i)) * KVF_CODE_TOKENS + token;
        if (is_first && at < t.tokens && mass)
            mass[at / PAGE] = kvf_from_float<kvf_bf16>(weight);
    }
    float all = PAIRED ? sum[0] + __shfl_xor_sync(KVF_FULL_WARP, sum[0], 2) : sum[0] + sum[1];
#pragma unroll
    for (int step = 4; step < (int)KVF_WARP_LANES; step *= 2)
        all += __shfl_xor_sync(KVF_FULL_WARP, all, step);
    return all;
}

/* parts [2, HEADS, HELD_WARPS]: largest and sum of every warp. The next call may write over a
 * call's shared memory after its first barrier. */
template <uint32_t PAGE, uint32_t SPANS, bool PAIRED>
static __device__ __forceinline__ void
score_codes_held(const kvf_score_codes_args &a, const tile &t, const columns &columns, const own &o,
                 const held_queries<SPANS, PAIRED> &q, const uint2 scales[], float *parts)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const bool is_told = lane < (PAIRED ? 2 : 4);
    float *tops = parts + lane_column<PAIRED>() * HELD_WARPS, *sums = tops + HEADS * HELD_WARPS;
    const lane_skips<PAIRED> skips(a, t, columns, o);
    float s[steps<PAIRED>::count][2][4], top[2];
    hold_logits<SPANS, PAIRED>(a, o, q, scales, skips, s, top);
    if (is_told) {
        tops[warp] = top[0];
        tops[HELD_WARPS + warp] = top[1];
    }
    __syncthreads();
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t query = query_of<PAIRED>(a, columns, lane_column<PAIRED>() + h);
        kvf_bf16 *mass = (kvf_bf16 *)a.mass + (size_t)query * a.pages_max + t.first / PAGE;
        top[h] = tops[h * HELD_WARPS];
#pragma unroll
        for (uint32_t w = 1; w < HELD_WARPS; w++)
            top[h] = fmaxf(top[h], tops[h * HELD_WARPS + w]);
        const float sum =
            hold_masses<PAGE, PAIRED>(s, t, o, skips, h, top[h] == -INFINITY ? 0.0f : top[h],
                                      query != NO_QUERY ? mass : nullptr);
        if (is_told)
            sums[h * HELD_WARPS + warp] = sum;
    }
    __syncthreads();
    if (warp != 0 || !is_told)
        return;
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t query = query_of<PAIRED>(a, columns, lane_column<PAIRED>() + h);
        const size_t at = (size_t)query * a.tiles_max + t.first / KVF_SCORE_CODES_TOKENS;
        float sum = 0.0f;
        for (uint32_t w = 0; w < HELD_WARPS; w++)
            sum += sums[h * HELD_WARPS + w];
        if (query != NO_QUERY) {
            a.tile_max[at] = top[h];
            a.tile_sum[at] = sum;
        }
    }
}

/* The block's tile, of the list that it is of; false if it is none, or another block scores it. */
static __device__ __forceinline__ bool find_tile(const kvf_score_codes_args &a, uint32_t list,
                                                 bool is_alone, tile *t, uint32_t *sharers)
{
    const uint32_t first = blockIdx.x * KVF_SCORE_CODES_TOKENS;
    const uint32_t all = a.pages[list] * a.page_size;
    *sharers = is_alone ? 1 : kvf_score_codes_sharers(&a, blockIdx.y, blockIdx.x);
    *t = {list, first, kvf_min_u32(KVF_SCORE_CODES_TOKENS, all - first)};
    return *sharers && first < all;
}

/* SPANS * 4 words of a token at most. */
template <uint32_t HEAD_BLOCKS, uint32_t SPANS, bool CAPPED>
static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES, HEAD_BLOCKS == 2 ? 2 : 3)
    score_codes_tile(const __grid_constant__ kvf_score_codes_args a)
{
    tile t;
    uint32_t sharers;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (!find_tile(a, kvf_score_codes_list(&a, blockIdx.y), false, &t, &sharers))
        return;
    uint4 *queries = (uint4 *)kvf_shared();
    float *logits = (float *)(queries + SPANS * HEAD_BLOCKS * KVF_WARP_LANES);
    float *parts = logits + (size_t)a.sub.count * KVF_SCORE_CODES_TOKENS;
    char *slots = (char *)(parts + (size_t)a.sub.count * 2 * WARPS) +
                  threadIdx.x / KVF_WARP_LANES * ring<SPANS>::slots * ring<SPANS>::slot_bytes;
    for (uint32_t i = 0; i < sharers; i++) {
        const columns one = {blockIdx.y + i * a.row_lists, 1};
        score_codes_groups<HEAD_BLOCKS, SPANS, CAPPED>(a, t, one, queries, logits, slots);
        __syncthreads();
        score_codes_heads(a, t, list_of(a, one, 0), logits, parts);
        __syncthreads();
    }
}

/* Blocks of a multiprocessor that registers have room for without spills. */
template <uint32_t SPANS, bool PAIRED> struct held_blocks {
    static const uint32_t count = PAIRED ? (SPANS == 2 ? 5 : 4) : (SPANS == 2 ? 3 : 2);
};

template <uint32_t PAGE, uint32_t SPANS, bool PAIRED>
static __global__ void __launch_bounds__(HELD_WARPS *KVF_WARP_LANES,
                                         held_blocks<SPANS, PAIRED>::count)
    score_codes_pages(const __grid_constant__ kvf_score_codes_args a)
{
    tile t;
    uint32_t sharers;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const uint32_t list = PAIRED ? blockIdx.y : kvf_score_codes_list(&a, blockIdx.y);
    const uint32_t *blocks = kvf_score_codes_blocks(&a, list);
    const uint64_t *bits = a.bits[list];
    const char *codes = a.physical ? nullptr : (const char *)a.codes[list];
    /* There are always bits. Without the question they would be asked for after the length. */
    if (!find_tile(a, list, PAIRED, &t, &sharers) | !bits)
        return;
    float *parts = (float *)kvf_shared();
    own o = {};
    uint2 scales[steps<PAIRED>::count];
    const uint32_t groups = kvf_div_ceil_u32(t.tokens, KVF_CODE_TOKENS);
    o.first = threadIdx.x / KVF_WARP_LANES * OWN;
    o.slots =
        (char *)(parts + 2 * HEADS * HELD_WARPS) + o.first * SPANS * KVF_WARP_LANES * sizeof(uint4);
    const found_group group = find_groups(a, t, blocks, bits, codes, &o);
    const uint32_t left = groups > o.first ? groups - o.first : 0;
    if constexpr (PAIRED) {
        const columns both = {list, 1};
        const held_queries<SPANS, PAIRED> q(a, both);
        begin_tile<SPANS, PAIRED>(a, o, group, true, left, scales);
        score_codes_held<PAGE, SPANS, PAIRED>(a, t, both, o, q, scales, parts);
    } else {
        begin_tile<SPANS, PAIRED>(a, o, group, sharers == 1, left, scales);
        for (uint32_t i = 0, most = HEADS / a.sub.count; i < sharers; i += most) {
            const columns some = {blockIdx.y + i * a.row_lists, kvf_min_u32(sharers - i, most)};
            const held_queries<SPANS, PAIRED> q(a, some);
            score_codes_held<PAGE, SPANS, PAIRED>(a, t, some, o, q, scales, parts);
        }
    }
}

template <uint32_t PAGE, uint32_t SPANS>
static int launch_pages(const kvf_score_codes_args *a, cudaStream_t stream)
{
    const size_t shared = 2 * HEADS * HELD_WARPS * sizeof(float) +
                          (size_t)GROUPS * SPANS * KVF_WARP_LANES * sizeof(uint4);
    const dim3 grid(a->tiles_max, a->lists), block(HELD_WARPS * KVF_WARP_LANES);
    if (a->sub.count <= HEADS / 2 && !a->order)
        return kvf_cuda_launch_early<score_codes_pages<PAGE, SPANS, true>>(grid, block, shared,
                                                                           stream, *a);
    return kvf_cuda_launch_early<score_codes_pages<PAGE, SPANS, false>>(grid, block, shared, stream,
                                                                        *a);
}

template <uint32_t HEAD_BLOCKS, uint32_t SPANS, bool CAPPED>
static int launch_tiles(const kvf_score_codes_args *a, cudaStream_t stream)
{
    const size_t shared =
        SPANS * HEAD_BLOCKS * KVF_WARP_LANES * sizeof(uint4) +
        (size_t)a->sub.count * (KVF_SCORE_CODES_TOKENS + 2 * WARPS) * sizeof(float) +
        (size_t)WARPS * ring<SPANS>::slots * ring<SPANS>::slot_bytes;
    return kvf_cuda_launch_early<score_codes_tile<HEAD_BLOCKS, SPANS, CAPPED>>(
        dim3(a->tiles_max, a->lists), dim3(WARPS * KVF_WARP_LANES), shared, stream, *a);
}

template <uint32_t HEAD_BLOCKS, uint32_t SPANS>
static int launch(const kvf_score_codes_args *a, cudaStream_t stream)
{
    return a->cap > 0.0f ? launch_tiles<HEAD_BLOCKS, SPANS, true>(a, stream)
                         : launch_tiles<HEAD_BLOCKS, SPANS, false>(a, stream);
}

template <uint32_t SPANS> static int launch_any(const kvf_score_codes_args *a, cudaStream_t stream)
{
    if (a->sub.count > HEADS)
        return launch<2, SPANS>(a, stream);
    if (a->cap > 0.0f)
        return launch<1, SPANS>(a, stream);
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

/* A sub-group, whose head 0 its pointers name: kernels know its number of heads, and what lies from
 * list to list. */
static kvf_score_codes_args take_subgroup(const kvf_score_codes_args *a, kvf_subgroup sub)
{
    kvf_score_codes_args one = *a;
    one.q = a->q + (size_t)sub.first * a->head_dim;
    one.q_scale = a->q_scale + sub.first;
    one.mass = a->mass + (size_t)sub.first * a->pages_max;
    one.tile_max = a->tile_max + (size_t)sub.first * a->tiles_max;
    one.tile_sum = a->tile_sum + (size_t)sub.first * a->tiles_max;
    one.sub.first = 0;
    one.sub.count = sub.count;
    return one;
}

extern "C" int kvf_score_codes_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_score_codes_args *a = (const kvf_score_codes_args *)args;
    const kvf_subgroup whole = kvf_subgroup_whole(a->sub, a->group);
    int error = cudaSuccess;
    for (uint32_t at = 0; at < whole.count && error == cudaSuccess; at += KVF_SUBGROUP_HEADS) {
        const kvf_score_codes_args one = take_subgroup(a, kvf_subgroup_at(whole, at));
        error = one.head_dim <= 128 ? launch_any<2>(&one, (cudaStream_t)stream)
                                    : launch_any<4>(&one, (cudaStream_t)stream);
    }
    return error;
}
