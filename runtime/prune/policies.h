/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PRUNE_POLICIES_H
#define KVF_PRUNE_POLICIES_H

/*
 * The library's own policies, and what can be told of settings before or when a prompt begins.
 *
 * One policy is one prune_<name>.c. Knows no cache.
 */

#include "kvferry/prune.h"

/* Whether a prompt of so many tokens can be pruned with checked settings. Returns NULL, or writes
 * what is wrong (field, value, fix) to text and returns it. */
const char *kvf_prune_prompt_problem(const kvf_prune_settings *settings, uint32_t tokens,
                                     char *text, size_t capacity);

/* `layer`, or what AUTO stands for. */
uint32_t kvf_fastkv_layer(const kvf_prune_settings *settings, uint32_t layers);
uint32_t kvf_gemfilter_layer(const kvf_prune_settings *settings, uint32_t layers);

/* PyramidKV: what a KV head of a layer keeps beside the window. `capacity` includes the window. */
uint32_t kvf_pyramidkv_count(const kvf_prune_settings *settings, const kvf_prune_view *view,
                             uint32_t capacity);

#endif
