/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ATTEND_ATTEND_QUANTIZED_CUH
#define KVF_KERNELS_ATTEND_ATTEND_QUANTIZED_CUH

/*
 * One split of attention whose last spans are quantized pages, on the tensor cores, in bf16.
 *
 * Knows nothing of passes or other splits. Exact spans come first and go the way of attend.cuh;
 * what a warp has of them then becomes its state for the quantized ones. Those it walks by chunks
 * of 16 tokens too, through a ring in shared memory whose slots hold codes as they are stored, and
 * codes become bf16, which holds them exactly, in registers. A rotated query enters as two bf16
 * numbers, which keep 17 bits of it, and so does a weight. A scale goes to the logit of its key and
 * to the weight of its value; where a value has scales by group, weights are made per group, and
 * minima are one product more: weights by tokens x minima by groups.
 *
 * Channels may come in any order, as long as both sides of a product have the same. In the first
 * product lane 4 * g + i reads 16 channels of token g in one piece, and the query is in that order.
 * In the second it reads the same word of four channels of four tokens, so it has channels 4 * g
 * .. + 3 of every 32, and what comes out in lane i of a query are channels 8 * i .. + 7 of
 * every 32.
 *
 * A page that misses is brought to its place before anything is read, by the whole block, with
 * BRING times 16 bytes on their way per thread.
 */

#include "attend.cuh"
#include "quantized.h"
#include "score/codes.cuh"

#define BRING 8u

/* A slot: keys [CHUNK, D], values [CHUNK, value_bytes], pieces of 16 bytes that hold the scale of a
 * key [CHUNK], and those that hold the scales of a value [CHUNK, value_scales]; live bits. NIBBLES:
 * values are in int4. */
template <uint32_t D, bool NIBBLES> struct code_ring {
    static const uint32_t value_dim = kvf_tile<D>::value_dim;
    static const uint32_t value_bytes = NIBBLES ? value_dim / 2 : value_dim;
    static const uint32_t groups = NIBBLES ? value_dim / KVF_QUANTIZED_GROUP : 0;
    static const uint32_t value_scales = NIBBLES ? 2 : 1; /* pairs need not lie in one piece */
    static const uint32_t values = CHUNK * D;
    static const uint32_t scales = values + CHUNK * value_bytes;
    static const uint32_t live = scales + CHUNK * 16 * (1 + value_scales);
    static const uint32_t slot_bytes = live + 16;
    static const uint32_t fit = (101376u - GROUP_QUERIES * D * 4) / (ring<D>::warps * slot_bytes);
    static const uint32_t slots = fit > 8 ? 8 : fit;
    static_assert(slots >= 3, "a chunk in use, and two on their way");
};

/* Bytes in front: of rotated queries, or of queries as they are. Then of what each warp has after
 * them: slots of codes, or of exact tokens and of what it leaves. */
template <uint32_t D>
static __host__ __device__ __forceinline__ uint32_t rotated_bytes(const kvf_attend_args *a)
{
    return a->sub.count * D * (uint32_t)sizeof(float);
}

template <uint32_t D, bool NIBBLES>
static __host__ __device__ __forceinline__ uint32_t code_bytes(const kvf_attend_args *a,
                                                               uint32_t warps)
{
    const uint32_t tokens = kvf_min_u32(a->split, a->spans_max) * a->shape.page_size;
    const uint32_t chunks = kvf_div_ceil_u32(kvf_div_ceil_u32(tokens, CHUNK), warps);
    return kvf_min_u32(code_ring<D, NIBBLES>::slots, chunks) * code_ring<D, NIBBLES>::slot_bytes;
}

template <uint32_t D>
static __host__ __device__ __forceinline__ uint32_t exact_bytes(const kvf_attend_args *a,
                                                                uint32_t warps)
{
    return kvf_max_u32(ring_slots<D>(a, warps) * ring<D>::slot_bytes,
                       part_floats<D>(a->sub.count) * (uint32_t)sizeof(float));
}

/* ---- codes to numbers ---- */

/* Differences of two pairs of bf16 numbers that bf16 holds. */
static __device__ __forceinline__ uint32_t pair_minus(uint32_t a, uint32_t b)
{
#if defined(__CUDA_ARCH__)
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    return d;
#else
    const float2 x = kvf_unpair<kvf_bf16>(a), y = kvf_unpair<kvf_bf16>(b);
    return kvf_pair<kvf_bf16>(x.x - y.x, x.y - y.y);
#endif
}

/* Two codes, each in the low half of 0x43xx. The low seven bits are a number 128 + n in bf16, and
 * the sign alone is 128 or 256: their difference is the code. */
static __device__ __forceinline__ uint32_t pair_of_codes(uint32_t word)
{
    return pair_minus(word & 0xff7fff7fu, word & 0xff80ff80u);
}

/* The four codes of a word. */
static __device__ __forceinline__ void codes_of(uint32_t *low, uint32_t *high, uint32_t word)
{
    *low = pair_of_codes(__byte_perm(word, 0x43434343u, 0x4140));
    *high = pair_of_codes(__byte_perm(word, 0x43434343u, 0x4342));
}

/* A number in fp16, by one instruction. */
static __device__ __forceinline__ float half_at(const uint16_t *bits)
{
    __half_raw raw;
    raw.x = *bits;
    return __half2float(__half(raw));
}

/* ---- queries ---- */

/* Rotated queries of the group in shared memory, half a warp each. By the whole block. */
template <uint32_t D>
static __device__ __forceinline__ void rotate_group(float *to, const kvf_attend_args *a,
                                                    uint32_t list)
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
    const kvf_bf16 *q = (const kvf_bf16 *)a->q + (size_t)list * a->group * D;
    for (uint32_t first = 0; first < a->sub.count; first += blockDim.x / KVF_CODE_LANES) {
        const uint32_t query = first + threadIdx.x / KVF_CODE_LANES;
        float x[KVF_CODE_WORDS];
        kvf_code_load(x, q + kvf_min_u32(query, a->sub.count - 1) * D, D / KVF_CODE_LANES);
        kvf_code_rotate_lanes(x, D / KVF_CODE_LANES);
#pragma unroll
        for (uint32_t k = 0; k < D / KVF_CODE_LANES; k++)
            if (query < a->sub.count)
                to[query * D + k * KVF_CODE_LANES + lane] = x[k];
    }
    __syncthreads();
}

/* Queries as products take them, in the order of a lane's channels. */
template <uint32_t D> struct code_queries {
    uint32_t high[D / 16][4];
    uint32_t low[D / 16][4];
};

template <uint32_t D>
static __device__ __forceinline__ void load_rotated(code_queries<D> *q, const float *rotated,
                                                    uint32_t group, uint32_t lane)
{
#pragma unroll
    for (uint32_t k = 0; k < D / 16; k++)
#pragma unroll
        for (uint32_t side = 0; side < 2; side++) {
            const uint32_t query = lane / 4 + 8 * side;
            const uint32_t channel = k / 4 * 64 + lane % 4 * 16 + k % 4 * 4;
            float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (query < group)
                x = *(const float4 *)(rotated + query * D + channel);
            q->high[k][side] = kvf_pair<kvf_bf16>(x.x, x.y);
            q->high[k][side + 2] = kvf_pair<kvf_bf16>(x.z, x.w);
            q->low[k][side] = kvf_pair_rest<kvf_bf16>(q->high[k][side], x.x, x.y);
            q->low[k][side + 2] = kvf_pair_rest<kvf_bf16>(q->high[k][side + 2], x.z, x.w);
        }
}

/* ---- the ring ---- */

/* Where a piece of a token lies, so that lanes that read at a time meet all banks: keys are read
 * in pairs, of values every second one. */
template <uint32_t PIECES>
static __device__ __forceinline__ uint32_t key_piece(uint32_t token, uint32_t piece)
{
    return PIECES == 8 ? piece ^ (token & 1) << 2 : piece;
}

template <uint32_t PIECES>
static __device__ __forceinline__ uint32_t value_piece(uint32_t token, uint32_t piece)
{
    return PIECES == 8   ? piece ^ (token >> 1 & 3) << 1
           : PIECES == 4 ? piece ^ (token >> 1 & 3)
                         : piece ^ (token >> 2 & 1);
}

/* Begins the copy of chunk `index` of the split; by the whole warp. */
template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ void ask_codes(const kvf_attend_args *a, const kvf_split *split,
                                                 char *slot, uint32_t index, uint32_t lane)
{
    typedef code_ring<D, NIBBLES> ring_t;
    const uint32_t page_size = a->shape.page_size, shift = kvf_page_shift(page_size);
    const uint32_t first = index * CHUNK, span = (first + lane) >> shift;
    const uint32_t codes = page_size * (D + ring_t::value_bytes);
    bool is_live = lane < CHUNK && span < split->count;
    if (is_live)
        is_live =
            span_live(&split->spans[span], page_size) >> ((first + lane) & (page_size - 1)) & 1;
    const uint32_t live = __ballot_sync(KVF_FULL_WARP, is_live);
    if (lane == 0)
        *(uint32_t *)(slot + ring_t::live) = live;
    if (!live)
        return;
#pragma unroll
    for (uint32_t i = 0; i < D / 32; i++) {
        const uint32_t at = i * KVF_WARP_LANES + lane, in_chunk = at / (D / 16),
                       piece = at % (D / 16);
        const bool wanted = live >> in_chunk & 1;
        const char *from = (const char *)a->q;
        if (wanted)
            from = (const char *)split->spans[(first + in_chunk) >> shift].page +
                   ((first + in_chunk) & (page_size - 1)) * D + piece * 16;
        kvf_async_copy16(slot + in_chunk * D + key_piece<D / 16>(in_chunk, piece) * 16, from,
                         wanted ? 16 : 0);
    }
    const uint32_t pieces = ring_t::value_bytes / 16;
#pragma unroll
    for (uint32_t i = 0; i < ring_t::value_bytes / 32; i++) {
        const uint32_t at = i * KVF_WARP_LANES + lane, in_chunk = at / pieces, piece = at % pieces;
        const bool wanted = live >> in_chunk & 1;
        const char *from = (const char *)a->q;
        if (wanted)
            from = (const char *)split->spans[(first + in_chunk) >> shift].page + page_size * D +
                   ((first + in_chunk) & (page_size - 1)) * ring_t::value_bytes + piece * 16;
        kvf_async_copy16(slot + ring_t::values + in_chunk * ring_t::value_bytes +
                             value_piece<ring_t::value_bytes / 16>(in_chunk, piece) * 16,
                         from, wanted ? 16 : 0);
    }
    /* The piece with the scale of a key, then the pieces with those of its value. */
#pragma unroll
    for (uint32_t at = lane; at < CHUNK * (1 + ring_t::value_scales); at += KVF_WARP_LANES) {
        const uint32_t in_chunk = at < CHUNK ? at : (at - CHUNK) / ring_t::value_scales;
        const uint32_t part = at < CHUNK ? 0 : (at - CHUNK) % ring_t::value_scales;
        const uint32_t token = (first + in_chunk) & (page_size - 1);
        const uint32_t bytes = at < CHUNK ? 2 : NIBBLES ? 4 * ring_t::groups : 2;
        const uint32_t begin = at < CHUNK ? 2 * token : 2 * page_size + bytes * token;
        const bool wanted = (live >> in_chunk & 1) && (part == 0 || begin % 16 + bytes > 16);
        const char *from = (const char *)a->q;
        if (wanted)
            from = (const char *)split->spans[(first + in_chunk) >> shift].page + codes +
                   begin / 16 * 16 + part * 16;
        kvf_async_copy16(slot + ring_t::scales + at * 16, from, wanted ? 16 : 0);
    }
}

/* Where the scale of a key is in its slot, and the scales of its value. `token`: of the page. */
template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ float key_scale(const char *slot, uint32_t in_chunk,
                                                  uint32_t token)
{
    return kvf_bf16_to_float(
        *(const uint16_t *)(slot + code_ring<D, NIBBLES>::scales + in_chunk * 16 + 2 * token % 16));
}

template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ const uint16_t *value_scales(const char *slot, uint32_t in_chunk,
                                                               uint32_t token, uint32_t page_size)
{
    typedef code_ring<D, NIBBLES> ring_t;
    const uint32_t bytes = NIBBLES ? 4 * ring_t::groups : 2;
    return (const uint16_t *)(slot + ring_t::scales +
                              (CHUNK + in_chunk * ring_t::value_scales) * 16 +
                              (2 * page_size + bytes * token) % 16);
}

/* ---- a chunk ---- */

/* The token of a chunk that element e of fragment n is about, in the columns of this lane. */
static __device__ __forceinline__ uint32_t token_of(uint32_t n, uint32_t e, uint32_t lane)
{
    return n * 8 + lane % 4 * 2 + e % 2;
}

/* As chunk_logits. `first`: the chunk's first token, of the split. */
template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ void
code_logits(float s[2][4], const code_queries<D> *q, const char *slot, uint32_t live, float unit,
            uint32_t first, uint32_t page_size, uint32_t lane)
{
#pragma unroll
    for (uint32_t n = 0; n < 2; n++) {
        const uint32_t token = lane / 4 + 8 * n;
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
        for (uint32_t k = 0; k < D / 16; k += 4) {
            const uint32_t piece = key_piece<D / 16>(token, k + lane % 4);
            const uint4 x = *(const uint4 *)(slot + token * D + piece * 16);
            const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t b[2];
                codes_of(&b[0], &b[1], words[i]);
                kvf_mma(s[n], q->high[k + i], b, kvf_bf16());
                kvf_mma(s[n], q->low[k + i], b, kvf_bf16());
            }
        }
    }
#pragma unroll
    for (uint32_t n = 0; n < 2; n++)
#pragma unroll
        for (uint32_t e = 0; e < 2; e++) {
            const uint32_t token = token_of(n, e, lane);
            const float times =
                unit * key_scale<D, NIBBLES>(slot, token, (first + token) & (page_size - 1));
            const bool is_live = live >> token & 1;
            s[n][e] = is_live ? kvf_times(s[n][e], times) : -INFINITY;
            s[n][e + 2] = is_live ? kvf_times(s[n][e + 2], times) : -INFINITY;
        }
}

/* Weights as the second product takes them. */
typedef struct weight_words {
    uint32_t high[4];
    uint32_t low[4];
} weight_words;

/* times[n][e]: of the tokens of this lane's columns. */
static __device__ __forceinline__ void score_codes_words(weight_words *w, const float s[2][4],
                                                         const float times[2][2])
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const float x = s[i / 2][i % 2 * 2] * times[i / 2][0];
        const float y = s[i / 2][i % 2 * 2 + 1] * times[i / 2][1];
        w->high[i] = kvf_pair<kvf_bf16>(x, y);
        w->low[i] = kvf_pair_rest<kvf_bf16>(w->high[i], x, y);
    }
}

/* Adds weights x codes of 32 channels. */
template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ void add_block(float o[4][4], const weight_words *w,
                                                 const char *slot, uint32_t block, uint32_t lane)
{
    typedef code_ring<D, NIBBLES> ring_t;
    const uint32_t g = lane / 4, pieces = ring_t::value_bytes / 16;
    const uint32_t piece = NIBBLES ? block : 2 * block + g / 4;
    uint32_t word[4], b[4][2];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t token = token_of(i / 2, i % 2, lane);
        word[i] = *(const uint32_t *)(slot + ring_t::values + token * ring_t::value_bytes +
                                      value_piece<pieces>(token, piece) * 16 + g % 4 * 4);
        if (NIBBLES)
            word[i] = word[i] >> (g < 4 ? 0 : 4) & 0x0f0f0f0fu;
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t x = word[2 * i], y = word[2 * i + 1];
        codes_of(&b[0][i], &b[1][i], __byte_perm(x, y, 0x5140));
        codes_of(&b[2][i], &b[3][i], __byte_perm(x, y, 0x7362));
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        kvf_mma(o[j], w->high, b[j], kvf_bf16());
        kvf_mma(o[j], w->low, b[j], kvf_bf16());
    }
}

/* Adds weights x minima: column g of the product is group g. */
template <uint32_t D>
static __device__ __forceinline__ void add_minima(float o[4], const float s[2][4],
                                                  const uint16_t *const scales[2][2], uint32_t lane)
{
    const float one[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
    const uint32_t g = lane / 4;
    weight_words w;
    uint32_t high[2], low[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const bool is_there = g < kvf_tile<D>::value_dim / KVF_QUANTIZED_GROUP;
        const float x = is_there ? half_at(&scales[i][0][2 * g + 1]) : 0.0f;
        const float y = is_there ? half_at(&scales[i][1][2 * g + 1]) : 0.0f;
        high[i] = kvf_pair<kvf_bf16>(x, y);
        low[i] = kvf_pair_rest<kvf_bf16>(high[i], x, y);
    }
    score_codes_words(&w, s, one);
    kvf_mma(o, w.high, high, kvf_bf16());
    kvf_mma(o, w.low, high, kvf_bf16());
    kvf_mma(o, w.high, low, kvf_bf16());
}

/* As add_values. */
template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ void
add_code_values(warp_queries<D> *r, float minima[4], const float s[2][4], const char *slot,
                uint32_t first, uint32_t page_size, uint32_t lane)
{
    const uint16_t *scales[2][2];
    float times[2][2];
    weight_words w;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t token = token_of(i / 2, i % 2, lane);
        scales[i / 2][i % 2] =
            value_scales<D, NIBBLES>(slot, token, (first + token) & (page_size - 1), page_size);
    }
    if (NIBBLES)
        add_minima<D>(minima, s, scales, lane);
#pragma unroll
    for (uint32_t block = 0; block < kvf_tile<D>::value_dim / 32; block++) {
#pragma unroll
        for (uint32_t i = 0; (NIBBLES || block == 0) && i < 4; i++)
            times[i / 2][i % 2] = NIBBLES ? half_at(&scales[i / 2][i % 2][2 * block])
                                          : kvf_bf16_to_float(*scales[i / 2][i % 2]);
        if (NIBBLES || block == 0)
            score_codes_words(&w, s, times);
        add_block<D, NIBBLES>(&r->o[4 * block], &w, slot, block, lane);
    }
}

/* As soften, of sums of minima too. */
template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ void soften_codes(warp_queries<D> *r, float minima[4],
                                                    float s[2][4], uint32_t side)
{
    const float before = r->top[side];
    soften<D>(r, s, side);
    if (!NIBBLES)
        return;
    const float factor = kvf_exp2(before - kvf_finite_top(r->top[side]));
    minima[2 * side] *= factor;
    minima[2 * side + 1] *= factor;
}

/* The quantized chunks of one warp, in order. */
template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ void walk_codes(warp_queries<D> *r, float minima[4],
                                                  const kvf_attend_args *a, const kvf_split *split,
                                                  const float *rotated, char *slots, uint32_t lane)
{
    typedef code_ring<D, NIBBLES> ring_t;
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, warps = blockDim.x / KVF_WARP_LANES;
    const uint32_t chunks = kvf_div_ceil_u32(split->count * a->shape.page_size, CHUNK);
    const float unit = a->scale * KVF_CUDA_LOG2E;
    code_queries<D> q;
    uint32_t asked = warp, to = 0;
    load_rotated<D>(&q, rotated, a->sub.count, lane);
    for (uint32_t i = 0; i + 1 < ring_t::slots; i++, asked += warps) {
        if (asked < chunks)
            ask_codes<D, NIBBLES>(a, split, slots + to++ * ring_t::slot_bytes, asked, lane);
        kvf_async_commit();
    }
    to = ring_t::slots - 1;
    for (uint32_t chunk = warp, slot = 0; chunk < chunks; chunk += warps, asked += warps) {
        const char *at = slots + slot * ring_t::slot_bytes;
        float logits[2][4];
        kvf_async_wait<(int)ring_t::slots - 2>();
        __syncwarp();
        if (asked < chunks)
            ask_codes<D, NIBBLES>(a, split, slots + to * ring_t::slot_bytes, asked, lane);
        kvf_async_commit();
        const uint32_t live = *(const uint32_t *)(at + ring_t::live);
        if (live) {
            code_logits<D, NIBBLES>(logits, &q, at, live, unit, chunk * CHUNK, a->shape.page_size,
                                    lane);
            if (a->cap > 0.0f)
                cap_logits(logits, a->cap);
            soften_codes<D, NIBBLES>(r, minima, logits, 0);
            if (a->sub.count > 8)
                soften_codes<D, NIBBLES>(r, minima, logits, 1);
            add_code_values<D, NIBBLES>(r, minima, logits, at, chunk * CHUNK, a->shape.page_size,
                                        lane);
        }
        slot = slot + 1 == ring_t::slots ? 0 : slot + 1;
        to = to + 1 == ring_t::slots ? 0 : to + 1;
    }
}

/* ---- a split ---- */

/* The warp's values of its queries, from the order of one product to that of the other, through the
 * warp's own shared memory. */
template <uint32_t D>
static __device__ __forceinline__ void reorder_queries(warp_queries<D> *r, float *part,
                                                       uint32_t group, uint32_t lane)
{
    kvf_async_wait<0>();
    __syncwarp();
    leave_queries<D>(r, part, group, lane);
    __syncwarp();
#pragma unroll
    for (uint32_t side = 0; side < 2; side++) {
        const uint32_t query = lane / 4 + 8 * side;
        if (query >= group)
            continue;
#pragma unroll
        for (uint32_t i = 0; i < kvf_tile<D>::value_dim / 16; i++) {
            const float4 x = *(const float4 *)(part + query * part_stride<D>() + i / 2 * 32 +
                                               lane % 4 * 8 + i % 2 * 4);
            r->o[i / 2 * 4][2 * side + i % 2] = x.x;
            r->o[i / 2 * 4 + 1][2 * side + i % 2] = x.y;
            r->o[i / 2 * 4 + 2][2 * side + i % 2] = x.z;
            r->o[i / 2 * 4 + 3][2 * side + i % 2] = x.w;
        }
    }
    __syncwarp();
}

/* As leave_queries. */
template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ void leave_codes(const warp_queries<D> *r, const float minima[4],
                                                   float *part, uint32_t group, uint32_t lane)
{
#pragma unroll
    for (uint32_t side = 0; side < 2; side++) {
        const uint32_t query = lane / 4 + 8 * side;
        const float sum = kvf_quad_sum(r->sum[side]);
        float least[kvf_tile<D>::value_dim / 32];
#pragma unroll
        for (uint32_t block = 0; block < kvf_tile<D>::value_dim / 32; block++)
            least[block] = NIBBLES ? __shfl_sync(KVF_FULL_WARP, minima[2 * side + block % 2],
                                                 (int)(lane / 4 * 4 + block / 2))
                                   : 0.0f;
        if (query >= group)
            continue;
#pragma unroll
        for (uint32_t i = 0; i < kvf_tile<D>::value_dim / 16; i++) {
            const uint32_t n = i / 2 * 4, e = 2 * side + i % 2;
            const float x = least[i / 2];
            *(float4 *)(part + query * part_stride<D>() + i / 2 * 32 + lane % 4 * 8 + i % 2 * 4) =
                make_float4(r->o[n][e] + x, r->o[n + 1][e] + x, r->o[n + 2][e] + x,
                            r->o[n + 3][e] + x);
        }
        if (lane % 4 == 0) {
            part[group * part_stride<D>() + query] = r->top[side];
            part[group * part_stride<D>() + GROUP_QUERIES + query] = sum;
        }
    }
}

/* Exact spans of a split, which come first; the same in all lanes. */
static __device__ __forceinline__ uint32_t exact_spans(const kvf_split *split)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    uint32_t first = 0, found = KVF_WARP_LANES;
    for (; first < split->count && found == KVF_WARP_LANES; first += KVF_WARP_LANES) {
        const uint32_t i = first + lane;
        const bool is_exact = i < split->count && !split->spans[i].quantized;
        found = (uint32_t)__popc(__ballot_sync(KVF_FULL_WARP, is_exact));
    }
    return first ? first - KVF_WARP_LANES + found : 0;
}

/* Quantized pages that are not here yet are brought to their place. */
static __device__ __forceinline__ void bring_codes(const kvf_attend_args *a, const kvf_split *split)
{
    const uint32_t words = (uint32_t)kvf_stored_page_bytes(&a->shape) / 16;
    const uint32_t all = split->count * words;
    for (uint32_t first = threadIdx.x; first < all; first += BRING * blockDim.x) {
        uint4 data[BRING];
#pragma unroll
        for (uint32_t k = 0; k < BRING; k++) {
            const uint32_t i = first + k * blockDim.x;
            if (i < all && split->spans[i / words].home)
                data[k] = kvf_load_once((const uint4 *)split->spans[i / words].home + i % words);
        }
#pragma unroll
        for (uint32_t k = 0; k < BRING; k++) {
            const uint32_t i = first + k * blockDim.x;
            if (i < all && split->spans[i / words].home)
                ((uint4 *)(uintptr_t)split->spans[i / words].page)[i % words] = data[k];
        }
    }
    __threadfence();
    __syncthreads();
}

/* As do_chunks. With `brings` spans that have a home are quantized, and their pages not here yet.
 * */
template <uint32_t D, bool NIBBLES>
static __device__ __forceinline__ void do_codes(const kvf_attend_args &a, const kvf_split &split,
                                                bool brings)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t warps = blockDim.x / KVF_WARP_LANES;
    constexpr uint32_t quads = kvf_tile<D>::value_dim / 4;
    float *rotated = (float *)kvf_shared();
    kvf_split exact = split, quantized = split;
    float minima[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    warp_queries<D> r;
    if (brings)
        bring_codes(&a, &split);
    exact.count = exact_spans(&split);
    quantized.spans += exact.count;
    quantized.count -= exact.count;
    begin_queries<D>(&r);
    if (exact.count) {
        char *own = kvf_shared() + query_bytes<D>() + warp * exact_bytes<D>(&a, warps);
        walk<kvf_bf16, D, false>(&r, &a, &exact, kvf_shared(), own, lane, warp, warps);
        reorder_queries<D>(&r, (float *)own, a.sub.count, lane);
        __syncthreads();
    }
    rotate_group<D>(rotated, &a, split.list);
    walk_codes<D, NIBBLES>(
        &r, minima, &a, &quantized, rotated,
        kvf_shared() + rotated_bytes<D>(&a) + warp * code_bytes<D, NIBBLES>(&a, warps), lane);
    float *parts = (float *)kvf_shared();
    kvf_async_wait<0>();
    __syncthreads();
    leave_codes<D, NIBBLES>(&r, minima, parts + warp * part_floats<D>(a.sub.count), a.sub.count,
                            lane);
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < a.sub.count * quads; i += blockDim.x)
        merge_parts<D>(&a, parts, warps, i / quads, i % quads * 4);
}

#endif
