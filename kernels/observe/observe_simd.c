/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention of the last queries over many keys, vectorised. Bound: the multiply-adds of q.k, twice.
 *
 * Knows nothing of policies. Queries are (head of the group, window query), tiles of TILE_QUERIES
 * of them run over all spans of the chunk. A tile is the live tokens of a span, or of as many short
 * ones as fit; spans that no query sees are passed over. Exactness: fp32 products and sums,
 * exponentials to 3e-7; maxima are stored in natural units, rounded to fp32.
 */

#include <math.h>
#include <stdbool.h>

#include "common/convert.h"
#include "tile_simd.h"
#include "variants.h"

typedef struct chunk {
    uint32_t head;
    uint32_t chunks_max;
    uint32_t first; /* span */
    uint32_t end;
} chunk;

typedef struct tile {
    query_strips q;
    _Alignas(64) float keys[TILE_KEYS * KVF_HEAD_DIM_MAX]; /* see panels_put_keys */
    tile_scores s;
    uint32_t queries;
    uint32_t keys_live;
    const void *key[TILE_KEYS];     /* of live tokens */
    uint32_t index[TILE_KEYS];      /* of the tokens */
    uint32_t place[TILE_KEYS];      /* among the scores of the chunk */
    uint32_t visible[TILE_QUERIES]; /* the first ones of the keys */
    uint32_t limit[TILE_QUERIES];
    uint32_t limit_top; /* no query sees a token beyond */
    uint32_t limit_low; /* every query sees the tokens up to here */
} tile;

static chunk chunk_of(const kvf_observe_args *a, uint32_t task)
{
    const uint32_t chunks_max = kvf_div_ceil_u32(a->spans_max, KVF_OBSERVE_SPANS);
    chunk c = {.head = task / chunks_max, .chunks_max = chunks_max};
    c.first = task % chunks_max * KVF_OBSERVE_SPANS;
    c.end = kvf_min_u32(a->span_count[c.head], c.first + KVF_OBSERVE_SPANS);
    return c;
}

/* Queries are numbered over the heads that take part. */
static uint32_t head_of(const kvf_observe_args *a, uint32_t query)
{
    return a->group_first + query / a->window;
}

/* Where statistics of query 0 are. */
static size_t stats_at(const kvf_observe_args *a, uint32_t task)
{
    return ((size_t)task * a->group + a->group_first) * a->window;
}

/* Queries first .. first + queries - 1 of the flattened (g, w). */
static void load_queries(tile *t, const kvf_observe_args *a, const chunk *c, uint32_t first,
                         uint32_t queries)
{
    const float unit = a->is_raw ? 1.0f : a->scale * KVF_LOG2E;
    t->queries = queries;
    t->limit_top = 0;
    t->limit_low = UINT32_MAX;
    for (uint32_t r = 0; r < queries; r++) {
        const uint32_t w = (first + r) % a->window;
        const size_t at = ((size_t)kvf_observe_place(a, w) * a->kv_heads + c->head) * a->group +
                          head_of(a, first + r);
        strips_put(&t->q, r, kvf_offset(a->q, at * kvf_key_bytes(&a->shape)), &a->shape, unit);
        t->limit[r] = a->limit ? a->limit[w] : a->limit_first + w;
        t->limit_top = kvf_max_u32(t->limit_top, t->limit[r]);
        t->limit_low = kvf_min_u32(t->limit_low, t->limit[r]);
    }
    strips_finish(&t->q, queries, &a->shape);
}

/* Live tokens of span `i`, after those of the tile. */
static void add_span(tile *t, const kvf_observe_args *a, const chunk *c, uint32_t i)
{
    const size_t at = (size_t)c->head * a->spans_max + i;
    const kvf_span *sp = &a->spans[at];
    const uint32_t index = a->span_index[at];
    uint64_t live = kvf_live_bits(kvf_min_u32(sp->count, a->shape.page_size), sp->skip);
    if (index < a->token_first)
        live &= ~kvf_live_bits(kvf_min_u32(a->token_first - index, 64), 0);
    for (; live && index <= t->limit_top; live &= live - 1) {
        const uint32_t token = (uint32_t)__builtin_ctzll(live), n = t->keys_live++;
        t->key[n] = kvf_page_key(&a->shape, sp->page, token);
        t->index[n] = index + token;
        t->place[n] = (i - c->first) * a->shape.page_size + token;
    }
}

/* Whether span `i` may follow what the tile has: what a query sees must come first. */
static bool fits(const tile *t, const kvf_observe_args *a, const chunk *c, uint32_t i)
{
    const uint32_t page_size = a->shape.page_size;
    const uint32_t index = a->span_index[(size_t)c->head * a->spans_max + i];
    if (t->keys_live + page_size > TILE_KEYS)
        return false;
    if (t->keys_live == 0)
        return true;
    const uint32_t last = t->index[t->keys_live - 1];
    return index > last || (last <= t->limit_low && index + page_size - 1 <= t->limit_low);
}

/* Logits, in units of ln 2, of the tile's queries against the live tokens of the spans from `first`
 * on. Returns the span after them. */
KVF_ALWAYS_INLINE uint32_t spans_logits(tile *t, const kvf_observe_args *a, const chunk *c,
                                        uint32_t first, const kvf_dtype dtype)
{
    uint32_t next = first;
    t->keys_live = 0;
    for (; next < c->end && (next == first || fits(t, a, c, next)); next++)
        add_span(t, a, c, next);
    if (t->keys_live == 0)
        return next;
    panels_put_keys(t->keys, t->key, t->keys_live, &a->shape, dtype);
    tile_logits(&t->s, &t->q, t->keys, 0, t->queries, t->keys_live, a->shape.head_dim);
    for (uint32_t r = 0; a->cap > 0.0f && !a->is_raw && r < t->queries; r++)
        cap_logits(t->s.at[r], t->keys_live, a->cap * KVF_LOG2E);
    for (uint32_t r = 0; r < t->queries; r++) {
        uint32_t seen = t->keys_live;
        while (seen > 0 && t->index[seen - 1] > t->limit[r])
            seen--;
        t->visible[r] = seen;
    }
    return next;
}

static uint32_t any_spans_logits(tile *t, const kvf_observe_args *a, const chunk *c, uint32_t first)
{
    if (a->shape.dtype == KVF_BF16)
        return spans_logits(t, a, c, first, KVF_BF16);
    if (a->shape.dtype == KVF_FP16)
        return spans_logits(t, a, c, first, KVF_FP16);
    return spans_logits(t, a, c, first, KVF_FP32);
}

static void stats_queries(tile *t, const kvf_observe_args *a, const chunk *c, uint32_t task,
                          uint32_t first, uint32_t queries)
{
    float top[TILE_QUERIES], sum[TILE_QUERIES];
    for (uint32_t r = 0; r < queries; r++) {
        top[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    load_queries(t, a, c, first, queries);
    for (uint32_t i = c->first; i < c->end;) {
        i = any_spans_logits(t, a, c, i);
        for (uint32_t r = 0; r < queries && t->keys_live; r++) {
            const float found = logits_mask_top(t->s.at[r], t->visible[r], t->keys_live);
            if (found > top[r]) {
                sum[r] *= top[r] == -INFINITY ? 0.0f : exp2_one(top[r] - found);
                top[r] = found;
            }
            const float base = top[r] == -INFINITY ? 0.0f : top[r];
            sum[r] += logits_soften(t->s.at[r], base, t->keys_live);
        }
    }
    const size_t at = stats_at(a, task) + first;
    for (uint32_t r = 0; r < queries; r++) {
        a->query_max[at + r] = top[r] == -INFINITY ? -INFINITY : top[r] * KVF_LN2;
        a->query_sum[at + r] = sum[r];
    }
}

void KVF_SIMD_NAME(observe_stats)(const void *args, uint32_t task)
{
    const kvf_observe_args *a = args;
    const chunk c = chunk_of(a, task);
    const uint32_t queries = kvf_observe_heads(a) * a->window,
                   most = tile_queries(a->shape.head_dim);
    tile t;
    if (c.first >= c.end)
        return;
    for (uint32_t first = 0; first < queries; first += most)
        stats_queries(&t, a, &c, task, first, kvf_min_u32(most, queries - first));
}

/* A query's part of a score: a logit x gives share * e^(x - base), a product itself weight * x. */
typedef struct query_shares {
    float base[TILE_QUERIES];   /* the maximum, in units of ln 2 */
    float share[TILE_QUERIES];  /* of a weight in the score */
    float weight[TILE_QUERIES]; /* of a product */
} query_shares;

static float unit_of(const kvf_observe_args *a, uint32_t w)
{
    float unit = kvf_observe_weight(a, w);
    if (a->group_reduce == KVF_GROUP_MEAN_SOFTMAX)
        unit /= (float)kvf_observe_heads(a);
    return unit;
}

/* Statistics merged over chunks, in order, for queries first .. first + queries - 1. */
static void merge_chunks(const kvf_observe_args *a, const chunk *c, uint32_t first,
                         uint32_t queries, query_shares *s)
{
    const uint32_t chunks = kvf_div_ceil_u32(a->span_count[c->head], KVF_OBSERVE_SPANS);
    const size_t stride = (size_t)a->group * a->window;
    const size_t at = stats_at(a, c->head * c->chunks_max) + first;
    for (uint32_t r = 0; r < queries; r++) {
        const float sink = kvf_observe_sink(a, c->head, head_of(a, first + r));
        float top = sink, sum = 0.0f;
        const float unit = unit_of(a, (first + r) % a->window);
        s->weight[r] = unit;
        if (a->is_raw)
            continue;
        for (uint32_t i = 0; i < chunks; i++) {
            const float x = a->query_max[at + i * stride + r];
            top = x > top ? x : top;
        }
        if (sink > -INFINITY)
            sum = exp2_one((sink - top) * KVF_LOG2E);
        for (uint32_t i = 0; i < chunks && top > -INFINITY; i++)
            sum += a->query_sum[at + i * stride + r] *
                   exp2_one((a->query_max[at + i * stride + r] - top) * KVF_LOG2E);
        s->base[r] = top > -INFINITY ? top * KVF_LOG2E : 0.0f;
        s->share[r] = sum > 0.0f ? unit / sum : 0.0f;
    }
}

/* Adds what one query looks at to sum[0 .. keys_live). */
KVF_ALWAYS_INLINE void add_query(tile *t, const query_shares *shares, uint32_t r, float *sum)
{
    float *s = t->s.at[r];
    for (uint32_t j = t->visible[r]; j < kvf_round_up(t->keys_live, VF_LANES); j++)
        s[j] = -INFINITY;
    for (uint32_t j = 0; j < t->keys_live; j += VF_LANES) {
        /* base went through fp32 and ln 2; no weight may exceed one for that */
        vf x = vf_min(vf_zero(), vf_sub(vf_load(s + j), vf_set(shares->base[r])));
        vf weight = vf_exp2(x);
        vf_store(sum + j, vf_fma(weight, vf_set(shares->share[r]), vf_load(sum + j)));
    }
}

/* The same for products themselves. */
static void add_raw_query(const tile *t, const query_shares *shares, uint32_t r, float *sum)
{
    const float *s = t->s.at[r];
    for (uint32_t j = 0; j < t->visible[r]; j++)
        sum[j] += s[j] * shares->weight[r];
}

/* Adds what queries first .. first + queries - 1 look at to out[(span - c->first) * page_size +
 * token].
 */
static void score_queries(tile *t, const kvf_observe_args *a, const chunk *c, uint32_t first,
                          uint32_t queries, float *out)
{
    query_shares shares;
    merge_chunks(a, c, first, queries, &shares);
    load_queries(t, a, c, first, queries);
    for (uint32_t i = c->first; i < c->end;) {
        i = any_spans_logits(t, a, c, i);
        float sum[TILE_KEYS] = {0.0f};
        if (a->is_raw)
            for (uint32_t r = 0; r < queries && t->keys_live; r++)
                add_raw_query(t, &shares, r, sum);
        else
            for (uint32_t r = 0; r < queries && t->keys_live; r++)
                add_query(t, &shares, r, sum);
        for (uint32_t j = 0; j < t->keys_live; j++)
            out[t->place[j]] += sum[j];
    }
}

/* The larger, head after head, into out; `is_first`: there is nothing yet. */
static void take_larger(const float *head, float *out, size_t tokens, int is_first)
{
    for (size_t i = 0; i < tokens; i++)
        out[i] = is_first || head[i] > out[i] ? head[i] : out[i];
}

void KVF_SIMD_NAME(observe_score)(const void *args, uint32_t task)
{
    const kvf_observe_args *a = args;
    const chunk c = chunk_of(a, task);
    const int by_head = a->group_reduce == KVF_GROUP_MAX;
    const uint32_t most = tile_queries(a->shape.head_dim);
    const uint32_t all = kvf_observe_heads(a) * a->window;
    const uint32_t part = by_head ? a->window : all; /* queries that are summed */
    float total[KVF_OBSERVE_SPANS * KVF_PAGE_SIZE_MAX];
    tile t;
    if (c.first >= c.end)
        return;
    const size_t tokens = (size_t)(c.end - c.first) * a->shape.page_size;
    float *out = a->score + ((size_t)c.head * a->spans_max + c.first) * a->shape.page_size;
    float *to = a->accumulates ? total : out;
    memset(to, 0, tokens * sizeof *to);
    for (uint32_t begin = 0; begin < all; begin += part) {
        float head_sum[KVF_OBSERVE_SPANS * KVF_PAGE_SIZE_MAX];
        if (by_head)
            memset(head_sum, 0, tokens * sizeof *head_sum);
        for (uint32_t first = begin; first < begin + part; first += most)
            score_queries(&t, a, &c, first, kvf_min_u32(most, begin + part - first),
                          by_head ? head_sum : to);
        if (by_head)
            take_larger(head_sum, to, tokens, begin == 0);
    }
    for (size_t i = 0; a->accumulates && i < tokens; i++)
        out[i] += total[i];
}
