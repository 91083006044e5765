/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels on the device cache of pages: resolve, admit, admit_written, stage, collect.
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
    char *pool = check_noise_in(c, pool_blocks * kvf_block_bytes(&w->p));
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
    w->slot_of_page = check_changed(c, NULL, w->page_count * sizeof *w->slot_of_page);
    w->words = check_changed(c, NULL, w->word_count * sizeof *w->words);
    w->tags = check_changed(c, NULL, w->word_count * sizeof *w->tags);
    w->writes = is_tagged ? check_out(c, pool_blocks * w->p.block_size * sizeof *w->writes) : NULL;
    w->slots = check_changed(c, NULL, w->word_count * kvf_page_bytes(&w->p.shape));
    w->counters = check_changed(c, NULL, sizeof *w->counters);
    w->slot_before = check_in(c, w->page_count * sizeof *w->slot_before);
    w->words_before = check_in(c, w->word_count * sizeof *w->words_before);
    w->tags_before = check_in(c, w->word_count * sizeof *w->tags_before);
    memset(w->slot_of_page, 0xff, w->page_count * sizeof *w->slot_of_page);
    memset(w->words, 0xff, w->word_count * sizeof *w->words);
    make_rows(w, pool_blocks);
}

/* Before a launch: of the reference, whose slots are noted, then of the variant, which gets them.
 */
static void begin_on_slots(world *w, int is_var)
{
    const size_t pages = w->page_count * sizeof *w->slot_of_page;
    const size_t words = w->word_count * sizeof *w->words, tags = w->word_count * sizeof *w->tags;
    memcpy(is_var ? w->slot_of_page : w->slot_before, is_var ? w->slot_before : w->slot_of_page,
           pages);
    memcpy(is_var ? w->words : w->words_before, is_var ? w->words_before : w->words, words);
    memcpy(is_var ? w->tags : w->tags_before, is_var ? w->tags_before : w->tags, tags);
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

/* The page that left a bucket is the one that was used longest ago, and nothing did while a slot
 * was free. */
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

static void look_at(const world *w, const kvf_choices *a, bool is_ref)
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
    kvf_choices a = {.paging = w.p,
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
        for (int is_var = 0; is_var < 2; is_var++) {
            begin_on_slots(&w, is_var);
            CHECK_RUN(c, is_var ? c->var : c->ref, resolve, &a, is_var);
            look_at(&w, &a, !is_var);
        }
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
        for (int is_var = 0; is_var < 2; is_var++) {
            begin_on_slots(&w, is_var);
            CHECK_RUN(c, is_var ? c->var : c->ref, admit, &a, is_var);
            look_at_admitted(&w, &a);
        }
    }
}

void check_admit(check *c)
{
    for (uint32_t i = 0; i < 30; i++)
        admit_case(c, 1 + i % ROWS_MAX, 1 + i % 12, KVF_SLOT_WAYS * (1 + i % 5));
}

/* ---- admit_written ---- */

/* Tokens of a call: pages of the pool whole and in order, and between them what is none. */
static uint32_t put_slots(const world *w, uint32_t tokens, int64_t *slots)
{
    const uint32_t size = w->p.shape.page_size;
    uint32_t count = 0;
    for (uint32_t page = 0; page < w->p.pool_pages && count + size <= tokens; page++) {
        if (check_below(w->c, 3) == 0)
            continue;
        const uint32_t lacks = check_below(w->c, 4); /* 0: its first token */
        for (uint32_t t = lacks == 0; t < size; t++)
            slots[count++] = (int64_t)page * size + t;
        if (lacks == 1 && count < tokens)
            slots[count++] = check_below(w->c, 2) ? -1 : (int64_t)w->p.pool_pages * size;
    }
    return count;
}

/* Pages that the call has whole, of heads that are not idle, are in their slots or in none. */
/* Any bits where both types are the same. */
static void put_row(char *to, kvf_dtype dtype, const void *from, kvf_dtype of, uint32_t count)
{
    if (of == dtype)
        memcpy(to, from, count * kvf_dtype_bytes(dtype));
    for (uint32_t d = 0; of != dtype && d < count; d++)
        kvf_element_set(to, dtype, d, kvf_element_get(from, of, d));
}

static void look_at_written(const world *w, const kvf_write_args *a)
{
    const uint32_t size = w->p.shape.page_size, row = HEADS * w->p.shape.head_dim;
    const kvf_dtype dtype = w->p.shape.dtype, of_caller = a->is_wide ? KVF_FP32 : dtype;
    const size_t element = kvf_dtype_bytes(of_caller);
    const size_t bytes = kvf_dtype_bytes(dtype) * w->p.shape.head_dim;
    uint32_t all = 0, without = 0;
    are_inverse(w);
    oldest_went(w, *a->blocks->clock - 1);
    for (uint32_t i = 0; i < a->tokens; i++)
        for (uint32_t h = 0; h < HEADS; h++) {
            const uint32_t page = kvf_admit_written_page(a, i);
            if (page == UINT32_MAX ||
                (a->blocks->streaming.number && a->blocks->streaming.number[h]))
                continue;
            const int32_t slot = w->slot_of_page[(size_t)h * w->p.pool_pages + page];
            all++;
            without += slot < 0;
            if (slot < 0)
                continue;
            char *at = kvf_row_slot(&w->p, w->row, h, (uint32_t)slot), want[128] = {0};
            for (uint32_t t = 0; t < size; t++, at += 2 * bytes) {
                const size_t from = ((size_t)(i + t) * row + h * w->p.shape.head_dim) * element;
                put_row(want, dtype, kvf_offset(a->k, from), of_caller, w->p.shape.head_dim);
                put_row(want + bytes, dtype, kvf_offset(a->v, from), of_caller,
                        w->p.shape.head_dim);
                if (a->blocks->nonfinite[a->slots[i] / w->p.block_size] >>
                        (a->slots[i] % w->p.block_size + t) &
                    1)
                    memset(want, 0, sizeof want);
                check_bits(w->c, "a token of an admitted page", at, want, 2 * bytes);
            }
            if (w->tags[(size_t)h * w->p.slots + (uint32_t)slot] !=
                kvf_row_page_tag(&w->p, w->row, page))
                check_fail(w->c, "the tag of page %u is an old one", page);
        }
    if (without && all <= KVF_SLOT_WAYS)
        check_fail(w->c, "%u of %u pages have no slot", without, all);
}

/* Bits, or numbers where they are rounded. */
static void put_noise(check *c, void *to, size_t bytes, bool is_wide)
{
    if (is_wide)
        check_fill(c, to, KVF_FP32, bytes / sizeof(float), DATA_NORMAL);
    else
        check_noise(c, to, bytes);
}

static void admit_written_case(check *c, uint32_t blocks, uint32_t slots)
{
    world w;
    if (!check_begin(c))
        return;
    make_world(c, &w, 1, 1, blocks, slots, true);
    const uint32_t most = blocks * w.p.block_size, row = HEADS * w.p.shape.head_dim;
    check_describe(c, "admit_written, tokens=%u slots=%u", most, slots);
    uint32_t *clock = check_in(c, sizeof *clock),
             *streaming = check_in(c, HEADS * sizeof *streaming);
    uint64_t *nonfinite = check_in(c, blocks * sizeof *nonfinite);
    int64_t *of = check_in(c, most * sizeof *of);
    kvf_physical_blocks *physical = check_in(c, sizeof *physical);
    const bool is_wide = w.p.shape.dtype != KVF_FP32 && check_below(c, 2);
    const size_t element = is_wide ? sizeof(float) : kvf_dtype_bytes(w.p.shape.dtype);
    const size_t bytes = (most * row + 1) * element;
    const size_t shift = check_below(c, 2) * element; /* rows need no alignment */
    char *k = check_in(c, bytes), *v = check_in(c, bytes);
    *physical = (kvf_physical_blocks){.paging = w.p,
                                      .layers = 1,
                                      .ids = blocks,
                                      .id_blocks = 1,
                                      .writes = w.writes,
                                      .nonfinite = nonfinite,
                                      .streaming.number = check_below(c, 2) ? streaming : NULL,
                                      .slots = w.slots,
                                      .slot_of_page = w.slot_of_page,
                                      .slot_words = w.words,
                                      .slot_tags = w.tags,
                                      .clock = clock};
    kvf_write_args a = {.blocks = physical,
                        .codes = {.kv_heads = HEADS},
                        .shape = w.p.shape,
                        .is_wide = is_wide,
                        .k = k + shift,
                        .v = v + shift,
                        .k_stride = row,
                        .v_stride = row,
                        .slots = of};
    streaming[check_below(c, HEADS)] = 1;
    for (uint32_t call = 0; call < 5; call++) {
        *clock = call - 1; /* the count goes around */
        put_noise(c, k, bytes, is_wide);
        put_noise(c, v, bytes, is_wide);
        for (uint32_t b = 0; b < blocks; b++)
            nonfinite[b] = check_below(c, 3) ? 0 : check_random(c);
        a.tokens = put_slots(&w, most, of);
        for (uint32_t i = 0; i < a.tokens; i++)
            if (of[i] >= 0 && of[i] < most)
                w.writes[of[i]]++;
        for (int is_var = 0; is_var < 2; is_var++) {
            begin_on_slots(&w, is_var);
            CHECK_RUN(c, is_var ? c->var : c->ref, admit_written, &a, is_var);
            look_at_written(&w, &a);
        }
    }
}

void check_admit_written(check *c)
{
    for (uint32_t i = 0; i < 30; i++)
        admit_written_case(c, 1 + i % 12, KVF_SLOT_WAYS * (1 + i % 4));
}

/* ---- stage ---- */

/* Bytes of pages that no slot has, all of them in what was staged. */
static uint64_t look_at_staged(const world *w, const kvf_stage_args *a, void *const *home)
{
    const size_t page_bytes = kvf_page_bytes(&w->p.shape);
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < a->rows; r++)
        for (uint32_t i = 0; i < a->count * PAGES * HEADS; i++) {
            const uint32_t page = i / HEADS, head = i % HEADS, block = page / PAGES;
            const kvf_row *row = &w->row[r];
            if (page * w->p.shape.page_size >= row->length)
                continue;
            const uint32_t number = kvf_row_pool_page(&w->p, row, page);
            const int32_t slot = w->slot_of_page[(size_t)head * w->p.pool_pages + number];
            const bool is_true =
                slot >= 0 && (!w->writes || w->tags[head * w->p.slots + (uint32_t)slot] ==
                                                kvf_row_page_tag(&w->p, row, number));
            const char *at = (const char *)(home ? home[block] : row->blocks[block]);
            bytes += is_true ? 0 : page_bytes;
            check_bits(w->c, is_true ? "a page with a slot" : "a page without one",
                       a->to + ((r * a->count + block) * HEADS + head) * kvf_run_bytes(&w->p) +
                           page % PAGES * page_bytes,
                       is_true && row->slots
                           ? kvf_row_slot(&w->p, row, head, (uint32_t)slot)
                           : at + head * kvf_run_bytes(&w->p) + page % PAGES * page_bytes,
                       page_bytes);
        }
    return bytes;
}

static void stage_case(check *c, uint32_t rows, uint32_t blocks, bool has_bytes, bool is_tagged)
{
    world w;
    if (!check_begin(c))
        return;
    make_world(c, &w, rows, 1, blocks, KVF_SLOT_WAYS * (1 + check_below(c, 3)), is_tagged);
    check_describe(c, "stage, rows=%u blocks=%u%s%s", rows, blocks, has_bytes ? " slots" : "",
                   is_tagged ? " tagged" : "");
    const bool has_home = rows == 1 && !is_tagged;
    const kvf_admit_args admit = {.paging = w.p, .rows = rows, .count = blocks, .row = w.row};
    const kvf_stage_args a = {
        .paging = w.p,
        .rows = rows,
        .count = 1 + check_below(c, blocks),
        .row = w.row,
        .to = check_changed(c, "staged", rows * blocks * kvf_block_bytes(&w.p)),
        .home = has_home ? check_changed(c, "home", blocks * sizeof *a.home) : NULL,
        .counters = w.counters};
    check_noise(c, w.slots, w.word_count * kvf_page_bytes(&w.p.shape));
    w.counters->bytes_prompt = 0;
    for (uint32_t r = 0; r < rows; r++) {
        w.row[r].slots = NULL; /* bytes of slots stay what they are: other than the pool's */
        w.row[r].sealed_before = check_below(c, blocks + 1);
        w.row[r].length -= check_below(c, 2 * w.p.block_size);
        check_track(c, "table", w.row[r].blocks, blocks * sizeof *w.row[r].blocks);
    }
    CHECK_RUN(c, c->ref, admit, &admit, false);
    for (uint32_t i = 0; is_tagged && i < w.word_count; i++)
        w.tags[i] = check_below(c, 2); /* half of them are old */
    for (uint32_t r = 0; r < rows; r++)
        w.row[r].slots = has_bytes ? w.slots : NULL;
    CHECK_BOTH(c, stage, &a);
    if (w.counters->bytes_prompt != look_at_staged(&w, &a, a.home))
        check_fail(c, "%u bytes are counted", (uint32_t)w.counters->bytes_prompt);
    for (uint32_t b = 0; has_home && b < a.count && b < kvf_row_blocks(&w.p, w.row); b++)
        if (w.row->blocks[b] != a.to + b * kvf_block_bytes(&w.p))
            check_fail(c, "the table names another place of block %u", b);
}

void check_stage(check *c)
{
    for (uint32_t i = 0; i < 40; i++)
        stage_case(c, 1 + i / 2 % ROWS_MAX, 1 + i % 12, i % 3, i % 2);
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
        const kvf_choices a = {.paging = w.p,
                               .rows = w.rows,
                               .ids_max = ids_max,
                               .row = w.row,
                               .misses = misses,
                               .miss_count = count};
        CHECK_BOTH(c, collect, &a);
    }
}
