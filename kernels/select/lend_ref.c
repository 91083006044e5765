/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Who has a slot for pages that rows have in common, the specification and the only host form.
 *
 * Knows nothing of bytes, and changes no table of slots: what a list gets, resolve says. So what
 * one row finds of another is how all of them were before, whatever the order in which it looks.
 * Meanwhile a table says of each page which row of the chain is the first to have it in a slot, and
 * the first to choose it: one look for most pages, where asking row by row would be many.
 */

#include <stdbool.h>

#include "variants.h"

/* Rows order[begin .. end), and the list of this number of each. */
typedef struct chain {
    const kvf_lend_args *a;
    uint32_t begin, end;
    uint32_t list;
    uint32_t words;
    uint32_t *holder, *chooser; /* [pages_max] end - place of the first row, 0 = none */
} chain;

/* Rows of a chain that have a page, and pages before `limit` too. */
typedef struct neighbours {
    uint32_t begin, end;
    uint32_t limit;
} neighbours;

static size_t list_at(const chain *c, uint32_t at)
{
    return (size_t)c->a->order[at] * c->a->lists + c->list;
}

static int32_t slot_at(const chain *c, uint32_t at, int32_t page)
{
    return c->a->slot_of_page[list_at(c, at)][page];
}

static neighbours neighbours_of(const chain *c, uint32_t at, int32_t page)
{
    neighbours n = {.begin = at, .end = at + 1, .limit = UINT32_MAX};
    for (; n.begin > c->begin && c->a->common[n.begin] > (uint32_t)page; n.begin--)
        n.limit = kvf_min_u32(n.limit, c->a->common[n.begin]);
    for (; n.end < c->end && c->a->common[n.end] > (uint32_t)page; n.end++)
        n.limit = kvf_min_u32(n.limit, c->a->common[n.end]);
    return n;
}

static bool is_set(const uint32_t *bits, int32_t slot)
{
    return bits[slot / 32] >> slot % 32 & 1;
}

static void set(uint32_t *bits, int32_t slot)
{
    bits[slot / 32] |= 1u << slot % 32;
}

/* The first of the chain, or its end. */
static uint32_t first_of(const chain *c, const uint32_t *seen, int32_t page)
{
    return c->end - seen[page];
}

static void note_first(const chain *c, uint32_t *seen, uint32_t at, int32_t page)
{
    seen[page] = kvf_max_u32(seen[page], c->end - at);
}

/* Slots of what a list chooses itself; and what it has and chooses is seen. */
static void keep_own(const chain *c, uint32_t at)
{
    const size_t l = list_at(c, at);
    const int32_t *pages = c->a->page_of_slot[l];
    uint32_t *kept = c->a->kept + l * c->words, *asked = c->a->asked + l * c->words;
    for (uint32_t w = 0; w < c->words; w++)
        kept[w] = asked[w] = 0;
    for (uint32_t i = 0; i < c->a->id_count[l]; i++) {
        const int32_t page = c->a->ids[l * c->a->ids_max + i], slot = slot_at(c, at, page);
        note_first(c, c->chooser, at, page);
        if (slot >= 0)
            set(kept, slot);
    }
    for (uint32_t slot = 0; slot < c->a->slots; slot++)
        if (pages[slot] >= 0)
            note_first(c, c->holder, at, pages[slot]);
}

static void forget(const chain *c, uint32_t at)
{
    const size_t l = list_at(c, at);
    const int32_t *pages = c->a->page_of_slot[l];
    for (uint32_t i = 0; i < c->a->id_count[l]; i++)
        c->chooser[c->a->ids[l * c->a->ids_max + i]] = 0;
    for (uint32_t slot = 0; slot < c->a->slots; slot++)
        if (pages[slot] >= 0)
            c->holder[pages[slot]] = 0;
}

/* The first neighbour, from `from` on, that has the page in a slot, and keeps it there if `kept` is
 * not NULL; or their end. */
static uint32_t holder_of(const chain *c, const neighbours *n, uint32_t from, int32_t page,
                          const uint32_t *kept)
{
    for (uint32_t k = kvf_max_u32(from, first_of(c, c->holder, page)); k < n->end; k++) {
        const int32_t slot = slot_at(c, k, page);
        if (slot >= 0 && (!kept || is_set(kept + list_at(c, k) * c->words, slot)))
            return k;
    }
    return n->end;
}

static void ask(const chain *c, uint32_t at)
{
    const size_t l = list_at(c, at);
    neighbours n = {.limit = 0};
    for (uint32_t i = 0; i < c->a->id_count[l]; i++) {
        const int32_t page = c->a->ids[l * c->a->ids_max + i];
        if (slot_at(c, at, page) >= 0)
            continue;
        if ((uint32_t)page >= n.limit)
            n = neighbours_of(c, at, page);
        const uint32_t k = holder_of(c, &n, n.begin, page, NULL);
        if (k < n.end)
            set(c->a->asked + list_at(c, k) * c->words, slot_at(c, k, page));
    }
}

static void keep_asked(const chain *c, uint32_t at)
{
    const size_t l = list_at(c, at);
    uint32_t *kept = c->a->kept + l * c->words;
    uint32_t room = c->a->slots - c->a->id_count[l];
    for (uint32_t w = 0; w < c->words; w++)
        for (uint32_t x = c->a->asked[l * c->words + w] & ~kept[w]; x && room; x &= x - 1, room--)
            kept[w] |= x & -x;
}

/* Who lends the page that row `at` lacks: a place in `order`, `at` itself if it brings it. */
static uint32_t lender_of(const chain *c, const neighbours *n, uint32_t at, int32_t page,
                          uint32_t *is_late)
{
    uint32_t k = holder_of(c, n, n->begin, page, c->a->kept);
    *is_late = k < n->end ? 0 : KVF_LENT_LATE;
    if (k < n->end)
        return k;
    k = kvf_max_u32(n->begin, first_of(c, c->chooser, page));
    while (k < at && !kvf_lend_chooses(c->a, list_at(c, k), page))
        k++;
    return k;
}

static void find_lenders(const chain *c, uint32_t at)
{
    const size_t l = list_at(c, at);
    neighbours n = {.limit = 0};
    for (uint32_t i = 0; i < c->a->id_count[l]; i++) {
        const size_t id = l * c->a->ids_max + i;
        const int32_t page = c->a->ids[id];
        c->a->lender[id] = -1;
        if (slot_at(c, at, page) >= 0)
            continue;
        if ((uint32_t)page >= n.limit)
            n = neighbours_of(c, at, page);
        uint32_t is_late;
        const uint32_t k = lender_of(c, &n, at, page, &is_late);
        if (k == at)
            continue;
        c->a->lender[id] = (int32_t)c->a->order[k];
        c->a->missed[id] = is_late;
    }
}

static void lend_chain(const chain *c)
{
    for (uint32_t at = c->begin; at < c->end; at++)
        keep_own(c, at);
    for (uint32_t at = c->begin; at < c->end; at++)
        ask(c, at);
    for (uint32_t at = c->begin; at < c->end; at++)
        keep_asked(c, at);
    for (uint32_t at = c->begin; at < c->end; at++)
        find_lenders(c, at);
    for (uint32_t at = c->begin; at < c->end; at++)
        forget(c, at);
}

void kvf_lend_ref(const void *args, uint32_t task)
{
    const kvf_lend_args *a = args;
    chain c = {.a = a, .list = task, .words = kvf_div_ceil_u32(a->slots, 32)};
    c.holder = a->seen + (size_t)task * 2 * a->pages_max;
    c.chooser = c.holder + a->pages_max;
    for (; c.begin < a->rows; c.begin = c.end) {
        for (c.end = c.begin + 1; c.end < a->rows && a->common[c.end]; c.end++)
            ;
        lend_chain(&c);
    }
}
