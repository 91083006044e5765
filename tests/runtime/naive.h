/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_NAIVE_H
#define KVF_TESTS_RUNTIME_NAIVE_H

/*
 * A model of one sequence, written for plainness: every key and value is kept in plain arrays, sums
 * are in double, and the selection is the definition, not the implementation.
 *
 * It shares no code with the library. Where two scores at the border of a choice are so close that
 * fp32 may order them the other way, it says so (`border` below NAIVE_BORDER), and the test must
 * not compare from there on.
 *
 * Rules. rest = budget - sink - (local + P - 1); static = floor(ratio x rest);
 * pages = floor((rest - static) / P). Page p is sealed iff (p+1) P <= length - local. Sink, static
 * tokens and everything unsealed are attended always; of the sealed pages, those with the highest
 * digest scores, without the tokens that are attended anyway. length <= budget: every token.
 * With fill = tokens as many pages of the highest scores as give no more than pages x P tokens.
 */

#include "harness.h"

#define NAIVE_BORDER 1e-4

typedef struct naive_layer {
    uint32_t index;
    uint32_t length;
    float *q, *k, *v;     /* [tokens_max, heads, head_dim], of v value_dim */
    double *rotated;      /* keys [tokens_max, kv_heads, head_dim], where codes are the digest */
    unsigned char *has_q; /* [tokens_max] */
    unsigned char *fixed; /* [kv_heads, tokens_max] 1 = in the static set */
    uint32_t *chosen_at;  /* [lists, tokens_max] 1 + decode step that chose a page last; 0 = none */
    uint32_t decoded;     /* decode steps */
    uint32_t steps;       /* decode steps since the static set was chosen */
    uint32_t chosen;      /* 1: a static set was chosen since the last prefill */
    uint32_t observed;    /* 1: chosen once with all keys */
    uint32_t static_tokens; /* in force; with the automatic ratio it is chosen once */
    uint32_t has_share;
} naive_layer;

typedef struct naive {
    kvf_cache_config c;
    kvf_cache_plan plan;
    uint32_t group;
    naive_layer *layers;
    uint32_t lists;          /* of pages: one per KV head; with QUEST one per query head */
    unsigned char *attended; /* [query_heads, tokens_max] by the last decode step */
    double border;           /* smallest relative gap at the border of any choice so far */
} naive;

/* The result of one decode step of one layer. Arrays are the naive model's, valid until the next
 * step.
 */
typedef struct naive_result {
    double *out;       /* [query_heads, value_dim] */
    double *lse;       /* [query_heads] */
    double *recall;    /* [query_heads] */
    double *dense;     /* [query_heads, value_dim] */
    uint64_t attended; /* tokens, over KV heads; with lists per query head the mean of a group */
    uint64_t pages;
} naive_result;

void naive_open(naive *n, const kvf_cache_config *settings, const kvf_cache_plan *plan);
void naive_close(naive *n);

/* One token; q may be NULL. */
void naive_append(naive *n, uint32_t layer, const void *q, const void *k, const void *v);
/* Dense attention of query `q` over the first `length` tokens. */
void naive_dense(const naive *n, uint32_t layer, const void *q, uint32_t length, double *out,
                 double *lse);
/* Attention of `q` over the tokens with mask[query_head, token] != 0. */
void naive_attend(const naive *n, uint32_t layer, const void *q, const unsigned char *mask,
                  naive_result *r);

/* Largest |a - b| of its numbers and those of a cache; NaN gives infinity. */
double naive_distance(const double *values, const void *got, kvf_dtype dtype, size_t count);

void naive_result_open(naive_result *r, const kvf_cache_config *settings);
void naive_result_close(naive_result *r);
/* A whole decode step, under any policy but CUSTOM (which it takes for HYBRID). */
void naive_decode(naive *n, uint32_t layer, const void *q, const void *k, const void *v,
                  naive_result *r);

/* A whole run, of which every output is attention over the tokens that its query sees. */
typedef struct naive_run {
    const test_scenario *scenario;
    const char *what;
    uint32_t every; /* so many tokens of a prompt one is compared, and the last; 0 = all */
    /* Which tokens a query sees; NULL = all. */
    int (*sees)(const kvf_cache_config *c, uint32_t layer, uint32_t kv_head, uint32_t query,
                uint32_t token);
    /* The newest token of a layer is there; may change what the model holds. NULL = nothing. */
    void (*appended)(naive *n, const test_tokens *t, uint32_t layer);
} naive_run;

/* Runs it; outputs, and logarithms of steps, are those of the model. */
void naive_expect_run(const naive_run *x);

uint32_t naive_sealed(const naive *n, uint32_t layer);
/* Digest scores of the sealed pages for query heads first .. first+heads-1, reduced over them as
 * asked, or raw if there is one: [pages]; -INFINITY = nothing left. */
typedef struct naive_heads {
    uint32_t first, count;
} naive_heads;
void naive_scores(const naive *n, uint32_t layer, naive_heads heads, const void *q, double *scores);
/* mask[i] = 1 for the `k` largest of scores[0..count) (ties to the lower index; -inf never).
 * Returns the relative gap at the border, 1 if there is none. */
double naive_top(const double *scores, uint32_t count, uint32_t k, unsigned char *mask);

#endif
