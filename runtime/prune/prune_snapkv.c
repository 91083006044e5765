/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the newest queries look at, per layer and KV head. After Li et al., "SnapKV: LLM Knows What
 * You Are Looking For Before Generation", NeurIPS 2024.
 *
 * Attention of the newest `window` queries, summed over them, smoothed along tokens; the best of
 * it and the window are kept. Nothing is propagated: every layer gets the whole prompt. The
 * published code repeats KV heads and chooses per query head; here a KV head has one set, from the
 * sum over its query heads. Defaults are those of the published configuration (window 32, average
 * over 5), but for the count: a share, 0.1, as in FastKV's comparison. Published: keep_tokens 2048.
 */

#include "choose.h"
#include "policies.h"

static void snapkv_defaults(kvf_prune_settings *settings)
{
    settings->keep = 0.1f;
    settings->window = 32;
    settings->pool = KVF_POOL_AVERAGE;
    settings->pool_width = 5;
}

static uint32_t snapkv_needs(const kvf_prune_settings *settings, const kvf_prune_shape *shape,
                             const void *state, uint32_t layer, uint32_t pass)
{
    (void)settings;
    (void)shape;
    (void)state;
    (void)layer;
    (void)pass;
    return KVF_PRUNE_SCORES;
}

static void snapkv_decide(void *user, const kvf_prune_settings *settings,
                          const kvf_prune_view *view, void *state, kvf_prune_answer *answer)
{
    (void)user;
    (void)state;
    kvf_answer_keep_top(view, kvf_keep_count(settings, view->tokens), answer);
}

const kvf_prune_policy kvf_prune_snapkv = {
    .size = sizeof(kvf_prune_policy),
    .name = "snapkv",
    .source = "Li et al., SnapKV: LLM Knows What You Are Looking For Before Generation, NeurIPS "
              "2024",
    .defaults = snapkv_defaults,
    .check = kvf_prune_window_problem,
    .needs = snapkv_needs,
    .decide = snapkv_decide};
