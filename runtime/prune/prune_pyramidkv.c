/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. SnapKV's choice with a budget that shrinks from layer to layer. After Cai et
 * al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", 2024;
 * arithmetic of its published code, in whole numbers.
 *
 * With capacity tokens per layer on average, the window included, and C = capacity - window:
 * nothing is dropped while the layer has fewer tokens than capacity, and C is the same everywhere
 * while it has fewer than 2 C. Else the last layer gets C / beta, the first one as much more than
 * C, and those between follow a line. Defaults are those of its evaluations (window 8, maximum over
 * 7, beta 20), but for the count: a share, 0.1, as in FastKV's comparisons.
 */

#include "common/base.h"
#include "policies.h"

/* Tokens that a KV head keeps beside the window. `capacity` includes the window. */
static uint32_t pyramidkv_count(const kvf_prune_settings *settings, const kvf_prune_view *view,
                                uint32_t capacity)
{
    const uint64_t window = view->window, n = view->tokens;
    const uint64_t mean = capacity > window ? capacity - window : 0;
    if (n < 2 * mean || view->layers < 2)
        return (uint32_t)mean;
    uint64_t least = mean / settings->beta;
    uint64_t most = 2 * mean - least;
    if (most >= n - window) {
        most = n - window;
        least = 2 * mean - most;
    }
    /* n >= capacity: most >= mean >= least. */
    const uint64_t step = (most - least) / (view->layers - 1);
    return (uint32_t)(most - view->layer * step);
}

static void pyramidkv_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const kvf_prune_settings *settings = view->settings;
    const uint32_t capacity = settings->keep_tokens
                                  ? settings->keep_tokens
                                  : kvf_share_count(view->tokens, kvf_share_value(settings->keep));
    if (view->tokens < capacity || view->tokens <= view->window)
        return;
    kvf_answer_keep_top(view, view->window + pyramidkv_count(settings, view, capacity), answer);
}

const kvf_prune_policy kvf_prune_pyramidkv = {
    .size = sizeof(kvf_prune_policy),
    .name = "pyramidkv",
    .source = "Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information "
              "Funneling, 2024",
    .settings = "keep=0.1 keep_tokens window=8 pool=max pool_width=7 group_reduce window_mean "
                "beta=20",
    .needs = KVF_PRUNE_SCORES,
    .decide = pyramidkv_decide};
