/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages on their way ahead of need: joined, forgotten, and the bits that say which slots have them.
 *
 * Knows nothing of which pages those are (speculate.c).
 */

#include "ahead.h"

uint32_t kvf_ahead_words(const kvf_part *part)
{
    return kvf_div_ceil_u32(part->dims.paging.slots, 32);
}

uint32_t *kvf_ahead_marks(const kvf_part *part, size_t row)
{
    return part->tables.marks + row * part->dims.paging.lists * kvf_ahead_words(part);
}

kvf_status kvf_ahead_leave(kvf_step *step)
{
    const kvf_order *order = &step->cache->order;
    const kvf_device_ops *ops = step->cache->device->ops;
    KVF_TRY(ops->event_record(order->left, step->stream));
    KVF_TRY(ops->stream_wait_event(order->aside, order->left));
    step->stream = order->aside;
    return KVF_OK;
}

kvf_status kvf_ahead_mark_end(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    return cache->order.aside ? cache->device->ops->event_record(cache->order.ranked, step->stream)
                              : KVF_OK;
}

kvf_status kvf_ahead_await_end(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    return cache->order.aside
               ? cache->device->ops->stream_wait_event(step->stream, cache->order.ranked)
               : KVF_OK;
}

kvf_status kvf_ahead_join_one(kvf_step *step, kvf_part *part, kvf_ahead *ahead)
{
    if (!ahead->is_open)
        return KVF_OK;
    ahead->is_open = 0;
    return kvf_transfer_join(part->transfer, ahead->ticket, step->stream);
}

/* A replay begins after whatever was under way, and ends after what it began itself. */
kvf_status kvf_ahead_join(kvf_step *step)
{
    kvf_part *part = step->part;
    return part->dims.ahead_max && !step->is_recorded
               ? kvf_ahead_join_one(step, part, &part->ahead[step->index])
               : KVF_OK;
}

kvf_status kvf_ahead_settle(kvf_step *step, kvf_part *part)
{
    part->is_unsettled = 0;
    for (uint32_t i = 0; part->dims.ahead_max && i < part->config.layers; i++)
        KVF_TRY(kvf_ahead_join_one(step, part, &part->ahead[i]));
    return KVF_OK;
}

kvf_status kvf_ahead_clear(kvf_step *step, const kvf_layer *state)
{
    kvf_part *part = state->part;
    const uint32_t lists = part->dims.paging.lists;
    if (part->dims.ahead_max == 0)
        return KVF_OK;
    if (part->dims.shadow_slots)
        KVF_TRY(kvf_residency_clear(&part->shadow, state->row * lists, lists, step->stream));
    return part->device->ops->fill(step->stream, kvf_ahead_marks(part, state->row), 0,
                                   (size_t)lists * kvf_ahead_words(part) * sizeof(uint32_t));
}
