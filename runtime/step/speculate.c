/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Speculation: rank once more with the scores of the step, resolve, fetch, note.
 *
 * Knows nothing of how pages are scored or attended. Victims are pages that rank below everything
 * that is ranked here, so what the step chose stays.
 */

#include "speculate.h"

#include "record.h"
#include "select.h"

uint32_t kvf_ahead_words(const kvf_cache *cache)
{
    return kvf_div_ceil_u32(cache->dims.paging.slots, 32);
}

uint32_t *kvf_ahead_marks(const kvf_cache *cache, size_t number)
{
    return cache->tables.ahead.marks + number * cache->dims.paging.lists * kvf_ahead_words(cache);
}

/* Rows whose residency is the shadow, and whose pages are read where they live. */
static void take_shadow_rows(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    const void *device = NULL;
    kvf_row *rows = kvf_step_take(step, step->rows * sizeof *rows, &device);
    for (uint32_t b = 0; b < step->rows; b++) {
        const size_t number = kvf_row_number(cache, step->sequences[b], step->layer);
        rows[b] = step->row_host[b];
        rows[b].slots = NULL;
        rows[b].slot_of_page =
            kvf_residency_slot_of_page(&cache->shadow, (uint32_t)number * cache->dims.paging.lists);
    }
    step->row_shadow = device;
}

void kvf_ahead_lists(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    const kvf_paging *p = &cache->dims.paging;
    const uint32_t lists = step->rows * p->lists, chosen = step->rows * cache->dims.choose_lists;
    const void *device[4];
    if (cache->dims.ahead_max == 0)
        return;
    uint32_t *k = kvf_step_take(step, chosen * sizeof *k, &device[0]);
    uint32_t **marks = kvf_step_take(step, lists * sizeof *marks, &device[1]);
    for (uint32_t i = 0; i < chosen; i++)
        k[i] = step->row_host[i / cache->dims.choose_lists].attend_all ? 0 : cache->dims.ahead_max;
    for (uint32_t l = 0; l < lists; l++) {
        const size_t number = kvf_row_number(cache, step->sequences[l / p->lists], step->layer);
        marks[l] = kvf_ahead_marks(cache, number) + (size_t)(l % p->lists) * kvf_ahead_words(cache);
    }
    step->ahead_k = device[0];
    step->marks = device[1];
    if (cache->dims.shadow_slots == 0)
        return;
    int32_t **slot_of_page = kvf_step_take(step, lists * sizeof *slot_of_page, &device[2]);
    int32_t **page_of_slot = kvf_step_take(step, lists * sizeof *page_of_slot, &device[3]);
    for (uint32_t l = 0; l < lists; l++) {
        const size_t number = kvf_row_number(cache, step->sequences[l / p->lists], step->layer);
        const uint32_t list = (uint32_t)number * p->lists + l % p->lists;
        slot_of_page[l] = kvf_residency_slot_of_page(&cache->shadow, list);
        page_of_slot[l] = kvf_residency_page_of_slot(&cache->shadow, list);
    }
    step->shadow_slot_of_page = device[2];
    step->shadow_page_of_slot = device[3];
    if (!step->is_recorded) /* a recorded step renews no static set */
        take_shadow_rows(step);
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

/* Bits of the slots after a resolve that wrote slot_of_id and missed. */
static kvf_status mark(kvf_step *step, const kvf_resolve_args *resolve, uint32_t is_use)
{
    const kvf_ahead_args args = {.lists = resolve->lists,
                                 .ids_max = resolve->ids_max,
                                 .is_use = is_use,
                                 .id_count = resolve->id_count,
                                 .slot_of_id = resolve->slot_of_id,
                                 .missed = resolve->missed,
                                 .marks = step->marks,
                                 .counters = kvf_counters_device(step->cache, step->layer)};
    return KVF_LAUNCH(step, ahead, args, args.lists);
}

kvf_status kvf_ahead_note(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    const kvf_tables *t = &cache->tables;
    kvf_resolve_args resolve = {.lists = step->rows * cache->dims.paging.lists,
                                .ids_max = cache->dims.ids_max,
                                .slots = cache->dims.shadow_slots,
                                .stride = step->stride,
                                .ids = t->ids,
                                .id_count = t->id_count,
                                .scores = step->list_scores,
                                .slot_of_page = step->shadow_slot_of_page,
                                .page_of_slot = step->shadow_page_of_slot,
                                .slot_of_id = t->slot_of_id,
                                .missed = t->missed};
    if (cache->dims.ahead_max == 0)
        return KVF_OK;
    KVF_TRY(mark(step, &resolve, 1));
    if (cache->dims.shadow_slots == 0)
        return KVF_OK;
    /* The results are not wanted, only the tables. */
    resolve.slot_of_id = t->ahead.slot_of_id;
    resolve.missed = t->ahead.missed;
    resolve.misses = t->ahead.misses;
    resolve.miss_count = t->ahead.miss_count;
    return KVF_LAUNCH(step, resolve, resolve, kvf_resolve_tasks(&resolve));
}

/* What ranks best, more of it than a step chooses, into ahead_ids. */
static kvf_status rank(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    const kvf_tables *t = &cache->tables;
    const kvf_ranking ranking = {.k = step->ahead_k,
                                 .ids_max = cache->dims.ahead_max,
                                 .ids = t->ahead.ids,
                                 .id_count = t->ahead.id_count,
                                 .list_ids = t->ahead.list_ids,
                                 .list_count = t->ahead.list_count};
    return kvf_choose_ranked(step, &ranking);
}

static kvf_status submit(kvf_step *step, const kvf_resolve_args *resolve)
{
    kvf_cache *cache = step->cache;
    const kvf_tables *t = &cache->tables;
    kvf_ahead *ahead = step->is_recorded ? &cache->recording->ahead : &cache->ahead[step->layer];
    const size_t first = (size_t)step->layer * cache->config.sequences_max *
                         cache->dims.paging.lists * cache->dims.ahead_max;
    const kvf_fetch_args fetch = {.paging = cache->dims.paging,
                                  .rows = step->rows,
                                  .ids_max = resolve->ids_max,
                                  .row = step->row,
                                  .misses = resolve->misses,
                                  .miss_count = resolve->miss_count,
                                  .from = t->ahead.from + first,
                                  .to = t->ahead.to + first,
                                  .count = t->ahead.fetch_count + step->layer};
    const kvf_transfer_request request = {.from = fetch.from, .to = fetch.to, .count = fetch.count};
    /* In a recording, that of the layer before: the transfer stream has passed it by now. */
    KVF_TRY(kvf_ahead_join_one(step, ahead));
    KVF_TRY(KVF_LAUNCH(step, fetch, fetch, 1));
    if (!step->is_recorded)
        KVF_TRY(kvf_transfer_wait_room(cache->transfer));
    KVF_TRY(kvf_transfer_submit(cache->transfer, &request, step->stream, &ahead->ticket));
    ahead->is_open = 1;
    return KVF_OK;
}

kvf_status kvf_ahead_fetch(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    const kvf_tables *t = &cache->tables;
    if (cache->dims.ahead_max == 0)
        return KVF_OK;
    const kvf_resolve_args resolve = {.lists = step->rows * cache->dims.paging.lists,
                                      .ids_max = cache->dims.ahead_max,
                                      .slots = cache->dims.paging.slots,
                                      .stride = step->stride,
                                      .ids = t->ahead.ids,
                                      .id_count = t->ahead.id_count,
                                      .scores = step->list_scores,
                                      .slot_of_page = step->slot_of_page,
                                      .page_of_slot = step->page_of_slot,
                                      .slot_of_id = t->ahead.slot_of_id,
                                      .missed = t->ahead.missed,
                                      .misses = t->ahead.misses,
                                      .miss_count = t->ahead.miss_count};
    KVF_TRY(rank(step));
    KVF_TRY(KVF_LAUNCH(step, resolve, resolve, kvf_resolve_tasks(&resolve)));
    KVF_TRY(mark(step, &resolve, 0));
    return kvf_moves_pages(cache) ? submit(step, &resolve) : KVF_OK;
}
