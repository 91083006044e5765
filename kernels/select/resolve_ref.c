/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Selected pages to slots, the specification and the only host form.
 *
 * Knows nothing of bytes. Before and after: slot_of_page and page_of_slot are inverse to each
 * other. A selected page is never a victim. Misses come in id order; free slots go first, lowest
 * slot first, then victims, lowest score first.
 */

#include <math.h>
#include <stdbool.h>

#include "variants.h"

/* Candidates of one scan. Most steps miss fewer pages than that per list. */
#define CANDIDATES 32u

typedef struct list_view {
    const int32_t *ids;
    uint32_t count;
    uint32_t slots;
    const float *scores; /* may be NULL */
    int32_t *slot_of_page;
    int32_t *page_of_slot;
} list_view;

static bool is_selected(const list_view *v, int32_t page)
{
    uint32_t low = 0, high = v->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (v->ids[middle] < page)
            low = middle + 1;
        else
            high = middle;
    }
    return low < v->count && v->ids[low] == page;
}

static float score_of(const list_view *v, int32_t page)
{
    float x = v->scores ? v->scores[page] : 0.0f;
    return isnan(x) ? -INFINITY : x;
}

/* A slot that may be given away, with what orders it among them. */
typedef struct candidate {
    float score;
    int32_t page; /* -1 = the slot is free */
    int32_t slot;
} candidate;

/* The next candidates in order; misses beyond them look again. */
typedef struct candidates {
    uint32_t next;
    uint32_t count;
    candidate sorted[CANDIDATES];
} candidates;

static bool comes_before(const candidate *a, const candidate *b)
{
    if (a->page < 0 || b->page < 0)
        return a->page < 0 && (b->page >= 0 || a->slot < b->slot);
    return a->score < b->score || (a->score == b->score && a->page < b->page);
}

/* One scan of the slots for the `wanted` that come first; pages given a slot meanwhile are selected
 * ones, so they are passed over. */
static void find_candidates(const list_view *v, uint32_t wanted, candidates *c)
{
    const uint32_t room = kvf_min_u32(wanted, CANDIDATES);
    *c = (candidates){.next = 0};
    for (uint32_t slot = 0; slot < v->slots; slot++) {
        candidate x = {.page = v->page_of_slot[slot], .slot = (int32_t)slot};
        if (x.page >= 0)
            x.score = score_of(v, x.page);
        if (c->count == room && !comes_before(&x, &c->sorted[room - 1]))
            continue;
        if (x.page >= 0 && is_selected(v, x.page))
            continue;
        uint32_t at = c->count < room ? c->count++ : room - 1;
        for (; at > 0 && comes_before(&x, &c->sorted[at - 1]); at--)
            c->sorted[at] = c->sorted[at - 1];
        c->sorted[at] = x;
    }
}

static void resolve_list(const kvf_resolve_args *a, uint32_t list)
{
    const size_t row = (size_t)list * a->ids_max;
    const list_view v = {
        .ids = a->ids + row,
        .count = a->id_count[list],
        .slots = a->slots,
        .scores = a->scores ? a->scores[list] : NULL,
        .slot_of_page = a->slot_of_page[list],
        .page_of_slot = a->page_of_slot[list],
    };
    uint32_t wanted = 0, misses = 0;
    candidates c = {.next = 0};
    KVF_ASSERT(v.count <= v.slots);
    for (uint32_t i = 0; i < v.count; i++)
        wanted += v.slot_of_page[v.ids[i]] < 0;
    for (uint32_t i = 0; i < v.count; i++) {
        const int32_t page = v.ids[i];
        int32_t slot = v.slot_of_page[page];
        a->missed[row + i] = slot < 0;
        if (slot < 0) {
            if (c.next == c.count)
                find_candidates(&v, wanted - misses, &c);
            KVF_ASSERT(c.next < c.count);
            slot = c.sorted[c.next++].slot;
            if (v.page_of_slot[slot] >= 0)
                v.slot_of_page[v.page_of_slot[slot]] = -1;
            v.page_of_slot[slot] = page;
            v.slot_of_page[page] = slot;
            a->misses[row + misses++] = (kvf_miss){.page = page, .slot = slot};
        }
        a->slot_of_id[row + i] = slot;
    }
    a->miss_count[list] = misses;
}

void kvf_resolve_ref(const void *args, uint32_t task)
{
    const kvf_resolve_args *a = args;
    const uint32_t first = task * KVF_RESOLVE_LISTS;
    for (uint32_t l = first; l < kvf_min_u32(a->lists, first + KVF_RESOLVE_LISTS); l++)
        resolve_list(a, l);
}
