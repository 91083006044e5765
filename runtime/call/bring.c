/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks into memory before they are read; see the header.
 *
 * Knows the tier only through the pool. The page table of a row is sent whole, when it lacks an
 * address that is needed: that happens after a read from disk, next to which it is nothing.
 */

#include "bring.h"

/* In a page table: a block that is not in memory. No address, and not NULL, because a span that
 * misses is known by where its page comes from. */
#define ABSENT ((void *)(uintptr_t)4096)

static kvf_status failed(const kvf_cache *cache, kvf_status status)
{
    if (status != KVF_FULL)
        return status;
    KVF_FAIL(cache->context, KVF_FULL,
             "host_bytes = %llu: this call needs more pages in memory at once; open the cache with "
             "more, or call it with fewer sequences",
             (unsigned long long)cache->config.host_bytes);
}

/* ---- page tables ---- */

/* Room for the addresses of a row, which the device has read when it is given out again. */
static kvf_status take_places(kvf_step *step, uint32_t count, void ***host, void ***seen)
{
    kvf_cache *cache = step->cache;
    const kvf_device_ops *ops = cache->device->ops;
    const uint32_t most = cache->dims.paging.blocks_max * cache->config.sequences_max;
    if (cache->places_used + count > most) {
        KVF_TRY(ops->event_record(cache->placed, step->stream));
        KVF_TRY(ops->event_wait(cache->placed));
        cache->places_used = 0;
    }
    *host = cache->control.places + cache->places_used;
    *seen = cache->control_device.places + cache->places_used;
    cache->places_used += count;
    return KVF_OK;
}

static kvf_status send_table(kvf_step *step, const kvf_sequence *sequence, uint32_t index,
                             uint32_t end)
{
    kvf_cache *cache = step->cache;
    kvf_layer *layer = &sequence->layers[index];
    const size_t row = kvf_row_number(cache, sequence, index);
    void **host, **seen;
    KVF_TRY(take_places(step, end, &host, &seen));
    for (uint32_t b = 0; b < end; b++) {
        void *block = kvf_page_pool_device(&cache->pool, layer->blocks[b]);
        host[b] = block ? block : ABSENT;
    }
    layer->arrivals = kvf_disk_tier_arrivals(cache->pool.tier);
    return cache->device->ops->copy(step->stream,
                                    cache->tables.blocks + row * cache->dims.paging.blocks_max,
                                    seen, end * sizeof *seen);
}

/* Blocks below `end` that are not in the prefill arena. */
static uint32_t in_pool(const kvf_cache *cache, const kvf_sequence *sequence, uint32_t layer,
                        uint32_t end)
{
    const kvf_prefill_arena *a = &cache->arena;
    const bool is_owner = a->owner == sequence && a->layer == layer;
    end = kvf_min_u32(end, sequence->layers[layer].sealed);
    return is_owner ? kvf_min_u32(end, a->first) : end;
}

/* The latest arrival among blocks that are in memory. */
static uint64_t latest(const kvf_cache *cache, const kvf_layer *layer, uint32_t first, uint32_t end)
{
    uint64_t most = 0;
    for (uint32_t b = first; b < end; b++) {
        const uint64_t arrival = kvf_disk_tier_arrival(
            cache->pool.tier, kvf_page_pool_bundle(&cache->pool, layer->blocks[b]));
        most = arrival > most ? arrival : most;
    }
    return most;
}

static void want(const kvf_cache *cache, kvf_block block)
{
    kvf_disk_tier_want(cache->pool.tier, kvf_page_pool_bundle(&cache->pool, block));
}

/* ---- ranges ---- */

kvf_status kvf_bring(kvf_step *step, kvf_sequence *sequence, uint32_t layer, uint32_t first,
                     uint32_t end)
{
    kvf_cache *cache = step->cache;
    const kvf_layer *state = &sequence->layers[layer];
    if (!cache->pool.tier)
        return KVF_OK;
    end = in_pool(cache, sequence, layer, end);
    for (uint32_t b = first; b < end; b++)
        want(cache, state->blocks[b]);
    KVF_TRY(failed(cache, kvf_disk_tier_bring(cache->pool.tier)));
    return latest(cache, state, first, end) > state->arrivals
               ? send_table(step, sequence, layer, in_pool(cache, sequence, layer, UINT32_MAX))
               : KVF_OK;
}

kvf_status kvf_bring_rows(kvf_step *step,
                          bool (*is_wanted)(const kvf_cache *cache, const kvf_layer *layer))
{
    for (uint32_t b = 0; step->cache->pool.tier && b < step->rows; b++) {
        const kvf_layer *layer = &step->sequences[b]->layers[step->layer];
        if (!is_wanted || is_wanted(step->cache, layer))
            KVF_TRY(kvf_bring(step, step->sequences[b], step->layer, 0, UINT32_MAX));
    }
    return KVF_OK;
}

kvf_status kvf_bring_blocks(kvf_cache *cache, const kvf_block *blocks, uint32_t count)
{
    for (uint32_t i = 0; cache->pool.tier && i < count; i++)
        want(cache, blocks[i]);
    return cache->pool.tier ? failed(cache, kvf_disk_tier_bring(cache->pool.tier)) : KVF_OK;
}

kvf_status kvf_bring_fresh(kvf_cache *cache, const kvf_block *blocks, uint32_t count)
{
    KVF_TRY(kvf_bring_blocks(cache, blocks, count));
    for (uint32_t i = 0; cache->pool.tier && i < count; i++)
        KVF_TRY(
            kvf_disk_tier_write(cache->pool.tier, kvf_page_pool_bundle(&cache->pool, blocks[i])));
    return KVF_OK;
}

void kvf_bring_again(kvf_cache *cache)
{
    if (cache->pool.tier)
        kvf_disk_tier_call(cache->pool.tier);
}

/* ---- what a step chose ---- */

/* Lists of pages: those that miss a slot, or all where there are no slots. The host reads them in
 * place: a tier is refused on devices that do not share its memory. */
typedef struct chosen {
    const uint32_t *count;  /* [lists] */
    const int32_t *ids;     /* [lists, ids_max], or */
    const kvf_miss *misses; /* likewise */
} chosen;

static chosen where(const kvf_cache *cache)
{
    const kvf_choice *now = &cache->tables.now;
    if (kvf_moves_pages(cache))
        return (chosen){.count = now->miss_count, .misses = now->misses};
    return (chosen){.count = now->id_count, .ids = now->ids};
}

kvf_status kvf_bring_note(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    return cache->pool.tier ? cache->device->ops->event_record(cache->chosen, step->stream)
                            : KVF_OK;
}

/* The latest arrival among the row's chosen blocks; first they are only wanted. */
static uint64_t look(const kvf_step *step, const chosen *c, uint32_t row, bool is_there)
{
    const kvf_cache *cache = step->cache;
    const kvf_paging *p = &cache->dims.paging;
    const kvf_layer *layer = &step->sequences[row]->layers[step->layer];
    uint64_t most = 0;
    for (uint32_t l = row * p->lists; l < (row + 1) * p->lists; l++)
        for (uint32_t i = 0; i < c->count[l]; i++) {
            const size_t at = (size_t)l * cache->tables.now.ids_max + i;
            const uint32_t page = (uint32_t)(c->ids ? c->ids[at] : c->misses[at].page);
            const uint32_t block = page / p->block_pages;
            KVF_ASSERT(block < layer->sealed);
            if (!is_there) {
                want(cache, layer->blocks[block]);
                continue;
            }
            const uint64_t arrival = latest(cache, layer, block, block + 1);
            most = arrival > most ? arrival : most;
        }
    return most;
}

kvf_status kvf_bring_chosen(kvf_step *step)
{
    kvf_cache *cache = step->cache;
    if (!cache->pool.tier)
        return KVF_OK;
    KVF_TRY(cache->device->ops->event_wait(cache->chosen));
    const chosen c = where(cache);
    for (uint32_t b = 0; b < step->rows; b++)
        (void)look(step, &c, b, false);
    const kvf_status status = failed(cache, kvf_disk_tier_bring(cache->pool.tier));
    step->is_undone = status != KVF_OK;
    KVF_TRY(status);
    for (uint32_t b = 0; b < step->rows; b++) {
        const kvf_layer *layer = &step->sequences[b]->layers[step->layer];
        if (look(step, &c, b, true) > layer->arrivals)
            KVF_TRY(send_table(step, step->sequences[b], step->layer, layer->sealed));
    }
    return KVF_OK;
}
