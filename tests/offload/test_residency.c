/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The device cache of pages over many steps of the resolve kernel on random choices: tables stay
 * true, a working set that fits is never moved again, and with room for all every page stays where
 * it came.
 */

#include "page_pool.h"

#include "offload_rig.h"
#include "slots.h"

#define HEADS  2u
#define BLOCKS 40u
#define PAGES  4u /* of a block */
#define IDS    16u

/* All that one launch of resolve reads and writes, in device memory. */
typedef struct step_tables {
    kvf_row row[1];
    uint32_t block_of[BLOCKS];
    int32_t ids[HEADS][IDS];
    uint32_t id_count[HEADS];
    int32_t slot_of_id[HEADS][IDS];
    uint32_t missed[HEADS][IDS];
    kvf_miss misses[HEADS][IDS];
    uint32_t miss_count[HEADS];
    kvf_layer_counters counters;
} step_tables;

typedef struct world {
    rig r;
    kvf_residency residency;
    kvf_stream *stream;
    step_tables *t;
    kvf_choices args;
    rig_random random;
} world;

static void open_world(world *w, uint32_t slots)
{
    rig_open(&w->r, NULL);
    const kvf_residency shape = {.device = w->r.device,
                                 .heads = HEADS,
                                 .pages = BLOCKS * PAGES,
                                 .slots = slots,
                                 .slot_bytes = 256};
    RIG_OK(kvf_residency_create(&shape, &w->residency));
    w->stream = rig_stream(&w->r);
    step_tables *t = w->t = rig_shared(&w->r, sizeof *t);
    for (uint32_t b = 0; b < BLOCKS; b++)
        t->block_of[b] = (b * 7 + 3) % BLOCKS;
    t->row[0] = (kvf_row){.block_of = t->block_of,
                          .slot_of_page = w->residency.slot_of_page,
                          .slot_words = w->residency.words,
                          .slots = w->residency.slot_memory};
    w->args = (kvf_choices){.paging = {.shape = {.dtype = KVF_BF16, .head_dim = 16, .page_size = 4},
                                       .kv_heads = HEADS,
                                       .lists = HEADS,
                                       .block_pages = PAGES,
                                       .slots = slots,
                                       .pool_pages = BLOCKS * PAGES},
                            .rows = 1,
                            .ids_max = IDS,
                            .row = t->row,
                            .ids = t->ids[0],
                            .id_count = t->id_count,
                            .slot_of_id = t->slot_of_id[0],
                            .missed = t->missed[0],
                            .misses = t->misses[0],
                            .miss_count = t->miss_count,
                            .counters = &t->counters};
    w->random = rig_seed("residency", 21);
}

static void close_world(world *w)
{
    kvf_residency_destroy(&w->residency);
    kvf_residency_destroy(&w->residency);
    rig_close(&w->r);
}

/* The tables as the host may read them. */
static void are_valid(world *w)
{
    static int32_t slot_of_page[HEADS][BLOCKS * PAGES];
    static uint64_t words[HEADS][BLOCKS * PAGES + KVF_SLOT_WAYS];
    const kvf_residency *r = &w->residency;
    for (uint32_t h = 0; h < HEADS; h++) {
        rig_put(&w->r, slot_of_page[h], r->slot_of_page + (size_t)h * r->pages,
                sizeof slot_of_page[h]);
        rig_put(&w->r, words[h], r->words + (size_t)h * r->slots, r->slots * sizeof **words);
        assert_true(kvf_residency_is_valid(r, slot_of_page[h], words[h]));
    }
}

/* Chooses `count` of the first `pages` pages; returns how many were missed. */
static uint32_t choose(world *w, uint32_t pages, uint32_t count)
{
    step_tables *t = w->t;
    uint32_t misses = 0;
    for (uint32_t h = 0; h < HEADS; h++) {
        uint32_t left = count;
        t->id_count[h] = 0;
        for (uint32_t p = 0; p < pages && left; p++)
            if (rig_below(&w->random, pages - p) < left) {
                t->ids[h][t->id_count[h]++] = (int32_t)p;
                left--;
            }
    }
    t->row[0].use++;
    RIG_OK(w->r.ops->launch(w->stream, w->r.device->kernels.resolve, &w->args, sizeof w->args,
                            kvf_resolve_tasks(&w->args)));
    RIG_OK(w->r.ops->stream_wait(w->stream));
    are_valid(w);
    for (uint32_t h = 0; h < HEADS; h++)
        misses += t->miss_count[h];
    return misses;
}

/* Every page that is chosen comes once, and is not chosen away. */
TEST(what_fits_stays)
{
    world w;
    open_world(&w, BLOCKS * PAGES);
    uint32_t misses = 0;
    for (uint32_t step = 0; step < 200; step++)
        misses += choose(&w, BLOCKS * PAGES, IDS);
    assert_int_equal(misses, HEADS * BLOCKS * PAGES);
    RIG_OK(kvf_residency_clear(&w.residency, w.stream));
    assert_int_equal(choose(&w, BLOCKS * PAGES, IDS), HEADS * IDS);
    close_world(&w);
}

/* A working set that is smaller than the cache stays while it is used, though others pass. */
TEST(what_is_used_stays)
{
    world w;
    open_world(&w, 2 * KVF_SLOT_WAYS);
    uint32_t misses = 0;
    for (uint32_t step = 0; step < 100; step++) {
        misses = choose(&w, IDS, IDS); /* the same ones */
        assert_true(step == 0 || misses == 0);
        assert_true(choose(&w, BLOCKS * PAGES, IDS / 2) <= HEADS * IDS / 2);
    }
    close_world(&w);
}

RIG_TEST(shapes)
{
    kvf_residency made;
    const kvf_residency good = {
        .device = r->device, .heads = 1, .pages = 10, .slots = KVF_SLOT_WAYS, .is_tagged = 1};
    RIG_OK(kvf_residency_create(&good, &made)); /* direct: no bytes */
    assert_null(made.slot_memory);
    assert_non_null(made.tags);
    kvf_residency_destroy(&made);
    kvf_residency bad = good;
    bad.heads = 1u << 20;
    bad.slots = 1u << 30;
    bad.slot_bytes = (size_t)1 << 20;
    assert_int_equal(kvf_residency_create(&bad, &made), KVF_OUT_OF_DEVICE_MEMORY);
}
