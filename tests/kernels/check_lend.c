/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Slots that rows lend each other, against the reference and against what they are for: whatever
 * rows have in common, a page is moved once at most and is then in the lender's slot, and nobody
 * gives away what is kept. Bit for bit.
 */

#include <stdlib.h>
#include <string.h>

#include "check_support.h"

enum { LISTS = 2, ROWS_MAX = 17 };

/* Rows, and their tables from one step to the next. */
typedef struct family {
    uint32_t rows, pages, k, slots, words;
    uint32_t *order, *common, *id_count;
    int32_t *ids, **of_page, **of_slot;
    float **scores;
    kvf_lend_args lend;
    kvf_resolve_args resolve;
} family;

/* A page of both rows, by their places in the order. */
static bool is_common(const family *f, uint32_t a, uint32_t b, int32_t page)
{
    for (uint32_t i = kvf_min_u32(a, b) + 1; i <= kvf_max_u32(a, b); i++)
        if (f->common[i] <= (uint32_t)page)
            return false;
    return true;
}

static size_t list_at(const family *f, uint32_t at, uint32_t list)
{
    return (size_t)f->order[at] * LISTS + list;
}

static void make_order(check *c, family *f)
{
    for (uint32_t i = 0; i < f->rows; i++) {
        const uint32_t j = check_below(c, i + 1);
        f->order[i] = f->order[j];
        f->order[j] = i;
        f->common[i] = check_below(c, 4) ? 1 + check_below(c, f->pages) : 0;
    }
    f->common[0] = 0;
}

static void make_args(check *c, family *f)
{
    const size_t lists = (size_t)f->rows * LISTS;
    f->lend = (kvf_lend_args){.rows = f->rows,
                              .lists = LISTS,
                              .ids_max = f->k,
                              .slots = f->slots,
                              .order = f->order,
                              .common = f->common,
                              .ids = f->ids,
                              .id_count = f->id_count,
                              .slot_of_page = f->of_page,
                              .page_of_slot = f->of_slot,
                              .pages_max = f->pages};
    f->lend.lender = check_changed(c, "lender", lists * f->k * sizeof(int32_t));
    f->lend.missed = check_changed(c, "missed", lists * f->k * sizeof(uint32_t));
    f->lend.kept = check_changed(c, "kept", lists * f->words * sizeof(uint32_t));
    f->lend.asked = check_changed(c, "asked", lists * f->words * sizeof(uint32_t));
    f->lend.seen = check_changed(c, "seen", (size_t)LISTS * 2 * f->pages * sizeof(uint32_t));
    memset(f->lend.seen, 0, (size_t)LISTS * 2 * f->pages * sizeof(uint32_t));
    f->resolve = (kvf_resolve_args){.lists = (uint32_t)lists,
                                    .ids_max = f->k,
                                    .slots = f->slots,
                                    .stride = f->pages,
                                    .ids = f->ids,
                                    .id_count = f->id_count,
                                    .scores = (const float *const *)f->scores,
                                    .slot_of_page = f->of_page,
                                    .page_of_slot = f->of_slot,
                                    .lender = f->lend.lender,
                                    .kept = f->lend.kept,
                                    .missed = f->lend.missed};
    f->resolve.slot_of_id = check_changed(c, "slot_of_id", lists * f->k * sizeof(int32_t));
    f->resolve.misses = check_changed(c, "misses", lists * f->k * sizeof(kvf_miss));
    f->resolve.miss_count = check_changed(c, "miss_count", lists * sizeof(uint32_t));
}

static void make_family(check *c, family *f)
{
    const size_t lists = (size_t)f->rows * LISTS;
    int32_t *of_page = check_changed(c, "slot_of_page", lists * f->pages * sizeof(int32_t));
    int32_t *of_slot = check_changed(c, "page_of_slot", lists * f->slots * sizeof(int32_t));
    float *scores = check_in(c, lists * f->pages * sizeof *scores);
    memset(of_page, 0xff, lists * f->pages * sizeof *of_page);
    memset(of_slot, 0xff, lists * f->slots * sizeof *of_slot);
    f->words = kvf_div_ceil_u32(f->slots, 32);
    f->order = check_in(c, f->rows * sizeof *f->order);
    f->common = check_in(c, f->rows * sizeof *f->common);
    f->ids = check_in(c, lists * f->k * sizeof *f->ids);
    f->id_count = check_in(c, lists * sizeof *f->id_count);
    f->of_page = check_in(c, lists * sizeof *f->of_page);
    f->of_slot = check_in(c, lists * sizeof *f->of_slot);
    f->scores = check_in(c, lists * sizeof *f->scores);
    for (size_t l = 0; l < lists; l++) {
        f->of_page[l] = of_page + l * f->pages;
        f->of_slot[l] = of_slot + l * f->slots;
        f->scores[l] = scores + l * f->pages;
    }
    make_order(c, f);
    make_args(c, f);
}

/* What each list chooses: mostly the same pages, from a window that drifts. */
static void choose(check *c, family *f, uint32_t step)
{
    const uint32_t width = kvf_min_u32(f->pages, 2 * f->k);
    for (size_t l = 0; l < (size_t)f->rows * LISTS; l++) {
        const uint32_t first = step * f->k / 3 % (f->pages - width + 1);
        uint32_t n = 0;
        for (uint32_t p = first; p < first + width && n < f->k; p++)
            if (check_below(c, 8) < (p % 3 ? 2 : 7))
                f->ids[l * f->k + n++] = (int32_t)p;
        f->id_count[l] = check_below(c, 9) ? n : 0;
        for (uint32_t p = 0; p < f->pages; p++)
            f->scores[l][p] = (float)check_below(c, 50);
    }
}

static bool is_kept(const family *f, size_t l, int32_t slot)
{
    return f->lend.kept[l * f->words + (uint32_t)slot / 32] >> slot % 32 & 1;
}

/* Place of a row in the order. */
static uint32_t place_of(const family *f, int32_t row)
{
    uint32_t at = 0;
    while (f->order[at] != (uint32_t)row)
        at++;
    return at;
}

/* Before anything is resolved. */
static void look_at_lenders(check *c, const family *f, uint32_t at, uint32_t list)
{
    const size_t l = list_at(f, at, list);
    uint32_t kept = 0;
    for (uint32_t w = 0; w < f->words; w++)
        kept += (uint32_t)__builtin_popcount(f->lend.kept[l * f->words + w]);
    if (kept > f->slots)
        check_fail(c, "list %zu keeps %u of %u slots", l, kept, f->slots);
    for (uint32_t i = 0; i < f->id_count[l]; i++) {
        const int32_t page = f->ids[l * f->k + i], lender = f->lend.lender[l * f->k + i];
        if (f->of_page[l][page] >= 0 && (lender >= 0 || !is_kept(f, l, f->of_page[l][page])))
            check_fail(c, "list %zu has page %d, lender %d", l, page, lender);
        if (lender < 0)
            continue;
        const uint32_t k = place_of(f, lender);
        const int32_t slot = f->of_page[list_at(f, k, list)][page];
        if (k == at || !is_common(f, at, k, page))
            check_fail(c, "page %d of row %u is lent by %d, which does not have it", page,
                       f->order[at], lender);
        if (f->lend.missed[l * f->k + i] != (slot < 0 ? KVF_LENT_LATE : 0))
            check_fail(c, "page %d is late: %u, slot %d", page, f->lend.missed[l * f->k + i], slot);
    }
}

/* After it: who chose a page has it or is lent it, and of those that have it in common one at most
 * moved it. */
static void look_at_slots(check *c, const family *f, uint32_t at, uint32_t list)
{
    const size_t l = list_at(f, at, list);
    uint32_t misses = 0;
    for (uint32_t i = 0; i < f->id_count[l]; i++) {
        const size_t id = l * f->k + i;
        const int32_t page = f->ids[id], lender = f->lend.lender[id];
        const size_t holder = lender < 0 ? l : (size_t)lender * LISTS + list;
        if (f->of_page[holder][page] < 0 || f->of_slot[holder][f->of_page[holder][page]] != page ||
            f->resolve.slot_of_id[id] != f->of_page[l][page])
            check_fail(c, "page %d of list %zu is not in a slot of %zu", page, l, holder);
        if (f->lend.missed[id] != 1)
            continue;
        misses++;
        for (uint32_t k = 0; k < f->rows; k++) {
            const size_t other = list_at(f, k, list);
            if (k == at || !is_common(f, at, k, page))
                continue;
            for (uint32_t j = 0; j < f->id_count[other]; j++)
                if (f->ids[other * f->k + j] == page && f->lend.missed[other * f->k + j] == 1)
                    check_fail(c, "page %d is moved for rows %u and %u", page, f->order[at],
                               f->order[k]);
        }
    }
    if (misses != f->resolve.miss_count[l])
        check_fail(c, "list %zu: %u misses, want %u", l, f->resolve.miss_count[l], misses);
}

/* Slots that are kept hold what they held, and the tables are inverse to each other. */
static void look_at_tables(check *c, const family *f, size_t l, const int32_t *before)
{
    for (uint32_t s = 0; s < f->slots; s++) {
        const int32_t page = f->of_slot[l][s];
        if (is_kept(f, l, (int32_t)s) && page != before[l * f->slots + s])
            check_fail(c, "slot %u of list %zu held %d and has %d", s, l, before[l * f->slots + s],
                       page);
        if (page >= 0 && f->of_page[l][page] != (int32_t)s)
            check_fail(c, "slot %u of list %zu holds page %d, which is in %d", s, l, page,
                       f->of_page[l][page]);
    }
}

static void lend_case(check *c, family f)
{
    if (!check_begin(c))
        return;
    check_describe(c, "rows=%u pages=%u k=%u slots=%u", f.rows, f.pages, f.k, f.slots);
    make_family(c, &f);
    const size_t table = (size_t)f.rows * LISTS * f.slots * sizeof(int32_t);
    int32_t *before = check_in(c, table);
    for (uint32_t step = 0; step < 5; step++) {
        choose(c, &f, step);
        memcpy(before, *f.of_slot, table);
        CHECK_BOTH(c, lend, &f.lend);
        for (uint32_t i = 0; i < LISTS * 2 * f.pages; i++)
            if (f.lend.seen[i])
                check_fail(c, "word %u of seen is %u afterwards", i, f.lend.seen[i]);
        for (uint32_t at = 0; at < f.rows; at++)
            for (uint32_t list = 0; list < LISTS; list++)
                look_at_lenders(c, &f, at, list);
        CHECK_BOTH(c, resolve, &f.resolve);
        for (uint32_t at = 0; at < f.rows; at++)
            for (uint32_t list = 0; list < LISTS; list++) {
                look_at_slots(c, &f, at, list);
                look_at_tables(c, &f, list_at(&f, at, list), before);
            }
    }
}

void check_lend(check *c)
{
    for (uint32_t i = 0; i < 24; i++) {
        family f = {.rows = 1 + i % ROWS_MAX, .pages = 30 + 19 * i, .k = 1 + 3 * (i % 7)};
        f.slots = f.k + 5 * i % (2 * f.k);
        lend_case(c, f);
    }
    lend_case(c, (family){.rows = 3, .pages = 2001, .k = 600, .slots = 700});
    lend_case(c, (family){.rows = 4, .pages = 1200, .k = 130, .slots = 1100});
    lend_case(c, (family){.rows = 5, .pages = 2600, .k = 700, .slots = 1200});
}
