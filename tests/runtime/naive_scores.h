/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_NAIVE_SCORES_H
#define KVF_TESTS_RUNTIME_NAIVE_SCORES_H

/*
 * Scores of tokens, restated in double: what queries give to the tokens before them, weighed,
 * pooled and reduced as kvf_scores_args says. Shares no code with the library.
 */

#include "harness.h"
#include "retain.h"

/* Place i of layer `a->layer` holds token tokens[i], or i if tokens is NULL; queries are those of
 * places a->first and up, whatever a->q is. `out` is [kv_heads, candidates - begin], `heads`, not
 * pooled, [query_heads, candidates - begin]. */
void naive_token_scores(const test_tokens *t, const uint32_t *tokens, const kvf_scores_args *a,
                        double *out, double *heads);

#endif
