/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. Keeps the tokens that the newest queries look at, per layer and KV head.
 * After Li et al., "SnapKV: LLM Knows What You Are Looking For Before Generation", NeurIPS 2024.
 *
 * Attention of the newest `window` queries, summed over them, smoothed along tokens; the best of
 * it and the window are kept. Nothing is propagated: every layer gets the whole prompt. The
 * published code repeats KV heads and chooses per query head; here a KV head has one set, from the
 * sum over its query heads. Defaults are those of the published configuration (window 32, average
 * over 5), but for the count: a share, 0.1, as in FastKV's comparison. Published: keep_tokens 2048.
 */

#include "policies.h"

static void snapkv_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    kvf_answer_keep_top(view, kvf_keep_count(view->settings, view->tokens), answer);
}

const kvf_prune_policy kvf_prune_snapkv = {
    .size = sizeof(kvf_prune_policy),
    .name = "snapkv",
    .source = "Li et al., SnapKV: LLM Knows What You Are Looking For Before Generation, NeurIPS "
              "2024",
    .settings = "keep=0.1 keep_tokens window=32 pool=avg pool_width=5 group_reduce window_mean",
    .needs = KVF_PRUNE_SCORES,
    .decide = snapkv_decide};
