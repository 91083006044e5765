/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PRUNE_POLICIES_H
#define KVF_PRUNE_POLICIES_H

/*
 * The library's own policies, and what can be told of settings before or when a prompt begins.
 *
 * One policy is one prune_<name>.c. Knows no cache.
 */

#include "context.h"
#include "kvferry/prune.h"

/* Whether a prompt of so many tokens can be pruned with checked settings. Returns NULL, or writes
 * what is wrong (field, value, fix) to text and returns it. */
/* The caller's configuration and policy, as this library knows them; everything else takes such. */
typedef struct kvf_prune_given {
    kvf_prune_config config; /* its policy is the one below */
    kvf_prune_policy policy;
} kvf_prune_given;

KVF_CHECKED kvf_status kvf_prune_config_read(kvf_context *context, const kvf_prune_config *config,
                                             kvf_prune_given *own);

/* kvf_prune_config_check of what was read. */
KVF_CHECKED kvf_status kvf_prune_config_valid(const kvf_prune_config *config,
                                              const kvf_prune_shape *shape, kvf_error *error);

const char *kvf_prune_prompt_problem(const kvf_prune_settings *settings, uint32_t tokens,
                                     char *text, size_t capacity);

/* `layer`, or what AUTO stands for. */
uint32_t kvf_fastkv_layer(const kvf_prune_settings *settings, uint32_t layers);
uint32_t kvf_gemfilter_layer(const kvf_prune_settings *settings, uint32_t layers);

/* PyramidKV: what a KV head of a layer keeps beside the window. `capacity` includes the window. */
uint32_t kvf_pyramidkv_count(const kvf_prune_settings *settings, const kvf_prune_view *view,
                             uint32_t capacity);

#endif
