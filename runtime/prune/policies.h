/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PRUNE_POLICIES_H
#define KVF_PRUNE_POLICIES_H

/*
 * The library's own policies, and what can be told of settings before or when a prompt begins.
 *
 * One policy is one prune_<name>.c. Knows no cache.
 */

#include "context.h"
#include "kvferry/prune.h"

#include <stdbool.h>

/* The caller's configuration and policy, as this library knows them; everything else takes such. */
typedef struct kvf_prune_given {
    kvf_prune_config config; /* its policy is the one below */
    kvf_prune_policy policy;
} kvf_prune_given;

KVF_CHECKED kvf_status kvf_prune_config_read(kvf_context *context, const kvf_prune_config *config,
                                             kvf_prune_given *own);

/* kvf_prune_config_check of what was read. */
KVF_CHECKED kvf_status kvf_prune_config_valid(const kvf_prune_config *config,
                                              const kvf_prune_shape *shape, kvf_error *error);

/* Whether a prompt of so many tokens can be pruned with checked settings. Returns NULL, or writes
 * what is wrong (field, value, fix) to text and returns it. */
const char *kvf_prune_prompt_problem(const kvf_prune_settings *settings, uint32_t tokens,
                                     char *text, size_t capacity);

/* `layer`, or what AUTO stands for. */
uint32_t kvf_fastkv_layer(const kvf_prune_settings *settings, uint32_t layers);
uint32_t kvf_gemfilter_layer(const kvf_prune_settings *settings, uint32_t layers);

/*
 * How policies choose tokens: shares of a count, the best of a head's scores, the window added to
 * them.
 *
 * Pure functions on the host that allocate nothing: the best of a head are found by counting digits
 * of the scores (linear time), and what has to be summed first is written where the answer will be.
 * Invariants: ids ascend; of equal scores the lower index is taken; -0 equals 0; NaN loses against
 * every number. An answer's `keep` has room for kv_heads * tokens, its `propagate` for tokens.
 */

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

/* The online rule after `layers` layers, whose scores are scaled by what was seen so far: true if
 * the highest score, which is above 0, is followed by two that do not exceed it. */
bool kvf_structkv_is_past(const double *score, uint32_t layers, uint32_t layer_min);

#endif
