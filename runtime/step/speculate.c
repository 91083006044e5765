/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Speculation: rank once more with the scores of the step, resolve, fetch, note.
 *
 * Knows nothing of how pages are scored or attended. Victims are pages that rank below everything
 * that is ranked here, so what the step chose stays.
 */

#include "speculate.h"

#include "ahead.h"
#include "attend.h"
#include "bring.h"
#include "select.h"

/* Lists and rows whose residency is the shadow; pages of the rows are read where they live. */
static void take_shadow(kvf_step *step, uint32_t lists)
{
    const kvf_part *part = step->part;
    const uint32_t per_row = part->dims.paging.lists;
    int32_t **slot_of_page, **page_of_slot;
    kvf_row *rows;
    KVF_TAKE(step, slot_of_page, step->shadow_slot_of_page, lists);
    KVF_TAKE(step, page_of_slot, step->shadow_page_of_slot, lists);
    /* A recorded step renews no static set. */
    KVF_TAKE(step, rows, step->row_shadow, step->is_recorded ? 0 : step->rows);
    for (uint32_t l = 0; slot_of_page && l < lists; l++) {
        const uint32_t list = step->states[l / per_row]->row * per_row + l % per_row;
        slot_of_page[l] = kvf_residency_slot_of_page(&part->shadow, list);
        page_of_slot[l] = kvf_residency_page_of_slot(&part->shadow, list);
    }
    for (uint32_t b = 0; rows && b < step->rows; b++) {
        rows[b] = step->row_host[b];
        rows[b].slots = NULL;
        rows[b].slot_of_page = slot_of_page[b * per_row];
    }
}

void kvf_ahead_lists(kvf_step *step)
{
    const kvf_part *part = step->part;
    const kvf_paging *p = &part->dims.paging;
    const uint32_t lists = step->rows * p->lists, chosen = step->rows * part->dims.choose_lists;
    uint32_t *k, **marks;
    if (part->dims.ahead_max == 0)
        return;
    KVF_TAKE(step, k, step->ahead_k, chosen);
    KVF_TAKE(step, marks, step->marks, lists);
    for (uint32_t i = 0; k && i < chosen; i++)
        k[i] = step->row_host[i / part->dims.choose_lists].attend_all ? 0 : part->dims.ahead_max;
    for (uint32_t l = 0; marks && l < lists; l++) {
        const size_t number = step->states[l / p->lists]->row;
        marks[l] = kvf_ahead_marks(part, number) + (size_t)(l % p->lists) * kvf_ahead_words(part);
    }
    if (part->dims.shadow_slots)
        take_shadow(step, lists);
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
                                 .counters = kvf_counters_device(step->part, step->index)};
    return KVF_LAUNCH(step, ahead, args);
}

/* What the step found there. */
static kvf_status note(kvf_step *step)
{
    const kvf_part *part = step->part;
    const kvf_choice *ahead = &part->tables.ahead;
    kvf_resolve_args resolve = kvf_step_resolve_args(step, &part->tables.now);
    KVF_TRY(mark(step, &resolve, 1));
    if (part->dims.shadow_slots == 0)
        return KVF_OK;
    /* The results are not wanted, only the tables. */
    resolve.slots = part->dims.shadow_slots;
    resolve.slot_of_page = step->shadow_slot_of_page;
    resolve.page_of_slot = step->shadow_page_of_slot;
    resolve.slot_of_id = ahead->slot_of_id;
    resolve.missed = ahead->missed;
    resolve.misses = ahead->misses;
    resolve.miss_count = ahead->miss_count;
    return KVF_LAUNCH(step, resolve, resolve);
}

static kvf_status submit(kvf_step *step)
{
    kvf_part *part = step->part;
    kvf_ahead *ahead = step->ahead ? step->ahead : &part->ahead[step->index];
    /* A recording joins the last of its transfers, which come one after the other. */
    KVF_ASSERT(!ahead->is_open || step->is_recorded);
    KVF_TRY(kvf_step_fetch(step, &part->tables.ahead, step->index, &ahead->ticket));
    ahead->is_open = 1;
    return KVF_OK;
}

/* What ranks best, more of it than a step chooses. With a disk tier only the host can tell what of
 * it has to be read first, and it does not wait for that; so it comes into memory, and not into
 * slots. */
kvf_status kvf_ahead_fetch(kvf_step *step)
{
    if (!step->part || step->part->dims.ahead_max == 0)
        return KVF_OK;
    const kvf_choice *ahead = &step->part->tables.ahead;
    const kvf_resolve_args resolve = kvf_step_resolve_args(step, ahead);
    KVF_TRY(kvf_ahead_leave(step));
    KVF_TRY(note(step));
    KVF_TRY(kvf_choose_ranked(step, step->ahead_k, ahead));
    if (step->part->pool.tier)
        return kvf_bring_expect(step);
    KVF_TRY(kvf_step_resolve(step, ahead));
    KVF_TRY(mark(step, &resolve, 0));
    return kvf_moves_pages(step->part) ? submit(step) : KVF_OK;
}
