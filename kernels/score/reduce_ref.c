/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of query heads into scores of lists, the specification.
 *
 * Knows nothing of groups or layers, only of consecutive vectors of scores. NaN counts as
 * -infinity, and +infinity as the largest float, so that a damaged score cannot erase the others of
 * its vector.
 */

#include <float.h>
#include <math.h>

#include "variants.h"

static float tame(float x)
{
    return isnan(x) ? -INFINITY : x > FLT_MAX ? FLT_MAX : x;
}

/* Scaled and capped. */
static double logit(const kvf_reduce_args *a, float score)
{
    return kvf_capped((double)a->scale * (double)tame(score), a->cap);
}

/* out += softmax of the scores; out starts at zero. */
static void add_softmax(const kvf_reduce_args *a, const float *scores, float *out, uint32_t pages)
{
    float top = -INFINITY;
    for (uint32_t p = 0; p < pages; p++)
        top = fmaxf(top, tame(scores[p]));
    if (isinf(top))
        return;
    double sum = 0.0;
    for (uint32_t p = 0; p < pages; p++)
        sum += exp(logit(a, scores[p]) - logit(a, top));
    for (uint32_t p = 0; p < pages; p++) {
        double weight = exp(logit(a, scores[p]) - logit(a, top)) / sum;
        out[p] += (float)(weight / a->heads);
    }
}

static float reduce_page(const kvf_reduce_args *a, const float *scores, uint32_t page)
{
    double sum = 0.0;
    float top = -INFINITY;
    for (uint32_t r = 0; r < a->heads; r++) {
        float x = tame(scores[(size_t)r * a->pages_max + page]);
        top = fmaxf(top, x);
        sum += a->cap > 0.0f ? logit(a, x) : (double)x;
    }
    return a->kind == KVF_GROUP_SUM ? (float)sum : top;
}

void kvf_reduce_ref(const void *args, uint32_t task)
{
    const kvf_reduce_args *a = args;
    const uint32_t pages = a->pages[task];
    const float *scores = a->scores + (size_t)task * a->heads * a->pages_max;
    float *out = a->out + (size_t)task * a->pages_max;
    if (a->kind != KVF_GROUP_MEAN_SOFTMAX) {
        for (uint32_t p = 0; p < pages; p++)
            out[p] = reduce_page(a, scores, p);
        return;
    }
    for (uint32_t p = 0; p < pages; p++)
        out[p] = 0.0f;
    for (uint32_t r = 0; r < a->heads; r++)
        add_softmax(a, scores + (size_t)r * a->pages_max, out, pages);
    for (uint32_t p = 0; p < pages; p++)
        if (isinf(reduce_page(&(kvf_reduce_args){.kind = KVF_GROUP_MAX,
                                                 .heads = a->heads,
                                                 .pages_max = a->pages_max},
                              scores, p)))
            out[p] = -INFINITY;
}
