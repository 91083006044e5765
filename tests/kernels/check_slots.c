/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels on the device cache of pages: resolve, admit, collect.
 *
 * Knows the laws of slots.h and no order of threads: a GPU may give other slots away than the
 * reference, so both are held to what must be true of any.
 */

#include <stdlib.h>
#include <string.h>

#include "check_rows.h"
#include "slots.h"

#define HEADS    2u
#define PAGES    4u /* of a block */
#define ROWS_MAX 4u

typedef struct world {
    check *c;
    kvf_paging p;
    kvf_row *row; /* [rows] of `blocks` sealed blocks each */
    uint32_t rows, blocks;
    int32_t *slot_of_page;
    uint64_t *words;
    uint32_t *tags, *writes; /* writes NULL: not tagged */
    char *slots;
    size_t page_count, word_count; /* of all heads */
    kvf_layer_counters *counters;
    /* as they were before a launch */
    int32_t *slot_before;
    uint64_t *words_before;
    uint32_t *tags_before;
} world;

/* Rows of which some have their first blocks in common, as forks. */
static void make_rows(world *w, uint32_t pool_blocks)
{
    check *c = w->c;
    w->row = check_in(c, w->rows * sizeof *w->row);
    char *pool = check_in(c, pool_blocks * kvf_block_bytes(&w->p));
    check_noise(c, pool, pool_blocks * kvf_block_bytes(&w->p));
    for (uint32_t r = 0; r < w->rows; r++) {
        const uint32_t common = r ? check_below(c, w->blocks + 1) : 0;
        uint32_t *block_of = check_out(c, w->blocks * sizeof *block_of);
        void **blocks = check_out(c, w->blocks * sizeof *blocks);
        for (uint32_t b = 0; b < w->blocks; b++) {
            block_of[b] = b < common ? w->row[r - 1].block_of[b] : r * w->blocks + b;
            blocks[b] = pool + block_of[b] * kvf_block_bytes(&w->p);
        }
        w->row[r] = (kvf_row){.blocks = blocks,
                              .block_of = block_of,
                              .slot_of_page = w->slot_of_page,
                              .slot_words = w->words,
                              .slot_tags = w->tags,
                              .writes = w->writes,
                              .slots = w->slots,
                              .length = w->blocks * w->p.block_size,
                              .sealed = w->blocks};
    }
}

static void make_world(check *c, world *w, uint32_t rows, uint32_t per, uint32_t blocks,
                       uint32_t slots, bool is_tagged)
{
    const uint32_t pool_blocks = rows * blocks;
    *w = (world){.c = c, .rows = rows, .blocks = blocks};
    w->p = (kvf_paging){.shape = {.dtype = KVF_BF16, .head_dim = 16, .page_size = 2},
                        .kv_heads = HEADS,
                        .group = per,
                        .lists = HEADS * per,
                        .block_size = 2 * PAGES,
                        .block_pages = PAGES,
                        .block_jobs = PAGES,
                        .blocks_max = blocks,
                        .pages_max = blocks * PAGES,
                        .slots = slots,
                        .pool_pages = pool_blocks * PAGES,
                        .ring_blocks = 1};
    w->page_count = (size_t)HEADS * w->p.pool_pages;
    w->word_count = (size_t)HEADS * slots;
    w->slot_of_page = check_out(c, w->page_count * sizeof *w->slot_of_page);
    w->words = check_out(c, w->word_count * sizeof *w->words);
    w->tags = check_out(c, w->word_count * sizeof *w->tags);
    w->writes = is_tagged ? check_out(c, pool_blocks * w->p.block_size * sizeof *w->writes) : NULL;
    w->slots = check_out(c, w->word_count * kvf_page_bytes(&w->p.shape));
    w->counters = check_out(c, sizeof *w->counters);
    w->slot_before = check_in(c, w->page_count * sizeof *w->slot_before);
    w->words_before = check_in(c, w->word_count * sizeof *w->words_before);
    w->tags_before = check_in(c, w->word_count * sizeof *w->tags_before);
    memset(w->slot_of_page, 0xff, w->page_count * sizeof *w->slot_of_page);
    memset(w->words, 0xff, w->word_count * sizeof *w->words);
    check_track(c, NULL, w->slot_of_page, w->page_count * sizeof *w->slot_of_page);
    check_track(c, NULL, w->words, w->word_count * sizeof *w->words);
    check_track(c, NULL, w->tags, w->word_count * sizeof *w->tags);
    check_track(c, NULL, w->slots, w->word_count * kvf_page_bytes(&w->p.shape));
    check_track(c, NULL, w->counters, sizeof *w->counters);
    make_rows(w, pool_blocks);
}

static void remember(world *w)
{
    memcpy(w->slot_before, w->slot_of_page, w->page_count * sizeof *w->slot_before);
    memcpy(w->words_before, w->words, w->word_count * sizeof *w->words_before);
    memcpy(w->tags_before, w->tags, w->word_count * sizeof *w->tags_before);
}

/* A page has one slot, and a slot one page. */
static void are_inverse(const world *w)
{
    for (uint32_t h = 0; h < HEADS; h++) {
        const int32_t *of_page = w->slot_of_page + (size_t)h * w->p.pool_pages;
        const uint64_t *words = w->words + (size_t)h * w->p.slots;
        for (uint32_t p = 0; p < w->p.pool_pages; p++)
            if (of_page[p] != -1 && !kvf_slot_is_of(words[of_page[p]], p))
                check_fail(w->c, "page %u says slot %d, which holds another", p, of_page[p]);
        for (uint32_t s = 0; s < w->p.slots; s++)
            if (words[s] != KVF_SLOT_FREE && of_page[kvf_slot_page(words[s])] != (int32_t)s)
                check_fail(w->c, "slot %u holds page %u, which does not know it", s,
                           kvf_slot_page(words[s]));
    }
}

/* What went of a bucket is what was used longest ago, and nothing did while a slot was free. */
static void oldest_went(const world *w, uint32_t now)
{
    for (size_t b = 0; b < w->word_count; b += KVF_SLOT_WAYS) {
        uint32_t youngest_gone = UINT32_MAX, oldest_left = 0;
        for (size_t s = b; s < b + KVF_SLOT_WAYS; s++) {
            const uint64_t was = w->words_before[s], is = w->words[s];
            const bool is_kept =
                was == KVF_SLOT_FREE ? is == was : kvf_slot_is_of(is, kvf_slot_page(was));
            if (!is_kept)
                youngest_gone = kvf_min_u32(youngest_gone, kvf_slot_age(was, now));
            else if (kvf_slot_age(is, now))
                oldest_left = kvf_max_u32(oldest_left, kvf_slot_age(was, now));
        }
        if (oldest_left > youngest_gone)
            check_fail(w->c, "bucket %zu: a page of age %u went, one of age %u stayed",
                       b / KVF_SLOT_WAYS, youngest_gone, oldest_left);
    }
}

/* ---- resolve ---- */

/* A page that had a slot, with what is true of it still. */
static bool was_there(const world *w, const kvf_row *row, uint32_t head, uint32_t page)
{
    const int32_t slot = w->slot_before[(size_t)head * w->p.pool_pages + page];
    return slot >= 0 && (!w->writes || w->tags_before[(size_t)head * w->p.slots + (uint32_t)slot] ==
                                           kvf_row_page_tag(&w->p, row, page));
}

static void look_at(const world *w, const kvf_resolve_args *a, bool is_ref)
{
    uint8_t *brought = calloc(w->page_count, 1), *wanted = calloc(w->page_count, 1);
    uint64_t misses = 0, absent = 0;
    KVF_ASSERT(brought && wanted);
    are_inverse(w);
    for (uint32_t l = 0; l < w->rows * w->p.lists; l++) {
        const kvf_row *row = &w->row[l / w->p.lists];
        const uint32_t head = kvf_list_head(&w->p, l % w->p.lists);
        uint32_t own = 0;
        for (uint32_t i = 0; i < a->id_count[l]; i++) {
            const size_t at = (size_t)l * a->ids_max + i;
            const uint32_t page = kvf_row_pool_page(&w->p, row, (uint32_t)a->ids[at]);
            const size_t number = (size_t)head * w->p.pool_pages + page;
            const int32_t slot = w->slot_of_page[number];
            const bool was = was_there(w, row, head, page);
            if (slot < 0 || slot != a->slot_of_id[at] ||
                kvf_slot_age(kvf_row_slot_words(&w->p, row, head)[slot], row->use))
                check_fail(w->c, "list %u: page %u has slot %d, the list slot %d", l, page, slot,
                           a->slot_of_id[at]);
            if (w->writes && w->tags[(size_t)head * w->p.slots + (uint32_t)slot] !=
                                 kvf_row_page_tag(&w->p, row, page))
                check_fail(w->c, "list %u: the tag of page %u is an old one", l, page);
            if (a->missed[at] == 0 && !was)
                check_fail(w->c, "list %u: page %u was not there and is no miss", l, page);
            if (is_ref && a->missed[at] && was)
                check_fail(w->c, "list %u: page %u was there and is missed", l, page);
            absent += !was && !wanted[number]++;
            if (a->missed[at] != 1)
                continue;
            const kvf_miss *miss = &a->misses[(size_t)l * a->ids_max + own++];
            if (own > a->miss_count[l] || miss->page != a->ids[at] || miss->slot != slot)
                check_fail(w->c, "list %u: page %u is not among its misses", l, page);
            if (brought[number]++)
                check_fail(w->c, "page %u of head %u is brought twice", page, head);
            misses++;
        }
        if (own != a->miss_count[l])
            check_fail(w->c, "list %u: %u misses, counted %u", l, own, a->miss_count[l]);
    }
    if (is_ref ? misses != absent : misses < absent)
        check_fail(w->c, "%u misses of %u absent pages", (uint32_t)misses, (uint32_t)absent);
    if (is_ref || (w->rows == 1 && w->p.lists == HEADS))
        oldest_went(w, w->row[0].use);
    free(brought);
    free(wanted);
}

static void choose_ids(const world *w, uint32_t ids_max, int32_t *ids, uint32_t *count)
{
    for (uint32_t l = 0; l < w->rows * w->p.lists; l++)
        count[l] = check_subset(w->c, w->p.pages_max, ids_max, ids + (size_t)l * ids_max);
}

/* Several steps, each of which begins with the slots that the one before left. */
static void resolve_case(check *c, uint32_t rows, uint32_t per, uint32_t blocks, uint32_t ids_max)
{
    world w;
    if (!check_begin(c))
        return;
    const uint32_t least = (uint32_t)kvf_round_up(rows * per * ids_max, KVF_SLOT_WAYS);
    const bool is_tagged = check_below(c, 2);
    make_world(c, &w, rows, per, blocks, least + check_below(c, 3) * KVF_SLOT_WAYS, is_tagged);
    check_describe(c, "resolve, rows=%u lists=%u pages=%u ids=%u slots=%u%s", rows, w.p.lists,
                   w.p.pages_max, ids_max, w.p.slots, is_tagged ? " tagged" : "");
    const size_t lists = rows * w.p.lists, all = lists * ids_max;
    int32_t *ids = check_in(c, all * sizeof *ids);
    uint32_t *count = check_in(c, lists * sizeof *count);
    kvf_resolve_args a = {.paging = w.p,
                          .rows = rows,
                          .ids_max = ids_max,
                          .row = w.row,
                          .ids = ids,
                          .id_count = count,
                          .slot_of_id = check_out(c, all * sizeof *a.slot_of_id),
                          .missed = check_out(c, all * sizeof *a.missed),
                          .misses = check_out(c, all * sizeof *a.misses),
                          .miss_count = check_out(c, lists * sizeof *a.miss_count),
                          .counters = w.counters};
    for (uint32_t step = 0; step < 6; step++) {
        choose_ids(&w, ids_max, ids, count);
        for (uint32_t i = 0; is_tagged && i < 20; i++)
            w.writes[check_below(c, w.p.pool_pages * w.p.shape.page_size)]++;
        for (uint32_t r = 0; r < rows; r++)
            w.row[r].use = UINT32_MAX - 2 + step; /* the count goes around */
        remember(&w);
        CHECK_RUN(c, c->ref, resolve, &a, false);
        look_at(&w, &a, true);
        memcpy(w.slot_of_page, w.slot_before, w.page_count * sizeof *w.slot_of_page);
        memcpy(w.words, w.words_before, w.word_count * sizeof *w.words);
        memcpy(w.tags, w.tags_before, w.word_count * sizeof *w.tags);
        CHECK_RUN(c, c->var, resolve, &a, true);
        look_at(&w, &a, false);
    }
}

void check_resolve(check *c)
{
    for (uint32_t i = 0; i < 40; i++)
        resolve_case(c, 1 + i % ROWS_MAX, 1 + i / 2 % 3, 2 + i, 1 + i % 17);
    resolve_case(c, 1, 1, 500, 600); /* all slots of a bucket are in use, and of the next */
    resolve_case(c, 1, 1, 2000, 1200);
    resolve_case(c, 4, 1, 1000, 300);
}

/* ---- admit ---- */

/* Each page of the blocks is in its slot, or in none. */
static void look_at_admitted(const world *w, const kvf_admit_args *a)
{
    uint32_t without = 0, all = 0;
    are_inverse(w);
    oldest_went(w, w->row[0].use);
    for (uint32_t r = 0; r < a->rows; r++)
        for (uint32_t b = w->row[r].sealed_before; b < w->row[r].sealed; b++)
            for (uint32_t n = 0; n < HEADS * PAGES; n++) {
                const uint32_t head = n / PAGES;
                const uint32_t page = kvf_row_sealing(&w->row[r], b) * PAGES + n % PAGES;
                const int32_t slot = w->slot_of_page[(size_t)head * w->p.pool_pages + page];
                all++;
                without += slot < 0;
                if (slot >= 0)
                    check_bits(w->c, "an admitted page",
                               kvf_row_slot(&w->p, &w->row[r], head, (uint32_t)slot),
                               kvf_admit_from(&w->p, &w->row[r], head, b, n % PAGES),
                               kvf_page_bytes(&w->p.shape));
            }
    if (without && all <= w->p.slots)
        check_fail(w->c, "%u of %u pages are not admitted to %u slots", without, all, w->p.slots);
}

static void admit_case(check *c, uint32_t rows, uint32_t blocks, uint32_t slots)
{
    world w;
    if (!check_begin(c))
        return;
    make_world(c, &w, rows, 1, blocks, slots, false);
    check_describe(c, "admit, rows=%u blocks=%u slots=%u", rows, blocks, slots);
    const kvf_admit_args a = {.paging = w.p, .rows = rows, .count = blocks, .row = w.row};
    for (uint32_t step = 0; step < 5; step++) {
        for (uint32_t r = 0; r < rows; r++) {
            kvf_row *row = &w.row[r];
            row->sealed = check_below(c, blocks + 1);
            row->sealed_before = check_below(c, row->sealed + 1);
            row->use = 100 + step;
            for (uint32_t b = 0; b < blocks; b++) /* blocks of their own */
                row->block_of[b] = r * blocks + (b + step) % blocks;
        }
        remember(&w);
        CHECK_RUN(c, c->ref, admit, &a, false);
        look_at_admitted(&w, &a);
        memcpy(w.slot_of_page, w.slot_before, w.page_count * sizeof *w.slot_of_page);
        memcpy(w.words, w.words_before, w.word_count * sizeof *w.words);
        CHECK_RUN(c, c->var, admit, &a, true);
        look_at_admitted(&w, &a);
    }
}

void check_admit(check *c)
{
    for (uint32_t i = 0; i < 30; i++)
        admit_case(c, 1 + i % ROWS_MAX, 1 + i % 12, KVF_SLOT_WAYS * (1 + i % 5));
}

/* ---- collect ---- */

void check_collect(check *c)
{
    for (uint32_t i = 0; i < 20; i++) {
        world w;
        if (!check_begin(c))
            continue;
        make_world(c, &w, 1 + i % ROWS_MAX, 1 + i % 2, 1 + i, 2 * KVF_SLOT_WAYS, false);
        check_describe(c, "collect, rows=%u lists=%u", w.rows, w.p.lists);
        const uint32_t lists = w.rows * w.p.lists, ids_max = 1 + i % 9;
        kvf_miss *misses = check_in(c, lists * ids_max * sizeof *misses);
        uint32_t *count = check_in(c, lists * sizeof *count);
        for (uint32_t l = 0, slot = 0; l < lists; l++) {
            count[l] = check_below(c, kvf_min_u32(ids_max, 2 * KVF_SLOT_WAYS / lists) + 1);
            for (uint32_t k = 0; k < count[l]; k++, slot++)
                misses[l * ids_max + k] =
                    (kvf_miss){(int32_t)check_below(c, w.p.pages_max), (int32_t)slot};
        }
        check_track(c, "slots", w.slots, w.word_count * kvf_page_bytes(&w.p.shape));
        const kvf_collect_args a = {.paging = w.p,
                                    .rows = w.rows,
                                    .ids_max = ids_max,
                                    .row = w.row,
                                    .misses = misses,
                                    .miss_count = count};
        CHECK_BOTH(c, collect, &a);
    }
}
