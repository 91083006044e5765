/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What a pruner would reserve, without reserving it.
 *
 * Knows no policy by name. The sizes are those of opening: they are taken for a cache of the same
 * configuration that has no memory. Invariant: nothing stays allocated.
 */

#include "pruner.h"

static kvf_status plan_make(kvf_cache *cache, const kvf_cache_config *cache_config,
                            const kvf_prune_config *config, kvf_prune_plan *plan)
{
    kvf_error error;
    kvf_context *context = cache->context;
    KVF_TRY(kvf_config_resolve(cache->runtime, cache_config, &cache->config, &cache->dims));
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

kvf_status kvf_prune_plan_make(kvf_runtime *runtime, const kvf_cache_config *cache_config,
                               const kvf_prune_config *config, kvf_prune_plan *plan,
                               kvf_error *error)
{
    kvf_status status = KVF_OK;
    kvf_cache *cache = kvf_alloc(runtime->context, 1, sizeof *cache);
    if (!cache) {
        status = kvf_fail(runtime->context, KVF_OUT_OF_MEMORY, 0,
                          "no memory for a plan of %zu bytes", sizeof *cache);
    } else {
        cache->runtime = runtime;
        cache->context = runtime->context;
        status = plan_make(cache, cache_config, config, plan);
        kvf_free(runtime->context, cache);
    }
    return kvf_runtime_report(runtime, status, error);
}
