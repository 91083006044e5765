/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening and closing a cache: every reservation it will ever make.
 *
 * Knows nothing of steps. A half-open cache is closed by the same function as an open one; nothing
 * is left behind whichever reservation fails.
 */

#include "cache.h"

#include <string.h>

#include "calibrate.h"
#include "config.h"
#include "layout.h"
#include "select_policy.h"
#include "stats.h"

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
kvf_status kvf_cache_take_memory(kvf_cache *cache, kvf_reservation *r)
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

/* Of a disk tier: whatever earlier calls enqueued is done. */
static kvf_status settle(void *user)
{
    const kvf_cache *cache = user;
    if (cache->last_done)
        KVF_TRY(cache->device->ops->event_wait(cache->last_done));
    return cache->device->ops->event_wait(cache->written);
}

static kvf_status take_pool(kvf_cache *cache)
{
    const kvf_dims *d = &cache->dims;
    const kvf_host_memory_config memory = kvf_runtime_memory(cache->runtime);
    const size_t block = kvf_block_bytes(&d->paging);
    if (!d->berths)
        return kvf_page_pool_create(cache->context, cache->device, &memory, block, d->block_count,
                                    &cache->pool);
    const kvf_page_pool_disk disk = {.folder = cache->config.disk_path,
                                     .engine = cache->runtime->seams.io_engine,
                                     .bundle_blocks = d->bundle_blocks,
                                     .berths = d->berths,
                                     .groups = cache->config.layers + 1,
                                     .settle = settle,
                                     .user = cache};
    KVF_TRY(cache->device->ops->event_create(cache->device, &cache->chosen));
    KVF_TRY(cache->device->ops->event_create(cache->device, &cache->placed));
    return kvf_page_pool_create_on_disk(cache->context, cache->device, &memory, &disk, block,
                                        d->block_count, &cache->pool);
}

static kvf_status take_pages(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_paging *p = &cache->dims.paging;
    KVF_TRY(take_pool(cache));
    KVF_TRY(kvf_residency_create(cache->device, c->sequences_max * c->layers * p->lists,
                                 p->pages_max, p->slots, kvf_cache_slot_bytes(cache),
                                 &cache->residency));
    if (cache->dims.shadow_slots)
        KVF_TRY(kvf_residency_create(cache->device, c->sequences_max * c->layers * p->lists,
                                     p->pages_max, cache->dims.shadow_slots, 0, &cache->shadow));
    kvf_transfer_config transfer = kvf_cache_transfer_config(cache);
    kvf_transfer_choice choice;
    transfer.pool = &cache->pool.memory;
    if (c->transfer == KVF_TRANSFER_AUTO)
        KVF_TRY(kvf_runtime_choose(cache->runtime, transfer.page_bytes, &choice, &transfer.choice));
    return kvf_transfer_open(cache->device, &transfer, &cache->transfer);
}

static kvf_status take_order(kvf_cache *cache)
{
    const kvf_device_ops *ops = cache->device->ops;
    KVF_TRY(ops->stream_create(cache->device, KVF_PRIORITY_LOW, &cache->writeback));
    KVF_TRY(ops->event_create(cache->device, &cache->sealed));
    KVF_TRY(ops->event_create(cache->device, &cache->written));
    if (cache->dims.ahead_max == 0)
        return KVF_OK;
    KVF_TRY(ops->stream_create(cache->device, KVF_PRIORITY_LOW, &cache->aside));
    KVF_TRY(ops->event_create(cache->device, &cache->left));
    return ops->event_create(cache->device, &cache->ranked);
}

static void link_sequences(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    for (uint32_t s = 0; s < c->sequences_max; s++)
        cache->sequences[s] = (kvf_sequence){
            .cache = cache, .slot = s, .layers = cache->layers + (size_t)s * c->layers};
    for (size_t n = 0; n < (size_t)c->sequences_max * c->layers; n++) {
        cache->layers[n].positions = cache->positions + n * c->tokens_max;
        cache->layers[n].by_step = cache->by_step + n * c->tokens_max;
        if (cache->blocks)
            cache->layers[n].blocks = cache->blocks + n * cache->dims.paging.blocks_max;
    }
}

kvf_status kvf_cache_take_frames(kvf_cache *cache)
{
    link_sequences(cache);
    for (uint32_t i = 0; i < KVF_FRAMES; i++) {
        kvf_frame *frame = &cache->frames[i];
        KVF_TRY(cache->device->ops->event_create(cache->device, &frame->done));
        frame->host.base = cache->control.frames + i * cache->dims.frame_bytes;
        frame->device = cache->tables.frames + i * cache->dims.frame_bytes;
    }
    return KVF_OK;
}

kvf_status kvf_cache_reserve(kvf_cache *cache, kvf_reservation *r)
{
    KVF_TRY(kvf_cache_take_memory(cache, r));
    kvf_layout_carve(cache, r);
    KVF_TRY(take_pages(cache));
    KVF_TRY(take_order(cache));
    KVF_TRY(kvf_cache_take_frames(cache));
    for (uint32_t i = 0; i < cache->config.layers; i++)
        kvf_footprint_shape(cache, i, cache->config.kv_heads, cache);
    kvf_stats_reset(cache);
    kvf_stats_send(cache);
    return KVF_OK;
}

/* ---- open and close ---- */

/* The settings are read as long as the cache lives. */
static kvf_status own_path(kvf_cache *cache)
{
    const size_t length = cache->config.disk_path ? strlen(cache->config.disk_path) + 1 : 0;
    if (length == 0)
        return KVF_OK;
    cache->disk_path = kvf_alloc(cache->context, length, 1);
    if (!cache->disk_path)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for the name of a folder");
    memcpy(cache->disk_path, cache->config.disk_path, length);
    cache->config.disk_path = cache->disk_path;
    return KVF_OK;
}

kvf_status kvf_cache_create(kvf_runtime *runtime, const kvf_cache_config *config, kvf_cache **out)
{
    kvf_cache *cache = *out = kvf_alloc(runtime->context, 1, sizeof *cache);
    if (!cache)
        KVF_FAIL(runtime->context, KVF_OUT_OF_MEMORY, "no memory for a cache of %zu bytes",
                 sizeof *cache);
    cache->runtime = runtime;
    cache->context = runtime->context;
    cache->device = runtime->device;
    atomic_flag_clear(&cache->in_use);
    KVF_TRY(kvf_config_resolve(runtime, config, &cache->config, &cache->dims));
    cache->policy = kvf_select_find(cache->config.select);
    return own_path(cache);
}

void kvf_cache_wait(kvf_cache *cache)
{
    for (uint32_t i = 0; i < KVF_FRAMES; i++)
        if (cache->frames[i].is_busy)
            (void)cache->device->ops->event_wait(cache->frames[i].done);
}

void kvf_cache_destroy(kvf_cache *cache)
{
    if (!cache)
        return;
    const kvf_device_ops *ops = cache->device->ops;
    kvf_cache_wait(cache);
    ops->stream_destroy(cache->aside);
    ops->stream_destroy(cache->writeback);
    kvf_transfer_close(cache->transfer);
    for (uint32_t i = KVF_FRAMES; i-- > 0;)
        ops->event_destroy(cache->frames[i].done);
    ops->event_destroy(cache->ranked);
    ops->event_destroy(cache->left);
    ops->event_destroy(cache->placed);
    ops->event_destroy(cache->chosen);
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
    kvf_free(cache->context, cache->disk_path);
    kvf_free(cache->context, cache);
}
