/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. Every layer gets fewer tokens than the one before. After Yang et al.,
 * "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference", Findings of ACL
 * 2024.
 *
 * Layer l of L gets share(l) = p + (1 - p) (1 + cos(pi l / (L - 1))) / 2 of the prompt: all of it
 * at first, p = `propagate` at last, (1 + p) / 2 on average. It keeps what it gets; what it does
 * not hand on is missing in all deeper layers. The choice is one for all heads: the window's
 * attention, newer queries counting more, summed over heads; first tokens and the window stay. The
 * default p = 0.2 is a mean of 60%, as in FastKV's comparison; 4 first tokens, no pooling and a
 * mean over queries as in the published code. That code multiplies the shares of successive layers
 * instead, weighs queries by 1.0 to 1.2, and takes a fifth of the prompt for the window.
 */

#include <math.h>

#include "common/base.h"
#include "policies.h"

#define PI 3.14159265358979323846

static uint32_t pyramidinfer_needs(const kvf_prune_view *view)
{
    if (view->layer + 1 >= view->layers)
        return KVF_PRUNE_NOTHING;
    return KVF_PRUNE_SCORES | KVF_PRUNE_WEIGHTED;
}

static void pyramidinfer_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const kvf_prune_settings *settings = view->settings;
    const uint32_t next = view->layer + 1;
    if (next >= view->layers)
        return;
    const double last = settings->propagate_tokens
                            ? fmin(1.0, (double)settings->propagate_tokens / (double)view->prompt)
                            : kvf_share_value(settings->propagate);
    const double way = (double)next / (double)(view->layers - 1);
    const double share = last + (1.0 - last) * (1.0 + cos(PI * way)) / 2.0;
    uint32_t count = kvf_share_count(view->prompt, share);
    if (next + 1 == view->layers) /* exact, whatever the cosine's last bit */
        count = kvf_propagate_count(settings, view->prompt);
    count = kvf_max_u32(count, settings->sink_tokens + view->window);
    kvf_answer_propagate_top(view, count, settings->sink_tokens, answer);
}

const kvf_prune_policy kvf_prune_pyramidinfer = {
    .size = sizeof(kvf_prune_policy),
    .name = "pyramidinfer",
    .source = "Yang et al., PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM "
              "Inference, Findings of ACL 2024",
    .settings = "propagate=0.2 propagate_tokens sink_tokens=4 window=32 window_mean=on pool "
                "pool_width=1 group_reduce=mean-softmax",
    .reach = KVF_PRUNE_REACH_PROPAGATE,
    .needs_at = pyramidinfer_needs,
    .decide = pyramidinfer_decide};
