/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention of the last queries over many keys, on the GPU, in two steps; see observe_ref.c for the
 * meaning.
 *
 * Knows nothing of policies. Both steps stream: nothing of size window x tokens is stored, in
 * shared memory neither.
 *
 * Stats, 16-bit types: grid (KV head x chunk, tiles of queries). A warp keeps 16 queries (g, w) in
 * registers; the keys of the chunk pass through three slots of shared memory. A lane has a maximum
 * and a sum for its own columns, and the four of a query are merged at the end of the chunk.
 *
 * Score, 16-bit types: grid (KV head x chunk, parts of the chunk's tokens). The block first merges
 * the statistics of its head over all chunks, in order, into a base and a share per query. A warp
 * keeps the keys of 16 tokens in registers, and the queries pass through the slots, head by head of
 * the group; weights are added up in registers over the window.
 *
 * Bound: matrix products, 2 * head_dim operations per (query, token) and step, and one exponential.
 * A key is read from device memory once per step and then comes from the second-level cache, once
 * per 64 queries; queries likewise, once per 128 tokens: at head_dim 128 that is 64 operations and
 * more per byte of that cache. Exactness: fp32 sums in a fixed order; maxima are stored in natural
 * units, rounded to fp32, and no weight exceeds one for that.
 *
 * fp32: plain, a query (stats) or a token (score) per thread; for tests and comparison.
 */

#include "common/convert.h"
#include "cuda_kernels.h"
#include "plain.cuh"

#define STATS_WARPS   4u
#define SCORE_WARPS   8u
#define SLOTS         3u
#define STEP          32u /* queries between two looks at the window's end */
#define PLAIN_THREADS 64u
#define ABSENT        UINT32_MAX /* the position of a token that does not count */

/* Keys, or queries, in one slot. */
template <uint32_t D> struct plan {
    static const uint32_t lines = D > 128 ? 32 : 64;
    static const uint32_t slot_bytes = lines * kvf_tile<D>::stride;
};

/* KV head x chunk, as in observe_ref.c. */
typedef struct span_chunk {
    const kvf_span *spans; /* [spans] */
    const uint32_t *index; /* [spans] token index of token 0 */
    size_t at;             /* of the first span among all of the launch */
    uint32_t head;
    uint32_t chunks_max;
    uint32_t tokens; /* of spans; 0: nothing to do */
} span_chunk;

static __device__ __forceinline__ span_chunk chunk_of(const kvf_observe_args *a, uint32_t task)
{
    span_chunk c;
    c.chunks_max = kvf_div_ceil_u32(a->spans_max, KVF_OBSERVE_SPANS);
    c.head = task / c.chunks_max;
    const uint32_t first = task % c.chunks_max * KVF_OBSERVE_SPANS, all = a->span_count[c.head];
    c.tokens = first < all ? kvf_min_u32(KVF_OBSERVE_SPANS, all - first) * a->shape.page_size : 0;
    c.at = (size_t)c.head * a->spans_max + first;
    c.spans = a->spans + c.at;
    c.index = a->span_index + c.at;
    return c;
}

/* Where token `token` of the chunk is in the sequence; ABSENT if it does not count. */
static __device__ __forceinline__ uint32_t position_of(const kvf_observe_args *a,
                                                       const span_chunk *c, uint32_t token)
{
    const uint32_t span = token >> kvf_page_shift(a->shape.page_size);
    const uint32_t place = token & (a->shape.page_size - 1);
    if (token >= c->tokens ||
        !(kvf_live_bits(c->spans[span].count, c->spans[span].skip) >> place & 1))
        return ABSENT;
    const uint32_t index = c->index[span] + place;
    return index < a->token_first ? ABSENT : index;
}

/* Key of a token that counts. */
static __device__ __forceinline__ const char *key_of(const kvf_observe_args *a, const span_chunk *c,
                                                     uint32_t token, size_t token_bytes)
{
    const uint32_t span = token >> kvf_page_shift(a->shape.page_size);
    return (const char *)c->spans[span].page + (token & (a->shape.page_size - 1)) * token_bytes;
}

static __device__ __forceinline__ const char *query_of(const kvf_observe_args *a, uint32_t head,
                                                       uint32_t g, uint32_t w, size_t query_bytes)
{
    const size_t at = kvf_observe_place(a, w);
    return (const char *)a->q + ((at * a->kv_heads + head) * a->group + g) * query_bytes;
}

/* Queries: heads of the group that take part, window after window. */
static __host__ __device__ __forceinline__ uint32_t queries_of(const kvf_observe_args *a)
{
    return kvf_observe_heads(a) * a->window;
}

static __device__ __forceinline__ uint32_t limit_of(const kvf_observe_args *a, uint32_t w)
{
    return kvf_min_u32(a->limit ? a->limit[w] : a->limit_first + w, ABSENT - 1);
}

/* A fragments of 16 lines of D elements in global memory; near: line lane / 4, far: 8 further. */
template <uint32_t D>
static __device__ __forceinline__ void load_lines(uint32_t r[kvf_tile<D>::steps][4],
                                                  const char *near, bool near_exists,
                                                  const char *far, bool far_exists, uint32_t lane)
{
#pragma unroll
    for (uint32_t k = 0; k < kvf_tile<D>::steps; k++) {
        const uint32_t column = k * 16 + lane % 4 * 2;
        r[k][0] = kvf_line_word(near, column, near_exists);
        r[k][1] = kvf_line_word(far, column, far_exists);
        r[k][2] = kvf_line_word(near, column + 8, near_exists);
        r[k][3] = kvf_line_word(far, column + 8, far_exists);
    }
}

static __device__ __forceinline__ uint32_t next_slot(uint32_t slot)
{
    return slot + 1 == SLOTS ? 0 : slot + 1;
}

/* Products of 16 lines in registers with lines line .. line + 8 * tiles - 1 of a slot. */
template <typename T, uint32_t D, uint32_t tiles>
static __device__ __forceinline__ void products(float s[tiles][4],
                                                const uint32_t r[kvf_tile<D>::steps][4],
                                                const char *slot, uint32_t line, uint32_t lane)
{
#pragma unroll
    for (uint32_t n = 0; n < tiles; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < kvf_tile<D>::steps; k++) {
#pragma unroll
        for (uint32_t n = 0; n < tiles; n += 2) {
            uint32_t b[4];
            kvf_load_tiles4(b, kvf_tile_keys<D>(slot, line + n * 8, k * 16, lane));
            kvf_mma(s[n], r[k], b, T());
            kvf_mma(s[n + 1], r[k], b + 2, T());
        }
    }
}

/* Products become those that `unit` makes capped logits: what is the same for all keeps no register
 * through a loop. */
template <uint32_t tiles>
static __device__ __forceinline__ void cap_products(float s[tiles][4], float unit, float cap)
{
    const float back = kvf_reciprocal(unit);
#pragma unroll
    for (uint32_t n = 0; n < tiles; n++)
#pragma unroll
        for (uint32_t e = 0; e < 4; e++)
            s[n][e] = kvf_cap_logit(s[n][e] * unit, cap * KVF_CUDA_LOG2E) * back;
}

/* q.k in fp32 as a logit. */
static __device__ __forceinline__ float plain_logit(const kvf_observe_args *a, const float *q,
                                                    const float *k)
{
    const float s = kvf_times(kvf_dot(q, k, a->shape.head_dim), a->scale * KVF_CUDA_LOG2E);
    return a->cap > 0.0f ? kvf_cap_logit(s, a->cap * KVF_CUDA_LOG2E) : s;
}

/* ---- stats, 16-bit types ---- */

/* Begins the copy of keys first .. first + plan::lines - 1, and notes their positions. */
template <uint32_t D>
static __device__ __forceinline__ void ask_keys(char *to, uint32_t *positions,
                                                const kvf_observe_args *a, const span_chunk *c,
                                                uint32_t first)
{
    if (first < c->tokens) {
        for (uint32_t i = threadIdx.x; i < plan<D>::lines; i += blockDim.x)
            positions[i] = position_of(a, c, first + i);
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < plan<D>::lines * kvf_tile<D>::pieces; i += blockDim.x) {
            const uint32_t key = i / kvf_tile<D>::pieces, column = i % kvf_tile<D>::pieces;
            const bool live = position_of(a, c, first + key) != ABSENT;
            const char *from = (const char *)a->q;
            if (live)
                from = key_of(a, c, first + key, kvf_tile<D>::token_bytes) + column * 16;
            kvf_async_copy16(to + key * kvf_tile<D>::stride + column * 16, from, live ? 16 : 0);
        }
    }
    kvf_async_commit();
}

/* Running maximum, in units of ln 2, and sum of one query over the columns of one lane. */
typedef struct query_stats {
    float top;
    float sum;
    uint32_t limit;
} query_stats;

/* Takes the logits of 8 * tiles keys; element e and e + 1 of each tile are of this query. */
template <uint32_t tiles>
static __device__ __forceinline__ void take_logits(query_stats *r, const float s[tiles][4],
                                                   uint32_t e, const uint32_t *positions,
                                                   float unit)
{
    float x[tiles][2], top = r->top;
#pragma unroll
    for (uint32_t n = 0; n < tiles; n++) {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            x[n][i] = positions[n * 8 + i] <= r->limit ? kvf_times(s[n][e + i], unit) : -INFINITY;
            top = fmaxf(top, x[n][i]);
        }
    }
    const float base = kvf_finite_top(top);
    float sum = r->sum * kvf_exp2(r->top - base);
#pragma unroll
    for (uint32_t n = 0; n < tiles; n++)
        sum += kvf_exp2(x[n][0] - base) + kvf_exp2(x[n][1] - base);
    r->top = top;
    r->sum = sum;
}

/* Where statistics of query 0 of a task are. */
static __device__ __forceinline__ size_t stats_at(const kvf_observe_args *a, uint32_t task)
{
    return ((size_t)task * a->group + a->group_first) * a->window;
}

/* query_max, query_sum [kv_heads, chunks_max, group, window]; queries r = g * window + w. */
static __device__ __forceinline__ void store_stats(const kvf_observe_args *a, uint32_t query,
                                                   const query_stats *r, uint32_t lane)
{
    const float top = kvf_quad_max(r->top);
    const float sum = kvf_quad_sum(r->sum * kvf_exp2(r->top - kvf_finite_top(top)));
    if (lane % 4 != 0 || query >= queries_of(a))
        return;
    const size_t at = stats_at(a, blockIdx.x) + query;
    a->query_max[at] = top == -INFINITY ? -INFINITY : top * KVF_CUDA_LN2;
    a->query_sum[at] = sum;
}

/* D 32 and 80, five blocks at a time: left alone, the compiler squeezes them into few registers. D
 * 256, four, or it takes more than others. */
template <typename T, uint32_t D>
static __global__ void __launch_bounds__(STATS_WARPS *KVF_WARP_LANES, D == 32 || D == 80 ? 5
                                                                      : D == 256         ? 4
                                                                                         : 0)
    stats_tiles(const __grid_constant__ kvf_observe_args a)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t tiles = plan<D>::lines / 8;
    const span_chunk c = chunk_of(&a, blockIdx.x);
    if (c.tokens == 0)
        return;
    const uint32_t first_query = (blockIdx.y * (blockDim.x / KVF_WARP_LANES) + warp) * 16;
    const uint32_t queries = queries_of(&a);
    const float unit = a.scale * KVF_CUDA_LOG2E;
    char *slots = kvf_shared();
    uint32_t *positions = (uint32_t *)(slots + SLOTS * plan<D>::slot_bytes);
    uint32_t q[kvf_tile<D>::steps][4];
    query_stats stats[2];
    const char *query_at[2];
#pragma unroll
    for (uint32_t side = 0; side < 2; side++) {
        const uint32_t query = kvf_min_u32(first_query + side * 8 + lane / 4, queries - 1);
        query_at[side] =
            query_of(&a, c.head, a.group_first + query / a.window, query % a.window, 2 * D);
        stats[side].top = -INFINITY;
        stats[side].sum = 0.0f;
        stats[side].limit = limit_of(&a, query % a.window);
    }
    load_lines<D>(q, query_at[0], true, query_at[1], true, lane);
    uint32_t used = 0, filled = 2;
    ask_keys<D>(slots, positions, &a, &c, 0);
    ask_keys<D>(slots + plan<D>::slot_bytes, positions + plan<D>::lines, &a, &c, plan<D>::lines);
    for (uint32_t first = 0; first < c.tokens; first += plan<D>::lines) {
        kvf_async_wait<1>();
        __syncthreads(); /* these keys are here, and nobody needs those before them */
        ask_keys<D>(slots + filled * plan<D>::slot_bytes, positions + filled * plan<D>::lines, &a,
                    &c, first + 2 * plan<D>::lines);
        if (first_query < queries) {
            const uint32_t *own = positions + used * plan<D>::lines + lane % 4 * 2;
            float s[tiles][4];
            products<T, D, tiles>(s, q, slots + used * plan<D>::slot_bytes, 0, lane);
            if (a.cap > 0.0f)
                cap_products<tiles>(s, unit, a.cap);
            take_logits<tiles>(&stats[0], s, 0, own, unit);
            take_logits<tiles>(&stats[1], s, 2, own, unit);
        }
        used = next_slot(used);
        filled = next_slot(filled);
    }
    if (first_query < queries) {
        store_stats(&a, first_query + lane / 4, &stats[0], lane);
        store_stats(&a, first_query + 8 + lane / 4, &stats[1], lane);
    }
}

template <typename T, uint32_t D>
static cudaError_t launch_stats(const kvf_observe_args *a, uint32_t tasks, cudaStream_t stream)
{
    const uint32_t fragments = kvf_div_ceil_u32(queries_of(a), 16);
    const uint32_t warps = kvf_min_u32(STATS_WARPS, fragments);
    const dim3 grid(tasks, kvf_div_ceil_u32(fragments, warps)), block(warps * KVF_WARP_LANES);
    const size_t shared = SLOTS * (plan<D>::slot_bytes + plan<D>::lines * sizeof(uint32_t));
    return kvf_cuda_launch<stats_tiles<T, D>>(grid, block, shared, stream, *a);
}

/* ---- score ---- */

/* The weights of the queries of a head, in shared memory. Queries are g * columns + w; a window is
 * padded to whole steps with queries that are worth nothing. */
typedef struct query_scales {
    float *base;     /* [heads, columns] the maximum, in units of ln 2 */
    float *share;    /* [heads, columns] of a weight in the score */
    uint32_t *limit; /* [columns] */
    uint32_t columns;
} query_scales;

static __host__ __device__ __forceinline__ size_t scales_bytes(const kvf_observe_args *a)
{
    return kvf_round_up(a->window, STEP) * (2 * kvf_observe_heads(a) + 1) * sizeof(float);
}

static __device__ __forceinline__ query_scales scales_at(const kvf_observe_args *a, char *shared)
{
    query_scales r;
    r.columns = (uint32_t)kvf_round_up(a->window, STEP);
    r.base = (float *)shared;
    r.share = r.base + kvf_observe_heads(a) * r.columns;
    r.limit = (uint32_t *)(r.share + kvf_observe_heads(a) * r.columns);
    return r;
}

/* Merges the statistics of a head over its chunks, in order. All threads of the block. */
template <bool IS_PLAIN>
static __device__ __forceinline__ void merge_chunks(const query_scales *r,
                                                    const kvf_observe_args *a, const span_chunk *c)
{
    const uint32_t chunks = kvf_div_ceil_u32(a->span_count[c->head], KVF_OBSERVE_SPANS);
    const size_t stride = (size_t)a->group * a->window;
    const size_t first = stats_at(a, c->head * c->chunks_max);
    const uint32_t heads = kvf_observe_heads(a);
    for (uint32_t i = threadIdx.x; i < heads * r->columns; i += blockDim.x) {
        const uint32_t g = i / r->columns, w = i % r->columns;
        const size_t at = first + g * a->window + w;
        const float sink = kvf_observe_sink(a, c->head, a->group_first + g);
        float top = sink, sum = 0.0f;
        float unit = 1.0f;
        if (IS_PLAIN && w < a->window)
            unit = kvf_observe_weight(a, w);
        if (IS_PLAIN && a->group_reduce == KVF_GROUP_MEAN_SOFTMAX)
            unit /= (float)heads;
        if (w < a->window && !a->is_raw) {
            for (uint32_t k = 0; k < chunks; k++)
                top = fmaxf(top, a->query_max[at + k * stride]);
            if (sink > -INFINITY)
                sum = kvf_exp2((sink - top) * KVF_CUDA_LOG2E);
            for (uint32_t k = 0; k < chunks && top > -INFINITY; k++)
                sum += a->query_sum[at + k * stride] *
                       kvf_exp2((a->query_max[at + k * stride] - top) * KVF_CUDA_LOG2E);
        }
        r->base[i] = top > -INFINITY ? top * KVF_CUDA_LOG2E : 0.0f;
        r->share[i] = sum > 0.0f ? unit / sum : 0.0f;
        if (g == 0)
            r->limit[w] = w < a->window ? limit_of(a, w) : 0;
    }
}

/* The score that the product of query `column` of head g adds. */
template <bool IS_PLAIN>
static __device__ __forceinline__ float share_of(const kvf_observe_args *a, const query_scales *r,
                                                 uint32_t g, uint32_t column, float product,
                                                 float unit)
{
    const uint32_t query = g * r->columns + column;
    const float weight = IS_PLAIN || column >= a->window ? 0.0f : kvf_observe_weight(a, column);
    if (!IS_PLAIN && a->is_raw)
        return product * weight;
    const float x = kvf_times(product, unit);
    const float share = kvf_exp2(fminf(x - r->base[query], 0.0f)) * r->share[query];
    return IS_PLAIN ? share : share * weight;
}

/* The heads of a group, one by one, into a score. */
template <bool IS_PLAIN>
static __device__ __forceinline__ float reduce_head(const kvf_observe_args *a, float score,
                                                    float sum, uint32_t g)
{
    if (!IS_PLAIN && a->group_reduce == KVF_GROUP_MEAN_SOFTMAX)
        sum /= (float)kvf_observe_heads(a);
    if (g == 0)
        return sum;
    return a->group_reduce == KVF_GROUP_MAX ? fmaxf(score, sum) : score + sum;
}

static __device__ __forceinline__ void put_score(const kvf_observe_args *a, float *out, float score)
{
    *out = a->accumulates ? *out + score : score;
}

/* Begins the copy of tile `n` of queries: windows of one head after the other, and over again for
 * the next tokens. */
template <uint32_t D>
static __device__ __forceinline__ void ask_queries(char *to, const kvf_observe_args *a,
                                                   const span_chunk *c, uint32_t n, uint32_t end)
{
    const uint32_t per_head = kvf_div_ceil_u32(a->window, plan<D>::lines);
    const uint32_t g = a->group_first + n / per_head % kvf_observe_heads(a);
    const uint32_t first = n % per_head * plan<D>::lines;
    if (n < end) {
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < plan<D>::lines * kvf_tile<D>::pieces; i += blockDim.x) {
            const uint32_t query = i / kvf_tile<D>::pieces, column = i % kvf_tile<D>::pieces;
            const bool exists = first + query < a->window;
            const char *from = (const char *)a->q;
            if (exists)
                from = query_of(a, c->head, g, first + query, 2 * D) + column * 16;
            kvf_async_copy16(to + query * kvf_tile<D>::stride + column * 16, from, exists ? 16 : 0);
        }
    }
    kvf_async_commit();
}

/* Adds what the queries of one slot, windows w .. of head g, give to the two tokens of this lane.
 */
template <typename T, uint32_t D, bool IS_PLAIN>
static __device__ __forceinline__ void
add_shares(float sum[2], const kvf_observe_args *a, const uint32_t k[kvf_tile<D>::steps][4],
           const uint32_t position[2], const char *slot, const query_scales *r, uint32_t g,
           uint32_t w, float unit, uint32_t lane)
{
    for (uint32_t line = 0; line < plan<D>::lines && w + line < r->columns; line += STEP) {
        float s[STEP / 8][4];
        products<T, D, STEP / 8>(s, k, slot, line, lane);
        if (a->cap > 0.0f && (IS_PLAIN || !a->is_raw))
            cap_products<STEP / 8>(s, unit, a->cap);
#pragma unroll
        for (uint32_t n = 0; n < STEP / 8; n++) {
#pragma unroll
            for (uint32_t e = 0; e < 4; e++) {
                const uint32_t column = w + line + n * 8 + lane % 4 * 2 + e % 2;
                const float share = share_of<IS_PLAIN>(a, r, g, column, s[n][e], unit);
                sum[e / 2] += position[e / 2] <= r->limit[column] ? share : 0.0f;
            }
        }
    }
}

/* score [kv_heads, spans_max * page_size]. Pass p of a block: tokens (p * parts + part) * 16 *
 * warps and on. */
template <typename T, uint32_t D, bool IS_PLAIN>
static __global__ void __launch_bounds__(SCORE_WARPS *KVF_WARP_LANES, 2)
    score_tiles(const __grid_constant__ kvf_observe_args a)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t pass_tokens = blockDim.x / KVF_WARP_LANES * 16, step = gridDim.y * pass_tokens;
    const span_chunk c = chunk_of(&a, blockIdx.x);
    const uint32_t begin = blockIdx.y * pass_tokens;
    if (begin >= c.tokens)
        return;
    char *slots = kvf_shared();
    const query_scales scales = scales_at(&a, slots + SLOTS * plan<D>::slot_bytes);
    const uint32_t per_head = kvf_div_ceil_u32(a.window, plan<D>::lines);
    const uint32_t end =
        kvf_div_ceil_u32(c.tokens - begin, step) * kvf_observe_heads(&a) * per_head;
    const float unit = a.scale * KVF_CUDA_LOG2E;
    ask_queries<D>(slots, &a, &c, 0, end);
    ask_queries<D>(slots + plan<D>::slot_bytes, &a, &c, 1, end);
    merge_chunks<IS_PLAIN>(&scales, &a, &c);
    uint32_t used = 0, filled = 2, n = 0;
    for (uint32_t first = begin; first < c.tokens; first += step) {
        const uint32_t token = first + warp * 16 + lane / 4;
        const bool warp_idle = first + warp * 16 >= c.tokens;
        const uint32_t position[2] = {position_of(&a, &c, token), position_of(&a, &c, token + 8)};
        const bool near = position[0] != ABSENT, far = position[1] != ABSENT;
        uint32_t k[kvf_tile<D>::steps][4];
        load_lines<D>(k, near ? key_of(&a, &c, token, kvf_tile<D>::token_bytes) : NULL, near,
                      far ? key_of(&a, &c, token + 8, kvf_tile<D>::token_bytes) : NULL, far, lane);
        float score[2] = {0.0f, 0.0f}, sum[2] = {0.0f, 0.0f};
        for (uint32_t i = 0; i < kvf_observe_heads(&a) * per_head; i++, n++) {
            kvf_async_wait<1>();
            __syncthreads(); /* these queries are here, and nobody needs those before them */
            ask_queries<D>(slots + filled * plan<D>::slot_bytes, &a, &c, n + 2, end);
            const uint32_t g = i / per_head, w = i % per_head * plan<D>::lines;
            if (!warp_idle) {
                add_shares<T, D, IS_PLAIN>(sum, &a, k, position, slots + used * plan<D>::slot_bytes,
                                           &scales, g, w, unit, lane);
                if (i % per_head == per_head - 1) {
#pragma unroll
                    for (uint32_t side = 0; side < 2; side++) {
                        score[side] =
                            reduce_head<IS_PLAIN>(&a, score[side], kvf_quad_sum(sum[side]), g);
                        sum[side] = 0.0f;
                    }
                }
            }
            used = next_slot(used);
            filled = next_slot(filled);
        }
        float *out = a.score + c.at * a.shape.page_size + token;
        if (lane % 4 == 0 && token < c.tokens)
            put_score(&a, out, score[0]);
        if (lane % 4 == 0 && token + 8 < c.tokens)
            put_score(&a, out + 8, score[1]);
    }
}

template <typename T, uint32_t D>
static cudaError_t launch_score(const kvf_observe_args *a, uint32_t tasks, cudaStream_t stream)
{
    const uint32_t tokens = kvf_min_u32(KVF_OBSERVE_SPANS, a->spans_max) * a->shape.page_size;
    const uint32_t warps = kvf_min_u32(SCORE_WARPS, kvf_div_ceil_u32(tokens, 16));
    const uint32_t passes = kvf_div_ceil_u32(tokens, warps * 16);
    /* Two blocks for every processor of a large GPU, where there is that much to do. */
    const uint32_t parts = kvf_min_u32(passes, kvf_div_ceil_u32(264, tasks));
    const dim3 grid(tasks, parts), block(warps * KVF_WARP_LANES);
    const size_t shared = SLOTS * plan<D>::slot_bytes + scales_bytes(a);
    if (a->is_raw)
        return kvf_cuda_launch<score_tiles<T, D, false>>(grid, block, shared, stream, *a);
    return kvf_cuda_launch<score_tiles<T, D, true>>(grid, block, shared, stream, *a);
}

/* ---- fp32 ---- */

/* A query per thread. */
static __global__ void __launch_bounds__(PLAIN_THREADS)
    stats_plain(const __grid_constant__ kvf_observe_args a)
{
    const span_chunk c = chunk_of(&a, blockIdx.x);
    const uint32_t query = blockIdx.y * PLAIN_THREADS + threadIdx.x, queries = queries_of(&a);
    if (query >= queries || c.tokens == 0)
        return;
    const uint32_t w = query % a.window, limit = limit_of(&a, w), d = a.shape.head_dim;
    const float *q =
        (const float *)query_of(&a, c.head, a.group_first + query / a.window, w, d * 4);
    float top = -INFINITY, sum = 0.0f;
    for (uint32_t t = 0; t < c.tokens; t++) {
        if (position_of(&a, &c, t) > limit)
            continue;
        const float *k = (const float *)key_of(&a, &c, t, kvf_token_bytes(&a.shape));
        const float x = plain_logit(&a, q, k), old = top;
        top = fmaxf(top, x);
        sum = sum * kvf_exp2(old - top) + kvf_exp2(x - top);
    }
    const size_t at = stats_at(&a, blockIdx.x) + query;
    a.query_max[at] = top == -INFINITY ? -INFINITY : top * KVF_CUDA_LN2;
    a.query_sum[at] = sum;
}

/* A token per thread. */
static __global__ void __launch_bounds__(PLAIN_THREADS, 8)
    score_plain(const __grid_constant__ kvf_observe_args a)
{
    const span_chunk c = chunk_of(&a, blockIdx.x);
    const uint32_t token = blockIdx.y * PLAIN_THREADS + threadIdx.x, d = a.shape.head_dim;
    const query_scales r = scales_at(&a, kvf_shared());
    if (blockIdx.y * PLAIN_THREADS >= c.tokens)
        return;
    merge_chunks<false>(&r, &a, &c);
    __syncthreads();
    if (token >= c.tokens)
        return;
    const uint32_t position = position_of(&a, &c, token);
    const float *k =
        position == ABSENT ? NULL : (const float *)key_of(&a, &c, token, kvf_token_bytes(&a.shape));
    float score = 0.0f;
    for (uint32_t g = 0; g < kvf_observe_heads(&a) && k; g++) {
        float sum = 0.0f;
        for (uint32_t w = 0; w < a.window; w++) {
            if (position > r.limit[w])
                continue;
            const float *q = (const float *)query_of(&a, c.head, a.group_first + g, w, d * 4);
            sum += share_of<false>(&a, &r, g, w,
                                   a.is_raw ? kvf_dot(q, k, d) : plain_logit(&a, q, k), 1.0f);
        }
        score = reduce_head<false>(&a, score, sum, g);
    }
    put_score(&a, a.score + c.at * a.shape.page_size + token, score);
}

/* ---- launches ---- */

template <typename T, uint32_t D>
static cudaError_t launch_step(const kvf_observe_args *a, bool is_score, cudaStream_t stream)
{
    const uint32_t tasks = a->kv_heads * kvf_div_ceil_u32(a->spans_max, KVF_OBSERVE_SPANS);
    return is_score ? launch_score<T, D>(a, tasks, stream) : launch_stats<T, D>(a, tasks, stream);
}

template <typename T>
static cudaError_t launch_type(const kvf_observe_args *a, bool is_score, cudaStream_t stream)
{
#define CASE(d)                                                                                    \
    case d:                                                                                        \
        return launch_step<T, d>(a, is_score, stream);
    switch (a->shape.head_dim) {
        KVF_GPU_HEAD_DIMS(CASE)
    default:
        return cudaErrorInvalidValue;
    }
#undef CASE
}

static cudaError_t launch_plain(const kvf_observe_args *a, bool is_score, cudaStream_t stream)
{
    const uint32_t tasks = a->kv_heads * kvf_div_ceil_u32(a->spans_max, KVF_OBSERVE_SPANS);
    const uint32_t tokens = kvf_min_u32(KVF_OBSERVE_SPANS, a->spans_max) * a->shape.page_size;
    if (!is_score)
        return kvf_cuda_launch<stats_plain>(
            dim3(tasks, kvf_div_ceil_u32(queries_of(a), PLAIN_THREADS)), dim3(PLAIN_THREADS), 0,
            stream, *a);
    return kvf_cuda_launch<score_plain>(dim3(tasks, kvf_div_ceil_u32(tokens, PLAIN_THREADS)),
                                        dim3(PLAIN_THREADS), scales_bytes(a), stream, *a);
}

static int launch(const kvf_observe_args *a, bool is_score, cudaStream_t stream)
{
    if (a->group == 0 || a->group > KVF_GROUP_MAX_HEADS || a->window == 0 ||
        a->window > kvf_observe_window_max(a->group) ||
        a->group_first + kvf_observe_heads(a) > a->group)
        return cudaErrorInvalidValue;
    switch (a->shape.dtype) {
    case KVF_BF16:
        return launch_type<kvf_bf16>(a, is_score, stream);
    case KVF_FP16:
        return launch_type<kvf_half>(a, is_score, stream);
    default:
        return launch_plain(a, is_score, stream);
    }
}

extern "C" int kvf_observe_stats_cuda(const void *args, uint32_t, void *stream)
{
    return launch((const kvf_observe_args *)args, false, (cudaStream_t)stream);
}

extern "C" int kvf_observe_score_cuda(const void *args, uint32_t, void *stream)
{
    return launch((const kvf_observe_args *)args, true, (cudaStream_t)stream);
}
