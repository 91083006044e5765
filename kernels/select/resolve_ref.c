/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Selected pages to slots, the specification and the only host form.
 *
 * Knows nothing of bytes. Before and after: slot_of_page and page_of_slot are inverse to each
 * other. A selected page is never a victim. Misses come in id order; free slots go first, lowest
 * slot first, then victims, lowest score first. Meanwhile the slots of hits, and what is kept for
 * other lists, carry a mark, and the list of misses holds the slots that will be given away: one
 * look at every slot, and a heap of as many victims as are needed.
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
    const int32_t *lender; /* may be NULL, with kept */
    const uint32_t *kept;
    int32_t *slot_of_id;
    uint32_t *missed;
    kvf_miss *misses;
} list_view;

/* In page_of_slot, for a while: a page is there that stays. Its own inverse, and below that of a
 * free slot. */
static int32_t marked(int32_t page)
{
    return -2 - page;
}

/* ---- victims: a heap with the one that goes last on top ---- */

/* While they are in the heap, `page` is the order of their score. */
static bool goes_before(const list_view *v, kvf_miss a, kvf_miss b)
{
    if (a.page != b.page)
        return a.page < b.page;
    return v->page_of_slot[a.slot] < v->page_of_slot[b.slot];
}

static kvf_miss victim_of(const list_view *v, uint32_t slot)
{
    const float x = v->scores ? v->scores[v->page_of_slot[slot]] : 0.0f;
    return (kvf_miss){.page = kvf_float_order(isnan(x) ? -INFINITY : x), .slot = (int32_t)slot};
}

static void sift_down(const list_view *v, kvf_miss *heap, uint32_t count, kvf_miss x)
{
    uint32_t at = 0;
    for (uint32_t child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && goes_before(v, heap[child], heap[child + 1]))
            child++;
        if (!goes_before(v, x, heap[child]))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = x;
}

static void sift_up(const list_view *v, kvf_miss *heap, uint32_t at)
{
    const kvf_miss x = heap[at];
    for (; at > 0 && goes_before(v, heap[(at - 1) / 2], x); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = x;
}

/* The `wanted` victims that go first, in that order. */
static void find_victims(const list_view *v, uint32_t wanted, kvf_miss *heap)
{
    uint32_t count = 0;
    for (uint32_t slot = 0; slot < v->slots; slot++) {
        if (v->page_of_slot[slot] < 0)
            continue;
        const kvf_miss x = victim_of(v, slot);
        if (count < wanted) {
            heap[count] = x;
            sift_up(v, heap, count++);
        } else if (goes_before(v, x, heap[0])) {
            sift_down(v, heap, count, x);
        }
    }
    KVF_ASSERT(count == wanted);
    while (count > 1) {
        const kvf_miss last = heap[--count];
        heap[count] = heap[0];
        sift_down(v, heap, count, last);
    }
}

/* ---- a list ---- */

static bool is_lent(const list_view *v, uint32_t id)
{
    return v->lender && v->lender[id] >= 0;
}

/* Hits, and the number of misses. */
static uint32_t look_up(const list_view *v)
{
    uint32_t misses = 0;
    for (uint32_t i = 0; i < v->count; i++) {
        const int32_t slot = v->slot_of_page[v->ids[i]];
        v->slot_of_id[i] = slot;
        if (is_lent(v, i))
            continue;
        v->missed[i] = slot < 0;
        misses += slot < 0;
    }
    return misses;
}

/* The slots that the misses get, in their order. */
static void find_slots(const list_view *v, uint32_t wanted)
{
    uint32_t found = 0;
    for (uint32_t slot = 0; slot < v->slots && found < wanted; slot++)
        if (v->page_of_slot[slot] == -1)
            v->misses[found++].slot = (int32_t)slot;
    if (found < wanted)
        find_victims(v, wanted - found, v->misses + found);
}

static void give(const list_view *v, kvf_miss *miss, int32_t page)
{
    const int32_t old = v->page_of_slot[miss->slot];
    if (old >= 0)
        v->slot_of_page[old] = -1;
    v->page_of_slot[miss->slot] = page;
    v->slot_of_page[page] = miss->slot;
    miss->page = page;
}

/* Marks the slots of pages that stay, or takes the marks away. */
static void mark(const list_view *v)
{
    for (uint32_t i = 0; !v->kept && i < v->count; i++)
        if (!v->missed[i])
            v->page_of_slot[v->slot_of_id[i]] = marked(v->page_of_slot[v->slot_of_id[i]]);
    for (uint32_t slot = 0; v->kept && slot < v->slots; slot++)
        if (v->kept[slot / 32] >> slot % 32 & 1)
            v->page_of_slot[slot] = marked(v->page_of_slot[slot]);
}

static uint32_t resolve_list(const list_view *v)
{
    KVF_ASSERT(v->count <= v->slots);
    const uint32_t wanted = look_up(v);
    if (wanted == 0)
        return 0;
    mark(v);
    find_slots(v, wanted);
    mark(v);
    kvf_miss *next = v->misses;
    for (uint32_t i = 0; i < v->count; i++) {
        if (v->missed[i] != 1)
            continue;
        give(v, next, v->ids[i]);
        v->slot_of_id[i] = next++->slot;
    }
    return wanted;
}

void kvf_resolve_ref(const void *args, uint32_t task)
{
    const kvf_resolve_args *a = args;
    const uint32_t per_task = kvf_resolve_lists(a), first = task * per_task;
    const uint32_t words = kvf_div_ceil_u32(a->slots, 32);
    for (uint32_t l = first; l < kvf_min_u32(a->lists, first + per_task); l++) {
        const size_t row = (size_t)l * a->ids_max;
        const list_view v = {.ids = a->ids + row,
                             .count = a->id_count[l],
                             .slots = a->slots,
                             .scores = a->scores ? a->scores[l] : NULL,
                             .slot_of_page = a->slot_of_page[l],
                             .page_of_slot = a->page_of_slot[l],
                             .lender = a->lender ? a->lender + row : NULL,
                             .kept = a->kept ? a->kept + (size_t)l * words : NULL,
                             .slot_of_id = a->slot_of_id + row,
                             .missed = a->missed + row,
                             .misses = a->misses + row};
        a->miss_count[l] = resolve_list(&v);
    }
}
