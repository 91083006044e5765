/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. One layer of the model filters the prompt, which is then read again without
 * the rest. After Shi et al., "Discovering the Gems in Early Layers: Accelerating Long-Context LLMs
 * with 1000x Input Token Reduction" (GemFilter), 2024.
 *
 * At the filter layer, the last query's raw products with all keys are summed over all heads and
 * smoothed (average over 5); the best tokens, as many as `keep` says, are the new prompt, at
 * positions 0, 1, ... Tokens of earlier layers in the first pass are thrown away. Published: layer
 * 13 of 32 (AUTO is as deep in other models) and 1024 tokens; the default share 0.1 is FastKV's for
 * this comparison. The tokens of the window, published 1, are always among the chosen: the answer
 * follows from the last token of the new prompt, and that is the one that asks. The published code
 * leaves it to its score, which is high, since a token is near itself.
 */

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "common/base.h"
#include "policies.h"

uint32_t kvf_gemfilter_layer(const kvf_prune_settings *settings, uint32_t layers)
{
    if (settings->layer != KVF_PRUNE_LAYER_AUTO)
        return settings->layer;
    return (uint32_t)((uint64_t)layers * 13 / 32);
}

static bool is_filter(const kvf_prune_view *view)
{
    return !view->pass && view->layer == kvf_gemfilter_layer(view->settings, view->layers);
}

static uint32_t gemfilter_needs(const kvf_prune_view *view)
{
    return is_filter(view) ? KVF_PRUNE_LOGITS : KVF_PRUNE_NOTHING;
}

/* Sums are kept as their bits, in memory of the answer. */
static float sum_at(const uint32_t *sums, uint32_t j)
{
    float value;
    memcpy(&value, sums + j, sizeof value);
    return value;
}

/* Padded with zeros and divided by the width, or the maximum. */
static float smooth(const kvf_prune_settings *settings, const uint32_t *sums, uint32_t n,
                    uint32_t j)
{
    const uint32_t half = settings->pool_width / 2;
    const uint32_t first = j > half ? j - half : 0;
    const uint32_t last = half < n - 1 - j ? j + half : n - 1;
    double total = 0.0;
    float most = -INFINITY;
    for (uint32_t i = first; i <= last; i++) {
        const float value = sum_at(sums, i);
        total += (double)value;
        most = value > most ? value : most;
    }
    return settings->pool == KVF_POOL_MAX ? most : (float)(total / (double)settings->pool_width);
}

static void gemfilter_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const kvf_prune_settings *settings = view->settings;
    const uint32_t n = view->tokens;
    if (!is_filter(view))
        return;
    answer->is_chosen = 1;
    const uint32_t forced = kvf_max_u32(view->window, 1);
    const uint32_t count = kvf_max_u32(forced, kvf_keep_count(settings, n));
    if (count >= n || view->candidates < n)
        return;
    /* Everything is kept at this layer, so the room for what is kept is free for the sums. */
    uint32_t *sums = answer->keep;
    for (uint32_t j = 0; j < n; j++) {
        const float sum = (float)kvf_choose_sum(view, j);
        memcpy(sums + j, &sum, sizeof sum);
    }
    uint32_t *ids = answer->propagate;
    for (uint32_t j = 0; j < n; j++)
        ids[j] = n - j <= forced ? UINT32_MAX : kvf_choose_key(smooth(settings, sums, n, j));
    kvf_choose_top_keys(ids, n, count, ids);
    answer->propagate_count = count;
    answer->restart = 1;
}

const kvf_prune_policy kvf_prune_gemfilter = {
    .size = sizeof(kvf_prune_policy),
    .name = "gemfilter",
    .source = "Shi et al., Discovering the Gems in Early Layers: Accelerating Long-Context LLMs "
              "with 1000x Input Token Reduction, 2024",
    .settings = "keep=0.1 keep_tokens layer window=1 pool=avg pool_width=5 group_reduce=sum",
    .reach = KVF_PRUNE_REACH_RESTART,
    .needs_at = gemfilter_needs,
    .decide = gemfilter_decide};
