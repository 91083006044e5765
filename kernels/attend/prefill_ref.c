/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Causal attention of a chunk, over all tokens or a sink and a window, the specification.
 *
 * Knows nothing of pruning or positions: token j is at j % page_size of block j / page_size. Task
 * = KV head * tiles + tile, a tile being KVF_PREFILL_QUERIES consecutive query tokens.
 */

#include <math.h>
#include <stdbool.h>

#include "common/convert.h"
#include "variants.h"

typedef struct chunk_query {
    uint32_t token; /* in the chunk */
    uint32_t kv_head;
    size_t at; /* in q, out and lse */
    float q[KVF_HEAD_DIM_MAX];
} chunk_query;

static const void *page_of(const kvf_prefill_kernel_args *a, uint32_t kv_head, uint32_t j)
{
    return kvf_offset(a->blocks[j / a->shape.page_size], kv_head * kvf_page_bytes(&a->shape));
}

static double logit(const kvf_prefill_kernel_args *a, const chunk_query *r, uint32_t j)
{
    const kvf_shape *s = &a->shape;
    float k[KVF_HEAD_DIM_MAX];
    kvf_elements_get(k, kvf_page_key(s, page_of(a, r->kv_head, j), j % s->page_size), s->dtype,
                     s->head_dim);
    return kvf_capped(kvf_sum_of_products(r->q, k, s->head_dim) * (double)a->scale, a->cap);
}

static bool is_seen(const kvf_prefill_kernel_args *a, uint32_t query, uint32_t j)
{
    return a->window == 0 || j < a->sink || query - j < a->window;
}

static void prefill_query(const kvf_prefill_kernel_args *a, chunk_query *r)
{
    const kvf_shape *s = &a->shape;
    for (uint32_t d = 0; d < s->head_dim; d++)
        r->q[d] =
            kvf_element_round(s->dtype, kvf_element_get(a->q, a->q_dtype, r->at * s->head_dim + d));
    const uint32_t last = a->base + r->token;
    const double sink = (double)kvf_prefill_sink(a, r->kv_head, (uint32_t)(r->at % a->group));
    double top = sink, sum = 0.0;
    double acc[KVF_HEAD_DIM_MAX] = {0.0};
    for (uint32_t j = 0; j <= last; j++)
        if (is_seen(a, last, j))
            top = fmax(top, logit(a, r, j));
    if (sink > -INFINITY)
        sum = exp(sink - top);
    for (uint32_t j = 0; j <= last && top > -INFINITY; j++) {
        if (!is_seen(a, last, j))
            continue;
        double weight = exp(logit(a, r, j) - top);
        float v[KVF_HEAD_DIM_MAX];
        kvf_elements_get(v, kvf_page_value(s, page_of(a, r->kv_head, j), j % s->page_size),
                         s->dtype, kvf_value_dim(s));
        sum += weight;
        for (uint32_t d = 0; d < kvf_value_dim(s); d++)
            acc[d] += weight * (double)v[d];
    }
    for (uint32_t d = 0; d < kvf_value_dim(s); d++)
        kvf_element_set(a->out, a->out_dtype, r->at * kvf_value_dim(s) + d,
                        sum > 0.0 ? (float)(acc[d] / sum) : 0.0f);
    if (a->lse)
        a->lse[r->at] = sum > 0.0 ? (float)(top + log(sum)) : -INFINITY;
}

void kvf_prefill_ref(const void *args, uint32_t task)
{
    const kvf_prefill_kernel_args one = kvf_prefill_one(args, &task), *a = &one;
    const uint32_t tiles = kvf_div_ceil_u32(a->tokens, KVF_PREFILL_QUERIES);
    const uint32_t kv_head = task / tiles;
    const uint32_t first = task % tiles * KVF_PREFILL_QUERIES;
    const uint32_t end = kvf_min_u32(a->tokens, first + KVF_PREFILL_QUERIES);
    for (uint32_t t = first; t < end && kv_head < a->kv_heads; t++)
        for (uint32_t g = 0; g < a->group; g++)
            prefill_query(a,
                          &(chunk_query){.token = t,
                                         .kv_head = kv_head,
                                         .at = ((size_t)t * a->kv_heads + kv_head) * a->group + g});
}
