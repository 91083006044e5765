/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks into memory before they are read; see the header.
 *
 * Knows the tier only through the pool. The page table of a row is sent whole, when it lacks an
 * address that is needed: that happens after a read from disk, next to which it is nothing.
 */

#include "bring.h"

#include <string.h>

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
        void *block = kvf_page_pool_place(&cache->pool, layer->blocks[b]);
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

/* The tier's groups are layers; what nobody has read yet is of a group of its own. */
#define UNREAD 0u

static void want(const kvf_cache *cache, kvf_block block, uint32_t group)
{
    kvf_disk_tier_want(cache->pool.tier, kvf_page_pool_bundle(&cache->pool, block), group);
}

static bool is_absent(const kvf_cache *cache, kvf_block block)
{
    return !kvf_disk_tier_device(cache->pool.tier, kvf_page_pool_bundle(&cache->pool, block));
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
        want(cache, state->blocks[b], layer + 1);
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
        want(cache, blocks[i], UNREAD);
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

/* Lists of pages: those that miss a slot, or all where there are no slots, or those of the caller.
 * The host reads them in place, or a copy that comes before the event. */
typedef struct chosen {
    const uint32_t *count;  /* [lists] */
    const int32_t *indptr;  /* [lists + 1] of lists one behind the other; NULL = ids_max apart */
    const int32_t *ids;     /* [lists, ids_max], or */
    const kvf_miss *misses; /* likewise */
} chosen;

static chosen where(const kvf_cache *cache)
{
    const kvf_choice *now = &cache->tables.now;
    if (cache->dims.needs_mirror)
        return (chosen){.count = cache->control.mirror.miss_count,
                        .misses = cache->control.mirror.misses};
    if (kvf_moves_pages(cache))
        return (chosen){.count = now->miss_count, .misses = now->misses};
    return (chosen){.count = now->id_count, .ids = now->ids};
}

/* Two copies on the step's stream. A device that needs them gives every page a slot. */
static kvf_status copy_misses(const kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    const kvf_device_ops *ops = cache->device->ops;
    const kvf_choice *now = &cache->tables.now;
    const size_t lists = (size_t)step->rows * cache->dims.paging.lists;
    KVF_ASSERT(kvf_moves_pages(cache));
    KVF_TRY(ops->copy(step->stream, cache->control_device.mirror.misses, now->misses,
                      lists * now->ids_max * sizeof *now->misses));
    return ops->copy(step->stream, cache->control_device.mirror.miss_count, now->miss_count,
                     lists * sizeof *now->miss_count);
}

kvf_status kvf_bring_note(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    return cache->pool.tier ? cache->device->ops->event_record(cache->chosen, step->stream)
                            : KVF_OK;
}

kvf_status kvf_bring_note_chosen(kvf_step *step)
{
    if (step->cache->pool.tier && step->cache->dims.needs_mirror)
        KVF_TRY(copy_misses(step));
    return kvf_bring_note(step);
}

kvf_status kvf_bring_wait(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    return cache->pool.tier ? cache->device->ops->event_wait(cache->chosen) : KVF_OK;
}

static uint32_t list_length(const chosen *c, uint32_t list)
{
    return c->indptr ? (uint32_t)(c->indptr[list + 1] - c->indptr[list]) : c->count[list];
}

/* First blocks are wanted; then, once they have places, the latest of their arrivals is looked up;
 * and where some are being read, pages are parted into those that are there and those that are not.
 */
typedef enum glance { WANT, LOOK, PART } glance;

/* A page that was chosen, `at` in its arrays, of list `l`. */
static void part(const kvf_step *step, const chosen *c, uint32_t l, size_t at, kvf_block block)
{
    const kvf_cache *cache = step->cache;
    const kvf_control *t = &cache->control;
    const uint32_t is_late =
        kvf_disk_tier_is_coming(cache->pool.tier, kvf_page_pool_bundle(&cache->pool, block));
    if (!c->misses) {
        t->late[at] = (uint8_t)is_late;
        return;
    }
    const size_t lists = (size_t)cache->config.sequences_max * cache->dims.paging.lists;
    const size_t list = is_late * lists + l;
    t->parted[list * cache->tables.now.ids_max + t->part_count[list]++] = c->misses[at];
}

/* The latest arrival among the row's chosen blocks. What is not sealed is listed, but never chosen.
 */
static uint64_t look(const kvf_step *step, const chosen *c, uint32_t row, glance why)
{
    const kvf_cache *cache = step->cache;
    const kvf_paging *p = &cache->dims.paging;
    const kvf_layer *layer = &step->sequences[row]->layers[step->layer];
    uint64_t most = 0;
    for (uint32_t l = row * p->lists; l < (row + 1) * p->lists; l++)
        for (uint32_t i = 0; i < list_length(c, l); i++) {
            const size_t at =
                (c->indptr ? (size_t)c->indptr[l] : (size_t)l * cache->tables.now.ids_max) + i;
            const uint32_t page = (uint32_t)(c->ids ? c->ids[at] : c->misses[at].page);
            const uint32_t block = page / p->block_pages;
            KVF_ASSERT(c->indptr || block < layer->sealed);
            if (block >= layer->sealed)
                continue;
            if (why == PART) {
                part(step, c, l, at, layer->blocks[block]);
            } else if (why == WANT) {
                step->cache->pages_from_disk += is_absent(cache, layer->blocks[block]);
                want(cache, layer->blocks[block], step->layer + 1);
            } else {
                const uint64_t arrival = latest(cache, layer, block, block + 1);
                most = arrival > most ? arrival : most;
            }
        }
    return most;
}

static kvf_status rest(kvf_step *step)
{
    const kvf_status status = failed(step->cache, kvf_disk_tier_bring(step->cache->pool.tier));
    step->is_late = 0;
    step->is_undone = status != KVF_OK;
    return status;
}

static kvf_status ask_pages(kvf_step *step, const chosen *c)
{
    kvf_cache *cache = step->cache;
    for (uint32_t b = 0; b < step->rows; b++)
        (void)look(step, c, b, WANT);
    step->is_late = kvf_disk_tier_ask(cache->pool.tier);
    if (!step->is_late || c->indptr)
        KVF_TRY(rest(step));
    for (uint32_t b = 0; b < step->rows; b++) {
        const kvf_layer *layer = &step->sequences[b]->layers[step->layer];
        if (look(step, c, b, LOOK) > layer->arrivals)
            KVF_TRY(send_table(step, step->sequences[b], step->layer, layer->sealed));
    }
    if (!step->is_late)
        return KVF_OK;
    const size_t lists = (size_t)cache->config.sequences_max * cache->dims.paging.lists;
    if (c->misses)
        memset(cache->control.part_count, 0, 2 * lists * sizeof *cache->control.part_count);
    for (uint32_t b = 0; b < step->rows; b++)
        (void)look(step, c, b, PART);
    return KVF_OK;
}

/* ---- what the next step may choose ---- */

kvf_status kvf_bring_expect(kvf_step *step)
{
    kvf_cache *cache = step->cache;
    const kvf_device_ops *ops = cache->device->ops;
    const kvf_choice *ahead = &cache->tables.ahead;
    const size_t lists = (size_t)step->rows * cache->dims.paging.lists;
    for (uint32_t b = 0; b < step->rows; b++)
        cache->expected[b] = step->sequences[b]->slot;
    cache->expected_rows = step->rows;
    cache->expected_layer = step->layer;
    if (!cache->dims.needs_mirror)
        return KVF_OK;
    KVF_TRY(ops->copy(step->stream, cache->control_device.mirror.ahead_ids, ahead->ids,
                      lists * ahead->ids_max * sizeof *ahead->ids));
    return ops->copy(step->stream, cache->control_device.mirror.ahead_count, ahead->id_count,
                     lists * sizeof *ahead->id_count);
}

static void expect_row(const kvf_cache *cache, uint32_t row)
{
    const kvf_paging *p = &cache->dims.paging;
    const kvf_choice *c = &cache->tables.ahead;
    const bool is_copied = cache->dims.needs_mirror != 0;
    const int32_t *ids = is_copied ? cache->control.mirror.ahead_ids : c->ids;
    const uint32_t *count = is_copied ? cache->control.mirror.ahead_count : c->id_count;
    const kvf_sequence *sequence = &cache->sequences[cache->expected[row]];
    const kvf_layer *layer = &sequence->layers[cache->expected_layer];
    for (uint32_t l = row * p->lists; sequence->is_alive && l < (row + 1) * p->lists; l++)
        for (uint32_t i = 0; i < count[l]; i++) {
            const uint32_t page = (uint32_t)ids[(size_t)l * c->ids_max + i];
            const uint32_t block = page / p->block_pages;
            if (block < layer->sealed) /* the sequence may have been cut since, or be another */
                kvf_disk_tier_expect(cache->pool.tier,
                                     kvf_page_pool_bundle(&cache->pool, layer->blocks[block]),
                                     cache->expected_layer + 1);
        }
}

/* What the step before ranked is known, because this one's choice is. */
static void expect(kvf_cache *cache)
{
    for (uint32_t b = 0; b < cache->expected_rows; b++)
        expect_row(cache, b);
    if (cache->expected_rows)
        kvf_disk_tier_begin(cache->pool.tier);
    cache->expected_rows = 0;
}

kvf_status kvf_bring_ask(kvf_step *step)
{
    if (!step->cache->pool.tier)
        return KVF_OK;
    KVF_TRY(kvf_bring_wait(step));
    const chosen c = where(step->cache);
    KVF_TRY(ask_pages(step, &c));
    if (!step->is_late)
        expect(step->cache);
    return KVF_OK;
}

kvf_status kvf_bring_late(kvf_step *step)
{
    if (!step->is_late)
        return KVF_OK;
    KVF_TRY(rest(step));
    expect(step->cache);
    return KVF_OK;
}

void kvf_bring_drop(kvf_step *step)
{
    const kvf_status status = step->is_late ? kvf_disk_tier_bring(step->cache->pool.tier) : KVF_OK;
    (void)status; /* the other failure is told */
    step->is_late = 0;
}

kvf_status kvf_bring_listed(kvf_step *step, const int32_t *indptr, const int32_t *indices)
{
    const chosen c = {.indptr = indptr, .ids = indices};
    return step->cache->pool.tier ? ask_pages(step, &c) : KVF_OK;
}
