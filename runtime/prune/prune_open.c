/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening and closing a pruner: every reservation it will ever make.
 *
 * Knows no policy by name: what to reserve follows from what a policy says it needs of each layer
 * with fresh state. Per KV head and token of a layer that is one score on the device and, where the
 * host cannot read it there, one pinned; a profile adds one per query head, sums one per sequence.
 * Nothing grows with the window. A half-open pruner is closed by the same function as an open one.
 */

#include <string.h>

#include "pruner.h"

#define PART_ALIGN 256u

static size_t aligned(size_t bytes)
{
    return kvf_round_up(bytes, PART_ALIGN);
}

/* ---- sizes ---- */

static kvf_prune_shape shape_of(const kvf_cache_config *c)
{
    return (kvf_prune_shape){.layers = c->layers,
                             .kv_heads = c->kv_heads,
                             .query_heads = c->query_heads,
                             .tokens_max = c->tokens_max};
}

static size_t state_bytes(const kvf_prune_config *config, const kvf_prune_shape *shape)
{
    const kvf_prune_policy *policy = config->policy;
    return policy->state_bytes ? aligned(policy->state_bytes(&config->settings, shape)) : 0;
}

kvf_prune_bytes kvf_prune_measure_bytes(const kvf_cache *cache, const kvf_prune_config *config,
                                        uint32_t needs)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_prune_shape shape = shape_of(c);
    const size_t row = c->tokens_max * sizeof(float);
    const bool evicts =
        config->retention == KVF_RETENTION_EVICT || config->eviction != KVF_EVICTION_NONE;
    const size_t profile = c->query_heads * sizeof(kvf_prune_profile);
    kvf_prune_bytes b = {
        .scores = aligned(c->kv_heads * row),
        .work = needs ? aligned(kvf_scores_work_floats(cache) * sizeof(float)) : 0,
        .keep_work = evicts ? aligned(kvf_keep_work_bytes(cache)) : 0,
        .host = aligned(sizeof(kvf_prune_clock)),
        .ids = (c->kv_heads + 1) * row,
        .state = c->sequences_max * state_bytes(config, &shape),
    };
    if (needs & KVF_PRUNE_SUMS)
        b.sums = c->sequences_max * b.scores;
    if (cache->dims.needs_mirror)
        b.host += b.scores;
    if (needs & KVF_PRUNE_PROFILE) {
        b.heads = aligned(c->query_heads * row) + aligned(profile);
        b.host += aligned(profile);
    }
    return b;
}

/* ---- reservations ---- */

static kvf_status take_host(kvf_prune *prune)
{
    const uint32_t sequences = prune->cache->config.sequences_max;
    const size_t bytes = state_bytes(&prune->config, &prune->shape);
    const size_t row = prune->shape.tokens_max * sizeof(uint32_t);
    prune->slots = kvf_alloc(prune->context, sequences, sizeof *prune->slots);
    prune->keep = kvf_alloc(prune->context, prune->shape.kv_heads, row);
    prune->propagate = kvf_alloc(prune->context, 1, row);
    prune->state = kvf_alloc(prune->context, sequences, bytes ? bytes : 1);
    if (!prune->slots || !prune->keep || !prune->propagate || !prune->state)
        KVF_FAIL(prune->context, KVF_OUT_OF_MEMORY,
                 "no memory for the tables of pruning with '%s' (%zu bytes); lower tokens_max or "
                 "sequences_max",
                 prune->policy->name, prune->bytes.ids + prune->bytes.state);
    for (uint32_t i = 0; bytes && i < sequences; i++)
        prune->slots[i].state = prune->state + i * bytes;
    prune->state_bytes = bytes;
    return KVF_OK;
}

uint32_t kvf_prune_all_needs(const kvf_prune_config *config, const kvf_prune_shape *shape,
                             void *state)
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

static kvf_status take_pinned(kvf_prune *prune)
{
    void *host = NULL, *device = NULL;
    KVF_TRY(kvf_pinned_alloc(prune->cache->runtime, prune->bytes.host, &host, &device));
    memset(host, 0, prune->bytes.host);
    prune->pinned = host;
    prune->pinned_device = device;
    char *next = host;
    prune->clock = (void *)next;
    next += aligned(sizeof *prune->clock);
    if (prune->bytes.heads) {
        prune->profile_host = (void *)next;
        next += aligned(prune->shape.query_heads * sizeof *prune->profile_host);
    }
    if (prune->cache->dims.needs_mirror)
        prune->scores_host = (void *)next;
    return KVF_OK;
}

static kvf_status take_device(kvf_prune *prune)
{
    const kvf_device_ops *ops = prune->cache->device->ops;
    const kvf_prune_bytes *b = &prune->bytes;
    void *base = NULL;
    KVF_TRY(ops->memory_alloc(prune->cache->device,
                              b->scores + b->heads + b->sums + b->work + b->keep_work, &base));
    prune->device_memory = base;
    char *next = base;
    prune->scores = (void *)next;
    next += b->scores;
    if (b->work)
        prune->work = (void *)next;
    next += b->work;
    if (b->keep_work)
        prune->keep_work = next;
    next += b->keep_work;
    if (b->heads) {
        prune->heads = (void *)next;
        prune->profile = (void *)(next + aligned(prune->shape.query_heads *
                                                 (size_t)prune->shape.tokens_max * sizeof(float)));
    }
    next += b->heads;
    for (uint32_t i = 0; b->sums && i < prune->cache->config.sequences_max; i++)
        prune->slots[i].sums = (void *)(next + i * b->scores);
    if (!prune->cache->dims.needs_mirror)
        prune->scores_host = prune->scores;
    return KVF_OK;
}

/* ---- open and close ---- */

static kvf_status check(kvf_prune *prune, const kvf_prune_config *config)
{
    kvf_error error;
    if (prune->cache->masked)
        KVF_FAIL(prune->context, KVF_UNSUPPORTED,
                 "head_mask of the cache has streaming heads, which keep tokens of their own; open "
                 "the cache without a mask, or do not prune");
    if (!config || config->size != sizeof *config)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "config is NULL or its size is not %zu: call kvf_prune_config_init first",
                 sizeof *config);
    const kvf_status status = kvf_prune_config_check(config, &prune->shape, &error);
    if (status != KVF_OK)
        KVF_FAIL(prune->context, status, "%s", error.text);
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
                 "observe_window = %u of the cache: '%s' looks with %u queries; open the cache "
                 "with observe_window = %u",
                 kept, prune->policy->name, window, window);
    return KVF_OK;
}

static kvf_status open_prune(kvf_prune *prune, const kvf_prune_config *config)
{
    KVF_TRY(check(prune, config));
    prune->config = *config;
    prune->policy = config->policy;
    prune->bytes = kvf_prune_measure_bytes(prune->cache, &prune->config, 0);
    KVF_TRY(take_host(prune));
    prune->needs = kvf_prune_all_needs(&prune->config, &prune->shape, prune->slots[0].state);
    prune->bytes = kvf_prune_measure_bytes(prune->cache, &prune->config, prune->needs);
    KVF_TRY(check_window(prune));
    KVF_TRY(take_pinned(prune));
    KVF_TRY(take_device(prune));
    return prune->cache->device->ops->event_create(prune->cache->device, &prune->retained);
}

kvf_status kvf_prune_open(kvf_cache *cache, const kvf_prune_config *config, kvf_prune **out,
                          kvf_error *error)
{
    *out = NULL;
    kvf_prune *prune = kvf_alloc(cache->context, 1, sizeof *prune);
    if (!prune)
        return kvf_runtime_report(cache->runtime,
                                  kvf_fail(cache->context, KVF_OUT_OF_MEMORY, 0,
                                           "no memory for a pruner of %zu bytes", sizeof *prune),
                                  error);
    prune->cache = cache;
    prune->context = cache->context;
    prune->shape = shape_of(&cache->config);
    prune->stats.chosen_layer = KVF_PRUNE_LAYER_AUTO;
    const kvf_status status = open_prune(prune, config);
    (void)kvf_runtime_report(cache->runtime, status, error);
    if (status != KVF_OK) {
        kvf_prune_close(prune);
        return status;
    }
    *out = prune;
    return KVF_OK;
}

void kvf_prune_close(kvf_prune *prune)
{
    if (!prune)
        return;
    kvf_device *device = prune->cache->device;
    device->ops->event_destroy(prune->retained);
    if (prune->device_memory)
        device->ops->memory_free(device, prune->device_memory);
    kvf_pinned_free(prune->cache->runtime, prune->pinned);
    kvf_free(prune->context, prune->state);
    kvf_free(prune->context, prune->propagate);
    kvf_free(prune->context, prune->keep);
    kvf_free(prune->context, prune->slots);
    kvf_free(prune->context, prune);
}

const kvf_prune_config *kvf_prune_config_get(const kvf_prune *prune)
{
    return &prune->config;
}

void kvf_prune_stats_get(const kvf_prune *prune, kvf_prune_stats *stats)
{
    *stats = prune->stats;
    stats->observe_ns += __atomic_load_n(&prune->clock->observe_ns, __ATOMIC_RELAXED);
    stats->retain_ns += __atomic_load_n(&prune->clock->retain_ns, __ATOMIC_RELAXED);
}
