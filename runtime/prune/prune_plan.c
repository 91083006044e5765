/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What a pruner would reserve, without reserving it.
 *
 * Knows no policy by name. The sizes are those of opening: they are taken for a cache of the same
 * configuration that has no memory. Invariant: nothing stays allocated.
 */

#include "pruner.h"

kvf_status kvf_pruner_plan(kvf_cache *cache, const kvf_prune_config *config, kvf_prune_plan *plan)
{
    kvf_error error;
    kvf_context *context = cache->context;
    const kvf_cache_config *c = &cache->config;
    const kvf_prune_shape shape = {.layers = c->layers,
                                   .kv_heads = c->kv_heads,
                                   .query_heads = c->query_heads,
                                   .tokens_max = c->tokens_max};
    const kvf_status status = kvf_prune_config_check(config, &shape, &error);
    if (status != KVF_OK)
        KVF_FAIL(context, status, "%s", error.text);
    const kvf_prune_policy *policy = config->policy;
    const size_t bytes = policy->state_bytes ? policy->state_bytes(&config->settings, &shape) : 0;
    void *state = kvf_alloc(context, 1, bytes ? bytes : 1);
    if (!state)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for the state of '%s' (%zu bytes)",
                 policy->name, bytes);
    *plan = kvf_prune_measure(cache, config, kvf_prune_all_needs(config, &shape, state));
    kvf_free(context, state);
    return KVF_OK;
}
