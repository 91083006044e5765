/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_EVAL_IDEAS_H
#define KVF_BENCH_EVAL_IDEAS_H

/*
 * Ideas that the library does not have, tried on its codes: what was not fetched is estimated, and
 * KV heads get unequal budgets.
 *
 * They look into a cache, at the tables of the layer that was decoded last: masses by codes, chosen
 * pages, log-sum-exp. So they are for the host device, single caches without a head mask, and
 * policies that score by codes. They know no tasks. Invariant: neither looks at keys or values that
 * the library would not have at hand, but the estimate with exact masses, which is a bound.
 */

#include "cache.h"
#include "eval_prefill.h"
#include "transformer_ops.h"

/* What is decoded: set before every step. */
typedef struct eval_batch {
    const kvf_transformer *transformer;
    const kvf_cache *cache;
    kvf_sequence *const *sequences; /* [rows] */
    uint32_t rows;
} eval_batch;

/*
 * The rest: sealed tokens that a step did not choose weigh what their codes say, block by block,
 * and count with the mean value of their block. Merged with what was attended by log-sum-exp.
 */
typedef struct eval_rest {
    bool is_exact;        /* masses by keys: what the error of the codes costs */
    uint32_t first_layer; /* that is completed */
    transformer_ops ops;  /* these stand in for the transformer's own */
    const transformer_ops *own;
    const eval_batch *batch;
    float *means;         /* [sequences, layers, blocks_max, kv_heads, head_dim] */
    uint32_t *ready;      /* [sequences, layers] blocks that have means */
    uint32_t *generation; /* [sequences, layers] of the sequence that they belong to */
    float *weights;       /* [blocks_max] */
} eval_rest;

/* Between these two, attention of decode steps is with the rest. */
kvf_status eval_rest_open(eval_rest *rest, const eval_batch *batch, kvf_transformer *transformer,
                          kvf_error *error);
void eval_rest_close(eval_rest *rest, kvf_transformer *transformer); /* zeros are fine */

/*
 * Adaptive budgets: the pages of a step's KV heads in one layer are the best of all of them
 * together, by estimated mass; a share of its equal part is every head's own. For contexts longer
 * than twice the budget.
 */
typedef struct eval_adaptive {
    const eval_batch *batch;
    float floor;       /* share of an equal part */
    bool knows_window; /* mass relative to sink and window too, which are on the device */
    uint32_t extra;    /* pages that the cache allows a head beyond an equal part */
    uint32_t next;     /* list of the batch that is asked for next */
    uint32_t *take;    /* [kv_heads] pages */
    float *values;     /* [kv_heads, pages] */
    float *work;       /* [kv_heads, pages] */
} eval_adaptive;

kvf_status eval_adaptive_open(eval_adaptive *adaptive, const kvf_model_config *model,
                              uint32_t pages, kvf_error *error);
void eval_adaptive_close(eval_adaptive *adaptive); /* zeros are fine */

/* A kvf_select_fn; @p user is an eval_adaptive. */
uint32_t eval_adaptive_choose(void *user, const kvf_select_view *view, int32_t *ids);

#endif
