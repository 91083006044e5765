/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PRUNE_CHOOSE_H
#define KVF_PRUNE_CHOOSE_H

/*
 * How policies choose tokens: shares of a count, the best of a row, the window added to them.
 *
 * Pure functions on the host that allocate nothing: the best of a row are found by counting digits
 * of the scores (linear time), and what has to be summed first is written where the answer will be.
 * Invariants: ids ascend; of equal scores the lower index is taken; -0 equals 0; NaN loses against
 * every number. An answer's `keep` has room for kv_heads * tokens, its `propagate` for tokens.
 */

#include "kvferry/prune.h"

/* The decimal that a share stands for: 0.1f is 0.1, not 0.100000001490116. */
double kvf_share_value(float share);

/* floor(tokens * share), as Python's int(tokens * share) on doubles; at most `tokens`. */
uint32_t kvf_share_count(uint32_t tokens, double share);

/* Tokens that the settings ask for: keep_tokens or the share, propagate_tokens or the share; at
 * most `tokens`. */
uint32_t kvf_keep_count(const kvf_prune_settings *settings, uint32_t tokens);
uint32_t kvf_propagate_count(const kvf_prune_settings *settings, uint32_t tokens);

/* A number that orders like the score; NaN comes first. */
uint32_t kvf_choose_key(float score);

/* The `count` highest of scores [n], count <= n: ids [count]. */
void kvf_choose_best(const float *scores, uint32_t n, uint32_t count, uint32_t *ids);

/* Likewise of keys [n]; ids may be keys. */
void kvf_choose_top_keys(const uint32_t *keys, uint32_t n, uint32_t count, uint32_t *ids);

/* ids [count] = first, first + 1, ... */
void kvf_choose_range(uint32_t first, uint32_t count, uint32_t *ids);

/* Sum over the KV heads of scores [kv_heads, candidates] at column j, in order of heads. */
double kvf_choose_sum(const kvf_prune_view *view, uint32_t j);

/* Each KV head keeps its best candidates and the window, `count` tokens together, at least the
 * window. Keeps all if count is not below the tokens or nothing was measured. */
void kvf_answer_keep_top(const kvf_prune_view *view, uint32_t count, kvf_prune_answer *answer);

/* Propagates the best candidates by the sum over KV heads, and the window; the first `sink`
 * candidates always. Propagates all if count is not below the tokens or nothing was measured. */
void kvf_answer_propagate_top(const kvf_prune_view *view, uint32_t count, uint32_t sink,
                              kvf_prune_answer *answer);

#endif
