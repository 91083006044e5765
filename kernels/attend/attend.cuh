/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ATTEND_ATTEND_CUH
#define KVF_KERNELS_ATTEND_ATTEND_CUH

/*
 * One split of sparse paged attention on the tensor cores, for the kernels of attend.cu, which says
 * what it costs.
 *
 * Knows nothing of passes, of other splits, or of what becomes of its results. Chunk c of 16 tokens
 * belongs to warp c % warps, which walks its chunks through a ring of its own in shared memory
 * (keys and values of a chunk are two slots of it), so that nothing but the queries and the end of
 * the split makes warps wait for each other. A lane finds where a token is, and tells those that
 * copy it. The queries of the group, padded to 16, are one side of the matrix products; they lie in
 * shared memory, and the registers are for sums. Tokens that do not count are filled with zeros and
 * never read. Softmax is online in fp32, in powers of two; the weights enter the second product as
 * two 16-bit numbers each, which keep 17 (bf16) or 22 (fp16) bits of them. At the end the warps'
 * results are merged in warp order.
 *
 * With STEP, tokens of a span that has a home come from there, over the link, through the same
 * ring, and whoever asked for 16 bytes leaves them in the page's place when they are there: all
 * tokens of it, also those that do not count, whose bytes in the ring become zeros after that.
 */

#include "split.h"

#include "cuda/tile.cuh"

#define WARPS         4u  /* of a block at most; half of them with heads of more than 128 */
#define CHUNK         16u /* tokens */
#define GROUP_QUERIES 16u

/* Live tokens of a span, as bits. */
static __device__ __forceinline__ uint64_t span_live(const kvf_span *span, uint32_t page_size)
{
    return kvf_live_bits(kvf_min_u32(span->count, page_size), span->skip);
}

/* Bytes of the group's queries, in front of a block's shared memory: a tile of GROUP_QUERIES lines.
 */
template <uint32_t D> static __host__ __device__ __forceinline__ constexpr uint32_t query_bytes()
{
    return GROUP_QUERIES * kvf_tile<D>::stride;
}

/* Slots of a warp's ring: as many as leave room for a block on devices with 99 KiB, at most 8. */
template <uint32_t D> struct ring {
    static const uint32_t warps = D > 128 ? WARPS / 2 : WARPS;
    static const uint32_t slot_bytes = CHUNK * kvf_tile<D>::stride;
    static const uint32_t fit = (101376u - query_bytes<D>()) / (warps * slot_bytes);
    static const uint32_t slots = fit > 8 ? 8 : fit;
    static_assert(slots >= 3, "keys and values in use, and one slot on its way");
};

/* Slots that a warp of `warps` fills in the longest split: short ones have room for what they read,
 * and do not go round the ring. */
template <uint32_t D>
static __host__ __device__ __forceinline__ uint32_t ring_slots(const kvf_attend_args *a,
                                                               uint32_t warps)
{
    const uint32_t tokens = kvf_min_u32(a->split, a->spans_max) * a->shape.page_size;
    const uint32_t chunks = kvf_div_ceil_u32(kvf_div_ceil_u32(tokens, CHUNK), warps);
    return kvf_min_u32(ring<D>::slots, 2 * chunks);
}

/* Whether 16 bytes of a slot are beyond its tokens: values may be narrower than keys. */
template <uint32_t D>
static __device__ __forceinline__ bool is_after_value(uint32_t column, size_t values)
{
    return kvf_tile<D>::value_dim < D && values && column >= kvf_tile<D>::value_dim / 8;
}

/* 16 tokens. Lane l has the key of token l % CHUNK, before its value, or what is not read. */
typedef struct token_chunk {
    const char *key;
    uint32_t live; /* bits */
    uint32_t late; /* bits: they come from their page's home, live or not */
} token_chunk;

/* Key of a token of the split, in its place. */
static __device__ __forceinline__ const char *
token_key(const kvf_attend_args *a, const kvf_split *split, uint32_t token, uint32_t token_bytes)
{
    const uint32_t page_size = a->shape.page_size;
    const void *page = split->spans[token >> kvf_page_shift(page_size)].page;
    return (const char *)page + (token & (page_size - 1)) * token_bytes;
}

template <bool STEP>
static __device__ __forceinline__ token_chunk chunk_at(const kvf_attend_args *a,
                                                       const kvf_split *split, uint32_t index,
                                                       uint32_t token_bytes)
{
    const uint32_t page_size = a->shape.page_size;
    const uint32_t token = index * CHUNK + threadIdx.x % CHUNK, place = token & (page_size - 1);
    const uint32_t at = token >> kvf_page_shift(page_size);
    token_chunk c = {(const char *)a->q, 0, 0};
    bool is_live = false, is_late = false;
    if (at < split->count) {
        const kvf_span span = split->spans[at];
        is_live = span_live(&span, page_size) >> place & 1;
        is_late = STEP && span.home;
        if (is_live || is_late)
            c.key = (const char *)(is_late ? span.home : span.page) + place * token_bytes;
    }
    c.live = __ballot_sync(KVF_FULL_WARP, is_live) & 0xffffu;
    if (STEP)
        c.late = __ballot_sync(KVF_FULL_WARP, is_late) & 0xffffu;
    return c;
}

/* Where a warp is in its chunks, and what it still has to ask for. */
typedef struct walker {
    uint32_t warps;
    uint32_t count;   /* chunks of this warp */
    uint32_t issued;  /* slots asked for: keys and values of a chunk in turn */
    uint32_t taken;   /* chunks whose live bits were taken from the queue */
    uint32_t slot;    /* the next one to fill */
    uint64_t queue;   /* live bits of chunks asked for and not taken, 16 each */
    uint64_t late;    /* likewise */
    token_chunk next; /* of the keys to ask for next, or of the values */
    token_chunk after;
} walker;

/* Begins the copy of one slot: keys [CHUNK, D] or values of a chunk. */
template <uint32_t D, bool STEP>
static __device__ __forceinline__ void ask(walker *s, const kvf_attend_args *a,
                                           const kvf_split *split, char *slots, uint32_t lane,
                                           uint32_t warp)
{
    const uint32_t chunk = s->issued / 2;
    if (chunk < s->count) {
        size_t values = 0; /* where they begin, after a key */
        if (s->issued % 2 == 0) {
            s->next = s->after;
            s->after =
                chunk_at<STEP>(a, split, warp + (chunk + 1) * s->warps, kvf_tile<D>::token_bytes);
            s->queue |= (uint64_t)s->next.live << (chunk - s->taken) * 16;
            s->late |= (uint64_t)s->next.late << (chunk - s->taken) * 16;
        } else {
            values = 2 * D;
        }
        char *to = slots + s->slot * ring<D>::slot_bytes;
        const uint32_t wanted = s->next.live | s->next.late;
        if (wanted) {
#pragma unroll
            for (uint32_t i = 0; i < kvf_tile<D>::pieces / 2; i++) {
                const uint32_t piece = i * KVF_WARP_LANES + lane;
                const uint32_t token = piece / kvf_tile<D>::pieces;
                const uint32_t column = piece % kvf_tile<D>::pieces;
                const bool is_wanted = wanted >> token & 1;
                const char *key =
                    (const char *)__shfl_sync(KVF_FULL_WARP, (uintptr_t)s->next.key, (int)token);
                if (is_after_value<D>(column, values))
                    continue;
                kvf_async_copy16(to + token * kvf_tile<D>::stride + column * 16,
                                 key + (is_wanted ? values + column * 16 : 0), is_wanted ? 16 : 0);
            }
        }
        s->issued++;
        s->slot = s->slot + 1 == ring<D>::slots ? 0 : s->slot + 1;
    }
    kvf_async_commit();
}

/* The bytes of late tokens that this lane asked for have come to the slot: they go to their place
 * as well, and out of the slot if it does not count. */
template <uint32_t D>
static __device__ __forceinline__ void settle(const kvf_attend_args *a, const kvf_split *split,
                                              char *slot, uint32_t first, uint32_t live,
                                              uint32_t late, size_t values, uint32_t lane)
{
#pragma unroll
    for (uint32_t i = 0; i < kvf_tile<D>::pieces / 2; i++) {
        const uint32_t piece = i * KVF_WARP_LANES + lane;
        const uint32_t token = piece / kvf_tile<D>::pieces, column = piece % kvf_tile<D>::pieces;
        uint4 *word = (uint4 *)(slot + token * kvf_tile<D>::stride + column * 16);
        if (!(late >> token & 1) || is_after_value<D>(column, values))
            continue;
        *(uint4 *)(token_key(a, split, first + token, kvf_tile<D>::token_bytes) + values +
                   column * 16) = *word;
        if (!(live >> token & 1))
            *word = make_uint4(0, 0, 0, 0);
    }
}

/* Asks for the group's queries; those of no head are zero. By the whole block. */
template <uint32_t D>
static __device__ __forceinline__ void ask_queries(char *to, const kvf_attend_args *a,
                                                   uint32_t list)
{
    const char *q = (const char *)a->q + (size_t)list * a->group * (2 * D);
    for (uint32_t i = threadIdx.x; i < GROUP_QUERIES * kvf_tile<D>::pieces; i += blockDim.x) {
        const uint32_t query = i / kvf_tile<D>::pieces, column = i % kvf_tile<D>::pieces;
        const bool exists = query < a->sub.count;
        kvf_async_copy16(to + query * kvf_tile<D>::stride + column * 16, q + (exists ? i * 16 : 0),
                         exists ? 16 : 0);
    }
    kvf_async_commit();
}

/* A warp's part of its queries: lane 4 * g + i has queries g and g + 8. */
template <uint32_t D> struct warp_queries {
    float o[kvf_tile<D>::value_dim / 8][4];
    float top[2];
    float sum[2]; /* of this lane's columns */
};

template <uint32_t D> static __device__ __forceinline__ void begin_queries(warp_queries<D> *r)
{
#pragma unroll
    for (uint32_t n = 0; n < kvf_tile<D>::value_dim / 8; n++)
        r->o[n][0] = r->o[n][1] = r->o[n][2] = r->o[n][3] = 0.0f;
    r->top[0] = r->top[1] = -INFINITY;
    r->sum[0] = r->sum[1] = 0.0f;
}

/* q.k of 16 tokens in units of ln 2; -INFINITY where a token does not count. */
template <typename T, uint32_t D>
static __device__ __forceinline__ void chunk_logits(float s[2][4], const char *queries,
                                                    const char *keys, uint32_t live, float unit,
                                                    uint32_t lane)
{
#pragma unroll
    for (uint32_t n = 0; n < 2; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < kvf_tile<D>::steps; k++) {
        uint32_t q[4], b[4];
        kvf_load_tiles4(q, kvf_tile_lines<D>(queries, 0, k * 16, lane));
        kvf_load_tiles4(b, kvf_tile_keys<D>(keys, 0, k * 16, lane));
        kvf_mma(s[0], q, b, T());
        kvf_mma(s[1], q, b + 2, T());
    }
#pragma unroll
    for (uint32_t n = 0; n < 2; n++) {
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) {
            const uint32_t token = n * 8 + lane % 4 * 2 + e % 2;
            s[n][e] = live >> token & 1 ? kvf_times(s[n][e], unit) : -INFINITY;
        }
    }
}

/* After chunk_logits, where there is a cap. */
static __device__ __forceinline__ void cap_logits(float s[2][4], float cap)
{
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        s[i / 4][i % 4] = kvf_cap_logit(s[i / 4][i % 4], cap * KVF_CUDA_LOG2E);
}

/* Logits become weights; what was summed so far is rescaled. `side`: queries g or g + 8. */
template <uint32_t D>
static __device__ __forceinline__ void soften(warp_queries<D> *r, float s[2][4], uint32_t side)
{
    const uint32_t e = 2 * side;
    float top = fmaxf(fmaxf(s[0][e], s[0][e + 1]), fmaxf(s[1][e], s[1][e + 1]));
    top = fmaxf(r->top[side], kvf_quad_max(top));
    const float base = kvf_finite_top(top), factor = kvf_exp2(r->top[side] - base);
    r->top[side] = top;
    float sum = r->sum[side] * factor;
#pragma unroll
    for (uint32_t n = 0; n < 2; n++) {
        s[n][e] = kvf_exp2(s[n][e] - base);
        s[n][e + 1] = kvf_exp2(s[n][e + 1] - base);
        sum += s[n][e] + s[n][e + 1];
    }
    r->sum[side] = sum;
#pragma unroll
    for (uint32_t n = 0; n < kvf_tile<D>::value_dim / 8; n++) {
        r->o[n][e] *= factor;
        r->o[n][e + 1] *= factor;
    }
}

/* Adds weights x values of 16 tokens. */
template <typename T, uint32_t D>
static __device__ __forceinline__ void add_values(warp_queries<D> *r, const float s[2][4],
                                                  const char *values, uint32_t lane)
{
    uint32_t high[4], low[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const float x = s[i / 2][i % 2 * 2], y = s[i / 2][i % 2 * 2 + 1];
        high[i] = kvf_pair<T>(x, y);
        low[i] = kvf_pair_rest<T>(high[i], x, y);
    }
#pragma unroll
    for (uint32_t k = 0; k < kvf_tile<D>::value_dim / 16; k++) {
        uint32_t b[4];
        kvf_load_tiles4_transposed(b, kvf_tile_lines<D>(values, 0, k * 16, lane));
        kvf_mma(r->o[2 * k], high, b, T());
        kvf_mma(r->o[2 * k + 1], high, b + 2, T());
        kvf_mma(r->o[2 * k], low, b, T());
        kvf_mma(r->o[2 * k + 1], low, b + 2, T());
    }
}

/* The chunks of one warp, in order. `queries`: room for a tile, the same for all warps. By the
 * whole block. */
template <typename T, uint32_t D, bool STEP>
static __device__ __forceinline__ void walk(warp_queries<D> *r, const kvf_attend_args *a,
                                            const kvf_split *split, char *queries, char *slots,
                                            uint32_t lane, uint32_t warp, uint32_t warps)
{
    const uint32_t chunks = kvf_div_ceil_u32(split->count * a->shape.page_size, CHUNK);
    const float unit = a->scale * KVF_CUDA_LOG2E;
    walker s = {};
    ask_queries<D>(queries, a, split->list);
    s.warps = warps;
    s.count = chunks > warp ? (chunks - warp - 1) / warps + 1 : 0;
    s.after = chunk_at<STEP>(a, split, warp, kvf_tile<D>::token_bytes);
#pragma unroll 1
    for (uint32_t i = 0; i + 1 < ring<D>::slots; i++)
        ask<D, STEP>(&s, a, split, slots, lane, warp);
    kvf_async_wait<(int)ring<D>::slots - 1>();
    __syncthreads();
    uint32_t slot = 0;
    for (uint32_t chunk = 0; chunk < s.count; chunk++) {
        float logits[2][4];
        const uint32_t live = (uint32_t)s.queue & 0xffffu, late = (uint32_t)s.late & 0xffffu;
        const uint32_t first = (warp + chunk * warps) * CHUNK;
        s.queue >>= 16;
        s.late >>= 16;
        s.taken++;
        kvf_async_wait<(int)ring<D>::slots - 2>();
        if (STEP && late)
            settle<D>(a, split, slots + slot * ring<D>::slot_bytes, first, live, late, 0, lane);
        __syncwarp();
        ask<D, STEP>(&s, a, split, slots, lane, warp);
        if (live) {
            chunk_logits<T, D>(logits, queries, slots + slot * ring<D>::slot_bytes, live, unit,
                               lane);
            if (a->cap > 0.0f)
                cap_logits(logits, a->cap);
            soften<D>(r, logits, 0);
            if (a->sub.count > 8)
                soften<D>(r, logits, 1);
        }
        slot = slot + 1 == ring<D>::slots ? 0 : slot + 1;
        kvf_async_wait<(int)ring<D>::slots - 2>();
        if (STEP && late)
            settle<D>(a, split, slots + slot * ring<D>::slot_bytes, first, live, late, 2 * D, lane);
        __syncwarp();
        ask<D, STEP>(&s, a, split, slots, lane, warp);
        if (live)
            add_values<T, D>(r, logits, slots + slot * ring<D>::slot_bytes, lane);
        slot = slot + 1 == ring<D>::slots ? 0 : slot + 1;
    }
}

/* The o of a query, [value_dim], and a pad, in shared memory. */
template <uint32_t D> static __host__ __device__ __forceinline__ constexpr uint32_t part_stride()
{
    return kvf_tile<D>::value_dim + 8;
}

/* A warp's queries there: o [group, part_stride], tops [GROUP_QUERIES], sums [GROUP_QUERIES]. */
template <uint32_t D>
static __host__ __device__ __forceinline__ uint32_t part_floats(uint32_t group)
{
    return group * part_stride<D>() + 2 * GROUP_QUERIES;
}

template <uint32_t D>
static __device__ __forceinline__ void leave_queries(const warp_queries<D> *r, float *part,
                                                     uint32_t group, uint32_t lane)
{
#pragma unroll
    for (uint32_t side = 0; side < 2; side++) {
        const uint32_t query = lane / 4 + 8 * side;
        if (side && group <= 8)
            break; /* the whole warp */
        const float sum = kvf_quad_sum(r->sum[side]);
        if (query >= group)
            continue;
#pragma unroll
        for (uint32_t n = 0; n < kvf_tile<D>::value_dim / 8; n++)
            *(float2 *)(part + query * part_stride<D>() + n * 8 + lane % 4 * 2) =
                make_float2(r->o[n][2 * side], r->o[n][2 * side + 1]);
        if (lane % 4 == 0) {
            part[group * part_stride<D>() + query] = r->top[side];
            part[group * part_stride<D>() + GROUP_QUERIES + query] = sum;
        }
    }
}

/* Four channels of a query over the warps, in their order. */
template <uint32_t D>
static __device__ __forceinline__ void merge_parts(const kvf_attend_args *a, const float *parts,
                                                   uint32_t warps, uint32_t query, uint32_t column)
{
    const uint32_t stride = part_floats<D>(a->sub.count);
    const float *tops = parts + a->sub.count * part_stride<D>() + query,
                *sums = tops + GROUP_QUERIES;
    float top = -INFINITY, sum = 0.0f, own[ring<D>::warps];
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (uint32_t w = 0; w < ring<D>::warps; w++) {
        own[w] = w < warps ? tops[w * stride] : -INFINITY;
        top = fmaxf(top, own[w]);
    }
#pragma unroll
    for (uint32_t w = 0; w < ring<D>::warps; w++) {
        if (w >= warps)
            break;
        const float factor = kvf_exp2(own[w] - kvf_finite_top(top));
        sum += factor * sums[w * stride];
        kvf_add_scaled(&o, factor, parts + w * stride + query * part_stride<D>() + column);
    }
    const bool any = !(sum <= 0.0f);
    kvf_scale(&o, any ? 1.0f / sum : 0.0f);
    const size_t at = (size_t)blockIdx.x * a->group + query;
    *(float4 *)(a->partial_o + at * kvf_tile<D>::value_dim + column) = o;
    if (column == 0)
        a->partial_lse[at] = any ? top * KVF_CUDA_LN2 + logf(sum) : -INFINITY;
}

/* One split: q [lists, group, D], partial_o [lists, splits_max, group, value_dim], partial_lse
 * [lists, splits_max, group]; WARPS or fewer warps. */
template <typename T, uint32_t D, bool STEP>
static __device__ __forceinline__ void do_chunks(const kvf_attend_args &a, const kvf_split &split)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t warps = blockDim.x / KVF_WARP_LANES;
    constexpr uint32_t quads = kvf_tile<D>::value_dim / 4;
    warp_queries<D> r;
    begin_queries<D>(&r);
    walk<T, D, STEP>(&r, &a, &split, kvf_shared(),
                     kvf_shared() + query_bytes<D>() +
                         warp * ring_slots<D>(&a, warps) * ring<D>::slot_bytes,
                     lane, warp, warps);
    float *parts = (float *)kvf_shared();
    kvf_async_wait<0>();
    __syncthreads();
    leave_queries<D>(&r, parts + warp * part_floats<D>(a.sub.count), a.sub.count, lane);
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < a.sub.count * quads; i += blockDim.x)
        merge_parts<D>(&a, parts, warps, i / quads, i % quads * 4);
}

#endif
