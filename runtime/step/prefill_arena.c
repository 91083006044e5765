/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The prefill arena: who owns it, what lies in it, and how its pages go to the pool.
 *
 * Knows nothing of attention. Layer-major prefill (every chunk of a layer, then the next layer)
 * reads and writes device memory only. A caller that goes chunk by chunk takes the arena from
 * itself at every call, and then reads earlier pages from the pool; the bits are the same.
 */

#include "prefill_arena.h"

#include "writeback.h"

static char *block_of(const kvf_cache *cache, uint32_t index)
{
    return cache->tables.arena + index * kvf_block_bytes(&cache->dims.paging);
}

static kvf_status wait_written(kvf_step *step)
{
    kvf_cache *cache = step->cache;
    if (!cache->arena.is_pending)
        return KVF_OK;
    cache->arena.is_pending = 0;
    return cache->device->ops->stream_wait_event(step->stream, cache->written);
}

static kvf_status leave(kvf_step *step)
{
    kvf_cache *cache = step->cache;
    kvf_prefill_arena *a = &cache->arena;
    if (!a->owner)
        return KVF_OK;
    const kvf_row row = kvf_step_row(cache, a->owner, a->layer);
    const uint32_t first = a->first, count = a->end - a->first;
    a->owner->layers[a->layer].arrivals = 0; /* addresses that are old by now, with a disk tier */
    a->owner = NULL;
    KVF_TRY(wait_written(step));
    if (count == 0)
        return KVF_OK;
    return cache->device->ops->copy(step->stream, row.blocks + first,
                                    cache->tables.arena_pool + first, count * sizeof *row.blocks);
}

kvf_status kvf_arena_take(kvf_step *step, kvf_sequence *sequence, uint32_t layer, uint32_t sealed)
{
    kvf_prefill_arena *a = &step->cache->arena;
    if (a->owner == sequence && a->layer == layer)
        return KVF_OK;
    KVF_TRY(kvf_arena_settle(step));
    a->owner = sequence;
    a->layer = layer;
    a->first = a->end = sealed;
    return KVF_OK;
}

kvf_status kvf_arena_shorten(kvf_step *step, const kvf_sequence *sequence, uint32_t layer,
                             uint32_t sealed)
{
    kvf_prefill_arena *a = &step->cache->arena;
    if (a->owner != sequence || a->layer != layer)
        return KVF_OK;
    a->first = kvf_min_u32(a->first, sealed);
    a->end = sealed;
    return wait_written(step);
}

void kvf_arena_place(kvf_step *step)
{
    kvf_row *row = step->row_host;
    void *const *device;
    KVF_TAKE(step, step->arena_host, device, step->sealed_blocks);
    if (!step->arena_host)
        return;
    KVF_ASSERT(step->rows == 1 && step->cache->arena.end == row->sealed_before);
    for (uint32_t i = 0; i < step->sealed_blocks; i++)
        step->arena_host[i] = block_of(step->cache, row->sealed_before + i);
    row->pool = device;
}

kvf_status kvf_arena_write_back(kvf_step *step)
{
    kvf_cache *cache = step->cache;
    const kvf_device_ops *ops = cache->device->ops;
    kvf_prefill_arena *a = &cache->arena;
    if (step->sealed_blocks == 0)
        return KVF_OK;
    KVF_TRY(ops->copy(step->stream, cache->tables.arena_pool + a->end, (const void *)step->pool,
                      step->sealed_blocks * sizeof(void *)));
    KVF_TRY(ops->event_record(cache->sealed, step->stream));
    KVF_TRY(ops->stream_wait_event(cache->writeback, cache->sealed));
    KVF_TRY(kvf_write_back(cache, step->pool_host, (const void *const *)step->arena_host,
                           step->sealed_blocks));
    a->end += step->sealed_blocks;
    a->is_pending = 1;
    return ops->event_record(cache->written, cache->writeback);
}

kvf_status kvf_arena_leave_rows(kvf_step *step)
{
    const kvf_prefill_arena *a = &step->cache->arena;
    for (uint32_t b = 0; b < step->rows; b++)
        if (a->owner == step->sequences[b] && a->layer == step->layer)
            return leave(step);
    return KVF_OK;
}

kvf_status kvf_arena_leave_sequence(kvf_step *step, const kvf_sequence *sequence)
{
    return step->cache->arena.owner == sequence ? leave(step) : KVF_OK;
}

kvf_status kvf_arena_settle(kvf_step *step)
{
    KVF_TRY(leave(step));
    return wait_written(step);
}

void kvf_arena_wait_block(const kvf_sequence *sequence, uint32_t layer, uint32_t block)
{
    const kvf_cache *cache = sequence->cache;
    const kvf_prefill_arena *a = &cache->arena;
    if (a->owner == sequence && a->layer == layer && block >= a->first && block < a->end)
        (void)cache->device->ops->event_wait(cache->written); /* a failure shows in the stream */
}

/* Blocks of one submission; a copy is cut into chunks that hold fewer anyway. */
#define BLOCKS_MAX 64u

kvf_status kvf_write_back(kvf_cache *cache, void *const *to, const void *const *from,
                          uint32_t count)
{
    kvf_writeback_block blocks[BLOCKS_MAX];
    for (uint32_t i = 0; i < count;) {
        uint32_t n = 0;
        for (; n < BLOCKS_MAX && i < count; n++, i++)
            blocks[n] = (kvf_writeback_block){.from = from[i], .to = to[i]};
        const kvf_writeback_job job = {
            .blocks = blocks, .count = n, .block_bytes = kvf_block_bytes(&cache->dims.paging)};
        KVF_TRY(kvf_writeback_enqueue(cache->writeback, &job, NULL));
    }
    return KVF_OK;
}
