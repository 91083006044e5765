/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The prefill arena: who owns it, what lies in it, and how its pages go to the pool.
 *
 * Knows nothing of attention. Layer-major prefill (every chunk of a layer, then the next layer)
 * finds its earlier blocks here. A caller that goes chunk by chunk takes the arena from itself at
 * every call, and they are brought again: from device memory if they have slots.
 */

#include "prefill_arena.h"

#include "seal.h"

static char *block_of(const kvf_kv_group *kv_group, uint32_t index)
{
    return kv_group->tables.arena + index * kvf_block_bytes(&kv_group->dims.paging);
}

static kvf_status wait_written(kvf_call *call, kvf_kv_group *kv_group)
{
    if (!kv_group->arena.is_pending)
        return KVF_OK;
    kv_group->arena.is_pending = 0;
    return kv_group->device->ops->stream_wait_event(call->stream, kv_group->written);
}

static kvf_status leave(kvf_call *call, kvf_kv_group *kv_group)
{
    kvf_prefill_arena *a = &kv_group->arena;
    if (!a->owner)
        return KVF_OK;
    const kvf_row row = kvf_call_row(kv_group, a->owner);
    const uint32_t first = a->first, count = a->end - a->first;
    a->owner->arrivals = 0; /* addresses may be old by now */
    a->owner = NULL;
    KVF_TRY(wait_written(call, kv_group));
    if (count == 0)
        return KVF_OK;
    return kv_group->device->ops->copy(call->stream, row.blocks + first,
                                       kv_group->tables.arena_pool + first,
                                       count * sizeof *row.blocks);
}

kvf_status kvf_arena_take(kvf_call *call, kvf_layer *layer, uint32_t sealed)
{
    kvf_prefill_arena *a = &layer->kv_group->arena;
    if (a->owner == layer)
        return KVF_OK;
    KVF_TRY(kvf_arena_settle(call, layer->kv_group));
    a->owner = layer;
    a->first = a->end = sealed;
    return KVF_OK;
}

kvf_status kvf_arena_fill(kvf_call *call)
{
    kvf_kv_group *kv_group = call->kv_group;
    kvf_prefill_arena *a = &kv_group->arena;
    const kvf_stage_args args = {.paging = kv_group->dims.paging,
                                 .rows = 1,
                                 .count = a->first,
                                 .row = call->row,
                                 .to = kv_group->tables.arena,
                                 .home = kv_group->tables.arena_pool,
                                 .counters = kvf_counters_device(kv_group, call->index)};
    if (a->first)
        KVF_TRY(KVF_LAUNCH(call, stage, args));
    a->first = 0;
    return KVF_OK;
}

kvf_status kvf_arena_shorten(kvf_call *call, const kvf_layer *layer, uint32_t sealed)
{
    kvf_prefill_arena *a = &layer->kv_group->arena;
    if (a->owner != layer)
        return KVF_OK;
    a->first = kvf_min_u32(a->first, sealed);
    a->end = sealed;
    return wait_written(call, layer->kv_group);
}

void kvf_arena_place(kvf_call *call)
{
    kvf_row *row = call->row_host;
    void *const *device;
    KVF_TAKE(call, call->arena_host, device, call->sealed_blocks);
    if (!call->arena_host)
        return;
    KVF_ASSERT(call->rows == 1 && call->kv_group->arena.end == row->sealed_before);
    for (uint32_t i = 0; i < call->sealed_blocks; i++)
        call->arena_host[i] = block_of(call->kv_group, row->sealed_before + i);
    row->pool = device;
}

kvf_status kvf_arena_write_back(kvf_call *call)
{
    kvf_kv_group *kv_group = call->kv_group;
    const kvf_device_ops *ops = kv_group->device->ops;
    kvf_prefill_arena *a = &kv_group->arena;
    if (call->sealed_blocks == 0)
        return KVF_OK;
    KVF_TRY(ops->copy(call->stream, kv_group->tables.arena_pool + a->end, (const void *)call->pool,
                      call->sealed_blocks * sizeof(void *)));
    KVF_TRY(ops->event_record(kv_group->sealed, call->stream));
    KVF_TRY(ops->stream_wait_event(kv_group->writeback, kv_group->sealed));
    KVF_TRY(kvf_write_back(kv_group, call->pool_host, (const void *const *)call->arena_host,
                           call->sealed_blocks));
    a->end += call->sealed_blocks;
    a->is_pending = 1;
    return ops->event_record(kv_group->written, kv_group->writeback);
}

kvf_status kvf_arena_leave_rows(kvf_call *call)
{
    for (uint32_t b = 0; b < call->rows; b++)
        if (call->kv_group->arena.owner == call->states[b])
            return leave(call, call->kv_group);
    return KVF_OK;
}

kvf_status kvf_arena_leave_sequence(kvf_call *call, const kvf_sequence *sequence)
{
    for (uint32_t i = 0; i < call->cache->config.layers; i++) {
        const kvf_layer *layer = &sequence->layers[i];
        if (layer->kv_group && layer->kv_group->arena.owner == layer)
            KVF_TRY(leave(call, layer->kv_group));
    }
    return KVF_OK;
}

kvf_status kvf_arena_settle(kvf_call *call, kvf_kv_group *kv_group)
{
    KVF_TRY(leave(call, kv_group));
    return wait_written(call, kv_group);
}

void kvf_arena_wait_block(const kvf_layer *layer, uint32_t block)
{
    const kvf_kv_group *kv_group = layer->kv_group;
    const kvf_prefill_arena *a = &kv_group->arena;
    if (a->owner == layer && block >= a->first && block < a->end)
        (void)kv_group->device->ops->event_wait(
            kv_group->written); /* a failure shows in the stream */
}
