/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of pruner.h. Opening and closing a pruner: every reservation it will ever make, or what they
 * would be.
 *
 * Knows no policy by name: what to reserve follows from what a policy says it needs of each layer
 * with fresh state. Per KV head and token of a layer that is one score on the device and, where the
 * host cannot read it there, one pinned; a profile adds one per query head, sums one per sequence.
 * Nothing grows with the window. A half-open pruner is closed by the same function as an open one.
 */

#include <math.h>
#include <string.h>

#include "pruner.h"

#include "policies.h"

/* ---- sizes ---- */

static kvf_prune new_prune(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    return (kvf_prune){.cache = cache,
                       .context = cache->context,
                       .shape = {.layers = c->layers,
                                 .kv_heads = c->kv_heads,
                                 .query_heads = c->query_heads,
                                 .tokens_max = c->tokens_max},
                       .stats = {.chosen_layer = KVF_PRUNE_LAYER_AUTO}};
}

static void carve_host(kvf_prune *prune, kvf_carver *k)
{
    const kvf_prune_policy *policy = prune->policy;
    const kvf_prune_shape *shape = &prune->shape;
    const uint32_t sequences = prune->cache->config.sequences_max;
    if (policy->state_bytes)
        prune->state_bytes = policy->state_bytes(&prune->config.settings, shape);
    KVF_CARVE(k, prune->slots, sequences);
    KVF_CARVE(k, prune->keep, shape->kv_heads, shape->tokens_max);
    KVF_CARVE(k, prune->propagate, shape->tokens_max);
    KVF_CARVE(k, prune->measures, shape->layers);
    for (uint32_t i = 0; i < sequences; i++) {
        char *state;
        KVF_CARVE(k, state, prune->state_bytes);
        if (prune->slots)
            prune->slots[i].state = state;
    }
}

static void carve_pinned(kvf_prune *prune, kvf_carver *k)
{
    const kvf_prune_shape *shape = &prune->shape;
    KVF_CARVE(k, prune->clock, 1);
    KVF_CARVE(k, prune->profile_host, prune->needs & KVF_PRUNE_PROFILE ? shape->query_heads : 0);
    KVF_CARVE(k, prune->scores_host,
              prune->cache->kv_groups[0].dims.needs_mirror ? shape->kv_heads : 0,
              shape->tokens_max);
}

static void carve_device(kvf_prune *prune, kvf_carver *k)
{
    const kvf_prune_config *config = &prune->config;
    const kvf_prune_shape *shape = &prune->shape;
    const bool evicts =
        config->retention == KVF_RETENTION_EVICT || config->eviction != KVF_EVICTION_NONE;
    const uint32_t heads = prune->needs & KVF_PRUNE_PROFILE ? shape->query_heads : 0;
    KVF_CARVE(k, prune->scores, shape->kv_heads, shape->tokens_max);
    KVF_CARVE(k, prune->work, prune->needs ? kvf_scores_work_floats(prune->cache) : 0);
    KVF_CARVE(k, prune->keep_work, evicts ? kvf_keep_work_bytes(prune->cache) : 0);
    KVF_CARVE(k, prune->heads, heads, shape->tokens_max);
    KVF_CARVE(k, prune->profile, heads);
    for (uint32_t i = 0; i < prune->cache->config.sequences_max; i++) {
        float *sums;
        KVF_CARVE(k, sums, prune->needs & KVF_PRUNE_SUMS ? shape->kv_heads : 0, shape->tokens_max);
        if (prune->slots)
            prune->slots[i].sums = sums;
    }
}

kvf_prune_plan kvf_prune_measure(kvf_cache *cache, const kvf_prune_config *config, uint32_t needs)
{
    kvf_prune prune = new_prune(cache);
    prune.config = *config;
    prune.policy = config->policy;
    prune.needs = needs;
    kvf_carver host = {0}, device = {0};
    carve_host(&prune, &host);
    carve_pinned(&prune, &host);
    carve_device(&prune, &device);
    return (kvf_prune_plan){.device_bytes = device.bytes, .host_bytes = host.bytes};
}

static kvf_status check(kvf_prune *prune, const kvf_prune_config *config)
{
    kvf_error error;
    const kvf_status status = kvf_prune_config_valid(config, &prune->shape, &error);
    if (status != KVF_OK)
        KVF_FAIL(prune->context, status, "%s", error.text);
    return KVF_OK;
}

/* Needs of the policy in any layer, as it says with fresh state. */
static uint32_t all_needs(const kvf_prune_config *config, const kvf_prune_shape *shape, void *state)
{
    uint32_t needs = config->eviction != KVF_EVICTION_NONE ? KVF_PRUNE_SCORES : 0;
    kvf_prune_view view = {.settings = &config->settings,
                           .user = config->policy->user,
                           .state = state,
                           .layers = shape->layers,
                           .kv_heads = shape->kv_heads,
                           .query_heads = shape->query_heads};
    for (; view.pass < 2; view.pass++)
        for (view.layer = 0; view.layer < shape->layers; view.layer++)
            needs |= kvf_prune_needs_at(config->policy, &view);
    return needs;
}

kvf_status kvf_pruner_plan(kvf_cache *cache, const kvf_prune_config *config, kvf_prune_plan *plan)
{
    kvf_prune prune = new_prune(cache);
    KVF_TRY(check(&prune, config));
    const kvf_prune_policy *policy = config->policy;
    const size_t bytes =
        policy->state_bytes ? policy->state_bytes(&config->settings, &prune.shape) : 0;
    void *state = kvf_alloc(cache->context, 1, bytes ? bytes : 1);
    if (!state)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for the state of '%s' (%zu bytes)",
                 policy->name, bytes);
    *plan = kvf_prune_measure(cache, config, all_needs(config, &prune.shape, state));
    kvf_free(cache->context, state);
    return KVF_OK;
}

/* ---- reservations ---- */

static kvf_status take_host(kvf_prune *prune)
{
    kvf_carver carver = {0};
    carve_host(prune, &carver);
    prune->host_memory = kvf_alloc(prune->context, 1, carver.bytes);
    if (!prune->host_memory)
        KVF_FAIL(prune->context, KVF_OUT_OF_MEMORY,
                 "no memory for the tables of pruning with '%s' (%llu bytes); lower tokens_max or "
                 "sequences_max",
                 prune->policy->name, (unsigned long long)carver.bytes);
    carve_host(prune, &(kvf_carver){.base = prune->host_memory});
    for (uint32_t l = 0; l < prune->shape.layers; l++)
        prune->measures[l] = NAN;
    return KVF_OK;
}

static kvf_status take_pinned(kvf_prune *prune)
{
    kvf_carver carver = {0};
    void *host = NULL, *device = NULL;
    carve_pinned(prune, &carver);
    KVF_TRY(kvf_pinned_alloc(prune->cache->runtime, carver.bytes, &host, &device));
    memset(host, 0, carver.bytes);
    prune->pinned = host;
    prune->pinned_device = device;
    carve_pinned(prune, &(kvf_carver){.base = prune->pinned});
    return KVF_OK;
}

static kvf_status take_device(kvf_prune *prune)
{
    const kvf_device_ops *ops = prune->cache->device->ops;
    kvf_carver carver = {0};
    void *base = NULL;
    carve_device(prune, &carver);
    KVF_TRY(ops->memory_alloc(prune->cache->device, carver.bytes, &base));
    prune->device_memory = base;
    carve_device(prune, &(kvf_carver){.base = prune->device_memory});
    if (!prune->cache->kv_groups[0].dims.needs_mirror)
        prune->scores_host = prune->scores;
    return KVF_OK;
}

/* The newest queries are kept by the cache, or they cannot be looked with. */
static kvf_status check_window(const kvf_prune *prune)
{
    const kvf_prune_config *config = &prune->config;
    const uint32_t kept = prune->cache->config.observe_window;
    uint32_t window = 0;
    if (prune->needs & (KVF_PRUNE_SCORES | KVF_PRUNE_PROFILE))
        window = config->settings.window;
    else if (prune->needs) /* the last query, or queries that are given: room to look */
        window = 1;
    if (config->eviction != KVF_EVICTION_NONE)
        window = kvf_max_u32(window, config->chunk_queries);
    if (window > kept)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "observe_window = %u of the cache: '%s' needs %u queries; open the cache "
                 "with observe_window = %u",
                 kept, prune->policy->name, window, window);
    return KVF_OK;
}

/* ---- open and close ---- */

static kvf_status open_prune(kvf_prune *prune, const kvf_prune_config *config)
{
    KVF_TRY(check(prune, config));
    prune->config = *config;
    prune->own_policy = *config->policy;
    prune->config.policy = prune->policy = &prune->own_policy;
    KVF_TRY(take_host(prune));
    prune->needs = all_needs(&prune->config, &prune->shape, prune->slots[0].state);
    KVF_TRY(check_window(prune));
    KVF_TRY(take_pinned(prune));
    KVF_TRY(take_device(prune));
    return prune->cache->device->ops->event_create(prune->cache->device, false, &prune->retained);
}

kvf_status kvf_pruner_open(kvf_cache *cache, const kvf_prune_config *config, kvf_prune **out)
{
    kvf_prune *prune = *out = kvf_alloc(cache->context, 1, sizeof *prune);
    if (!prune)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a pruner of %zu bytes",
                 sizeof *prune);
    *prune = new_prune(cache);
    kvf_cache_hold(cache);
    return open_prune(prune, config);
}

void kvf_pruner_close(kvf_prune *prune)
{
    if (!prune)
        return;
    kvf_device *device = prune->cache->device;
    device->ops->event_destroy(prune->retained);
    if (prune->device_memory)
        device->ops->memory_free(device, prune->device_memory);
    kvf_pinned_free(prune->cache->runtime, prune->pinned);
    kvf_cache *cache = prune->cache;
    kvf_free(cache->context, prune->host_memory);
    kvf_free(cache->context, prune);
    kvf_cache_release(cache);
}
