/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chosen pages to slots, the specification and the only host form.
 *
 * Knows nothing of bytes. Before and after: slot_of_page and words are inverse to each other. A
 * task is a KV head, whose slots nobody else looks at meanwhile: first all its lists mark the pages
 * that have slots, then what misses gets one, list by list, so nothing that the call uses goes.
 */

#include "select/find_slot.h"
#include "variants.h"

/* Lists of a KV head: every `per` of each row. */
typedef struct head_lists {
    const kvf_choices *a;
    uint32_t head;
    uint32_t per;
} head_lists;

static uint32_t list_at(const head_lists *h, uint32_t i)
{
    return i / h->per * h->a->paging.lists + h->head * h->per + i % h->per;
}

/* Slots that pages of a list have. Their words are anywhere: all are on their way from memory
 * before the first is looked at. */
static void look_for(const head_lists *h, uint32_t list)
{
    const kvf_choices *a = h->a;
    const kvf_row *row = &a->row[list / a->paging.lists];
    const kvf_slot_tables t = kvf_slot_tables_of(&a->paging, row, h->head);
    const size_t first = (size_t)list * a->ids_max;
    for (size_t at = first; at < first + a->id_count[list]; at++) {
        const uint32_t page = kvf_row_pool_page(&a->paging, row, (uint32_t)a->ids[at]);
        a->slot_of_id[at] = t.slot_of_page[page];
        if (a->slot_of_id[at] >= 0)
            __builtin_prefetch(&t.words[a->slot_of_id[at]], 1);
    }
}

/* Hits of one list, and pages that were written again since they were brought: these come anew, to
 * where they are. Returns how many. */
static uint32_t look_up(const head_lists *h, uint32_t list)
{
    const kvf_choices *a = h->a;
    const kvf_row *row = &a->row[list / a->paging.lists];
    const kvf_slot_tables t = kvf_slot_tables_of(&a->paging, row, h->head);
    uint32_t voided = 0;
    for (uint32_t i = 0; i < a->id_count[list]; i++) {
        const size_t at = (size_t)list * a->ids_max + i;
        const int32_t slot = a->slot_of_id[at];
        if (slot < 0)
            continue;
        if (kvf_slot_age(t.words[slot], row->use) == 0) {
            a->missed[at] = kvf_slot_is_coming(t.words[slot]) ? KVF_MISSED_LATE : 0;
            continue;
        }
        const uint32_t page = kvf_slot_page(t.words[slot]);
        const uint32_t tag = kvf_row_page_tag(&a->paging, row, page);
        a->missed[at] = t.tags && t.tags[slot] != tag;
        t.words[slot] = kvf_slot_word(page, row->use, a->missed[at]);
        if (a->missed[at])
            t.tags[slot] = tag;
        voided += a->missed[at];
    }
    return voided;
}

/* A slot for a page that has none; the call brings it, for this list or for one before it. */
static void place(const head_lists *h, uint32_t list, size_t at)
{
    const kvf_choices *a = h->a;
    const kvf_row *row = &a->row[list / a->paging.lists];
    const kvf_slot_tables t = kvf_slot_tables_of(&a->paging, row, h->head);
    const uint32_t page = kvf_row_pool_page(&a->paging, row, (uint32_t)a->ids[at]);
    int32_t slot = t.slot_of_page[page];
    a->missed[at] = slot < 0 ? 1 : KVF_MISSED_LATE;
    if (slot < 0) {
        slot = kvf_find_slot(&a->paging, &t, page, row->use, UINT32_MAX);
        KVF_ASSERT(slot >= 0);
        kvf_give_slot(&t, (uint32_t)slot, kvf_slot_word(page, row->use, 1));
        if (t.tags)
            t.tags[slot] = kvf_row_page_tag(&a->paging, row, page);
    }
    a->slot_of_id[at] = slot;
}

static void place_list(const head_lists *h, uint32_t list)
{
    const kvf_choices *a = h->a;
    const size_t first = (size_t)list * a->ids_max;
    uint32_t count = 0;
    for (size_t at = first; at < first + a->id_count[list]; at++) {
        if (a->slot_of_id[at] < 0)
            place(h, list, at);
        if (a->missed[at] == 1)
            a->misses[first + count++] = (kvf_miss){.page = a->ids[at], .slot = a->slot_of_id[at]};
    }
    a->miss_count[list] = count;
}

void kvf_resolve_ref(const void *args, uint32_t task)
{
    const kvf_choices *a = args;
    const head_lists h = {.a = a, .head = task, .per = a->paging.lists / a->paging.kv_heads};
    uint32_t voided = 0;
    for (uint32_t i = 0; i < a->rows * h.per; i++)
        look_for(&h, list_at(&h, i));
    for (uint32_t i = 0; i < a->rows * h.per; i++)
        voided += look_up(&h, list_at(&h, i));
    for (uint32_t i = 0; i < a->rows * h.per; i++)
        place_list(&h, list_at(&h, i));
    if (voided)
        __atomic_fetch_add(&a->counters->pages_voided, voided, __ATOMIC_RELAXED);
}
