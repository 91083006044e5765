/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages on their way ahead of need: joined, forgotten, and the bits that say which slots have them.
 *
 * Knows nothing of which pages those are (speculate.c).
 */

#include "ahead.h"

uint32_t kvf_ahead_words(const kvf_cache *cache)
{
    return kvf_div_ceil_u32(cache->dims.paging.slots, 32);
}

uint32_t *kvf_ahead_marks(const kvf_cache *cache, size_t number)
{
    return cache->tables.marks + number * cache->dims.paging.lists * kvf_ahead_words(cache);
}

kvf_status kvf_ahead_leave(kvf_step *step)
{
    kvf_cache *cache = step->cache;
    const kvf_device_ops *ops = cache->device->ops;
    KVF_TRY(ops->event_record(cache->left, step->stream));
    KVF_TRY(ops->stream_wait_event(cache->aside, cache->left));
    step->stream = cache->aside;
    return KVF_OK;
}

kvf_status kvf_ahead_mark_end(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    return cache->dims.ahead_max ? cache->device->ops->event_record(cache->ranked, step->stream)
                                 : KVF_OK;
}

kvf_status kvf_ahead_await_end(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    return cache->dims.ahead_max
               ? cache->device->ops->stream_wait_event(step->stream, cache->ranked)
               : KVF_OK;
}

kvf_status kvf_ahead_join_one(kvf_step *step, kvf_ahead *ahead)
{
    if (!ahead->is_open)
        return KVF_OK;
    ahead->is_open = 0;
    return kvf_transfer_join(step->cache->transfer, ahead->ticket, step->stream);
}

static kvf_status join(kvf_step *step, uint32_t layer)
{
    return kvf_ahead_join_one(step, &step->cache->ahead[layer]);
}

/* A replay begins after whatever was under way, and ends after what it began itself. */
kvf_status kvf_ahead_join(kvf_step *step)
{
    return step->cache->dims.ahead_max && !step->is_recorded ? join(step, step->layer) : KVF_OK;
}

kvf_status kvf_ahead_settle(kvf_step *step)
{
    kvf_cache *cache = step->cache;
    cache->is_unsettled = 0;
    for (uint32_t i = 0; cache->dims.ahead_max && i < cache->config.layers; i++)
        KVF_TRY(join(step, i));
    return KVF_OK;
}

kvf_status kvf_ahead_clear(kvf_step *step, size_t number)
{
    kvf_cache *cache = step->cache;
    const uint32_t lists = cache->dims.paging.lists;
    if (cache->dims.ahead_max == 0)
        return KVF_OK;
    if (cache->dims.shadow_slots)
        KVF_TRY(kvf_residency_clear(&cache->shadow, (uint32_t)number * lists, lists, step->stream));
    return cache->device->ops->fill(step->stream, kvf_ahead_marks(cache, number), 0,
                                    (size_t)lists * kvf_ahead_words(cache) * sizeof(uint32_t));
}
