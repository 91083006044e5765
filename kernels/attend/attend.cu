/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sparse paged attention over spans, on the GPU; see attend_ref.c for the meaning.
 *
 * Knows nothing of pages beyond their address, their live tokens and whether they arrive late.
 * Grid: one block per (list, split). What a split gives depends on its spans and on the shape of
 * the launch alone, never on the pass or on other splits; a split of another pass exits before it
 * writes.
 *
 * 16-bit types: chunk c of 16 tokens belongs to warp c % warps, which walks its chunks through a
 * ring of its own in shared memory (keys and values of a chunk are two slots of it), so that
 * nothing but the end of the split makes warps wait for each other. The rows of the group, padded
 * to 16, are one side of the matrix products. Tokens that do not count are filled with zeros and
 * never read. Softmax is online in fp32, in powers of two; the weights enter the second product as
 * two 16-bit numbers each, which keep 17 (bf16) or 22 (fp16) bits of them. At the end the warps'
 * results are merged in warp order.
 *
 * Bound: bytes. A chunk of 16 tokens at head_dim 128 is 8 KiB from device memory, 48 matrix
 * products of 16x8x16, 16 matrix loads and 8 exponentials per lane: at 4096 operations per product
 * a fifth of what the tensor cores of an A100 or H100 do while the memory delivers 8 KiB. With the
 * ring full an SM has 48 to 70 KiB on their way per block, so one block alone streams at what one
 * SM can take.
 *
 * fp32: plain sums by channel and by row, for tests and for comparison; no bound claimed.
 */

#include "cuda_kernels.h"
#include "plain.cuh"
#include "split.h"
#include "tile.cuh"

#define WARPS      4u
#define CHUNK      16u /* tokens */
#define GROUP_ROWS 16u

/* The split of this block; as kvf_split_get, by all lanes of a warp together. */
static __device__ __forceinline__ bool split_of(const kvf_attend_args *a, kvf_split *out)
{
    const uint32_t splits_max = kvf_div_ceil_u32(a->spans_max, a->split);
    const uint32_t first = blockIdx.x % splits_max * a->split;
    out->list = blockIdx.x / splits_max;
    const uint32_t spans = a->span_count[out->list];
    if (first >= spans)
        return false;
    out->count = kvf_min_u32(a->split, spans - first);
    out->spans = a->spans + (size_t)out->list * a->spans_max + first;
    if (a->pass == KVF_PASS_ALL)
        return true;
    bool fetched = false;
    for (uint32_t i = threadIdx.x % KVF_WARP_LANES; i < out->count; i += KVF_WARP_LANES)
        fetched |= out->spans[i].fetched != 0;
    return (__any_sync(KVF_FULL_WARP, fetched) != 0) == (a->pass == KVF_PASS_FETCHED);
}

/* Live tokens of a span, as bits. */
static __device__ __forceinline__ uint64_t span_live(const kvf_span *span, uint32_t page_size)
{
    return kvf_live_bits(kvf_min_u32(span->count, page_size), span->skip);
}

/* ---- 16-bit types ---- */

/* Slots of a warp's ring: as many as leave room for a block on devices with 99 KiB, at most 8. */
template <uint32_t D> struct ring {
    static const uint32_t slot_bytes = CHUNK * kvf_tile<D>::stride;
    static const uint32_t fit = 101376u / (WARPS * slot_bytes);
    static const uint32_t slots = fit > 8 ? 8 : fit;
    static_assert(slots >= 3, "keys and values in use, and one slot on its way");
};

/* 16 tokens: two runs of 8 rows, each of one page, or of as many smaller pages. */
typedef struct token_chunk {
    const char *keys[2]; /* of 8 tokens, each before its value; only where a token is live */
    uint32_t live;       /* bits */
    uint32_t first;      /* token of the split; of pages of less than 8 tokens */
} token_chunk;

/* Key of a token of the split. */
static __device__ __forceinline__ const char *
token_key(const kvf_attend_args *a, const kvf_split *split, uint32_t token, uint32_t token_bytes)
{
    const uint32_t page_size = a->shape.page_size;
    const kvf_span *span = &split->spans[token >> kvf_page_shift(page_size)];
    return (const char *)span->page + (token & (page_size - 1)) * token_bytes;
}

/* The same of pages of less than 8 tokens: a lane looks at a token. */
static __device__ __forceinline__ token_chunk small_chunk_at(const kvf_attend_args *a,
                                                             const kvf_split *split, uint32_t index)
{
    const uint32_t page_size = a->shape.page_size, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t token = index * CHUNK + lane, span = token >> kvf_page_shift(page_size);
    const bool live = lane < CHUNK && span < split->count &&
                      (span_live(&split->spans[span], page_size) >> (token & (page_size - 1)) & 1);
    token_chunk c = {{(const char *)a->q, (const char *)a->q}, 0, index * CHUNK};
    c.live = __ballot_sync(KVF_FULL_WARP, live);
    return c;
}

static __device__ __forceinline__ token_chunk chunk_at(const kvf_attend_args *a,
                                                       const kvf_split *split, uint32_t index,
                                                       uint32_t token_bytes)
{
    const uint32_t page_size = a->shape.page_size;
    const uint32_t span = index * CHUNK >> kvf_page_shift(page_size);
    const uint32_t row = index * CHUNK & (page_size - 1);
    token_chunk c = {{(const char *)a->q, (const char *)a->q}, 0, 0};
    if (page_size < 8)
        return small_chunk_at(a, split, index);
    if (span >= split->count)
        return c;
    c.live = (uint32_t)(span_live(&split->spans[span], page_size) >> row) & 0xffffu;
    if (c.live)
        c.keys[0] = c.keys[1] = (const char *)split->spans[span].page + row * token_bytes;
    if (page_size >= CHUNK) {
        c.keys[1] += c.live ? 8 * token_bytes : 0;
    } else if (span + 1 < split->count) {
        const uint32_t live = (uint32_t)span_live(&split->spans[span + 1], page_size);
        c.live |= live << 8;
        if (live)
            c.keys[1] = (const char *)split->spans[span + 1].page;
    }
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
    token_chunk next; /* of the keys to ask for next, or of the values */
    token_chunk after;
} walker;

/* Begins the copy of one slot: keys [CHUNK, D] or values of a chunk. */
template <uint32_t D>
static __device__ __forceinline__ void ask(walker *s, const kvf_attend_args *a,
                                           const kvf_split *split, char *slots, uint32_t lane,
                                           uint32_t warp)
{
    const uint32_t chunk = s->issued / 2;
    if (chunk < s->count) {
        size_t values = 0;
        if (s->issued % 2 == 0) {
            s->next = s->after;
            s->after = chunk_at(a, split, warp + (chunk + 1) * s->warps, 4 * D);
            s->queue |= (uint64_t)s->next.live << (chunk - s->taken) * 16;
        } else {
            values = 2 * D;
        }
        char *to = slots + s->slot * ring<D>::slot_bytes;
        if (s->next.live) {
#pragma unroll
            for (uint32_t i = 0; i < kvf_tile<D>::pieces / 2; i++) {
                const uint32_t piece = i * KVF_WARP_LANES + lane;
                const uint32_t row = piece / kvf_tile<D>::pieces;
                const uint32_t column = piece % kvf_tile<D>::pieces;
                const bool live = s->next.live >> row & 1;
                const char *from = row < 8 ? s->next.keys[0] : s->next.keys[1];
                if (a->shape.page_size >= 8)
                    from += live ? values + row % 8 * (4 * D) + column * 16 : 0;
                else if (live)
                    from = token_key(a, split, s->next.first + row, 4 * D) + values + column * 16;
                kvf_async_copy16(to + row * kvf_tile<D>::stride + column * 16, from, live ? 16 : 0);
            }
        }
        s->issued++;
        s->slot = s->slot + 1 == ring<D>::slots ? 0 : s->slot + 1;
    }
    kvf_async_commit();
}

/* What a warp has of its rows: lane 4 * g + i has rows g and g + 8. */
template <uint32_t D> struct warp_rows {
    uint32_t q[kvf_tile<D>::steps][4];
    float o[D / 8][4];
    float top[2];
    float sum[2]; /* of this lane's columns */
};

template <uint32_t D>
static __device__ __forceinline__ void begin_rows(warp_rows<D> *r, const kvf_attend_args *a,
                                                  uint32_t list, uint32_t lane)
{
    const uint32_t row = lane / 4, column = lane % 4 * 2;
    const char *q = (const char *)a->q + ((size_t)list * a->group + row) * (2 * D);
    const char *far = row + 8 < a->group ? q + 8 * 2 * D : q;
#pragma unroll
    for (uint32_t k = 0; k < kvf_tile<D>::steps; k++) {
        r->q[k][0] = kvf_row_word(q, k * 16 + column, row < a->group);
        r->q[k][1] = kvf_row_word(far, k * 16 + column, row + 8 < a->group);
        r->q[k][2] = kvf_row_word(q, k * 16 + column + 8, row < a->group);
        r->q[k][3] = kvf_row_word(far, k * 16 + column + 8, row + 8 < a->group);
    }
#pragma unroll
    for (uint32_t n = 0; n < D / 8; n++)
        r->o[n][0] = r->o[n][1] = r->o[n][2] = r->o[n][3] = 0.0f;
    r->top[0] = r->top[1] = -INFINITY;
    r->sum[0] = r->sum[1] = 0.0f;
}

/* q.k of 16 tokens in units of ln 2; -INFINITY where a token does not count. */
template <typename T, uint32_t D>
static __device__ __forceinline__ void chunk_logits(float s[2][4], const warp_rows<D> *r,
                                                    const char *keys, uint32_t live, float unit,
                                                    uint32_t lane)
{
#pragma unroll
    for (uint32_t n = 0; n < 2; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < kvf_tile<D>::steps; k++) {
        uint32_t b[4];
        kvf_load_tiles4(b, kvf_tile_keys<D>(keys, 0, k * 16, lane));
        kvf_mma(s[0], r->q[k], b, T());
        kvf_mma(s[1], r->q[k], b + 2, T());
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

/* Logits become weights; what was summed so far is rescaled. `side`: rows g or g + 8. */
template <uint32_t D>
static __device__ __forceinline__ void soften(warp_rows<D> *r, float s[2][4], uint32_t side)
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
    for (uint32_t n = 0; n < D / 8; n++) {
        r->o[n][e] *= factor;
        r->o[n][e + 1] *= factor;
    }
}

/* Adds weights x values of 16 tokens. */
template <typename T, uint32_t D>
static __device__ __forceinline__ void add_values(warp_rows<D> *r, const float s[2][4],
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
    for (uint32_t k = 0; k < kvf_tile<D>::steps; k++) {
        uint32_t b[4];
        kvf_load_tiles4_transposed(b, kvf_tile_rows<D>(values, 0, k * 16, lane));
        kvf_mma(r->o[2 * k], high, b, T());
        kvf_mma(r->o[2 * k + 1], high, b + 2, T());
        kvf_mma(r->o[2 * k], low, b, T());
        kvf_mma(r->o[2 * k + 1], low, b + 2, T());
    }
}

/* The chunks of one warp, in order. */
template <typename T, uint32_t D>
static __device__ __forceinline__ void walk(warp_rows<D> *r, const kvf_attend_args *a,
                                            const kvf_split *split, char *slots, uint32_t lane,
                                            uint32_t warp, uint32_t warps)
{
    const uint32_t chunks = kvf_div_ceil_u32(split->count * a->shape.page_size, CHUNK);
    const float unit = a->scale * KVF_CUDA_LOG2E;
    walker s = {};
    s.warps = warps;
    s.count = chunks > warp ? (chunks - warp - 1) / warps + 1 : 0;
    s.after = chunk_at(a, split, warp, 4 * D);
    for (uint32_t i = 0; i + 1 < ring<D>::slots; i++)
        ask<D>(&s, a, split, slots, lane, warp);
    uint32_t slot = 0;
    for (uint32_t chunk = 0; chunk < s.count; chunk++) {
        float logits[2][4];
        const uint32_t live = (uint32_t)s.queue & 0xffffu;
        s.queue >>= 16;
        s.taken++;
        kvf_async_wait<(int)ring<D>::slots - 2>();
        __syncwarp();
        ask<D>(&s, a, split, slots, lane, warp);
        if (live) {
            chunk_logits<T, D>(logits, r, slots + slot * ring<D>::slot_bytes, live, unit, lane);
            soften<D>(r, logits, 0);
            if (a->group > 8)
                soften<D>(r, logits, 1);
        }
        slot = slot + 1 == ring<D>::slots ? 0 : slot + 1;
        kvf_async_wait<(int)ring<D>::slots - 2>();
        __syncwarp();
        ask<D>(&s, a, split, slots, lane, warp);
        if (live)
            add_values<T, D>(r, logits, slots + slot * ring<D>::slot_bytes, lane);
        slot = slot + 1 == ring<D>::slots ? 0 : slot + 1;
    }
}

/* A warp's rows in shared memory: o [group, D + 8], tops [GROUP_ROWS], sums [GROUP_ROWS]. */
template <uint32_t D>
static __host__ __device__ __forceinline__ uint32_t part_floats(uint32_t group)
{
    return group * (D + 8) + 2 * GROUP_ROWS;
}

template <uint32_t D>
static __device__ __forceinline__ void leave_rows(const warp_rows<D> *r, float *part,
                                                  uint32_t group, uint32_t lane)
{
#pragma unroll
    for (uint32_t side = 0; side < 2; side++) {
        const uint32_t row = lane / 4 + 8 * side;
        if (side && group <= 8)
            break; /* the whole warp */
        const float sum = kvf_quad_sum(r->sum[side]);
        if (row >= group)
            continue;
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++)
            *(float2 *)(part + row * (D + 8) + n * 8 + lane % 4 * 2) =
                make_float2(r->o[n][2 * side], r->o[n][2 * side + 1]);
        if (lane % 4 == 0) {
            part[group * (D + 8) + row] = r->top[side];
            part[group * (D + 8) + GROUP_ROWS + row] = sum;
        }
    }
}

/* Four channels of a row over the warps, in their order. */
template <uint32_t D>
static __device__ __forceinline__ void merge_parts(const kvf_attend_args *a, const float *parts,
                                                   uint32_t warps, uint32_t row, uint32_t column)
{
    const uint32_t stride = part_floats<D>(a->group);
    const float *tops = parts + a->group * (D + 8) + row, *sums = tops + GROUP_ROWS;
    float top = -INFINITY, sum = 0.0f;
    for (uint32_t w = 0; w < warps; w++)
        top = fmaxf(top, tops[w * stride]);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint32_t w = 0; w < warps; w++) {
        const float factor = kvf_exp2(tops[w * stride] - kvf_finite_top(top));
        sum += factor * sums[w * stride];
        kvf_add_scaled(&o, factor, parts + w * stride + row * (D + 8) + column);
    }
    const bool any = !(sum <= 0.0f);
    kvf_scale(&o, any ? 1.0f / sum : 0.0f);
    const size_t at = (size_t)blockIdx.x * a->group + row;
    *(float4 *)(a->partial_o + at * D + column) = o;
    if (column == 0)
        a->partial_lse[at] = any ? top * KVF_CUDA_LN2 + logf(sum) : -INFINITY;
}

/* q [lists, group, D], partial_o [lists, splits_max, group, D], partial_lse [lists, splits_max,
 * group]; WARPS or fewer warps. */
template <typename T, uint32_t D>
static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES)
    attend_chunks(const __grid_constant__ kvf_attend_args a)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t warps = blockDim.x / KVF_WARP_LANES;
    kvf_split split;
    if (!split_of(&a, &split))
        return;
    warp_rows<D> r;
    begin_rows<D>(&r, &a, split.list, lane);
    walk<T, D>(&r, &a, &split, kvf_shared() + warp * ring<D>::slots * ring<D>::slot_bytes, lane,
               warp, warps);
    float *parts = (float *)kvf_shared();
    kvf_async_wait<0>();
    __syncthreads();
    leave_rows<D>(&r, parts + warp * part_floats<D>(a.group), a.group, lane);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.group * (D / 4); i += blockDim.x)
        merge_parts<D>(&a, parts, warps, i / (D / 4), i % (D / 4) * 4);
}

template <typename T, uint32_t D>
static cudaError_t launch_chunks(const kvf_attend_args *a, uint32_t blocks, cudaStream_t stream)
{
    const uint32_t tokens = kvf_min_u32(a->split, a->spans_max) * a->shape.page_size;
    const uint32_t warps = kvf_min_u32(WARPS, kvf_div_ceil_u32(tokens, CHUNK));
    const size_t rings = (size_t)warps * ring<D>::slots * ring<D>::slot_bytes;
    const size_t parts = (size_t)warps * part_floats<D>(a->group) * sizeof(float);
    return kvf_cuda_launch<attend_chunks<T, D>>(dim3(blocks), dim3(warps * KVF_WARP_LANES),
                                                rings > parts ? rings : parts, stream, *a);
}

template <typename T>
static cudaError_t launch_type(const kvf_attend_args *a, uint32_t blocks, cudaStream_t stream)
{
#define CASE(d)                                                                                    \
    case d:                                                                                        \
        return launch_chunks<T, d>(a, blocks, stream);
    switch (a->shape.head_dim) {
        KVF_GPU_HEAD_DIMS(CASE)
    default:
        return cudaErrorInvalidValue;
    }
#undef CASE
}

/* ---- fp32 ---- */

/* Key of token `token` of the split, or NULL if it does not count. */
static __device__ __forceinline__ const float *plain_key(const kvf_attend_args *a,
                                                         const kvf_split *split, uint32_t token)
{
    const uint32_t page_size = a->shape.page_size;
    const kvf_span *span = &split->spans[token / page_size];
    if (token / page_size >= split->count || !(span_live(span, page_size) >> token % page_size & 1))
        return NULL;
    return (const float *)token_key(a, split, token, 8 * a->shape.head_dim);
}

/* Logits of tokens first .. first + KVF_PLAIN_TOKENS - 1, a token per thread. */
static __device__ __forceinline__ void plain_logits(kvf_plain_shared *state,
                                                    const kvf_attend_args *a,
                                                    const kvf_split *split, uint32_t first)
{
    static_assert(KVF_PLAIN_TOKENS == KVF_PLAIN_THREADS, "a token per thread");
    const uint32_t d = a->shape.head_dim;
    const float unit = a->scale * KVF_CUDA_LOG2E;
    const float *q = (const float *)a->q + (size_t)split->list * a->group * d;
    const float *k = plain_key(a, split, first + threadIdx.x);
    for (uint32_t g = 0; g < a->group; g++)
        state->s[g][threadIdx.x] = k ? kvf_times(kvf_dot(q + g * d, k, d), unit) : -INFINITY;
}

/* Adds weights x values to the channels of this thread. */
static __device__ __forceinline__ void plain_values(const kvf_plain_shared *state,
                                                    const kvf_attend_args *a,
                                                    const kvf_split *split, uint32_t first,
                                                    kvf_plain_rows *r)
{
    const uint32_t d = a->shape.head_dim, page_size = a->shape.page_size;
    const uint32_t count = kvf_min_u32(KVF_PLAIN_TOKENS, split->count * page_size - first);
#pragma unroll
    for (uint32_t i = 0; i < KVF_PLAIN_ITEMS; i++) {
        const uint32_t at = i * KVF_PLAIN_THREADS + threadIdx.x, row = at / (d / 4);
        if (row >= a->group)
            continue;
        kvf_scale(&r->o[i], state->factor[row]);
        for (uint32_t t = 0; t < count; t++) {
            const float weight = state->s[row][t];
            if (weight == 0.0f)
                continue; /* perhaps there is no such token */
            const float *page = (const float *)split->spans[(first + t) / page_size].page;
            kvf_add_scaled(&r->o[i], weight,
                           page + (2 * ((first + t) % page_size) + 1) * d + at % (d / 4) * 4);
        }
    }
}

static __global__ void __launch_bounds__(KVF_PLAIN_THREADS)
    attend_plain(const __grid_constant__ kvf_attend_args a)
{
    kvf_plain_shared *state = (kvf_plain_shared *)kvf_shared();
    const uint32_t quads = a.shape.head_dim / 4;
    kvf_split split;
    if (!split_of(&a, &split))
        return;
    kvf_plain_rows r;
    kvf_plain_begin(&r);
    for (uint32_t first = 0; first < split.count * a.shape.page_size; first += KVF_PLAIN_TOKENS) {
        __syncthreads();
        plain_logits(state, &a, &split, first);
        __syncthreads();
        kvf_plain_soften(state, &r, a.group);
        __syncthreads();
        plain_values(state, &a, &split, first, &r);
    }
    __syncthreads();
    const float lse = kvf_plain_end(state, &r);
    const size_t out = (size_t)blockIdx.x * a.group;
    if (threadIdx.x % KVF_PLAIN_PARTS == 0 && threadIdx.x / KVF_PLAIN_PARTS < a.group)
        a.partial_lse[out + threadIdx.x / KVF_PLAIN_PARTS] = lse;
#pragma unroll
    for (uint32_t i = 0; i < KVF_PLAIN_ITEMS; i++) {
        const uint32_t at = i * KVF_PLAIN_THREADS + threadIdx.x;
        if (at / quads >= a.group)
            continue;
        kvf_scale(&r.o[i], state->factor[at / quads]);
        *(float4 *)(a.partial_o + out * a.shape.head_dim + (size_t)at * 4) = r.o[i];
    }
}

extern "C" int kvf_attend_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_attend_args *a = (const kvf_attend_args *)args;
    (void)tasks;
    if (a->lists == 0 || a->spans_max == 0)
        return cudaSuccess;
    if (a->group == 0 || a->group > KVF_GROUP_MAX_HEADS || a->split == 0)
        return cudaErrorInvalidValue;
    const uint32_t blocks = a->lists * kvf_div_ceil_u32(a->spans_max, a->split);
    switch (a->shape.dtype) {
    case KVF_BF16:
        return launch_type<kvf_bf16>(a, blocks, (cudaStream_t)stream);
    case KVF_FP16:
        return launch_type<kvf_half>(a, blocks, (cudaStream_t)stream);
    default:
        return kvf_cuda_launch<attend_plain>(dim3(blocks), dim3(KVF_PLAIN_THREADS),
                                             sizeof(kvf_plain_shared), (cudaStream_t)stream, *a);
    }
}
