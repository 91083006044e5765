/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. First and newest tokens, without looking at attention. After Xiao et al.,
 * "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM), ICLR 2024.
 *
 * Every layer and KV head keeps the first `sink_tokens` (4, as published) and the newest of what it
 * may keep. Positions stay true. The share that is kept is FastKV's for this comparison, 0.1.
 */

#include "common/base.h"
#include "policies.h"

static void streaming_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const kvf_prune_settings *settings = view->settings;
    const uint32_t count = kvf_max_u32(1, kvf_keep_count(settings, view->tokens));
    if (count >= view->tokens)
        return;
    /* The newest token is always kept. */
    const uint32_t sink = kvf_min_u32(settings->sink_tokens, count - 1);
    const uint32_t recent = count - sink;
    for (uint32_t h = 0; h < view->kv_heads; h++) {
        uint32_t *ids = answer->keep + (size_t)h * count;
        kvf_choose_range(0, sink, ids);
        kvf_choose_range(view->tokens - recent, recent, ids + sink);
    }
    answer->keep_count = count;
}

const kvf_prune_policy kvf_prune_streaming = {
    .size = sizeof(kvf_prune_policy),
    .name = "streaming",
    .source = "Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024",
    .settings = "keep=0.1 keep_tokens sink_tokens=4",
    .decide = streaming_decide};
