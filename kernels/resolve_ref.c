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

/* The free slot that comes first, else the slot of the victim; -1 cannot happen while slots >=
 * count. */
static int32_t find_slot(const list_view *v)
{
    int32_t best = -1;
    for (uint32_t slot = 0; slot < v->slots; slot++) {
        int32_t page = v->page_of_slot[slot];
        if (page < 0)
            return (int32_t)slot;
        if (is_selected(v, page))
            continue;
        if (best >= 0) {
            int32_t other = v->page_of_slot[best];
            float x = score_of(v, page), y = score_of(v, other);
            if (x > y || (x == y && page > other))
                continue;
        }
        best = (int32_t)slot;
    }
    return best;
}

void kvf_resolve_ref(const void *args, uint32_t task)
{
    const kvf_resolve_args *a = args;
    const size_t row = (size_t)task * a->ids_max;
    const list_view v = {
        .ids = a->ids + row,
        .count = a->id_count[task],
        .slots = a->slots,
        .scores = a->scores ? a->scores[task] : NULL,
        .slot_of_page = a->slot_of_page[task],
        .page_of_slot = a->page_of_slot[task],
    };
    uint32_t misses = 0;
    KVF_ASSERT(v.count <= v.slots);
    for (uint32_t i = 0; i < v.count; i++) {
        const int32_t page = v.ids[i];
        int32_t slot = v.slot_of_page[page];
        a->missed[row + i] = slot < 0;
        if (slot < 0) {
            slot = find_slot(&v);
            KVF_ASSERT(slot >= 0);
            if (v.page_of_slot[slot] >= 0)
                v.slot_of_page[v.page_of_slot[slot]] = -1;
            v.page_of_slot[slot] = page;
            v.slot_of_page[page] = slot;
            a->misses[row + misses++] = (kvf_miss){.page = page, .slot = slot};
        }
        a->slot_of_id[row + i] = slot;
    }
    a->miss_count[task] = misses;
}
