/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A decode step of the naive model: which tokens are static, which pages are taken, what has a
 * slot.
 *
 * Knows only naive.h. A token is attended iff its bit in `attended` is set, so it cannot count
 * twice.
 */

#include "naive.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "attention_params.h"
#define WINDOW_MAX 128u

static void note_border(naive *n, double gap)
{
    n->border = fmin(n->border, gap);
}

/* Beside sink and the longest window. */
static uint32_t rest_tokens(const naive *n)
{
    return n->c.budget_tokens - n->c.sink_tokens - (n->c.local_tokens + n->plan.block_size - 1);
}

/* At least a share of what there is. */
static uint32_t budget_now(const naive *n, const naive_layer *l)
{
    const long share = lround((double)n->c.budget_share * l->length);
    return share > n->c.budget_tokens ? (uint32_t)share : n->c.budget_tokens;
}

/* Beside sink and the window as it is. */
static uint32_t rest_now(const naive *n, uint32_t layer)
{
    const uint32_t sealed = naive_sealed(n, layer) * n->c.page_size;
    return budget_now(n, &n->layers[layer]) - n->c.sink_tokens - (n->layers[layer].length - sealed);
}

#define RECENT_STEPS 8u

/* In one of the steps before this one. */
static int is_recent(const naive *n, const naive_layer *l, uint32_t list, uint32_t page)
{
    const uint32_t at = l->chosen_at[(size_t)list * n->c.tokens_max + page];
    return at && at + RECENT_STEPS > l->decoded;
}

static double query_key(const naive *n, const naive_layer *l, uint32_t head, uint32_t query,
                        uint32_t token)
{
    const float *q = l->q + ((size_t)query * n->c.query_heads + head) * n->c.head_dim;
    const float *k = l->k + ((size_t)token * n->c.kv_heads + head / n->group) * n->c.head_dim;
    double sum = 0.0;
    for (uint32_t d = 0; d < n->c.head_dim; d++)
        sum += (double)q[d] * (double)k[d];
    return test_logit(&n->c, l->index, sum);
}

/* score[t] += attention of one query (causal, over the tokens in `seen`) / parts. */
static void observe_query(const naive *n, const naive_layer *l, uint32_t head, uint32_t query,
                          const unsigned char *seen, double parts, double *score)
{
    const double sink = test_sink(l->index, head);
    double top = sink, sum = 0.0, *share = calloc((size_t)query + 1, sizeof *share);
    assert(share);
    for (uint32_t t = 0; t <= query; t++)
        if (seen[t])
            top = fmax(top, share[t] = query_key(n, l, head, query, t));
    if (sink > -INFINITY)
        sum = exp(sink - top);
    for (uint32_t t = 0; t <= query; t++)
        if (seen[t])
            sum += share[t] = exp(share[t] - top);
    for (uint32_t t = 0; t <= query && sum > 0.0; t++)
        if (seen[t])
            score[t] += share[t] / sum / parts;
    free(share);
}

/* Tokens that a refresh can see: all of them, or those of recent choices beside what is on the
 * device anyway. */
static void seen_tokens(const naive *n, const naive_layer *l, uint32_t layer, uint32_t kv_head,
                        int exact, unsigned char *seen)
{
    const uint32_t sealed = naive_sealed(n, layer);
    for (uint32_t t = 0; t < l->length; t++) {
        const uint32_t page = t / n->c.page_size;
        seen[t] = exact || page >= sealed || t < n->c.sink_tokens ||
                  l->fixed[(size_t)kv_head * n->c.tokens_max + t] || is_recent(n, l, kv_head, page);
    }
}

/* The queries of the last tokens that have one, at most the window; newest first. */
static uint32_t window_queries(const naive *n, const naive_layer *l, uint32_t *queries)
{
    uint32_t count = 0, limit = n->c.local_tokens < WINDOW_MAX ? n->c.local_tokens : WINDOW_MAX;
    for (uint32_t t = l->length; t-- > 0 && count < limit && l->has_q[t];)
        queries[count++] = t;
    return count;
}

static void choose_static(naive *n, naive_layer *l, uint32_t layer, int exact)
{
    const uint32_t candidates = naive_sealed(n, layer) * n->c.page_size;
    uint32_t queries[WINDOW_MAX];
    const uint32_t query_count = window_queries(n, l, queries);
    double *score = calloc(l->length + 1, sizeof *score);
    unsigned char *seen = calloc(l->length + 1, 1);
    unsigned char *mask = calloc(l->length + 1, 1);
    assert(score && seen && mask);
    for (uint32_t h = 0; h < n->c.kv_heads && query_count > 0; h++) {
        memset(score, 0, (l->length + 1) * sizeof *score);
        seen_tokens(n, l, layer, h, exact, seen);
        for (uint32_t g = 0; g < n->group; g++)
            for (uint32_t i = 0; i < query_count; i++)
                observe_query(n, l, h * n->group + g, queries[i], seen,
                              (double)query_count * n->group, score);
        for (uint32_t t = 0; t < candidates; t++)
            if (t < n->c.sink_tokens || !seen[t])
                score[t] = -INFINITY;
        note_border(n, naive_top(score, candidates, l->static_tokens, mask));
        memset(l->fixed + (size_t)h * n->c.tokens_max, 0, n->c.tokens_max);
        memcpy(l->fixed + (size_t)h * n->c.tokens_max, mask, candidates);
    }
    free(score);
    free(seen);
    free(mask);
}

/* The `rest` tokens that one query ranks highest, in one KV head; returns how many there were. */
static uint32_t top_of_query(naive *n, const naive_layer *l, uint32_t layer, uint32_t kv_head,
                             uint32_t query, unsigned char *mask)
{
    const uint32_t candidates = naive_sealed(n, layer) * n->c.page_size;
    double *score = calloc(l->length + 1, sizeof *score);
    unsigned char *all = malloc(l->length + 1);
    uint32_t count = 0;
    assert(score && all);
    memset(all, 1, l->length + 1);
    for (uint32_t g = 0; g < n->group; g++)
        observe_query(n, l, kv_head * n->group + g, query, all, n->group, score);
    for (uint32_t t = 0; t < n->c.sink_tokens && t < candidates; t++)
        score[t] = -INFINITY;
    note_border(n, naive_top(score, candidates, rest_tokens(n), mask));
    for (uint32_t t = 0; t < candidates; t++)
        count += mask[t];
    free(score);
    free(all);
    return count;
}

/* The automatic ratio: what the first and the last query of the window both rank highest, mean over
 * KV heads, in whole pages; a quarter while everything would be both. */
static void choose_share(naive *n, naive_layer *l, uint32_t layer)
{
    uint32_t queries[WINDOW_MAX], both = 0, candidates = 0;
    const uint32_t count = window_queries(n, l, queries), rest = rest_tokens(n);
    unsigned char *a = calloc(l->length + 1, 1), *b = calloc(l->length + 1, 1);
    assert(a && b && count > 0);
    for (uint32_t h = 0; h < n->c.kv_heads; h++) {
        candidates = top_of_query(n, l, layer, h, queries[0], a);
        top_of_query(n, l, layer, h, queries[count - 1], b);
        for (uint32_t t = 0; t < l->length; t++)
            both += a[t] && b[t];
    }
    const uint32_t tokens = both / n->c.kv_heads / n->c.page_size * n->c.page_size;
    l->static_tokens = candidates < rest ? rest / 4 : tokens < rest ? tokens : rest;
    l->has_share = naive_sealed(n, layer) * n->c.page_size > rest + n->c.sink_tokens;
    free(a);
    free(b);
}

/* The first choice after a prefill sees every key; later ones do if the cache was asked for it. */
static void refresh_if_due(naive *n, naive_layer *l, uint32_t layer)
{
    if (n->plan.static_tokens == 0)
        return;
    if (naive_sealed(n, layer) == 0 || (l->chosen && l->steps < n->c.refresh_interval)) {
        l->steps++;
        return;
    }
    const int shares = n->c.static_ratio == KVF_STATIC_RATIO_AUTO && !l->has_share;
    if (shares)
        choose_share(n, l, layer);
    choose_static(n, l, layer, !l->chosen || shares || n->c.refresh == KVF_REFRESH_EXACT);
    l->chosen = 1;
    l->steps = 1;
}

static void note_choice(const naive *n, naive_layer *l, uint32_t list, uint32_t pages,
                        const unsigned char *taken, naive_result *r)
{
    for (uint32_t p = 0; p < pages; p++) {
        if (!taken[p])
            continue;
        r->pages++;
        l->chosen_at[(size_t)list * n->c.tokens_max + p] = l->decoded + 1;
    }
}

/* ---- step ---- */

/* Scores over pages that the policy ranks by: of the list's heads, of all heads, or of nobody. */
static void policy_scores(naive *n, uint32_t layer, uint32_t list, const void *q, double *scores)
{
    const uint32_t pages = naive_sealed(n, layer), heads = n->c.query_heads / n->lists;
    const naive_heads own = {list * heads, heads}, all = {0, n->c.query_heads};
    naive_scores(n, layer, n->c.select == KVF_SELECT_ARKVALE ? all : own, q, scores);
    if (n->c.select == KVF_SELECT_STREAMING)
        for (uint32_t p = 0; p < pages; p++)
            scores[p] = p;
}

static uint32_t pages_to_take(const naive *n, const naive_layer *l)
{
    const bool is_auto = n->c.static_ratio == KVF_STATIC_RATIO_AUTO;
    if (n->c.select == KVF_SELECT_FULL || l->length <= budget_now(n, l))
        return UINT32_MAX;
    if (n->c.select == KVF_SELECT_STATIC)
        return 0;
    const uint32_t rest = is_auto ? rest_tokens(n) : rest_now(n, (uint32_t)(l - n->layers));
    return (rest - l->static_tokens) / n->c.page_size;
}

/* With fill = tokens as many of the best as have the tokens of `pages` full ones. */
static uint32_t pages_that_fit(naive *n, const naive_layer *l, uint32_t kv_head, uint32_t pages,
                               const double *scores, uint32_t sealed, unsigned char *taken)
{
    const unsigned char *fixed = l->fixed + (size_t)kv_head * n->c.tokens_max;
    uint32_t tokens = 0, count = 0;
    if (pages == UINT32_MAX || n->c.select != KVF_SELECT_HYBRID || n->c.fill == KVF_FILL_PAGES)
        return pages;
    while (tokens <= pages * n->c.page_size && count <= sealed) {
        naive_top(scores, sealed, ++count, taken);
        tokens = 0;
        for (uint32_t t = 0; t < sealed * n->c.page_size; t++)
            tokens += taken[t / n->c.page_size] && t >= n->c.sink_tokens && !fixed[t];
    }
    note_border(n, naive_top(scores, sealed, count, taken)); /* another one might have fit */
    return count - 1;
}

static void select_pages(naive *n, naive_layer *l, uint32_t layer, const void *q, naive_result *r)
{
    const uint32_t sealed = naive_sealed(n, layer), P = n->c.page_size;
    double *scores = calloc(sealed + 1, sizeof *scores);
    unsigned char *taken = calloc(sealed + 1, 1);
    assert(scores && taken);
    const uint32_t heads = n->c.query_heads / n->lists;
    for (uint32_t list = 0; list < n->lists; list++) {
        const uint32_t kv_head = list * heads / n->group;
        const unsigned char *fixed = l->fixed + (size_t)kv_head * n->c.tokens_max;
        policy_scores(n, layer, list, q, scores);
        const uint32_t take =
            pages_that_fit(n, l, kv_head, pages_to_take(n, l), scores, sealed, taken);
        note_border(n, naive_top(scores, sealed, take, taken));
        for (uint32_t h = list * heads; h < (list + 1) * heads; h++)
            for (uint32_t t = 0; t < l->length; t++)
                n->attended[(size_t)h * n->c.tokens_max + t] =
                    t < n->c.sink_tokens || t >= sealed * P || fixed[t] || taken[t / P];
        note_choice(n, l, list, sealed, taken, r);
    }
    free(scores);
    free(taken);
}

/* The `rest` tokens of a KV head with the highest true attention, mean over the group. */
static void select_oracle(naive *n, naive_layer *l, uint32_t layer, naive_result *r)
{
    const uint32_t sealed = naive_sealed(n, layer) * n->c.page_size, query = l->length - 1;
    double *score = calloc(l->length + 1, sizeof *score);
    unsigned char *all = calloc(l->length + 1, 1);
    assert(score && all);
    memset(all, 1, l->length);
    (void)r;
    for (uint32_t h = 0; h < n->c.kv_heads; h++) {
        unsigned char *mask = n->attended + (size_t)h * n->group * n->c.tokens_max;
        memset(score, 0, (l->length + 1) * sizeof *score);
        for (uint32_t g = 0; g < n->group; g++)
            observe_query(n, l, h * n->group + g, query, all, n->group, score);
        for (uint32_t t = 0; t < n->c.sink_tokens && t < sealed; t++)
            score[t] = -INFINITY;
        note_border(n,
                    naive_top(score, sealed,
                              l->length <= budget_now(n, l) ? sealed : rest_now(n, layer), mask));
        for (uint32_t t = 0; t < l->length; t++)
            mask[t] |= t < n->c.sink_tokens || t >= sealed || l->length <= budget_now(n, l);
        for (uint32_t g = 1; g < n->group; g++)
            memcpy(mask + (size_t)g * n->c.tokens_max, mask, l->length);
    }
    free(score);
    free(all);
}

void naive_decode(naive *n, uint32_t layer, const void *q, const void *k, const void *v,
                  naive_result *r)
{
    naive_layer *l = &n->layers[layer];
    const uint32_t chosen = l->chosen;
    naive_append(n, layer, q, k, v);
    l->chosen = chosen;
    l->decoded++;
    r->pages = 0;
    memset(n->attended, 0, (size_t)n->c.query_heads * n->c.tokens_max);
    refresh_if_due(n, l, layer);
    if (n->c.select == KVF_SELECT_ORACLE)
        select_oracle(n, l, layer, r);
    else
        select_pages(n, l, layer, q, r);
    naive_attend(n, layer, q, n->attended, r);
}
