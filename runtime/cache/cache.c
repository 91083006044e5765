/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening and closing a cache: every reservation it will ever make.
 *
 * Knows nothing of steps. A half-open cache is closed by the same function as an open one; nothing
 * is left behind whichever reservation fails.
 */

#include "cache.h"

#include <math.h>
#include <string.h>

#include "layout.h"
#include "rings.h"
#include "settings.h"

/* ---- memory ---- */

kvf_status kvf_cache_take_memory(kvf_cache *cache, size_t bytes, void **out)
{
    const kvf_device_ops *ops = cache->device->ops;
    const bool on_demand = cache->kv_group_count && cache->kv_groups[0].dims.on_demand;
    return (on_demand ? ops->memory_on_demand : ops->memory_alloc)(cache->device, bytes, out);
}

static kvf_status take_device(kvf_cache *cache, kvf_carver *carver)
{
    void *base = NULL;
    if (carver->bytes)
        KVF_TRY(kvf_cache_take_memory(cache, carver->bytes, &base));
    *carver = (kvf_carver){.base = base};
    return KVF_OK;
}

static kvf_status take_control(kvf_cache *cache, kvf_reservation *r)
{
    kvf_host_memory_config memory = kvf_runtime_memory(cache->runtime);
    memory.huge_pages = KVF_HUGE_PAGES_OFF;
    memory.bytes = memory.granule = r->control.bytes; /* one granule, so one arena */
    KVF_TRY(kvf_host_memory_create(cache->context, cache->device, &memory, &cache->control_memory));
    r->control = (kvf_carver){.base = cache->control_memory.arenas[0].host};
    r->control_device = (kvf_carver){.base = cache->control_memory.arenas[0].device};
    return KVF_OK;
}

/* Room for what was planned; afterwards the carvers of `r` stand at its beginning. */
static kvf_status take_memory(kvf_cache *cache, kvf_reservation *r)
{
    kvf_carver *const device[] = {&r->kv, &r->digest, &r->table};
    cache->host_memory = kvf_alloc(cache->context, 1, r->host.bytes);
    if (!cache->host_memory)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY,
                 "no memory for the tables of %u sequences (%llu bytes); lower sequences_max or "
                 "tokens_max",
                 cache->config.sequences_max, (unsigned long long)r->host.bytes);
    r->host = (kvf_carver){.base = cache->host_memory};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) {
        KVF_TRY(take_device(cache, device[i]));
        cache->device_memory[i] = device[i]->base;
    }
    return take_control(cache, r);
}

/* ---- sequences and order ---- */

static void link_sequences(kvf_cache *cache)
{
    const uint32_t layers = cache->config.layers;
    for (uint32_t s = 0; s < cache->config.sequences_max; s++) {
        kvf_sequence *sequence = &cache->sequences[s];
        *sequence =
            (kvf_sequence){.cache = cache, .slot = s, .layers = cache->layers + (size_t)s * layers};
        for (uint32_t i = 0; i < layers; i++) {
            const kvf_layer_group *at = &cache->layer_groups[i];
            kvf_layer *layer = &sequence->layers[i];
            layer->kv_group = at->kv_group;
            layer->index = at->index;
            layer->row = at->kv_group ? s * at->kv_group->config.layers + at->index : 0;
            layer->fault = cache->words_device.faults + s;
            if (kvf_streaming_count(cache, i))
                layer->ring = cache->rings->layers[i].blocks + s * kvf_ring_bytes(cache, i);
        }
    }
}

static kvf_status take_order(kvf_cache *cache)
{
    const kvf_device_ops *ops = cache->device->ops;
    kvf_order *order = &cache->order;
    for (uint32_t i = 0; i < KVF_FRAMES; i++)
        KVF_TRY(ops->event_create(cache->device, false, &order->frames[i].done));
    return KVF_OK;
}

kvf_status kvf_cache_reserve(kvf_cache *cache, kvf_reservation *r)
{
    KVF_TRY(take_memory(cache, r));
    kvf_layout_carve(cache, r);
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        KVF_TRY(kvf_kv_group_open(&cache->kv_groups[i]));
    KVF_TRY(take_order(cache));
    link_sequences(cache);
    kvf_attention_params_reset(cache);
    for (uint32_t i = 0; i < cache->config.layers; i++)
        kvf_footprint_shape(cache, i);
    return kvf_stats_clear(cache);
}

/* ---- open and close ---- */

kvf_status kvf_cache_create(kvf_runtime *runtime, const kvf_cache_config *config, kvf_cache **out)
{
    kvf_cache *cache = *out = kvf_alloc(runtime->context, 1, sizeof *cache);
    kvf_dims dims;
    if (!cache)
        KVF_FAIL(runtime->context, KVF_OUT_OF_MEMORY, "no memory for a cache of %zu bytes",
                 sizeof *cache);
    cache->runtime = runtime;
    cache->context = runtime->context;
    cache->device = runtime->device;
    kvf_context_hold(cache->context);
    atomic_flag_clear(&cache->in_use);
    atomic_init(&cache->users, 1);
    KVF_TRY(kvf_config_resolve(runtime, config, &cache->config, &dims));
    cache->plan.block_size = dims.paging.block_size;
    return kvf_kv_groups_create(cache, config, &dims);
}

void kvf_cache_destroy(kvf_cache *cache)
{
    if (!cache)
        return;
    const kvf_device_ops *ops = cache->device->ops;
    kvf_order *order = &cache->order;
    for (uint32_t i = 0; i < KVF_FRAMES; i++)
        if (order->frames[i].is_busy)
            (void)ops->event_wait(order->frames[i].done);
    kvf_kv_groups_destroy(cache);
    for (uint32_t i = KVF_FRAMES; i-- > 0;)
        ops->event_destroy(order->frames[i].done);
    if (cache->control_memory.arenas)
        kvf_host_memory_destroy(cache->context, &cache->control_memory);
    for (size_t i = sizeof cache->device_memory / sizeof *cache->device_memory; i-- > 0;)
        ops->memory_free(cache->device, cache->device_memory[i]);
    kvf_free(cache->context, cache->host_memory);
    kvf_context *context = cache->context;
    kvf_free(context, cache);
    kvf_context_release(context);
}

void kvf_cache_hold(kvf_cache *cache)
{
    atomic_fetch_add_explicit(&cache->users, 1, memory_order_relaxed);
}

void kvf_cache_release(kvf_cache *cache)
{
    if (atomic_fetch_sub_explicit(&cache->users, 1, memory_order_acq_rel) == 1)
        kvf_cache_destroy(cache);
}

/* ---- attention parameters of layers ---- */

static const kvf_attention_params defaults = {.size = sizeof(kvf_attention_params)};

void kvf_attention_params_init_sized(kvf_attention_params *params, size_t size)
{
    kvf_sized_init(params, size, &defaults, sizeof defaults);
}

void kvf_attention_params_reset(kvf_cache *cache)
{
    for (uint32_t i = 0; i < cache->config.layers; i++)
        cache->attention[i] = (kvf_layer_attention){.scale = cache->config.softmax_scale};
}

static kvf_status check(const kvf_cache *cache, const kvf_attention_params *params)
{
    if (!(params->scale >= 0.0f) || isinf(params->scale))
        KVF_FAIL(cache->context, KVF_INVALID,
                 "scale = %g: must be a number above 0, or 0 for softmax_scale = %g",
                 (double)params->scale, (double)cache->config.softmax_scale);
    if (!(params->soft_cap >= 0.0f) || isinf(params->soft_cap))
        KVF_FAIL(cache->context, KVF_INVALID,
                 "soft_cap = %g: must be a number above 0, or 0 for none",
                 (double)params->soft_cap);
    for (uint32_t h = 0; params->sinks && h < cache->config.query_heads; h++)
        if (!(params->sinks[h] < INFINITY))
            KVF_FAIL(cache->context, KVF_INVALID,
                     "sinks[%u] = %g: must be a number, or -infinity for a head without one", h,
                     (double)params->sinks[h]);
    return KVF_OK;
}

/* Sinks as a caller told them, to the place of the layer in device memory, which captures have. */
static kvf_status put_sinks(kvf_cache *cache, uint32_t layer, const float *sinks_host)
{
    const kvf_device_ops *ops = cache->device->ops;
    const uint32_t heads = cache->config.query_heads, group = heads / cache->config.kv_heads;
    const uint32_t *order = cache->layer_groups[layer].heads;
    float *to = cache->sinks + (size_t)layer * heads;
    kvf_stream *stream = NULL;
    KVF_TRY(kvf_order_wait(&cache->order, cache->device)); /* they may read those from before */
    for (uint32_t h = 0; h < cache->config.kv_heads; h++)
        memcpy(cache->words.sinks + h * group, sinks_host + (order ? order[h] : h) * group,
               group * sizeof *to);
    KVF_TRY(ops->stream_create(cache->device, KVF_PRIORITY_NORMAL, &stream));
    kvf_status status = ops->copy(stream, to, cache->words_device.sinks, heads * sizeof *to);
    if (status == KVF_OK)
        status = ops->stream_wait(stream);
    ops->stream_destroy(stream);
    return status;
}

/* Replace the layer's parameters by `params`, which has sinks. On failure the layer keeps its own.
 */
static kvf_status replace_sinks(kvf_cache *cache, uint32_t layer, kvf_layer_attention *params)
{
    const uint32_t heads = cache->config.query_heads;
    const float *before = cache->attention[layer].sinks_host;
    float *sinks_host = cache->sinks_host + (size_t)layer * heads;
    const kvf_status status = put_sinks(cache, layer, params->sinks_host);
    if (status != KVF_OK) {
        if (before)
            (void)put_sinks(cache, layer, before); /* or the device is lost */
        return status;
    }
    memcpy(sinks_host, params->sinks_host, heads * sizeof *sinks_host);
    params->sinks = cache->sinks + (size_t)layer * heads;
    params->sinks_host = sinks_host;
    return KVF_OK;
}

static bool has_sinks(const float *sinks, uint32_t heads)
{
    bool has = false;
    for (uint32_t h = 0; sinks && !has && h < heads; h++)
        has = sinks[h] > -INFINITY;
    return has;
}

static bool is_same(const kvf_layer_attention *a, const kvf_layer_attention *b, uint32_t heads)
{
    bool same = a->scale == b->scale && a->cap == b->cap && !a->sinks_host == !b->sinks_host;
    for (uint32_t h = 0; same && a->sinks_host && h < heads; h++)
        same = a->sinks_host[h] == b->sinks_host[h];
    return same;
}

/* Tokens of a layer were made under its attention parameters. */
static kvf_status check_tokens(const kvf_cache *cache, uint32_t layer)
{
    for (uint32_t s = 0; s < cache->config.sequences_max; s++) {
        const kvf_sequence *sequence = &cache->sequences[s];
        if (sequence->is_alive && sequence->layers[layer].extent.length > 0)
            KVF_FAIL(cache->context, KVF_INVALID,
                     "layer = %u: a sequence has %u tokens in it under other attention parameters; "
                     "set them "
                     "before the first token, or truncate the sequence to 0",
                     layer, sequence->layers[layer].extent.length);
    }
    return KVF_OK;
}

kvf_status kvf_attention_params_set(kvf_cache *cache, uint32_t layer,
                                    const kvf_attention_params *params)
{
    kvf_attention_params own = defaults;
    KVF_TRY(KVF_SIZED_READ(cache->context, kvf_attention_params, params, &own));
    KVF_TRY(check(cache, &own));
    const uint32_t heads = cache->config.query_heads;
    kvf_layer_attention wanted = {.scale =
                                      own.scale > 0.0f ? own.scale : cache->config.softmax_scale,
                                  .cap = own.soft_cap,
                                  .sinks_host = has_sinks(own.sinks, heads) ? own.sinks : NULL};
    if (is_same(&wanted, &cache->attention[layer], heads))
        return KVF_OK;
    KVF_TRY(check_tokens(cache, layer));
    if (wanted.sinks_host)
        KVF_TRY(replace_sinks(cache, layer, &wanted));
    cache->attention[layer] = wanted;
    cache->attention_changes++;
    return KVF_OK;
}
