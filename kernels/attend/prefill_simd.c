/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Causal attention of a chunk, vectorised. Bound it aims at: the core's fp32 multiply-adds.
 *
 * Knows nothing beyond prefill_ref.c. Queries (token, head of the group) go in tiles of
 * TILE_QUERIES against tiles of TILE_KEYS keys, half as many of both where heads are wide; keys and
 * values of a tile are widened to fp32 once per tile of queries, keys transposed on the way, and
 * both products run on strips of six queries (tile_simd.h). Softmax is online, a tile at a time, in
 * powers of two. Exactness: fp32 products and sums, exponentials to 3e-7; |q.k| must stay below
 * FLT_MAX. About 250 KiB of stack.
 */

#include <math.h>

#include "tile_simd.h"
#include "variants.h"

_Static_assert(KVF_PREFILL_TILE % TILE_KEYS == 0, "keys of a tile are summed together");

/* Keys of a tile. */
KVF_INLINE uint32_t tile_keys(uint32_t head_dim)
{
    return head_dim > TILE_WIDTH ? TILE_KEYS * TILE_WIDTH / KVF_HEAD_DIM_MAX : TILE_KEYS;
}

typedef struct query_tile {
    query_strips q;
    _Alignas(64) float keys[TILE_KEYS * TILE_WIDTH];   /* see panels_put_keys */
    _Alignas(64) float values[TILE_KEYS * TILE_WIDTH]; /* [column panel][tile_keys][VF_PAIR] */
    tile_scores s;
    _Alignas(64) float o[TILE_QUERIES * TILE_WIDTH]; /* [query][columns] */
    float top[TILE_QUERIES];
    float sum[TILE_QUERIES];
    uint32_t limit[TILE_QUERIES]; /* last key that the query sees; ascending */
    size_t at[TILE_QUERIES];      /* query in q, out and lse */
    uint32_t queries;
    uint32_t tile_keys;
    uint32_t columns; /* value_dim, rounded up to whole panels */
    uint32_t sink;
    uint32_t window; /* 0 = all */
    float cap;       /* of logits in units of ln 2; 0 = none */
} query_tile;

KVF_ALWAYS_INLINE void put_values(query_tile *b, const void *const *values, uint32_t count,
                                  const kvf_shape *s, const kvf_dtype dtype)
{
    for (uint32_t d = 0; d < kvf_value_dim(s); d += VF_LANES) {
        float *to = b->values + (size_t)(d / VF_PAIR) * VF_PAIR * b->tile_keys + d % VF_PAIR;
        for (uint32_t j = 0; j < count; j++)
            vf_store(to + (size_t)j * VF_PAIR, vf_load_as(values[j], dtype, d));
    }
}

/* Keys and values first .. first + count - 1 of one head, widened. */
KVF_ALWAYS_INLINE void load_tile(query_tile *b, const kvf_prefill_kernel_args *a, uint32_t kv_head,
                                 uint32_t first, uint32_t count, const kvf_dtype dtype)
{
    const kvf_shape *s = &a->shape;
    const size_t page_offset = kv_head * kvf_page_bytes(s);
    const void *keys[TILE_KEYS], *values[TILE_KEYS];
    for (uint32_t j = 0; j < count; j++) {
        const uint32_t token = first + j;
        const void *page = kvf_offset(a->blocks[token / s->page_size], page_offset);
        keys[j] = kvf_page_key(s, page, token % s->page_size);
        values[j] = kvf_page_value(s, page, token % s->page_size);
    }
    panels_put_keys(b->keys, keys, count, s, dtype);
    put_values(b, values, count, s, dtype);
}

/* Keys of a tile that lie between the sink and the window of the query. */
KVF_ALWAYS_INLINE void hide_query(query_tile *b, uint32_t query, uint32_t first, uint32_t count)
{
    const uint32_t seen = b->limit[query] + 1 > b->window ? b->limit[query] + 1 - b->window : 0;
    const uint32_t end = seen > first ? kvf_min_u32(seen - first, count) : 0;
    for (uint32_t j = b->sink > first ? b->sink - first : 0; j < end; j++)
        b->s.at[query][j] = -INFINITY;
}

/* Logits of one query become weights; what was summed so far is rescaled if the maximum grew. */
KVF_ALWAYS_INLINE void soften_query(query_tile *b, uint32_t query, uint32_t first, uint32_t count)
{
    float *s = b->s.at[query];
    uint32_t visible = 0;
    if (query < b->queries && b->limit[query] >= first)
        visible = kvf_min_u32(b->limit[query] - first + 1, count);
    if (b->window && query < b->queries)
        hide_query(b, query, first, count);
    const float tile_top = logits_mask_top(s, visible, count);
    const float top = tile_top > b->top[query] ? tile_top : b->top[query];
    const float base = top == -INFINITY ? 0.0f : top;
    if (top != b->top[query]) {
        const float factor = exp2_one(b->top[query] - base);
        float *o = b->o + (size_t)query * b->columns;
        for (uint32_t d = 0; d < b->columns; d += VF_LANES)
            vf_store(o + d, vf_mul(vf_load(o + d), vf_set(factor)));
        b->sum[query] *= factor;
        b->top[query] = top;
    }
    b->sum[query] += logits_soften(s, base, count);
}

KVF_ALWAYS_INLINE void attend_tile(query_tile *b, uint32_t first, uint32_t count, uint32_t head_dim)
{
    uint32_t strip = 0;
    while (b->limit[kvf_min_u32(strip * STRIP + STRIP - 1, b->queries - 1)] < first)
        strip++;
    tile_logits(&b->s, &b->q, b->keys, strip, b->queries, count, head_dim);
    for (uint32_t query = strip * STRIP; b->cap > 0.0f && query < b->queries; query++)
        cap_logits(b->s.at[query], count, b->cap);
    for (uint32_t query = strip * STRIP; query < kvf_round_up(b->queries, STRIP); query++)
        soften_query(b, query, first, count);
    for (uint32_t d = 0; d < b->columns; d += VF_PAIR)
        for (uint32_t i = strip; i * STRIP < b->queries; i++)
            multiply_strip(b->o + (size_t)i * STRIP * b->columns + d, b->columns,
                           b->s.at[i * STRIP], TILE_KEYS, 1, b->values + (size_t)d * b->tile_keys,
                           count, 1);
}

/* A query in fp32 as the element type has it. */
KVF_ALWAYS_INLINE void put_query(query_tile *b, const kvf_prefill_kernel_args *a, uint32_t query)
{
    const kvf_shape *s = &a->shape;
    const size_t at = b->at[query] * s->head_dim * kvf_dtype_bytes(a->q_dtype);
    const void *q = kvf_offset(a->q, at);
    _Alignas(64) uint16_t rounded[KVF_HEAD_DIM_MAX];
    if (a->q_dtype != s->dtype) {
        vf_round_array(rounded, s->dtype, q, s->head_dim);
        q = rounded;
    }
    strips_put(&b->q, query, q, s, a->scale * KVF_LOG2E);
}

KVF_ALWAYS_INLINE void begin_tile(query_tile *b, const kvf_prefill_kernel_args *a, uint32_t kv_head,
                                  uint32_t first_query, uint32_t queries)
{
    const uint32_t value_dim = kvf_value_dim(&a->shape);
    b->queries = queries;
    b->tile_keys = tile_keys(a->shape.head_dim);
    b->sink = a->sink;
    b->window = a->window;
    b->cap = a->cap * KVF_LOG2E;
    b->columns = (uint32_t)kvf_round_up(value_dim, VF_PAIR);
    for (uint32_t r = 0; r < queries; r++) {
        const uint32_t token = (first_query + r) / a->group, g = (first_query + r) % a->group;
        b->limit[r] = a->base + token;
        b->at[r] = ((size_t)token * a->kv_heads + kv_head) * a->group + g;
        put_query(b, a, r);
    }
    strips_finish(&b->q, queries, &a->shape);
    for (uint32_t r = 0; r < kvf_round_up(queries, STRIP); r++) {
        const float sink = kvf_prefill_sink(a, kv_head, (first_query + r) % a->group);
        b->top[r] = sink * KVF_LOG2E;
        b->sum[r] = sink == -INFINITY ? 0.0f : 1.0f;
    }
    memset(b->o, 0, kvf_round_up(queries, STRIP) * b->columns * sizeof *b->o);
    /* A half panel at the end of a value of 80 channels with 16 lanes: its second vector stays
     * zero. */
    if (b->columns != value_dim)
        memset(b->values + (size_t)(b->columns - VF_PAIR) * b->tile_keys, 0,
               (size_t)VF_PAIR * b->tile_keys * sizeof *b->values);
}

KVF_ALWAYS_INLINE void end_tile(query_tile *b, const kvf_prefill_kernel_args *a)
{
    const uint32_t value_dim = kvf_value_dim(&a->shape);
    for (uint32_t r = 0; r < b->queries; r++) {
        float *o = b->o + (size_t)r * b->columns;
        const int any = !(b->sum[r] <= 0.0f);
        const vf inverse = vf_set(any ? 1.0f / b->sum[r] : 0.0f);
        for (uint32_t d = 0; d < value_dim; d += VF_LANES)
            vf_store(o + d, vf_mul(vf_load(o + d), inverse));
        vf_round_array(kvf_offset_mut(a->out, b->at[r] * value_dim * kvf_dtype_bytes(a->out_dtype)),
                       a->out_dtype, o, value_dim);
        if (a->lse)
            a->lse[b->at[r]] = any ? b->top[r] * KVF_LN2 + logf(b->sum[r]) : -INFINITY;
    }
}

KVF_ALWAYS_INLINE void prefill_task(const kvf_prefill_kernel_args *a, uint32_t task,
                                    const kvf_dtype dtype)
{
    const uint32_t tiles = kvf_div_ceil_u32(a->tokens, KVF_PREFILL_QUERIES);
    const uint32_t kv_head = task / tiles;
    const uint32_t token = task % tiles * KVF_PREFILL_QUERIES;
    const uint32_t end = kvf_min_u32(a->tokens, token + KVF_PREFILL_QUERIES) * a->group;
    const uint32_t most = tile_queries(a->shape.head_dim), step = tile_keys(a->shape.head_dim);
    query_tile b;
    for (uint32_t query = token * a->group; query < end; query += most) {
        begin_tile(&b, a, kv_head, query, kvf_min_u32(most, end - query));
        const uint32_t keys = b.limit[b.queries - 1] + 1;
        for (uint32_t first = 0; first < keys; first += step) {
            /* The first query's window begins earliest. */
            if (a->window && first >= a->sink && first + step - 1 + a->window <= b.limit[0])
                continue;
            const uint32_t count = kvf_min_u32(step, keys - first);
            load_tile(&b, a, kv_head, first, count, dtype);
            attend_tile(&b, first, count, a->shape.head_dim);
        }
        end_tile(&b, a);
    }
}

void KVF_SIMD_NAME(prefill)(const void *args, uint32_t task)
{
    const kvf_prefill_kernel_args a = kvf_prefill_one(args, &task);
    if (task >= kvf_prefill_tasks(&a))
        return;
    if (a.shape.dtype == KVF_BF16)
        prefill_task(&a, task, KVF_BF16);
    else if (a.shape.dtype == KVF_FP16)
        prefill_task(&a, task, KVF_FP16);
    else
        prefill_task(&a, task, KVF_FP32);
}
