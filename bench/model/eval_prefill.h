/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_EVAL_PREFILL_H
#define KVF_BENCH_EVAL_PREFILL_H

/*
 * A prompt whose prefill is computed once and put into any number of caches.
 *
 * Keys, values and the newest queries of every layer are kept; prefill is dense whatever a cache
 * selects, so they are the same for all. It knows the transformer's operations and no selection.
 * Host device only. Invariant: a sequence that was loaded holds what kvf_transformer_prefill would
 * have left in it, bit for bit.
 */

#include "transformer.h"

/* Queries that a cache may look at later: more than any local window of the evaluation. */
#define EVAL_QUERIES 128u

typedef struct eval_prefill {
    uint32_t tokens, queries; /* queries: of the newest tokens */
    void *k, *v;              /* [layers, tokens, kv_heads, head_dim] */
    void *q;                  /* [layers, queries, query_heads, head_dim] */
} eval_prefill;

typedef struct eval_machine {
    kvf_model_config model;
    kvf_weights *weights;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_transformer *transformer;
    uint32_t chunk; /* tokens of an operation */
    void *unused;   /* what appended queries attend to: [EVAL_QUERIES, query_heads, head_dim] */
} eval_machine;

/* Compute. Free it in either case. */
kvf_status eval_prefill_make(const eval_machine *m, const uint32_t *ids, uint32_t count,
                             eval_prefill *out, kvf_error *error);
/* Into an empty sequence of a cache of this model. Waits. */
kvf_status eval_prefill_load(const eval_machine *m, const eval_prefill *kept, kvf_cache *cache,
                             kvf_sequence *sequence);
void eval_prefill_free(eval_prefill *kept);

#endif
