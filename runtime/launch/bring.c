/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks into memory before they are read; see the header.
 *
 * Knows the disk by the pool's door alone. The page table of a row is sent whole, when it lacks an
 * address that is needed: that happens after a read from disk, next to which it is nothing.
 */

#include "bring.h"

#include <string.h>

/* In a page table: a block that is not in memory. No address, and not NULL, because a span that
 * misses is known by where its page comes from. */
#define ABSENT ((void *)(uintptr_t)4096)

static kvf_status failed(const kvf_part *part, kvf_status status)
{
    if (status != KVF_FULL)
        return status;
    KVF_FAIL(part->context, KVF_FULL,
             "host_bytes = %llu: this call needs more pages in memory at once; open the cache with "
             "more, or call it with fewer sequences",
             (unsigned long long)part->config.host_bytes);
}

/* ---- page tables ---- */

/* Room for the addresses of a row, which the device has read when it is given out again. */
static kvf_status take_places(kvf_step *step, uint32_t count, void ***host, void ***seen)
{
    kvf_part *part = step->part;
    const kvf_device_ops *ops = part->device->ops;
    const uint32_t most = part->dims.paging.blocks_max * part->config.sequences_max;
    if (part->places_used + count > most) {
        KVF_TRY(ops->event_record(part->placed, step->stream));
        KVF_TRY(ops->event_wait(part->placed));
        part->places_used = 0;
    }
    *host = part->control.places + part->places_used;
    *seen = part->control_device.places + part->places_used;
    part->places_used += count;
    return KVF_OK;
}

static kvf_status send_table(kvf_step *step, kvf_layer *layer, uint32_t end)
{
    kvf_part *part = step->part;
    const size_t row = layer->row;
    void **host, **seen;
    KVF_TRY(take_places(step, end, &host, &seen));
    for (uint32_t b = 0; b < end; b++) {
        void *block = kvf_page_pool_place(&part->pool, layer->blocks[b]);
        host[b] = block ? block : ABSENT;
    }
    layer->arrivals = kvf_page_pool_arrivals(&part->pool);
    return part->device->ops->copy(step->stream,
                                   part->tables.blocks + row * part->dims.paging.blocks_max, seen,
                                   end * sizeof *seen);
}

/* Blocks below `end` that are not in the prefill arena. */
static uint32_t in_pool(const kvf_layer *layer, uint32_t end)
{
    const kvf_prefill_arena *a = &layer->part->arena;
    end = kvf_min_u32(end, layer->sealed);
    return a->owner == layer ? kvf_min_u32(end, a->first) : end;
}

/* The latest arrival among blocks that are in memory. */
static uint64_t latest(const kvf_part *part, const kvf_layer *layer, uint32_t first, uint32_t end)
{
    uint64_t most = 0;
    for (uint32_t b = first; b < end; b++) {
        const uint64_t arrival = kvf_page_pool_arrival(&part->pool, layer->blocks[b]);
        most = arrival > most ? arrival : most;
    }
    return most;
}

/* kvf_step.is_late: 1, or the host has not looked yet. */
#define UNASKED 2u

/* The tier's groups are layers; what nobody has read yet is of a group of its own. */
#define UNREAD 0u

/* ---- ranges ---- */

kvf_status kvf_bring(kvf_step *step, kvf_layer *state, uint32_t first, uint32_t end)
{
    kvf_part *part = state->part;
    if (!kvf_page_pool_spills(&part->pool))
        return KVF_OK;
    end = in_pool(state, end);
    for (uint32_t b = first; b < end; b++)
        kvf_page_pool_want(&part->pool, state->blocks[b], state->index + 1);
    KVF_TRY(failed(part, kvf_page_pool_bring(&part->pool)));
    return latest(part, state, first, end) > state->arrivals
               ? send_table(step, state, in_pool(state, UINT32_MAX))
               : KVF_OK;
}

kvf_status kvf_bring_rows(kvf_step *step,
                          bool (*is_wanted)(const kvf_part *part, const kvf_layer *layer),
                          kvf_status (*before)(kvf_step *step))
{
    if (!kvf_page_pool_spills(&step->part->pool))
        return KVF_OK;
    if (before)
        KVF_TRY(before(step));
    for (uint32_t b = 0; b < step->rows; b++)
        if (!is_wanted || is_wanted(step->part, step->states[b]))
            KVF_TRY(kvf_bring(step, step->states[b], 0, UINT32_MAX));
    return KVF_OK;
}

kvf_status kvf_bring_blocks(kvf_part *part, const kvf_block *blocks, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        kvf_page_pool_want(&part->pool, blocks[i], UNREAD);
    return failed(part, kvf_page_pool_bring(&part->pool));
}

kvf_status kvf_bring_fresh(kvf_part *part, const kvf_block *blocks, uint32_t count)
{
    KVF_TRY(kvf_bring_blocks(part, blocks, count));
    for (uint32_t i = 0; i < count; i++)
        kvf_page_pool_write(&part->pool, blocks[i]);
    return KVF_OK;
}

kvf_status kvf_bring_wait(kvf_part *part, kvf_stream *stream)
{
    if (!kvf_page_pool_spills(&part->pool))
        return KVF_OK;
    KVF_TRY(part->device->ops->event_record(part->chosen, stream));
    return part->device->ops->event_wait(part->chosen);
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

static chosen where(const kvf_part *part)
{
    const kvf_choice *now = &part->tables.now;
    if (part->dims.needs_mirror)
        return (chosen){.count = part->control.mirror.miss_count,
                        .misses = part->control.mirror.misses};
    if (kvf_moves_pages(part))
        return (chosen){.count = now->miss_count, .misses = now->misses};
    return (chosen){.count = now->id_count, .ids = now->ids};
}

/* Two copies on the step's stream. A device that needs them gives every page a slot. */
static kvf_status copy_misses(const kvf_step *step)
{
    const kvf_part *part = step->part;
    const kvf_device_ops *ops = part->device->ops;
    const kvf_choice *now = &part->tables.now;
    const size_t lists = (size_t)step->rows * part->dims.paging.lists;
    KVF_ASSERT(kvf_moves_pages(part));
    KVF_TRY(ops->copy(step->stream, part->control_device.mirror.misses, now->misses,
                      lists * now->ids_max * sizeof *now->misses));
    return ops->copy(step->stream, part->control_device.mirror.miss_count, now->miss_count,
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
static void set_apart(const kvf_step *step, const chosen *c, uint32_t l, size_t at, kvf_block block)
{
    const kvf_part *part = step->part;
    const kvf_control *t = &part->control;
    const uint32_t is_late = kvf_page_pool_is_coming(&part->pool, block);
    if (!c->misses) {
        t->late[at] = (uint8_t)is_late;
        return;
    }
    const size_t lists = (size_t)part->config.sequences_max * part->dims.paging.lists;
    const size_t list = is_late * lists + l;
    t->parted[list * part->tables.now.ids_max + t->part_count[list]++] = c->misses[at];
}

/*
 * The latest arrival among the row's chosen blocks. Pages that are not sealed are listed, but never
 * chosen.
 */
static uint64_t look(const kvf_step *step, const chosen *c, uint32_t row, glance why)
{
    const kvf_part *part = step->part;
    const kvf_paging *p = &part->dims.paging;
    const kvf_layer *layer = step->states[row];
    uint64_t most = 0;
    for (uint32_t l = row * p->lists; l < (row + 1) * p->lists; l++)
        for (uint32_t i = 0; i < list_length(c, l); i++) {
            const size_t at =
                (c->indptr ? (size_t)c->indptr[l] : (size_t)l * part->tables.now.ids_max) + i;
            const uint32_t page = (uint32_t)(c->ids ? c->ids[at] : c->misses[at].page);
            const uint32_t block = page / p->block_pages;
            KVF_ASSERT(c->indptr || block < layer->sealed);
            if (block >= layer->sealed)
                continue;
            if (why == PART) {
                set_apart(step, c, l, at, layer->blocks[block]);
            } else if (why == WANT) {
                step->part->pages_brought +=
                    !kvf_page_pool_device(&part->pool, layer->blocks[block]);
                kvf_page_pool_want(&step->part->pool, layer->blocks[block], step->index + 1);
            } else {
                const uint64_t arrival = latest(part, layer, block, block + 1);
                most = arrival > most ? arrival : most;
            }
        }
    return most;
}

static kvf_status rest(kvf_step *step)
{
    const kvf_status status = failed(step->part, kvf_page_pool_bring(&step->part->pool));
    step->is_late = 0;
    step->is_undone = status != KVF_OK;
    return status;
}

static kvf_status ask_pages(kvf_step *step, const chosen *c)
{
    kvf_part *part = step->part;
    for (uint32_t b = 0; b < step->rows; b++)
        (void)look(step, c, b, WANT);
    step->is_late = kvf_page_pool_ask(&part->pool);
    if (!step->is_late || c->indptr)
        KVF_TRY(rest(step));
    for (uint32_t b = 0; b < step->rows; b++) {
        kvf_layer *layer = step->states[b];
        if (look(step, c, b, LOOK) > layer->arrivals)
            KVF_TRY(send_table(step, layer, layer->sealed));
    }
    if (!step->is_late)
        return KVF_OK;
    const size_t lists = (size_t)part->config.sequences_max * part->dims.paging.lists;
    if (c->misses)
        memset(part->control.part_count, 0, 2 * lists * sizeof *part->control.part_count);
    for (uint32_t b = 0; b < step->rows; b++)
        (void)look(step, c, b, PART);
    return KVF_OK;
}

static kvf_status ask_chosen(kvf_step *step)
{
    const chosen c = where(step->part);
    KVF_TRY(step->part->device->ops->event_wait(step->part->chosen));
    return ask_pages(step, &c);
}

kvf_status kvf_bring_chosen(kvf_step *step)
{
    const kvf_part *part = step->part;
    if (!kvf_page_pool_spills(&part->pool))
        return KVF_OK;
    if (part->dims.needs_mirror)
        KVF_TRY(copy_misses(step));
    KVF_TRY(part->device->ops->event_record(part->chosen, step->stream));
    if (!kvf_moves_pages(part))
        return ask_chosen(step);
    step->is_late = UNASKED; /* hits are attended before the host looks at the misses */
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

kvf_status kvf_bring_mark(kvf_step *step)
{
    const kvf_part *part = step->part;
    if (!step->is_late || kvf_moves_pages(part))
        return KVF_OK;
    const kvf_tables *t = &part->tables;
    const late_spans s = {.spans = t->spans,
                          .span_count = t->span_count,
                          .id_count = t->now.id_count,
                          .late = part->control.late,
                          .lists = step->rows * part->dims.paging.lists,
                          .ids_max = part->dims.ids_max,
                          .spans_max = part->dims.spans_max};
    return step->stream->device->ops->host_call(step->stream, give_home, &s, sizeof s);
}

kvf_status kvf_bring_late(kvf_step *step)
{
    return rest(step);
}

/* Misses that were set apart: those in memory (0), or those that were not (1). */
static kvf_choice set_of(const kvf_part *part, uint32_t late)
{
    const kvf_control *seen = &part->control_device;
    const size_t lists = part->dims.paging.lists;
    const size_t first = late * part->config.sequences_max * lists;
    kvf_choice c = part->tables.now;
    c.misses = seen->parted + first * c.ids_max;
    c.miss_count = seen->part_count + first;
    c.from += late * kvf_rows_max(&part->config) * lists * c.ids_max;
    c.to += late * kvf_rows_max(&part->config) * lists * c.ids_max;
    c.fetch_count += late;
    return c;
}

kvf_status kvf_bring_misses(kvf_step *step, kvf_choice *out)
{
    const kvf_part *part = step->part;
    const bool is_first = step->is_late == UNASKED;
    KVF_TRY(is_first ? ask_chosen(step) : rest(step));
    *out = !is_first ? set_of(part, 1) : step->is_late ? set_of(part, 0) : part->tables.now;
    return KVF_OK;
}

void kvf_bring_drop(kvf_step *step)
{
    const kvf_status status = step->is_late ? kvf_page_pool_bring(&step->part->pool) : KVF_OK;
    (void)status; /* the other failure is told */
    step->is_late = 0;
}

kvf_status kvf_bring_listed(kvf_step *step, const kvf_page_lists *lists,
                            kvf_status (*find)(kvf_step *step, const kvf_page_lists *lists,
                                               const int32_t **indptr, const int32_t **indices))
{
    chosen c = {0};
    if (!kvf_page_pool_spills(&step->part->pool))
        return KVF_OK;
    KVF_TRY(find(step, lists, &c.indptr, &c.ids));
    KVF_TRY(ask_pages(step, &c));
    step->cache->order.is_listed = 1;
    return KVF_OK;
}
