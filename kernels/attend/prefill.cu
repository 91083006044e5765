/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Causal attention of a chunk, on the GPU; see prefill_ref.c for the meaning.
 *
 * Knows nothing of pruning or positions: key j is token j % page_size of block j / page_size. Grid:
 * (tiles of queries of the longest chunk, KV heads, chunks); queries are (token, head of the
 * group), so all heads of a group share the keys of their block. Tiles with the most keys start
 * first.
 *
 * 16-bit types: a warp has 32 queries (16 at head_dim 256), and keys and values come in tiles of 64
 * (32) through three slots of shared memory: while one is in use two are on their way. Softmax is
 * online in fp32, in powers of two; weights are rounded to the element type before they multiply
 * values, sums of weights are not. The result of a query does not depend on the other queries of
 * its tile. Pages of a tile are looked up a tile ahead, once for RUN keys.
 *
 * Bound: matrix products, 4 * head_dim operations per visible (query, key). A tile of 128 queries
 * and 64 keys at head_dim 128 is 1024 products of 16x8x16 (4096 operations each), 8192 exponentials
 * and 32 KiB of keys and values, 16 operations per query for each of its bytes: at 128 queries a
 * tenth of the rate at which an A100 would starve. Keys after the last query of a tile are never
 * read, and with a window, which is a form of its own, neither are tiles of keys between the sink
 * and the window of the first query. A cap, with a window or none, is a form too: 64 tangents for a
 * query and tile. So is all of it with outputs in fp32, and queries if they are: in the others it
 * would cost registers.
 *
 * fp32: plain, see plain.cuh.
 */

#include "cuda_kernels.h"
#include "plain.cuh"

#define WARPS   4u
#define THREADS (WARPS * KVF_WARP_LANES)
#define SLOTS   3u
#define RUN     32u /* keys that lie side by side, where pages have as many */

/* The tile of one head_dim. */
template <uint32_t D> struct plan {
    static const uint32_t keys = D > 128 ? 32 : 64;
    static_assert(KVF_PREFILL_TILE % keys == 0, "keys of a tile are summed together");
    static const uint32_t parts = D > 128 ? 1 : 2; /* of 16 queries, in a warp */
    static const uint32_t warp_queries = 16 * parts;
    static const uint32_t slot_bytes = keys * kvf_tile<D>::stride;
    static const uint32_t runs = keys / RUN;
    static_assert(keys % RUN == 0, "a tile has whole runs");
    static const uint32_t table_bytes = (SLOTS * runs * sizeof(char *) + 15) / 16 * 16;
};

/* The queries of one block. */
typedef struct query_tile {
    uint32_t head;
    uint32_t first;   /* query (token, g) of the chunk */
    uint32_t queries; /* 0: it is after the end of its chunk */
    uint32_t base;
    uint32_t keys; /* that its last query sees */
    uint32_t skip; /* keys skip .. skip_end - 1 are seen by no query; nothing without a window */
    uint32_t skip_end;
} query_tile;

static __device__ __forceinline__ query_tile tile_of(const kvf_prefill_kernel_args *a,
                                                     uint32_t block_queries)
{
    const kvf_query_chunk chunk = kvf_prefill_chunk(a, blockIdx.z);
    const uint32_t end = chunk.tokens * a->group;
    query_tile t;
    t.head = blockIdx.y;
    t.first = (gridDim.x - 1 - blockIdx.x) * block_queries;
    t.queries = t.first < end ? kvf_min_u32(block_queries, end - t.first) : 0;
    t.base = chunk.base;
    t.keys = t.base + (t.first + t.queries - 1) / a->group + 1;
    const uint32_t after = t.base + t.first / a->group + 1; /* the first query */
    t.skip = a->sink;
    t.skip_end = a->window && after > a->window ? after - a->window : 0;
    return t;
}

/* The first key of the first tile, of `tile` keys, from `first` on that a query sees. */
static __device__ __forceinline__ uint32_t seen_tile(const query_tile *t, uint32_t first,
                                                     uint32_t tile)
{
    return first >= t->skip && first < t->skip_end / tile * tile ? t->skip_end / tile * tile
                                                                 : first;
}

static __device__ __forceinline__ bool is_hidden(const kvf_prefill_kernel_args *a, uint32_t key,
                                                 uint32_t limit)
{
    return a->window && key >= a->sink && key + a->window <= limit;
}

/* Index of query `query` of a tile in q, out and lse. */
static __device__ __forceinline__ size_t query_at(const kvf_prefill_kernel_args *a,
                                                  const query_tile *t, uint32_t query)
{
    const uint32_t first = a->chunks.count ? a->chunks.at[blockIdx.z].first : 0;
    const uint32_t token = first + (t->first + query) / a->group, g = (t->first + query) % a->group;
    return ((size_t)token * a->kv_heads + t->head) * a->group + g;
}

/* Key 0 of the chunk, in the blocks of all. */
static __device__ __forceinline__ uint32_t first_key(const kvf_prefill_kernel_args *a)
{
    return kvf_block_z() * a->blocks_stride * a->shape.page_size;
}

/* Key j of all blocks in its page; its value follows it. */
static __device__ __forceinline__ const char *key_at(const kvf_prefill_kernel_args *a,
                                                     uint32_t head, uint32_t j, size_t token_bytes)
{
    const uint32_t shift = kvf_page_shift(a->shape.page_size);
    const char *block = (const char *)a->blocks[j >> shift];
    return block + (((size_t)head << shift) + (j & (a->shape.page_size - 1))) * token_bytes;
}

/* ---- 16-bit types ---- */

template <uint32_t D>
static __device__ __forceinline__ void load_queries(char *to, const kvf_prefill_kernel_args *a,
                                                    const query_tile *t, uint32_t block_queries)
{
    for (uint32_t i = threadIdx.x; i < block_queries * kvf_tile<D>::pieces; i += blockDim.x) {
        const uint32_t query = i / kvf_tile<D>::pieces, column = i % kvf_tile<D>::pieces;
        const bool exists = query < t->queries;
        const char *from = (const char *)a->q;
        from += exists ? query_at(a, t, query) * (2 * D) + column * 16 : 0;
        kvf_async_copy16(to + query * kvf_tile<D>::stride + column * 16, from, exists ? 16 : 0);
    }
}

/* Eight numbers in fp32, rounded. */
template <typename T> static __device__ __forceinline__ uint4 narrow8(const float *from)
{
    const float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
    return make_uint4(kvf_pair<T>(a.x, a.y), kvf_pair<T>(a.z, a.w), kvf_pair<T>(b.x, b.y),
                      kvf_pair<T>(b.z, b.w));
}

/* The same of queries in fp32. */
template <typename T, uint32_t D>
static __device__ __forceinline__ void round_queries(char *to, const kvf_prefill_kernel_args *a,
                                                     const query_tile *t, uint32_t block_queries)
{
    for (uint32_t i = threadIdx.x; i < block_queries * kvf_tile<D>::pieces; i += blockDim.x) {
        const uint32_t query = i / kvf_tile<D>::pieces, column = i % kvf_tile<D>::pieces;
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (query < t->queries)
            piece = narrow8<T>((const float *)a->q + query_at(a, t, query) * D + column * 8);
        *(uint4 *)(to + query * kvf_tile<D>::stride + column * 16) = piece;
    }
}

/* Keys, or their values, in pieces of 16 bytes. */
template <uint32_t D, bool Values> struct piece {
    static const uint32_t each = Values ? kvf_tile<D>::value_dim / 8 : kvf_tile<D>::pieces;
    static const uint32_t first = Values ? 2 * D : 0; /* byte of a token */
};

/* Keys of a run that so many threads copy at once, a column each: a power of two. */
template <uint32_t EACH, uint32_t COUNT> struct keys_at_once {
    static const uint32_t fit = COUNT / EACH;
    static_assert(fit > 0, "a key at least");
    static const uint32_t count = fit >= RUN  ? RUN
                                  : fit >= 16 ? 16
                                  : fit >= 8  ? 8
                                  : fit >= 4  ? 4
                                  : fit >= 2  ? 2
                                              : 1;
};

/* Ask for the pages of a tile's runs; runs after its last key have none. */
template <uint32_t D>
static __device__ __forceinline__ void
ask_pages(const void **pages, const kvf_prefill_kernel_args *a, const query_tile *t, uint32_t first)
{
    const uint32_t key = first + threadIdx.x * RUN, shift = kvf_page_shift(a->shape.page_size);
    if (threadIdx.x < plan<D>::runs && key < t->keys)
        kvf_async_copy8(pages + threadIdx.x, a->blocks + ((first_key(a) + key) >> shift));
}

/* Keys first .. first + plan::keys - 1, or their values; zeros after the last key of the tile. A
 * page is looked up for every 16 bytes. */
template <uint32_t D, bool Values>
static __device__ __forceinline__ void load_keys(char *to, const kvf_prefill_kernel_args *a,
                                                 const query_tile *t, uint32_t first)
{
    constexpr uint32_t each = piece<D, Values>::each;
    const uint32_t left = t->keys - first, at = first_key(a) + first;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < plan<D>::keys * each; i += blockDim.x) {
        const uint32_t key = i / each, column = i % each;
        const bool exists = key < left;
        const char *from = (const char *)a->q;
        if (exists)
            from = key_at(a, t->head, at + key, kvf_tile<D>::token_bytes) +
                   piece<D, Values>::first + column * 16;
        kvf_async_copy16(to + key * kvf_tile<D>::stride + column * 16, from, exists ? 16 : 0);
    }
}

/* The same where all keys are there, by a block of Threads: a thread has one column, and addresses
 * of a run are a step apart. `pages` are those that ask_pages() asked for. */
template <uint32_t D, bool Values, uint32_t Threads>
static __device__ __forceinline__ void load_runs(char *to, const kvf_prefill_kernel_args *a,
                                                 const query_tile *t, uint32_t first,
                                                 const void *const *pages)
{
    constexpr uint32_t each = piece<D, Values>::each, at_once = keys_at_once<each, Threads>::count;
    constexpr uint32_t token = kvf_tile<D>::token_bytes, stride = kvf_tile<D>::stride;
    const uint32_t key = threadIdx.x / each, column = threadIdx.x % each;
    const uint32_t size = a->shape.page_size;
    if (key >= at_once)
        return;
    to += key * stride + column * 16;
#pragma unroll
    for (uint32_t r = 0; r < plan<D>::keys; r += RUN) {
        const uint32_t at = t->head * size + ((first + r) & (size - 1)) + key;
        const char *from = (const char *)pages[r / RUN] + (size_t)at * token +
                           (piece<D, Values>::first + column * 16);
#pragma unroll
        for (uint32_t i = 0; i < RUN; i += at_once)
            kvf_async_copy16(to + (r + i) * stride, from + i * token);
    }
}

template <uint32_t D, bool Values>
static __device__ __forceinline__ void load_tile(char *to, const kvf_prefill_kernel_args *a,
                                                 const query_tile *t, uint32_t first,
                                                 const void *const *pages)
{
    const bool are_runs = a->shape.page_size >= RUN && t->keys - first >= plan<D>::keys;
    if (are_runs && blockDim.x == THREADS)
        load_runs<D, Values, THREADS>(to, a, t, first, pages);
    else if (are_runs && blockDim.x == THREADS / 2)
        load_runs<D, Values, THREADS / 2>(to, a, t, first, pages);
    else
        load_keys<D, Values>(to, a, t, first);
}

/* A warp's part of its queries; part m, side s: query 16 m + 8 s + lane / 4. */
template <uint32_t D> struct warp_state {
    float o[plan<D>::parts][kvf_tile<D>::value_dim / 8][4];
    float s[plan<D>::parts][plan<D>::keys / 8][4];     /* logits */
    uint32_t p[plan<D>::parts][plan<D>::keys / 16][4]; /* weights, rounded, two in a word */
    float top[plan<D>::parts][2];
    float sum[plan<D>::parts][2]; /* of this lane's columns */
    uint32_t first_limit;         /* of the first query: the last key that it sees */
    uint32_t last_limit;          /* of the last one */
    uint32_t limits;              /* of the lane's queries, a byte each: how far above the first */
};

/* The last key that a query sees. */
template <uint32_t D>
static __device__ __forceinline__ uint32_t limit_of(const warp_state<D> *w, uint32_t m,
                                                    uint32_t side)
{
    return w->first_limit + (w->limits >> 8 * (2 * m + side) & 0xff);
}

template <uint32_t D>
static __device__ __forceinline__ void
begin_queries(warp_state<D> *w, const kvf_prefill_kernel_args *a, const query_tile *t,
              uint32_t first, uint32_t lane)
{
    w->first_limit = t->base + (t->first + first) / a->group;
    w->limits = 0;
#pragma unroll
    for (uint32_t m = 0; m < plan<D>::parts; m++) {
#pragma unroll
        for (uint32_t n = 0; n < kvf_tile<D>::value_dim / 8; n++)
            w->o[m][n][0] = w->o[m][n][1] = w->o[m][n][2] = w->o[m][n][3] = 0.0f;
#pragma unroll
        for (uint32_t side = 0; side < 2; side++) {
            const uint32_t query =
                kvf_min_u32(first + m * 16 + side * 8 + lane / 4, t->queries - 1);
            const uint32_t limit = t->base + (t->first + query) / a->group;
            w->limits |= (limit - w->first_limit) << 8 * (2 * m + side);
            const float sink = kvf_prefill_sink(a, t->head, (t->first + query) % a->group);
            w->top[m][side] = sink * KVF_CUDA_LOG2E;
            w->sum[m][side] = sink == -INFINITY || lane % 4 ? 0.0f : 1.0f;
        }
    }
    const uint32_t last = kvf_min_u32(first + plan<D>::warp_queries, t->queries) - 1;
    w->last_limit = t->base + (t->first + last) / a->group;
}

/* q.k of the warp's queries with a tile of keys, in units of ln 2. */
template <typename T, uint32_t D>
static __device__ __forceinline__ void tile_logits(warp_state<D> *w, const char *queries,
                                                   const char *keys, uint32_t first, float unit,
                                                   uint32_t lane)
{
#pragma unroll
    for (uint32_t m = 0; m < plan<D>::parts; m++) {
#pragma unroll
        for (uint32_t n = 0; n < plan<D>::keys / 8; n++)
            w->s[m][n][0] = w->s[m][n][1] = w->s[m][n][2] = w->s[m][n][3] = 0.0f;
    }
#pragma unroll
    for (uint32_t k = 0; k < kvf_tile<D>::steps; k++) {
        uint32_t q[plan<D>::parts][4];
#pragma unroll
        for (uint32_t m = 0; m < plan<D>::parts; m++)
            kvf_load_tiles4(q[m], kvf_tile_lines<D>(queries, m * 16, k * 16, lane));
#pragma unroll
        for (uint32_t n = 0; n < plan<D>::keys / 16; n++) {
            uint32_t b[4];
            kvf_load_tiles4(b, kvf_tile_keys<D>(keys, n * 16, k * 16, lane));
#pragma unroll
            for (uint32_t m = 0; m < plan<D>::parts; m++) {
                kvf_mma(w->s[m][2 * n], q[m], b, T());
                kvf_mma(w->s[m][2 * n + 1], q[m], b + 2, T());
            }
        }
    }
    const bool all_visible = first + plan<D>::keys - 1 <= w->first_limit;
#pragma unroll
    for (uint32_t m = 0; m < plan<D>::parts; m++) {
#pragma unroll
        for (uint32_t n = 0; n < plan<D>::keys / 8; n++) {
#pragma unroll
            for (uint32_t e = 0; e < 4; e++) {
                const uint32_t key = first + n * 8 + lane % 4 * 2 + e % 2;
                w->s[m][n][e] = all_visible || key <= limit_of(w, m, e / 2)
                                    ? kvf_times(w->s[m][n][e], unit)
                                    : -INFINITY;
            }
        }
    }
}

/* After tile_logits, where there is a cap. */
template <uint32_t D> static __device__ __forceinline__ void cap_logits(warp_state<D> *w, float cap)
{
#pragma unroll
    for (uint32_t m = 0; m < plan<D>::parts; m++) {
#pragma unroll
        for (uint32_t n = 0; n < plan<D>::keys / 8; n++) {
#pragma unroll
            for (uint32_t e = 0; e < 4; e++)
                w->s[m][n][e] = kvf_cap_logit(w->s[m][n][e], cap * KVF_CUDA_LOG2E);
        }
    }
}

/* Logits of keys between the sink and the window of a query. */
template <uint32_t D>
static __device__ __forceinline__ void hide(warp_state<D> *w, const kvf_prefill_kernel_args *a,
                                            uint32_t first, uint32_t lane)
{
    if (first + plan<D>::keys <= a->sink || first + a->window > w->last_limit)
        return;
#pragma unroll
    for (uint32_t m = 0; m < plan<D>::parts; m++) {
#pragma unroll
        for (uint32_t n = 0; n < plan<D>::keys / 8; n++) {
#pragma unroll
            for (uint32_t e = 0; e < 4; e++)
                if (is_hidden(a, first + n * 8 + lane % 4 * 2 + e % 2, limit_of(w, m, e / 2)))
                    w->s[m][n][e] = -INFINITY;
        }
    }
}

/* Logits become weights; what was summed so far is rescaled. */
template <typename T, uint32_t D>
static __device__ __forceinline__ void soften(warp_state<D> *w, uint32_t m, uint32_t side)
{
    const uint32_t e = 2 * side;
    float top = -INFINITY;
#pragma unroll
    for (uint32_t n = 0; n < plan<D>::keys / 8; n++)
        top = fmaxf(top, fmaxf(w->s[m][n][e], w->s[m][n][e + 1]));
    top = fmaxf(w->top[m][side], kvf_quad_max(top));
    const float base = kvf_finite_top(top), factor = kvf_exp2(w->top[m][side] - base);
    w->top[m][side] = top;
    float sum = w->sum[m][side] * factor;
#pragma unroll
    for (uint32_t n = 0; n < plan<D>::keys / 8; n++) {
        const float even = kvf_exp2(w->s[m][n][e] - base);
        const float odd = kvf_exp2(w->s[m][n][e + 1] - base);
        w->p[m][n / 2][n % 2 * 2 + side] = kvf_pair<T>(even, odd);
        sum += even + odd;
    }
    w->sum[m][side] = sum;
#pragma unroll
    for (uint32_t n = 0; n < kvf_tile<D>::value_dim / 8; n++) {
        w->o[m][n][e] *= factor;
        w->o[m][n][e + 1] *= factor;
    }
}

/* Adds weights x values of a tile. */
template <typename T, uint32_t D>
static __device__ __forceinline__ void add_values(warp_state<D> *w, const char *values,
                                                  uint32_t lane)
{
#pragma unroll
    for (uint32_t n = 0; n < plan<D>::keys / 16; n++) {
#pragma unroll
        for (uint32_t k = 0; k < kvf_tile<D>::value_dim / 16; k++) {
            uint32_t b[4];
            kvf_load_tiles4_transposed(b, kvf_tile_lines<D>(values, n * 16, k * 16, lane));
#pragma unroll
            for (uint32_t m = 0; m < plan<D>::parts; m++) {
                kvf_mma(w->o[m][2 * k], w->p[m][n], b, T());
                kvf_mma(w->o[m][2 * k + 1], w->p[m][n], b + 2, T());
            }
        }
    }
}

/* One query in fp32, from where it is; the four lanes that have it write 32 bytes side by side. */
template <uint32_t D>
static __device__ __forceinline__ void
store_wide(const warp_state<D> *w, uint32_t m, uint32_t side, float inverse,
           const kvf_prefill_kernel_args *a, const query_tile *t, uint32_t query, uint32_t lane)
{
    if (query >= t->queries)
        return;
    float *out = (float *)a->out + query_at(a, t, query) * kvf_tile<D>::value_dim + lane % 4 * 2;
#pragma unroll
    for (uint32_t n = 0; n < kvf_tile<D>::value_dim / 8; n++)
        *(float2 *)(out + n * 8) =
            make_float2(w->o[m][n][2 * side] * inverse, w->o[m][n][2 * side + 1] * inverse);
}

/* Results of the warp's queries, through the shared memory that held their queries, or in fp32. */
template <typename T, uint32_t D, bool Wide>
static __device__ __forceinline__ void
store_outputs(warp_state<D> *w, char *queries, const kvf_prefill_kernel_args *a,
              const query_tile *t, uint32_t first, uint32_t lane)
{
#pragma unroll
    for (uint32_t m = 0; m < plan<D>::parts; m++) {
#pragma unroll
        for (uint32_t side = 0; side < 2; side++) {
            const uint32_t query = m * 16 + side * 8 + lane / 4;
            const float sum = kvf_quad_sum(w->sum[m][side]);
            const bool any = !(sum <= 0.0f);
            const float inverse = any ? 1.0f / sum : 0.0f;
            if (a->lse && lane % 4 == 0 && first + query < t->queries)
                a->lse[query_at(a, t, first + query)] =
                    any ? w->top[m][side] * KVF_CUDA_LN2 + logf(sum) : -INFINITY;
            if constexpr (Wide) {
                store_wide<D>(w, m, side, inverse, a, t, first + query, lane);
            } else {
#pragma unroll
                for (uint32_t n = 0; n < kvf_tile<D>::value_dim / 8; n++)
                    *(uint32_t *)(queries + query * kvf_tile<D>::stride + n * 16 + lane % 4 * 4) =
                        kvf_pair<T>(w->o[m][n][2 * side] * inverse,
                                    w->o[m][n][2 * side + 1] * inverse);
            }
        }
    }
    if constexpr (!Wide) {
        __syncwarp();
        constexpr uint32_t pieces = kvf_tile<D>::value_dim / 8;
        for (uint32_t i = lane; i < plan<D>::warp_queries * pieces; i += KVF_WARP_LANES) {
            const uint32_t query = i / pieces, column = i % pieces;
            if (first + query < t->queries)
                *(uint4 *)((char *)a->out +
                           (query_at(a, t, first + query) * pieces + column) * 16) =
                    *(const uint4 *)(queries + query * kvf_tile<D>::stride + column * 16);
        }
    }
}

/* The tile that comes after the one from `first` on. */
template <uint32_t D, bool Windowed>
static __device__ __forceinline__ uint32_t next_tile(const query_tile *t, uint32_t first)
{
    const uint32_t next = first + plan<D>::keys;
    return Windowed ? seen_tile(t, next, plan<D>::keys) : next;
}

/* The slot that comes `more` after one, of which there are fewer than SLOTS. */
static __device__ __forceinline__ uint32_t slot_after(uint32_t slot, uint32_t more)
{
    return slot + more < SLOTS ? slot + more : slot + more - SLOTS;
}

/* Logits of a warp's queries with the keys of a tile become weights of its values. */
template <typename T, uint32_t D, bool Windowed, bool Capped, bool Wide>
static __device__ __forceinline__ void
weigh_tile(warp_state<D> *w, const kvf_prefill_kernel_args &a, const char *queries,
           const char *keys, uint32_t first, float unit, uint32_t lane)
{
    tile_logits<T, D>(w, queries, keys, first, unit, lane);
    if (Capped && a.cap > 0.0f) /* also where it is: a branch keeps its registers out of the loop */
        cap_logits<D>(w, a.cap);
    if (Windowed)
        hide<D>(w, &a, first, lane);
#pragma unroll
    for (uint32_t m = 0; m < plan<D>::parts; m++) {
        soften<T, D>(w, m, 0);
        soften<T, D>(w, m, 1);
    }
}

/* q [tokens, kv_heads, group, D], out [.., value_dim], blocks [pages] -> [kv_heads] pages, lse
 * [tokens, kv_heads, group]; WARPS or fewer warps. Wide: out is fp32, q perhaps, and there need be
 * neither a window nor a cap. */
template <typename T, uint32_t D, bool Windowed, bool Capped, bool Wide>
static __device__ __forceinline__ void do_tiles(const kvf_prefill_kernel_args &a)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t block_queries = blockDim.x / KVF_WARP_LANES * plan<D>::warp_queries;
    const query_tile t = tile_of(&a, block_queries);
    const float unit = a.scale * KVF_CUDA_LOG2E;
    const uint32_t begin = Windowed ? seen_tile(&t, 0, plan<D>::keys) : 0;
    const uint32_t first_query = warp * plan<D>::warp_queries;
    const bool idle = first_query >= t.queries;
    char *slots = kvf_shared();
    /* For each slot: pages of the tile whose keys are there, or come there next. */
    const void **tables = (const void **)(slots + SLOTS * plan<D>::slot_bytes);
    char *queries = (char *)tables + plan<D>::table_bytes;
    char *own = queries + first_query * kvf_tile<D>::stride;
    warp_state<D> w;
    if (t.queries == 0)
        return;
    ask_pages<D>(tables, &a, &t, begin);
    kvf_async_commit();
    begin_queries<D>(&w, &a, &t, idle ? 0 : first_query, lane);
    if (Wide && a.q_dtype == KVF_FP32)
        round_queries<T, D>(queries, &a, &t, block_queries);
    else
        load_queries<D>(queries, &a, &t, block_queries);
    kvf_async_commit();
    kvf_async_wait<1>();
    __syncthreads(); /* the first pages are known */
    load_tile<D, false>(slots, &a, &t, begin, tables);
    ask_pages<D>(tables + 2 * plan<D>::runs, &a, &t, next_tile<D, Windowed>(&t, begin));
    kvf_async_commit();
    load_tile<D, true>(slots + plan<D>::slot_bytes, &a, &t, begin, tables);
    kvf_async_commit();
    uint32_t used = 0;
    for (uint32_t first = begin, next; first < t.keys; first = next) {
        const bool visible = !idle && first <= w.last_limit;
        next = next_tile<D, Windowed>(&t, first);
        kvf_async_wait<1>();
        __syncthreads(); /* keys and the next pages are here; nobody needs the values before them */
        if (next < t.keys) {
            const uint32_t filled = slot_after(used, 2);
            load_tile<D, false>(slots + filled * plan<D>::slot_bytes, &a, &t, next,
                                tables + filled * plan<D>::runs);
            ask_pages<D>(tables + slot_after(used, 1) * plan<D>::runs, &a, &t,
                         next_tile<D, Windowed>(&t, next));
        }
        kvf_async_commit();
        if (visible)
            weigh_tile<T, D, Windowed, Capped, Wide>(&w, a, own, slots + used * plan<D>::slot_bytes,
                                                     first, unit, lane);
        used = slot_after(used, 1);
        kvf_async_wait<1>();
        __syncthreads(); /* values are here, and nobody needs the keys */
        if (next < t.keys)
            load_tile<D, true>(slots + slot_after(used, 2) * plan<D>::slot_bytes, &a, &t, next,
                               tables + slot_after(used, 1) * plan<D>::runs);
        kvf_async_commit();
        if (visible)
            add_values<T, D>(&w, slots + used * plan<D>::slot_bytes, lane);
        used = slot_after(used, 1);
    }
    if (!idle)
        store_outputs<T, D, Wide>(&w, own, &a, &t, first_query, lane);
}

template <typename T, uint32_t D, bool Windowed>
static __global__ void __launch_bounds__(THREADS)
    prefill_tiles(const __grid_constant__ kvf_prefill_kernel_args a)
{
    do_tiles<T, D, Windowed, false, false>(a);
}

/* With a cap, and a window or none. */
template <typename T, uint32_t D>
static __global__ void __launch_bounds__(THREADS)
    prefill_capped(const __grid_constant__ kvf_prefill_kernel_args a)
{
    do_tiles<T, D, true, true, false>(a);
}

/* For callers that want fp32. */
template <typename T, uint32_t D>
static __global__ void __launch_bounds__(THREADS)
    prefill_wide(const __grid_constant__ kvf_prefill_kernel_args a)
{
    do_tiles<T, D, true, true, true>(a);
}

template <typename T, uint32_t D>
static cudaError_t launch_tiles(const kvf_prefill_kernel_args *a, cudaStream_t stream)
{
    const uint32_t queries = a->tokens * a->group, chunks = kvf_max_u32(a->chunks.count, 1);
    uint32_t warps = kvf_min_u32(WARPS, kvf_div_ceil_u32(queries, plan<D>::warp_queries));
    /* Fewer queries to a block where that is what gives every processor of a large GPU one. */
    if (warps == WARPS &&
        kvf_div_ceil_u32(queries, WARPS * plan<D>::warp_queries) * a->kv_heads * chunks < 128)
        warps = WARPS / 2;
    const uint32_t block_queries = warps * plan<D>::warp_queries;
    const size_t shared = (size_t)SLOTS * plan<D>::slot_bytes + plan<D>::table_bytes +
                          (size_t)block_queries * kvf_tile<D>::stride;
    const dim3 grid(kvf_div_ceil_u32(queries, block_queries), a->kv_heads, chunks);
    const dim3 block(warps * KVF_WARP_LANES);
    if (a->out_dtype == KVF_FP32)
        return kvf_cuda_launch<prefill_wide<T, D>>(grid, block, shared, stream, *a);
    if (a->cap > 0.0f)
        return kvf_cuda_launch<prefill_capped<T, D>>(grid, block, shared, stream, *a);
    if (a->window)
        return kvf_cuda_launch<prefill_tiles<T, D, true>>(grid, block, shared, stream, *a);
    return kvf_cuda_launch<prefill_tiles<T, D, false>>(grid, block, shared, stream, *a);
}

template <typename T>
static cudaError_t launch_type(const kvf_prefill_kernel_args *a, cudaStream_t stream)
{
#define CASE(d)                                                                                    \
    case d:                                                                                        \
        return launch_tiles<T, d>(a, stream);
    switch (a->shape.head_dim) {
        KVF_GPU_HEAD_DIMS(CASE)
    default:
        return cudaErrorInvalidValue;
    }
#undef CASE
}

/* ---- fp32 ---- */

/* Logits of keys first .. first + KVF_PLAIN_TOKENS - 1, a key per thread. */
static __device__ __forceinline__ void plain_logits(kvf_plain_shared *state,
                                                    const kvf_prefill_kernel_args *a,
                                                    const query_tile *t, uint32_t first)
{
    static_assert(KVF_PLAIN_TOKENS == KVF_PLAIN_THREADS, "a key per thread");
    static_assert(KVF_PREFILL_TILE % KVF_PLAIN_TOKENS == 0, "keys of a tile are summed together");
    const uint32_t d = a->shape.head_dim, key = first + threadIdx.x, zero = first_key(a);
    const float unit = a->scale * KVF_CUDA_LOG2E;
    const bool skipped = key >= t->skip && key < t->skip_end;
    const char *at = key < t->keys && !skipped
                         ? key_at(a, t->head, zero + key, kvf_token_bytes(&a->shape))
                         : NULL;
    const float *k = (const float *)at;
    for (uint32_t query = 0; query < t->queries; query++) {
        const float *q = (const float *)a->q + query_at(a, t, query) * d;
        const uint32_t limit = t->base + (t->first + query) / a->group;
        const bool visible = key <= limit && !is_hidden(a, key, limit);
        const float s = k && visible ? kvf_times(kvf_dot(q, k, d), unit) : -INFINITY;
        state->s[query][threadIdx.x] =
            a->cap > 0.0f ? kvf_cap_logit(s, a->cap * KVF_CUDA_LOG2E) : s;
    }
}

/* Adds weights x values to the channels of this thread. */
static __device__ __forceinline__ void plain_values(const kvf_plain_shared *state,
                                                    const kvf_prefill_kernel_args *a,
                                                    const query_tile *t, uint32_t first,
                                                    kvf_plain_sums *r)
{
    const uint32_t d = kvf_value_dim(&a->shape), zero = first_key(a);
    const size_t token = kvf_token_bytes(&a->shape);
#pragma unroll
    for (uint32_t i = 0; i < KVF_PLAIN_ITEMS; i++) {
        const uint32_t at = i * KVF_PLAIN_THREADS + threadIdx.x, query = at / (d / 4);
        if (query >= t->queries)
            continue;
        const uint32_t limit = t->base + (t->first + query) / a->group;
        kvf_scale(&r->o[i], state->factor[query]);
        for (uint32_t j = 0; j < KVF_PLAIN_TOKENS && first + j <= limit; j++) {
            if (is_hidden(a, first + j, limit))
                continue;
            const float *v = (const float *)key_at(a, t->head, zero + first + j, token);
            kvf_add_scaled(&r->o[i], state->s[query][j], v + a->shape.head_dim + at % (d / 4) * 4);
        }
    }
}

static __global__ void __launch_bounds__(KVF_PLAIN_THREADS)
    prefill_plain(const __grid_constant__ kvf_prefill_kernel_args a)
{
    kvf_plain_shared *state = (kvf_plain_shared *)kvf_shared();
    const uint32_t quads = kvf_value_dim(&a.shape) / 4;
    const query_tile t = tile_of(&a, KVF_PLAIN_QUERIES);
    kvf_plain_sums r;
    if (t.queries == 0)
        return;
    kvf_plain_begin(&r);
    const uint32_t own = threadIdx.x / KVF_PLAIN_PARTS;
    if (own < t.queries) {
        const float sink = kvf_prefill_sink(&a, t.head, (t.first + own) % a.group);
        r.top = sink * KVF_CUDA_LOG2E;
        r.sum = sink == -INFINITY || threadIdx.x % KVF_PLAIN_PARTS ? 0.0f : 1.0f;
    }
    for (uint32_t first = seen_tile(&t, 0, KVF_PLAIN_TOKENS); first < t.keys;
         first = seen_tile(&t, first + KVF_PLAIN_TOKENS, KVF_PLAIN_TOKENS)) {
        __syncthreads();
        plain_logits(state, &a, &t, first);
        __syncthreads();
        kvf_plain_soften(state, &r, t.queries);
        __syncthreads();
        plain_values(state, &a, &t, first, &r);
    }
    __syncthreads();
    const float lse = kvf_plain_end(state, &r);
    if (a.lse && threadIdx.x % KVF_PLAIN_PARTS == 0 && own < t.queries)
        a.lse[query_at(&a, &t, own)] = lse;
#pragma unroll
    for (uint32_t i = 0; i < KVF_PLAIN_ITEMS; i++) {
        const uint32_t at = i * KVF_PLAIN_THREADS + threadIdx.x, query = at / quads;
        if (query >= t.queries)
            continue;
        kvf_scale(&r.o[i], state->factor[query]);
        *(float4 *)((float *)a.out + (query_at(&a, &t, query) * quads + at % quads) * 4) = r.o[i];
    }
}

extern "C" int kvf_prefill_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_prefill_kernel_args *a = (const kvf_prefill_kernel_args *)args;
    if (a->group == 0 || a->group > KVF_GROUP_MAX_HEADS)
        return cudaErrorInvalidValue;
    switch (a->shape.dtype) {
    case KVF_BF16:
        return launch_type<kvf_bf16>(a, (cudaStream_t)stream);
    case KVF_FP16:
        return launch_type<kvf_half>(a, (cudaStream_t)stream);
    default:
        return kvf_cuda_launch<prefill_plain>(
            dim3(kvf_div_ceil_u32(a->tokens * a->group, KVF_PLAIN_QUERIES), a->kv_heads,
                 kvf_max_u32(a->chunks.count, 1)),
            dim3(KVF_PLAIN_THREADS), sizeof(kvf_plain_shared), (cudaStream_t)stream, *a);
    }
}
