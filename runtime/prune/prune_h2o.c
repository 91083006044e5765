/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. Heavy hitters and newest tokens. After Zhang et al., "H2O: Heavy-Hitter
 * Oracle for Efficient Generative Inference of Large Language Models", NeurIPS 2023.
 *
 * A token's score is the attention that it got from all queries of the prompt; of what a KV head
 * keeps, one half are the newest tokens and the rest the heaviest of those before (the published
 * setting; here `recent_share`). As in its published code for grouped heads, the query heads of a
 * KV head are summed. The share that is kept is FastKV's for this comparison, 0.1.
 */

#include "common/base.h"
#include "policies.h"

static void h2o_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const kvf_prune_settings *settings = view->settings;
    const uint32_t count = kvf_max_u32(1, kvf_keep_count(settings, view->tokens));
    if (count >= view->tokens || view->candidates == 0)
        return;
    const uint32_t recent = kvf_share_count(count, kvf_share_value(settings->recent_share));
    const uint32_t sink = kvf_min_u32(settings->sink_tokens, count - recent);
    const uint32_t heavy = count - recent - sink;
    const uint32_t older = kvf_min_u32(view->candidates, view->tokens - recent) - sink;
    for (uint32_t h = 0; h < view->kv_heads; h++) {
        uint32_t *ids = answer->keep + (size_t)h * count;
        kvf_choose_range(0, sink, ids);
        kvf_choose_best(view->scores + (size_t)h * view->candidates + sink, older, heavy,
                        ids + sink);
        for (uint32_t i = 0; i < heavy; i++)
            ids[sink + i] += sink;
        kvf_choose_range(view->tokens - recent, recent, ids + sink + heavy);
    }
    answer->keep_count = count;
}

const kvf_prune_policy kvf_prune_h2o = {
    .size = sizeof(kvf_prune_policy),
    .name = "h2o",
    .source = "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large "
              "Language Models, NeurIPS 2023",
    .settings = "keep=0.1 keep_tokens recent_share=0.5 sink_tokens group_reduce=sum",
    .needs = KVF_PRUNE_SUMS,
    .decide = h2o_decide};
