/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of tokens by the definition; see the header.
 */

#include "naive_scores.h"

#include <math.h>

#include "attention_params.h"

static double product(const test_tokens *t, uint32_t layer, uint32_t query, uint32_t head,
                      uint32_t key, uint32_t kv_head)
{
    const size_t d = t->head_dim;
    const void *q = test_q(t, layer, query), *k = test_k(t, layer, key);
    double sum = 0.0;
    for (uint32_t i = 0; i < d; i++)
        sum += (double)kvf_element_get(q, t->dtype, head * d + i) *
               (double)kvf_element_get(k, t->dtype, kv_head * d + i);
    return sum;
}

/* s[begin .. candidates) of one query head, queries first .. first + window - 1. */
static void head_scores(const test_tokens *t, const uint32_t *tokens, const kvf_scores_args *a,
                        uint32_t head, uint32_t kv_head, double *s)
{
    const kvf_cache_config c = {.head_dim = t->head_dim};
    double *x = calloc(t->count, sizeof *x);
    assert_non_null(x);
    for (uint32_t j = 0; j < a->candidates; j++)
        s[j] = 0.0;
    for (uint32_t w = 0; w < a->window; w++) {
        const uint32_t query = a->first + w, end = query + 1; /* sees itself */
        double top = test_sink(a->layer, head), sum;
        for (uint32_t j = a->begin; j < end; j++) {
            x[j] = product(t, a->layer, tokens ? tokens[query] : query, head,
                           tokens ? tokens[j] : j, kv_head);
            if (!a->is_raw)
                x[j] = test_logit(&c, a->layer, x[j]);
            top = fmax(top, x[j]);
        }
        sum = exp(test_sink(a->layer, head) - top);
        for (uint32_t j = a->begin; j < end; j++)
            sum += exp(x[j] - top);
        double weight = a->is_weighted ? (w + 1.0) / a->window : 1.0;
        weight /= a->window_mean ? a->window : 1;
        for (uint32_t j = a->begin; j < end && j < a->candidates; j++)
            s[j] += (a->is_raw ? x[j] : exp(x[j] - top) / sum) * weight;
    }
    free(x);
}

static double pooled(const kvf_scores_args *a, const double *s, uint32_t j)
{
    const int64_t half = a->pool_width / 2;
    double sum = 0.0, top = -INFINITY;
    for (int64_t i = (int64_t)j - half; i <= (int64_t)j + half; i++) {
        if (i < (int64_t)a->begin || i >= (int64_t)a->candidates)
            continue;
        sum += s[i];
        top = fmax(top, s[i]);
    }
    return a->pool == KVF_POOL_MAX ? top : sum / a->pool_width;
}

void naive_token_scores(const test_tokens *t, const uint32_t *tokens, const kvf_scores_args *a,
                        double *out, double *heads)
{
    const uint32_t group = t->query_heads / t->kv_heads, n = a->candidates - a->begin;
    double *s = calloc(a->candidates + 1, sizeof *s);
    assert_non_null(s);
    for (uint32_t h = 0; h < t->kv_heads; h++)
        for (uint32_t g = 0; g < group; g++) {
            head_scores(t, tokens, a, h * group + g, h, s);
            for (uint32_t i = 0; i < n; i++) {
                double *to = &out[h * n + i];
                const double x = pooled(a, s, a->begin + i);
                heads[(h * group + g) * n + i] = s[a->begin + i];
                if (a->group_reduce == KVF_GROUP_MAX)
                    *to = g == 0 || x > *to ? x : *to;
                else
                    *to =
                        (g == 0 ? 0.0 : *to) + x / (a->group_reduce == KVF_GROUP_SUM ? 1.0 : group);
            }
        }
    free(s);
}
