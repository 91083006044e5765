/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening and closing a cache: every reservation it will ever make.
 *
 * Knows nothing of steps. A half-open cache is closed by the same function as an open one; nothing
 * is left behind whichever reservation fails.
 */

#include "masked.h"

/* ---- plan ---- */

static kvf_status plan(kvf_cache *cache, const kvf_cache_config *config, kvf_reservation *r)
{
    KVF_TRY(kvf_config_resolve(cache->runtime, config, &cache->config, &cache->dims));
    cache->policy = kvf_select_find(cache->config.select);
    return cache->config.head_mask ? kvf_masked_plan(cache, config, r) : kvf_layout_plan(cache, r);
}

kvf_status kvf_cache_plan_make(kvf_runtime *runtime, const kvf_cache_config *config,
                               kvf_cache_plan *out, kvf_error *error)
{
    kvf_cache cache = {.runtime = runtime, .context = runtime->context, .device = runtime->device};
    kvf_reservation unused;
    const kvf_status status = plan(&cache, config, &unused);
    if (status == KVF_OK)
        *out = cache.plan;
    kvf_masked_close(&cache);
    return kvf_runtime_report(runtime, status, error);
}

/* ---- reservations ---- */

static kvf_status take_device(kvf_cache *cache, kvf_carver *carver)
{
    void *base = NULL;
    if (carver->bytes)
        KVF_TRY(cache->device->ops->memory_alloc(cache->device, carver->bytes, &base));
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

static void link_sequences(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    for (uint32_t s = 0; s < c->sequences_max; s++)
        cache->sequences[s] = (kvf_sequence){
            .cache = cache, .slot = s, .layers = cache->layers + (size_t)s * c->layers};
    for (size_t n = 0; n < (size_t)c->sequences_max * c->layers; n++) {
        cache->layers[n].positions = cache->positions + n * c->tokens_max;
        if (cache->blocks)
            cache->layers[n].blocks = cache->blocks + n * cache->dims.paging.pages_max;
    }
}

static kvf_status take_pages(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_paging *p = &cache->dims.paging;
    const kvf_host_memory_config memory = kvf_runtime_memory(cache->runtime);
    KVF_TRY(kvf_page_pool_create(cache->context, cache->device, &memory, kvf_block_bytes(p),
                                 cache->dims.block_count, &cache->pool));
    KVF_TRY(kvf_residency_create(cache->device, c->sequences_max * c->layers * p->lists,
                                 p->pages_max, p->slots, kvf_cache_slot_bytes(cache),
                                 &cache->residency));
    if (cache->dims.shadow_slots)
        KVF_TRY(kvf_residency_create(cache->device, c->sequences_max * c->layers * p->lists,
                                     p->pages_max, cache->dims.shadow_slots, 0, &cache->shadow));
    kvf_transfer_config transfer = kvf_cache_transfer_config(cache);
    kvf_transfer_choice choice;
    transfer.pool = &cache->pool.memory;
    if (c->transfer == KVF_TRANSFER_AUTO) {
        KVF_TRY(kvf_runtime_calibrate(cache->runtime));
        transfer.choice = kvf_runtime_choose(cache->runtime, transfer.page_bytes, &choice);
    }
    return kvf_transfer_open(cache->device, &transfer, &cache->transfer);
}

static kvf_status take_frames(kvf_cache *cache)
{
    for (uint32_t i = 0; i < KVF_FRAMES; i++) {
        kvf_frame *frame = &cache->frames[i];
        KVF_TRY(cache->device->ops->event_create(cache->device, &frame->done));
        frame->host = cache->control.frames + i * cache->dims.frame_bytes;
        frame->device = cache->tables.frames + i * cache->dims.frame_bytes;
    }
    return KVF_OK;
}

static kvf_status take_order(kvf_cache *cache)
{
    const kvf_device_ops *ops = cache->device->ops;
    KVF_TRY(ops->stream_create(cache->device, KVF_PRIORITY_LOW, &cache->writeback));
    KVF_TRY(ops->event_create(cache->device, &cache->sealed));
    KVF_TRY(ops->event_create(cache->device, &cache->written));
    KVF_TRY(ops->event_create(cache->device, &cache->recorded_sealed));
    KVF_TRY(ops->event_create(cache->device, &cache->recorded_written));
    return take_frames(cache);
}

static kvf_status open_cache(kvf_cache *cache, const kvf_cache_config *config)
{
    kvf_reservation r;
    KVF_TRY(plan(cache, config, &r));
    KVF_TRY(take_memory(cache, &r));
    if (cache->masked) { /* its pages are in inner caches */
        KVF_TRY(kvf_masked_open(cache, config, &r));
        KVF_TRY(take_frames(cache));
    } else {
        kvf_layout_carve(cache, &r);
        KVF_TRY(take_pages(cache));
        KVF_TRY(take_order(cache));
    }
    link_sequences(cache);
    kvf_cache_stats_reset(cache);
    return KVF_OK;
}

/* ---- open and close ---- */

kvf_status kvf_cache_open(kvf_runtime *runtime, const kvf_cache_config *config, kvf_cache **out,
                          kvf_error *error)
{
    *out = NULL;
    kvf_cache *cache = kvf_alloc(runtime->context, 1, sizeof *cache);
    if (!cache)
        return kvf_runtime_report(runtime,
                                  kvf_fail(runtime->context, KVF_OUT_OF_MEMORY, 0,
                                           "no memory for a cache of %zu bytes", sizeof *cache),
                                  error);
    cache->runtime = runtime;
    cache->context = runtime->context;
    cache->device = runtime->device;
    atomic_flag_clear(&cache->in_use);
    const kvf_status status = open_cache(cache, config);
    (void)kvf_runtime_report(runtime, status, error);
    if (status != KVF_OK) {
        kvf_cache_close(cache);
        return status;
    }
    *out = cache;
    return KVF_OK;
}

void kvf_cache_close(kvf_cache *cache)
{
    if (!cache)
        return;
    const kvf_device_ops *ops = cache->device->ops;
    for (uint32_t i = 0; i < KVF_FRAMES; i++)
        if (cache->frames[i].is_busy)
            (void)ops->event_wait(cache->frames[i].done);
    kvf_masked_close(cache);
    ops->stream_destroy(cache->writeback);
    kvf_transfer_close(cache->transfer);
    for (uint32_t i = KVF_FRAMES; i-- > 0;)
        ops->event_destroy(cache->frames[i].done);
    ops->event_destroy(cache->recorded_written);
    ops->event_destroy(cache->recorded_sealed);
    ops->event_destroy(cache->written);
    ops->event_destroy(cache->sealed);
    if (cache->residency.device)
        kvf_residency_destroy(&cache->residency);
    kvf_residency_destroy(&cache->shadow);
    if (cache->control_memory.arenas)
        kvf_host_memory_destroy(cache->context, &cache->control_memory);
    kvf_page_pool_destroy(&cache->pool);
    for (size_t i = sizeof cache->device_memory / sizeof *cache->device_memory; i-- > 0;)
        ops->memory_free(cache->device, cache->device_memory[i]);
    kvf_free(cache->context, cache->host_memory);
    kvf_free(cache->context, cache);
}

const kvf_cache_config *kvf_cache_settings(const kvf_cache *cache)
{
    return &cache->config;
}

const kvf_cache_plan *kvf_cache_memory(const kvf_cache *cache)
{
    return &cache->plan;
}

kvf_status kvf_cache_enter(kvf_cache *cache)
{
    const bool was_in_use = atomic_flag_test_and_set_explicit(&cache->in_use, memory_order_acquire);
    KVF_ASSERT_DEBUG(!was_in_use);
    if (was_in_use)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "two threads use one cache at once; give each thread a cache, or take a lock");
    if (cache->broken != KVF_OK) {
        kvf_cache_leave(cache);
        KVF_FAIL(cache->context, cache->broken,
                 "an earlier call on this cache failed half-way; close it and open another");
    }
    return KVF_OK;
}

void kvf_cache_leave(kvf_cache *cache)
{
    atomic_flag_clear_explicit(&cache->in_use, memory_order_release);
}
