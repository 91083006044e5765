/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks into memory before they are read; see addressable.h, and bring.h for what a step chose.
 *
 * Knows the disk by the pool's door alone. The page table of a row is sent whole, when it lacks an
 * address that is needed: that happens after a read from disk, next to which it is nothing.
 */

#include "bring.h"

#include <string.h>

/* In a page table: a block that is not in memory. No address, and not NULL, because a span that
 * misses is known by where its page comes from. */
#define ABSENT ((void *)(uintptr_t)4096)

static kvf_status failed(const kvf_kv_group *kv_group, kvf_status status)
{
    if (status != KVF_FULL)
        return status;
    KVF_FAIL(kv_group->context, KVF_FULL,
             "host_bytes = %llu: this call needs more pages in memory at once; open the cache with "
             "more, or call it with fewer sequences",
             (unsigned long long)kv_group->config.host_bytes);
}

/* ---- page tables ---- */

/* Room for the addresses of a row, which the device has read when it is given out again. */
static kvf_status take_places(kvf_call *call, uint32_t count, void ***host, void ***seen)
{
    kvf_kv_group *kv_group = call->kv_group;
    const kvf_device_ops *ops = kv_group->device->ops;
    const uint32_t most = kv_group->dims.paging.blocks_max * kv_group->config.sequences_max;
    if (kv_group->places_used + count > most) {
        KVF_TRY(ops->event_record(kv_group->placed, call->stream));
        KVF_TRY(ops->event_wait(kv_group->placed));
        kv_group->places_used = 0;
    }
    *host = kv_group->control.places + kv_group->places_used;
    *seen = kv_group->control_device.places + kv_group->places_used;
    kv_group->places_used += count;
    return KVF_OK;
}

static kvf_status send_table(kvf_call *call, kvf_layer *layer, uint32_t end)
{
    kvf_kv_group *kv_group = call->kv_group;
    const size_t row = layer->row;
    void **host, **seen;
    KVF_TRY(take_places(call, end, &host, &seen));
    for (uint32_t b = 0; b < end; b++) {
        void *block = kvf_page_pool_place(&kv_group->pool, layer->blocks[b]);
        host[b] = block ? block : ABSENT;
    }
    layer->arrivals = kvf_page_pool_arrivals(&kv_group->pool);
    return kv_group->device->ops->copy(
        call->stream, kv_group->tables.rows.blocks + row * kv_group->dims.paging.blocks_max, seen,
        end * sizeof *seen);
}

/* Sealed blocks that are not in the prefill arena. */
static uint32_t in_pool(const kvf_layer *layer)
{
    const kvf_prefill_arena *a = &layer->kv_group->arena;
    return a->owner == layer ? kvf_min_u32(layer->extent.sealed, a->first) : layer->extent.sealed;
}

/* The latest arrival among blocks that are in memory. */
static uint64_t latest(const kvf_kv_group *kv_group, const kvf_layer *layer, uint32_t first,
                       uint32_t end)
{
    uint64_t most = 0;
    for (uint32_t b = first; b < end; b++) {
        const uint64_t arrival = kvf_page_pool_arrival(&kv_group->pool, layer->blocks[b]);
        most = arrival > most ? arrival : most;
    }
    return most;
}

/* kvf_call.is_late: 1, or the host has not looked yet. */
#define UNASKED 2u

/* The tier's groups are layers; what nobody has read yet is of a group of its own. */
#define UNREAD 0u

/* ---- ranges ---- */

/* All sealed blocks of a row that do not lie in the prefill arena. */
static kvf_status bring_row(kvf_call *call, kvf_layer *layer)
{
    kvf_kv_group *kv_group = call->kv_group;
    const uint32_t end = in_pool(layer);
    for (uint32_t b = 0; b < end; b++)
        kvf_page_pool_want(&kv_group->pool, layer->blocks[b], layer->index + 1);
    KVF_TRY(failed(kv_group, kvf_page_pool_bring(&kv_group->pool)));
    return latest(kv_group, layer, 0, end) > layer->arrivals ? send_table(call, layer, end)
                                                             : KVF_OK;
}

kvf_status kvf_addressable_blocks(kvf_kv_group *kv_group, const kvf_block *blocks, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        kvf_page_pool_want(&kv_group->pool, blocks[i], UNREAD);
    return failed(kv_group, kvf_page_pool_bring(&kv_group->pool));
}

kvf_status kvf_addressable_fresh(kvf_kv_group *kv_group, const kvf_block *blocks, uint32_t count)
{
    KVF_TRY(kvf_addressable_blocks(kv_group, blocks, count));
    for (uint32_t i = 0; i < count; i++)
        kvf_page_pool_write(&kv_group->pool, blocks[i]);
    return KVF_OK;
}

kvf_status kvf_addressable_wait(kvf_kv_group *kv_group, kvf_stream *stream)
{
    if (!kvf_page_pool_spills(&kv_group->pool))
        return KVF_OK;
    KVF_TRY(kv_group->device->ops->event_record(kv_group->chosen, stream));
    return kv_group->device->ops->event_wait(kv_group->chosen);
}

/* ---- a call, from its beginning to its end ---- */

bool kvf_call_may_fail(const kvf_cache *cache, uint32_t layer)
{
    const kvf_kv_group *kv_group = cache->layer_groups[layer].kv_group;
    return kv_group && kvf_page_pool_spills(&kv_group->pool);
}

kvf_status kvf_call_open(kvf_call *call, uint32_t layer, kvf_sequence *const *sequence, bool reads,
                         kvf_stream *stream)
{
    KVF_TRY(kvf_call_begin(call->cache, stream, call));
    kvf_call_at(call, layer, sequence, 1);
    const bool may_fail = reads && kvf_call_may_fail(call->cache, layer);
    const kvf_status status = may_fail ? bring_row(call, call->states[0]) : KVF_OK;
    return status == KVF_OK ? KVF_OK : kvf_call_refuse(call, status);
}

kvf_status kvf_addressable_rows(kvf_call *call, bool (*is_read)(const kvf_kv_group *kv_group,
                                                                const kvf_layer *layer))
{
    for (uint32_t b = 0; kvf_call_may_fail(call->cache, call->layer) && b < call->rows; b++)
        if (is_read(call->kv_group, call->states[b]))
            KVF_TRY(bring_row(call, call->states[b]));
    return KVF_OK;
}

/* Slots that were to get pages have others now, or none: all are empty, because nobody knows which
 * these are. */
static kvf_status end_failed(kvf_call *call, kvf_status failure)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_status status = kvf_moves_pages(kv_group)
                                  ? kvf_residency_clear(&kv_group->residency, call->stream)
                                  : KVF_OK;
    KVF_TRY(kvf_call_end(call, status));
    return failure;
}

kvf_status kvf_call_close(kvf_call *call, kvf_status status)
{
    /* After a failure of something else no read is left in flight. */
    const kvf_status late = call->is_late ? kvf_page_pool_bring(&call->kv_group->pool) : KVF_OK;
    (void)late; /* the other failure is told */
    call->is_late = 0;
    return call->is_undone ? end_failed(call, status) : kvf_call_end(call, status);
}

/* ---- what a step chose ---- */

/* Lists of pages: those that miss a slot, or all where there are no slots, or those of the caller.
 * The host reads them in place, or a copy that comes before the event. */
typedef struct chosen {
    const uint32_t *count;  /* [lists] */
    const int32_t *indptr;  /* [lists + 1] of lists one after the other; NULL = ids_max apart */
    const int32_t *ids;     /* [lists, ids_max], or */
    const kvf_miss *misses; /* likewise */
} chosen;

static chosen where(const kvf_kv_group *kv_group)
{
    const kvf_choice *now = &kv_group->tables.now;
    if (kv_group->dims.needs_mirror)
        return (chosen){.count = kv_group->control.mirror.miss_count,
                        .misses = kv_group->control.mirror.misses};
    if (kvf_moves_pages(kv_group))
        return (chosen){.count = now->miss_count, .misses = now->misses};
    return (chosen){.count = now->id_count, .ids = now->ids};
}

/* Two copies on the call's stream. A device that needs them gives every page a slot. */
static kvf_status copy_misses(const kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_device_ops *ops = kv_group->device->ops;
    const kvf_choice *now = &kv_group->tables.now;
    const size_t lists = (size_t)call->rows * kv_group->dims.paging.lists;
    KVF_ASSERT(kvf_moves_pages(kv_group));
    KVF_TRY(ops->copy(call->stream, kv_group->control_device.mirror.misses, now->misses,
                      lists * now->ids_max * sizeof *now->misses));
    return ops->copy(call->stream, kv_group->control_device.mirror.miss_count, now->miss_count,
                     lists * sizeof *now->miss_count);
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
static void set_apart(const kvf_call *call, const chosen *c, uint32_t l, size_t at, kvf_block block)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_control *t = &kv_group->control;
    const uint32_t is_late = kvf_page_pool_is_coming(&kv_group->pool, block);
    if (!c->misses) {
        t->late[at] = (uint8_t)is_late;
        return;
    }
    const size_t lists = (size_t)kv_group->config.sequences_max * kv_group->dims.paging.lists;
    const size_t list = is_late * lists + l;
    t->parted[list * kv_group->tables.now.ids_max + t->part_count[list]++] = c->misses[at];
}

/*
 * The latest arrival among the row's chosen blocks. Pages that are not sealed are listed, but never
 * chosen.
 */
static uint64_t look(const kvf_call *call, const chosen *c, uint32_t row, glance why)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_layer *layer = call->states[row];
    uint64_t most = 0;
    for (uint32_t l = row * p->lists; l < (row + 1) * p->lists; l++)
        for (uint32_t i = 0; i < list_length(c, l); i++) {
            const size_t at =
                (c->indptr ? (size_t)c->indptr[l] : (size_t)l * kv_group->tables.now.ids_max) + i;
            const uint32_t page = (uint32_t)(c->ids ? c->ids[at] : c->misses[at].page);
            const uint32_t block = page / p->block_pages;
            KVF_ASSERT(c->indptr || block < layer->extent.sealed);
            if (block >= layer->extent.sealed)
                continue;
            if (why == PART) {
                set_apart(call, c, l, at, layer->blocks[block]);
            } else if (why == WANT) {
                call->kv_group->pages_brought +=
                    !kvf_page_pool_device(&kv_group->pool, layer->blocks[block]);
                kvf_page_pool_want(&call->kv_group->pool, layer->blocks[block], call->index + 1);
            } else {
                const uint64_t arrival = latest(kv_group, layer, block, block + 1);
                most = arrival > most ? arrival : most;
            }
        }
    return most;
}

static kvf_status rest(kvf_call *call)
{
    const kvf_status status = failed(call->kv_group, kvf_page_pool_bring(&call->kv_group->pool));
    call->is_late = 0;
    call->is_undone = status != KVF_OK;
    return status;
}

static kvf_status ask_pages(kvf_call *call, const chosen *c)
{
    kvf_kv_group *kv_group = call->kv_group;
    for (uint32_t b = 0; b < call->rows; b++)
        (void)look(call, c, b, WANT);
    call->is_late = kvf_page_pool_ask(&kv_group->pool);
    if (!call->is_late || c->indptr)
        KVF_TRY(rest(call));
    for (uint32_t b = 0; b < call->rows; b++) {
        kvf_layer *layer = call->states[b];
        if (look(call, c, b, LOOK) > layer->arrivals)
            KVF_TRY(send_table(call, layer, layer->extent.sealed));
    }
    if (!call->is_late)
        return KVF_OK;
    const size_t lists = (size_t)kv_group->config.sequences_max * kv_group->dims.paging.lists;
    if (c->misses)
        memset(kv_group->control.part_count, 0, 2 * lists * sizeof *kv_group->control.part_count);
    for (uint32_t b = 0; b < call->rows; b++)
        (void)look(call, c, b, PART);
    return KVF_OK;
}

static kvf_status ask_chosen(kvf_call *call)
{
    const chosen c = where(call->kv_group);
    KVF_TRY(call->kv_group->device->ops->event_wait(call->kv_group->chosen));
    return ask_pages(call, &c);
}

kvf_status kvf_bring_chosen(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    if (!kvf_page_pool_spills(&kv_group->pool))
        return KVF_OK;
    if (kv_group->dims.needs_mirror)
        KVF_TRY(copy_misses(call));
    KVF_TRY(kv_group->device->ops->event_record(kv_group->chosen, call->stream));
    if (!kvf_moves_pages(kv_group))
        return ask_chosen(call);
    call->is_late = UNASKED; /* hits are attended before the host looks at the misses */
    return KVF_OK;
}

/* Where pages stay, a span that is still being read is attended with those that move. */
typedef struct late_spans {
    kvf_span *spans;
    const uint32_t *span_count, *id_count;
    const uint8_t *late;
    uint32_t lists, ids_max, spans_max;
} late_spans;

static void give_home(const void *raw, uint32_t task)
{
    const late_spans *s = raw;
    (void)task;
    for (uint32_t l = 0; l < s->lists; l++) {
        kvf_span *spans = s->spans + (size_t)l * s->spans_max + s->span_count[l] - s->id_count[l];
        for (uint32_t i = 0; i < s->id_count[l]; i++)
            if (s->late[(size_t)l * s->ids_max + i])
                spans[i].home = spans[i].page;
    }
}

kvf_status kvf_bring_mark(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    if (!call->is_late || kvf_moves_pages(kv_group))
        return KVF_OK;
    const kvf_tables *t = &kv_group->tables;
    const late_spans s = {.spans = t->spans,
                          .span_count = t->span_count,
                          .id_count = t->now.id_count,
                          .late = kv_group->control.late,
                          .lists = call->rows * kv_group->dims.paging.lists,
                          .ids_max = kv_group->dims.ids_max,
                          .spans_max = kv_group->dims.spans_max};
    return call->stream->device->ops->host_call(call->stream, give_home, &s, sizeof s);
}

kvf_status kvf_bring_late(kvf_call *call)
{
    return rest(call);
}

/* Misses that were set apart: those in memory (0), or those that were not (1). */
static kvf_choice set_of(const kvf_kv_group *kv_group, uint32_t late)
{
    const kvf_control *seen = &kv_group->control_device;
    const size_t lists = kv_group->dims.paging.lists;
    const size_t first = late * kv_group->config.sequences_max * lists;
    kvf_choice c = kv_group->tables.now;
    c.misses = seen->parted + first * c.ids_max;
    c.miss_count = seen->part_count + first;
    c.from += late * kvf_rows_max(&kv_group->config) * lists * c.ids_max;
    c.to += late * kvf_rows_max(&kv_group->config) * lists * c.ids_max;
    c.fetch_count += late;
    return c;
}

kvf_status kvf_bring_misses(kvf_call *call, kvf_choice *out)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const bool is_first = call->is_late == UNASKED;
    KVF_TRY(is_first ? ask_chosen(call) : rest(call));
    *out = !is_first       ? set_of(kv_group, 1)
           : call->is_late ? set_of(kv_group, 0)
                           : kv_group->tables.now;
    return KVF_OK;
}

kvf_status kvf_addressable_listed(kvf_call *call, const kvf_page_lists *lists,
                                  kvf_status (*find)(kvf_call *call, const kvf_page_lists *lists,
                                                     const int32_t **indptr,
                                                     const int32_t **indices))
{
    chosen c = {0};
    if (!kvf_page_pool_spills(&call->kv_group->pool))
        return KVF_OK;
    KVF_TRY(find(call, lists, &c.indptr, &c.ids));
    KVF_TRY(ask_pages(call, &c));
    call->cache->order.is_listed = 1;
    return KVF_OK;
}
