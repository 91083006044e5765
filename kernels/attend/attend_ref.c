/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sparse paged attention over spans, the specification.
 *
 * Knows nothing of pages beyond their address, their live tokens and whether they arrive late. A
 * split is computed whole or not at all, so its bits do not depend on the pass. A quantized key is
 * in the rotated space, so the query that meets it is rotated too: in fp32, as codes are.
 */

#include <math.h>
#include <string.h>

#include "common/convert.h"
#include "quantized.h"
#include "split.h"
#include "variants.h"

/* A query, and the same rotated. */
typedef struct query {
    float plain[KVF_HEAD_DIM_MAX], rotated[KVF_HEAD_DIM_MAX];
} query;

static void put_query(query *q, const kvf_shape *s, const void *from)
{
    kvf_elements_get(q->plain, from, s->dtype, s->head_dim);
    memcpy(q->rotated, q->plain, s->head_dim * sizeof *q->plain);
    kvf_code_rotate(q->rotated, s->head_dim);
}

/* The key of a token, or its value, in fp32. */
static void get_key(const kvf_shape *s, const kvf_span *span, uint32_t t, float *k)
{
    if (span->quantized)
        kvf_dequantize_key(s, span->page, t, k);
    else
        kvf_elements_get(k, kvf_page_key(s, span->page, t), s->dtype, s->head_dim);
}

static void get_value(const kvf_shape *s, const kvf_span *span, uint32_t t, float *v)
{
    if (span->quantized)
        kvf_dequantize_value(s, span->page, t, v);
    else
        kvf_elements_get(v, kvf_page_value(s, span->page, t), s->dtype, kvf_value_dim(s));
}

static double logit(const kvf_attend_args *a, const query *q, const kvf_span *span, uint32_t t)
{
    const float *with = span->quantized ? q->rotated : q->plain;
    const kvf_shape *s = &a->shape;
    float k[KVF_HEAD_DIM_MAX];
    get_key(s, span, t, k);
    return kvf_capped(kvf_sum_of_products(with, k, s->head_dim) * (double)a->scale, a->cap);
}

/* One query over the spans of a split. */
static void attend_query(const kvf_attend_args *a, const kvf_split *split, const void *from,
                         float *o, float *lse)
{
    const kvf_shape *s = &a->shape;
    double top = -INFINITY, sum = 0.0;
    double acc[KVF_HEAD_DIM_MAX] = {0.0};
    query q;
    put_query(&q, s, from);
    for (uint32_t i = 0; i < split->count; i++) {
        uint64_t live = kvf_live_bits(split->spans[i].count, split->spans[i].skip);
        for (uint32_t t = 0; t < s->page_size; t++)
            if (live >> t & 1)
                top = fmax(top, logit(a, &q, &split->spans[i], t));
    }
    for (uint32_t i = 0; i < split->count && top > -INFINITY; i++) {
        const kvf_span *span = &split->spans[i];
        uint64_t live = kvf_live_bits(span->count, span->skip);
        for (uint32_t t = 0; t < s->page_size; t++) {
            if (!(live >> t & 1))
                continue;
            double weight = exp(logit(a, &q, span, t) - top);
            float v[KVF_HEAD_DIM_MAX];
            get_value(s, span, t, v);
            sum += weight;
            for (uint32_t d = 0; d < kvf_value_dim(s); d++)
                acc[d] += weight * (double)v[d];
        }
    }
    for (uint32_t d = 0; d < kvf_value_dim(s); d++)
        o[d] = sum > 0.0 ? (float)(acc[d] / sum) : 0.0f;
    *lse = sum > 0.0 ? (float)(top + log(sum)) : -INFINITY;
}

void kvf_attend_ref(const void *args, uint32_t task)
{
    const kvf_attend_args *a = args;
    kvf_split split;
    if (!kvf_split_get(a, task, &split))
        return;
    const kvf_subgroup sub = kvf_subgroup_whole(a->sub, a->group);
    for (uint32_t g = sub.first; g < sub.first + sub.count; g++) {
        const void *q =
            kvf_offset(a->q, ((size_t)split.list * a->group + g) * kvf_key_bytes(&a->shape));
        const size_t at_query = (size_t)task * a->group + g;
        attend_query(a, &split, q, a->partial_o + at_query * kvf_value_dim(&a->shape),
                     a->partial_lse + at_query);
    }
}

/* Beside the order of its parts it says that a missed page is whole in its place afterwards. */
void kvf_attend_step_ref(const void *args, uint32_t task)
{
    const kvf_attend_step_args *a = args;
    const kvf_attend_args *attend = &a->attend;
    const kvf_merge_args merge = kvf_attend_step_merge(a);
    const kvf_span *spans = attend->spans + (size_t)task * attend->spans_max;
    for (uint32_t i = 0; i < attend->span_count[task]; i++)
        if (spans[i].home)
            memcpy((void *)(uintptr_t)spans[i].page, spans[i].home,
                   spans[i].quantized ? kvf_stored_page_bytes(&attend->shape)
                                      : kvf_page_bytes(&attend->shape));
    for (uint32_t s = 0; s < merge.splits_max; s++)
        kvf_attend_ref(attend, task * merge.splits_max + s);
    kvf_merge_ref(&merge, task);
}
