/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of selection policies.
 *
 * Knows no cache. Invariant: an entry per value of KVF_SELECT_LIST.
 */

#include "select_policy.h"

#include "settings.h"

#define TOP      .choose = KVF_CHOOSE_TOP, .scores_pages = 1, .can_record = 1
#define NEWEST   .choose = KVF_CHOOSE_NEWEST, .can_record = 1
#define TOKENS   .choose = KVF_CHOOSE_TOKENS, .by_token = 1
#define FUNCTION .choose = KVF_CHOOSE_FUNCTION, .scores_pages = 1, .calls_function = 1

static const kvf_select_policy policies[] = {
    /* A static set of single tokens, refreshed now and then, and the best pages of each step by the
     * digest's upper bound. After PRKV, "Page Restricted KV Cache for High Accuracy and Efficiency
     * LLM Generation": static share S of the budget, pages of 32 tokens, a refresh every 128 steps.
     */
    [KVF_SELECT_HYBRID] = {TOP, .static_use = KVF_STATIC_CONFIGURED},

    /* Every page: dense attention through the same pages, slots and splits as the others. It has no
     * budget; it is what the others are compared with. */
    [KVF_SELECT_FULL] = {NEWEST, .all_pages = 1},

    /* The static set takes the whole budget: tokens that the last refresh found important, as
     * SnapKV ("SnapKV: LLM Knows What You are Looking for Before Generation") keeps them, but
     * refreshed. */
    [KVF_SELECT_STATIC] = {NEWEST, .static_use = KVF_STATIC_WHOLE},

    /* Pages take the whole budget: the best of each step by the digest's upper bound, chosen per KV
     * head over its query group. Hybrid with a static share of 0. */
    [KVF_SELECT_DYNAMIC] = {TOP},

    /* Sink and the newest tokens, without looking at keys. After StreamingLLM, "Efficient Streaming
     * Language Models with Attention Sinks". */
    [KVF_SELECT_STREAMING] = {NEWEST},

    /* Pages per query head by the digest's upper bound, min and max per channel. After Quest,
     * "Query-Aware Sparsity for Efficient Long-Context LLM Inference". Lists, slots and attention
     * are per query head, so pages that several heads of a group choose are fetched for each. */
    [KVF_SELECT_QUEST] = {TOP, .per_query_head = 1, .sets_digest = 1, .digest = KVF_DIGEST_MINMAX},

    /* One page list per layer, shared by all heads; digest = centre of the box and mean distance
     * from it. After ArkVale, "Efficient Generative LLM Inference with Recallable Key-Value
     * Eviction". */
    [KVF_SELECT_ARKVALE] = {TOP, .per_layer = 1, .sets_digest = 1,
                            .digest = KVF_DIGEST_CUBOID_MEAN},

    /* True top tokens of each step; for evaluation. See select_oracle.c. */
    [KVF_SELECT_ORACLE] = {TOKENS},

    /* The caller's function chooses. See select_custom.c. */
    [KVF_SELECT_CUSTOM] = {FUNCTION, .static_use = KVF_STATIC_CONFIGURED},
};

_Static_assert(sizeof policies / sizeof *policies == KVF_NAMES_HIGH(KVF_SELECT_LIST) + 1,
               "an entry per policy");

const kvf_select_policy *kvf_select_find(kvf_select select)
{
    return (uint32_t)select <= KVF_NAMES_HIGH(KVF_SELECT_LIST) ? &policies[select] : NULL;
}

const char *kvf_select_name(kvf_select select)
{
    return KVF_NAMES(KVF_SELECT_LIST)[select];
}
