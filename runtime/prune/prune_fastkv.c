/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. One layer hands few tokens to the deeper ones, apart from what each layer
 * keeps. After Jo et al., "FastKV: Decoupling of Context Reduction and KV Cache Compression for
 * Prefill-Decoding Acceleration", 2025; conditions of its published code.
 *
 * Scores as in SnapKV, maximum over 7 tokens, summed over the query heads of a KV head. Every layer
 * keeps, per KV head, the best and the window: of n tokens floor(n * keep) up to and including the
 * propagation layer, floor(n * (keep / propagate)) of the fewer tokens after it, so that all layers
 * keep about the same. Counts of tokens are the same in all layers. The propagation layer hands on
 * the best by the sum over KV heads, and the window. A layer with fewer tokens than it might keep
 * drops nothing and propagates all. Defaults: window 8, keep 0.1, propagate 0.2; AUTO is the last
 * layer of the first half, 15 of 32.
 */

#include <stdbool.h>

#include "common/base.h"
#include "policies.h"

uint32_t kvf_fastkv_layer(const kvf_prune_settings *settings, uint32_t layers)
{
    if (settings->layer != KVF_PRUNE_LAYER_AUTO)
        return settings->layer;
    return layers < 2 ? 0 : layers / 2 - 1;
}

/* Tokens that a KV head may keep; not limited by those that there are. */
static uint32_t fastkv_capacity(const kvf_prune_view *view, bool is_behind)
{
    const kvf_prune_settings *settings = view->settings;
    if (settings->keep_tokens)
        return settings->keep_tokens;
    const double keep = kvf_share_value(settings->keep);
    if (!is_behind)
        return kvf_share_count(view->tokens, keep);
    if (settings->propagate_tokens)
        return kvf_share_count(view->prompt, keep);
    const double rest = keep / kvf_share_value(settings->propagate);
    return kvf_share_count(view->tokens, rest);
}

static void fastkv_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const kvf_prune_settings *settings = view->settings;
    const uint32_t layer = kvf_fastkv_layer(settings, view->layers);
    answer->is_chosen = view->layer == layer;
    const uint32_t capacity = fastkv_capacity(view, view->layer > layer);
    if (view->tokens < capacity)
        return;
    kvf_answer_keep_top(view, capacity, answer);
    if (view->layer == layer)
        kvf_answer_propagate_top(view, kvf_propagate_count(settings, view->tokens), 0, answer);
}

const kvf_prune_policy kvf_prune_fastkv = {
    .size = sizeof(kvf_prune_policy),
    .name = "fastkv",
    .source = "Jo et al., FastKV: Decoupling of Context Reduction and KV Cache Compression for "
              "Prefill-Decoding Acceleration, 2025",
    .settings = "keep=0.1 keep_tokens propagate=0.2 propagate_tokens layer window=8 pool=max "
                "pool_width=7 group_reduce=sum window_mean",
    .reach = KVF_PRUNE_REACH_PROPAGATE,
    .needs = KVF_PRUNE_SCORES,
    .decide = fastkv_decide};
