/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention of the last queries over many keys, the specification, in two steps over chunks of
 * spans.
 *
 * Knows nothing of policies; it says how much each token was looked at. Step 1 (stats) leaves a
 * maximum and a sum per (head, chunk, query), step 2 (score) merges them over chunks in order.
 * Nothing of size window x tokens is stored. Entries of chunks and spans beyond span_count are
 * neither read nor written. Task = KV head * chunks_max + chunk.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

typedef struct chunk {
    uint32_t head;
    uint32_t index;
    uint32_t chunks_max;
    uint32_t first; /* span */
    uint32_t end;
} chunk;

static chunk chunk_of(const kvf_observe_args *a, uint32_t task)
{
    const uint32_t chunks_max = kvf_div_ceil_u32(a->spans_max, KVF_OBSERVE_SPANS);
    chunk c = {.head = task / chunks_max, .index = task % chunks_max, .chunks_max = chunks_max};
    c.first = c.index * KVF_OBSERVE_SPANS;
    c.end = kvf_min_u32(a->span_count[c.head], c.first + KVF_OBSERVE_SPANS);
    return c;
}

static const void *query(const kvf_observe_args *a, uint32_t head, uint32_t g, uint32_t w)
{
    const size_t at = ((size_t)kvf_observe_place(a, w) * a->kv_heads + head) * a->group + g;
    return kvf_offset(a->q, at * kvf_key_bytes(&a->shape));
}

static uint32_t limit_of(const kvf_observe_args *a, uint32_t w)
{
    return a->limit ? a->limit[w] : a->limit_first + w;
}

/* -INFINITY if query w does not see the token. */
static double logit(const kvf_observe_args *a, const void *q, uint32_t w, size_t span, uint32_t t)
{
    const kvf_shape *s = &a->shape;
    const kvf_span *sp = &a->spans[span];
    if (!(kvf_live_bits(sp->count, sp->skip) >> t & 1) ||
        a->span_index[span] + t > limit_of(a, w) || a->span_index[span] + t < a->token_first)
        return -INFINITY;
    float x[KVF_HEAD_DIM_MAX], k[KVF_HEAD_DIM_MAX];
    kvf_elements_get(x, q, s->dtype, s->head_dim);
    kvf_elements_get(k, kvf_page_key(s, sp->page, t), s->dtype, s->head_dim);
    const double sum = kvf_sum_of_products(x, k, s->head_dim);
    return a->is_raw ? sum : kvf_capped(sum * (double)a->scale, a->cap);
}

void kvf_observe_stats_ref(const void *args, uint32_t task)
{
    const kvf_observe_args *a = args;
    const chunk c = chunk_of(a, task);
    const uint32_t group_end = a->group_first + kvf_observe_heads(a);
    if (c.first >= c.end)
        return;
    for (uint32_t g = a->group_first; g < group_end; g++)
        for (uint32_t w = 0; w < a->window; w++) {
            const void *q = query(a, c.head, g, w);
            double top = -INFINITY, sum = 0.0;
            for (uint32_t i = c.first; i < c.end; i++)
                for (uint32_t t = 0; t < a->shape.page_size; t++)
                    top = fmax(top, logit(a, q, w, (size_t)c.head * a->spans_max + i, t));
            for (uint32_t i = c.first; i < c.end && top > -INFINITY; i++)
                for (uint32_t t = 0; t < a->shape.page_size; t++)
                    sum += exp(logit(a, q, w, (size_t)c.head * a->spans_max + i, t) - top);
            const size_t at = ((size_t)task * a->group + g) * a->window + w;
            a->query_max[at] = (float)top;
            a->query_sum[at] = (float)sum;
        }
}

typedef struct query_scale {
    double top;
    double sum;
} query_scale;

static query_scale merge_chunks(const kvf_observe_args *a, const chunk *c, uint32_t g, uint32_t w)
{
    const uint32_t chunks = kvf_div_ceil_u32(a->span_count[c->head], KVF_OBSERVE_SPANS);
    const double sink = (double)kvf_observe_sink(a, c->head, g);
    query_scale r = {.top = sink};
    for (uint32_t i = 0; i < chunks; i++) {
        const size_t at = ((size_t)c->head * c->chunks_max + i) * a->group + g;
        r.top = fmax(r.top, (double)a->query_max[at * a->window + w]);
    }
    if (sink > -INFINITY)
        r.sum = exp(sink - r.top);
    for (uint32_t i = 0; i < chunks && r.top > -INFINITY; i++) {
        const size_t at = ((size_t)c->head * c->chunks_max + i) * a->group + g;
        r.sum += (double)a->query_sum[at * a->window + w] *
                 exp((double)a->query_max[at * a->window + w] - r.top);
    }
    return r;
}

/* The score of one token by query w of head g. */
static double share(const kvf_observe_args *a, double x, const query_scale *r)
{
    if (x == -INFINITY)
        return 0.0;
    if (a->is_raw)
        return x;
    /* top was rounded to fp32 */
    return r->sum > 0.0 ? exp(fmin(x - r->top, 0.0)) / r->sum : 0.0;
}

static float token_score(const kvf_observe_args *a, const chunk *c, uint32_t i, uint32_t t,
                         const query_scale *scales)
{
    const uint32_t heads = kvf_observe_heads(a);
    double top = -INFINITY, total = 0.0;
    for (uint32_t g = a->group_first; g < a->group_first + heads; g++) {
        double sum = 0.0;
        for (uint32_t w = 0; w < a->window; w++) {
            const double x =
                logit(a, query(a, c->head, g, w), w, (size_t)c->head * a->spans_max + i, t);
            sum += share(a, x, &scales[g * a->window + w]) * (double)kvf_observe_weight(a, w);
        }
        total += sum;
        top = fmax(top, sum);
    }
    if (a->group_reduce == KVF_GROUP_MAX)
        return (float)top;
    return (float)(a->group_reduce == KVF_GROUP_SUM ? total : total / heads);
}

void kvf_observe_score_ref(const void *args, uint32_t task)
{
    const kvf_observe_args *a = args;
    const chunk c = chunk_of(a, task);
    const uint32_t group_end = a->group_first + kvf_observe_heads(a);
    if (c.first >= c.end)
        return;
    query_scale scales[KVF_OBSERVE_QUERIES_MAX];
    for (uint32_t g = a->group_first; g < group_end && !a->is_raw; g++)
        for (uint32_t w = 0; w < a->window; w++)
            scales[g * a->window + w] = merge_chunks(a, &c, g, w);
    for (uint32_t i = c.first; i < c.end; i++) {
        float *out = a->score + ((size_t)c.head * a->spans_max + i) * a->shape.page_size;
        for (uint32_t t = 0; t < a->shape.page_size; t++)
            out[t] = token_score(a, &c, i, t, scales) + (a->accumulates ? out[t] : 0.0f);
    }
}
