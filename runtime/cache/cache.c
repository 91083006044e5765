/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening and closing a cache: every reservation it will ever make.
 *
 * Knows nothing of steps. A half-open cache is closed by the same function as an open one; nothing
 * is left behind whichever reservation fails.
 */

#include <string.h>

#include "masked.h"
#include "select.h"

static kvf_status take_host(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    const size_t rows = (size_t)c->sequences_max * c->layers;
    const size_t pages = cache->dims.paging.pages_max;
    cache->sequences = kvf_alloc(cache->context, c->sequences_max, sizeof *cache->sequences);
    cache->layers = kvf_alloc(cache->context, rows, sizeof *cache->layers);
    cache->blocks = kvf_alloc(cache->context, rows, pages * sizeof *cache->blocks);
    cache->positions = kvf_alloc(cache->context, rows, c->tokens_max * sizeof *cache->positions);
    cache->ahead = kvf_alloc(cache->context, c->layers, sizeof *cache->ahead);
    cache->host_counters = kvf_alloc(cache->context, c->layers, sizeof *cache->host_counters);
    cache->footprint.rows = kvf_alloc(cache->context, rows, sizeof *cache->footprint.rows);
    cache->footprint.spans =
        kvf_alloc(cache->context, c->sequences_max, sizeof *cache->footprint.spans);
    cache->replaced =
        kvf_alloc(cache->context, cache->dims.spare_blocks + 1, sizeof *cache->replaced);
    cache->sealed_before =
        kvf_alloc(cache->context, c->sequences_max, sizeof *cache->sealed_before);
    if (!cache->replaced || !cache->sealed_before || !cache->sequences || !cache->layers ||
        !cache->blocks || !cache->positions || !cache->host_counters || !cache->ahead ||
        !cache->footprint.rows || !cache->footprint.spans)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY,
                 "no memory for the tables of %u sequences (%llu bytes); lower sequences_max or "
                 "tokens_max",
                 c->sequences_max, (unsigned long long)cache->plan.host_table_bytes);
    for (uint32_t s = 0; s < c->sequences_max; s++) {
        kvf_sequence *sequence = &cache->sequences[s];
        *sequence = (kvf_sequence){
            .cache = cache, .slot = s, .layers = cache->layers + (size_t)s * c->layers};
        for (uint32_t i = 0; i < c->layers; i++) {
            sequence->layers[i].blocks = cache->blocks + ((size_t)s * c->layers + i) * pages;
            sequence->layers[i].positions =
                cache->positions + ((size_t)s * c->layers + i) * c->tokens_max;
        }
    }
    return KVF_OK;
}

static kvf_status take_device(kvf_cache *cache)
{
    struct {
        uint64_t bytes;
        char **pointer;
    } parts[] = {{cache->layout.device_kv, &cache->device_kv},
                 {cache->layout.device_digest, &cache->device_digest},
                 {cache->layout.device_table, &cache->device_table}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        void *pointer = NULL;
        if (parts[i].bytes == 0)
            continue;
        KVF_TRY(cache->device->ops->memory_alloc(cache->device, parts[i].bytes, &pointer));
        *parts[i].pointer = pointer;
    }
    return KVF_OK;
}

static kvf_status take_control(kvf_cache *cache)
{
    kvf_host_memory_config memory = kvf_runtime_memory(cache->runtime);
    memory.huge_pages = KVF_HUGE_PAGES_OFF;
    memory.bytes = memory.granule = cache->layout.control;
    return kvf_host_memory_create(cache->context, cache->device, &memory, &cache->control);
}

static kvf_status take_pages(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_paging *p = &cache->dims.paging;
    const kvf_host_memory_config memory = kvf_runtime_memory(cache->runtime);
    KVF_TRY(kvf_page_pool_create(cache->context, cache->device, &memory, kvf_block_bytes(p),
                                 cache->dims.block_count, &cache->pool));
    KVF_TRY(take_control(cache));
    const size_t slot_bytes = c->transfer == KVF_TRANSFER_DIRECT ? 0 : kvf_page_bytes(&p->shape);
    KVF_TRY(kvf_residency_create(cache->device, c->sequences_max * c->layers * p->lists,
                                 p->pages_max, p->slots, slot_bytes, &cache->residency));
    if (cache->dims.shadow_slots)
        KVF_TRY(kvf_residency_create(cache->device, c->sequences_max * c->layers * p->lists,
                                     p->pages_max, cache->dims.shadow_slots, 0, &cache->shadow));
    kvf_transfer_config transfer = kvf_cache_transfer_config(cache->runtime, c, &cache->dims);
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
        const size_t offset = i * kvf_round_up(cache->dims.frame_bytes, 64);
        frame->host = kvf_control_host(cache, cache->layout.control_frames + offset);
        frame->device = kvf_table_at(cache, cache->layout.frames + offset);
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

/* A cache with streaming heads has its pages in inner caches. */
static kvf_status open_masked(kvf_cache *cache, const kvf_cache_config *config)
{
    KVF_TRY(kvf_masked_open(cache, config));
    KVF_TRY(take_host(cache));
    KVF_TRY(take_device(cache));
    KVF_TRY(take_control(cache));
    KVF_TRY(take_frames(cache));
    kvf_cache_stats_reset(cache);
    return KVF_OK;
}

static kvf_status open_cache(kvf_cache *cache, const kvf_cache_config *config)
{
    KVF_TRY(kvf_config_resolve(cache->runtime, config, &cache->config, &cache->dims));
    cache->policy = kvf_select_find(cache->config.select);
    if (cache->config.head_mask)
        return open_masked(cache, config);
    KVF_TRY(kvf_layout_make(cache->runtime, &cache->config, &cache->dims, &cache->layout,
                            &cache->plan));
    KVF_TRY(take_host(cache));
    KVF_TRY(take_device(cache));
    KVF_TRY(take_pages(cache));
    KVF_TRY(take_order(cache));
    kvf_cache_stats_reset(cache);
    return KVF_OK;
}

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
    if (cache->control.arenas)
        kvf_host_memory_destroy(cache->context, &cache->control);
    kvf_page_pool_destroy(&cache->pool);
    char *const device[] = {cache->device_table, cache->device_digest, cache->device_kv};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        if (device[i])
            ops->memory_free(cache->device, device[i]);
    kvf_free(cache->context, cache->sealed_before);
    kvf_free(cache->context, cache->replaced);
    kvf_free(cache->context, cache->footprint.spans);
    kvf_free(cache->context, cache->footprint.rows);
    kvf_free(cache->context, cache->host_counters);
    kvf_free(cache->context, cache->ahead);
    kvf_free(cache->context, cache->positions);
    kvf_free(cache->context, cache->blocks);
    kvf_free(cache->context, cache->layers);
    kvf_free(cache->context, cache->sequences);
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
