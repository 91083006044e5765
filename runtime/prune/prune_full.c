/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Nothing is pruned: every layer gets and keeps every token.
 *
 * What the others are compared with, and what leaves pruning to streaming heads or retrieval.
 */

#include "policies.h"

static uint32_t full_needs(const kvf_prune_settings *settings, const kvf_prune_shape *shape,
                           const void *state, uint32_t layer, uint32_t pass)
{
    (void)settings;
    (void)shape;
    (void)state;
    (void)layer;
    (void)pass;
    return KVF_PRUNE_NOTHING;
}

static void full_decide(void *user, const kvf_prune_settings *settings, const kvf_prune_view *view,
                        void *state, kvf_prune_answer *answer)
{
    (void)user;
    (void)settings;
    (void)view;
    (void)state;
    (void)answer; /* preset: keep all, propagate all */
}

const kvf_prune_policy kvf_prune_full = {.size = sizeof(kvf_prune_policy),
                                         .name = "full",
                                         .source = "nothing is pruned",
                                         .needs = full_needs,
                                         .decide = full_decide};
