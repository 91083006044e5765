/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Residency, changed by the resolve kernel, against a naive model over many steps of random
 * selections.
 */

#include "residency.h"

#include <math.h>

#include "offload_rig.h"

#define LISTS 3u
#define PAGES 40u
#define SLOTS 9u
#define IDS   9u
#define STEPS 400u

/* All that one launch of resolve reads and writes, in device memory. */
typedef struct step_tables {
    int32_t ids[LISTS][IDS];
    uint32_t id_count[LISTS];
    float scores[LISTS][PAGES];
    const float *score_rows[LISTS];
    int32_t *slot_of_page[LISTS];
    int32_t *page_of_slot[LISTS];
    int32_t slot_of_id[LISTS][IDS];
    uint32_t missed[LISTS][IDS];
    kvf_miss misses[LISTS][IDS];
    uint32_t miss_count[LISTS];
} step_tables;

typedef struct model {
    int32_t page_of_slot[SLOTS];
} model;

static int model_slot(const model *m, int32_t page)
{
    for (uint32_t s = 0; s < SLOTS; s++)
        if (m->page_of_slot[s] == page)
            return (int)s;
    return -1;
}

/* The page to evict: not selected, lowest score, then lowest id. */
static int model_victim(const model *m, const step_tables *t, uint32_t list)
{
    int best = -1;
    for (uint32_t s = 0; s < SLOTS; s++) {
        int32_t page = m->page_of_slot[s];
        int is_selected = 0;
        for (uint32_t i = 0; i < t->id_count[list]; i++)
            is_selected |= t->ids[list][i] == page;
        if (is_selected)
            continue;
        int32_t other = best >= 0 ? m->page_of_slot[best] : -1;
        if (best < 0 || t->scores[list][page] < t->scores[list][other] ||
            (t->scores[list][page] == t->scores[list][other] && page < other))
            best = (int)s;
    }
    return best;
}

/* The pages that are new now, and the contents afterwards. Which free slot is taken is left open.
 */
static uint32_t model_resolve(model *m, const step_tables *t, uint32_t list)
{
    uint32_t misses = 0;
    for (uint32_t i = 0; i < t->id_count[list]; i++) {
        int32_t page = t->ids[list][i];
        int slot = model_slot(m, page);
        assert_int_equal(t->missed[list][i], slot < 0);
        if (slot >= 0) {
            assert_int_equal(t->slot_of_id[list][i], slot);
            continue;
        }
        int32_t taken = t->slot_of_id[list][i];
        assert_true(taken >= 0 && (uint32_t)taken < SLOTS);
        assert_int_equal(t->misses[list][misses].page, page);
        assert_int_equal(t->misses[list][misses].slot, taken);
        misses++;
        if (model_slot(m, -1) >= 0)
            assert_int_equal(m->page_of_slot[taken], -1);
        else
            assert_int_equal(taken, model_victim(m, t, list));
        m->page_of_slot[taken] = page;
    }
    return misses;
}

static void make_step(step_tables *t, rig_random *random)
{
    for (uint32_t l = 0; l < LISTS; l++) {
        t->id_count[l] = rig_below(random, IDS + 1);
        uint32_t left = t->id_count[l];
        uint32_t n = 0;
        for (uint32_t p = 0; p < PAGES && left > 0; p++)
            if (rig_below(random, PAGES - p) < left) {
                t->ids[l][n++] = (int32_t)p;
                left--;
            }
        /* Few distinct scores, so that ties are met. */
        for (uint32_t p = 0; p < PAGES; p++)
            t->scores[l][p] =
                (float)rig_below(random, 6) - (rig_below(random, 9) == 0 ? INFINITY : 0);
    }
}

static void point_tables(const kvf_residency *residency, step_tables *t)
{
    for (uint32_t l = 0; l < LISTS; l++) {
        t->score_rows[l] = t->scores[l];
        t->slot_of_page[l] = kvf_residency_slot_of_page(residency, l);
        t->page_of_slot[l] = kvf_residency_page_of_slot(residency, l);
    }
}

/* The tables of one list, as the host may read them. */
typedef struct lists {
    int32_t slot_of_page[PAGES], page_of_slot[SLOTS];
} lists;

/* 1 if they are valid. */
static int read_lists(rig *r, const kvf_residency *residency, uint32_t list, lists *out)
{
    rig_put(r, out->slot_of_page, kvf_residency_slot_of_page(residency, list),
            sizeof out->slot_of_page);
    rig_put(r, out->page_of_slot, kvf_residency_page_of_slot(residency, list),
            sizeof out->page_of_slot);
    return kvf_residency_is_valid(residency, out->slot_of_page, out->page_of_slot);
}

static void test_resolve(void **state)
{
    rig r;
    rig_open(&r, NULL);
    kvf_residency residency;
    RIG_OK(kvf_residency_create(r.device, LISTS, PAGES, SLOTS, 256, &residency));
    kvf_stream *stream;
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &stream));
    step_tables *t = rig_shared(&r, sizeof *t);
    point_tables(&residency, t);
    model models[LISTS];
    memset(models, 0xff, sizeof models);
    rig_random random = rig_seed("residency", 21);
    uint64_t hits = 0, misses = 0;
    for (uint32_t step = 0; step < STEPS; step++) {
        make_step(t, &random);
        kvf_resolve_args args = {.lists = LISTS,
                                 .ids_max = IDS,
                                 .slots = SLOTS,
                                 .stride = PAGES,
                                 .ids = t->ids[0],
                                 .id_count = t->id_count,
                                 .scores = t->score_rows,
                                 .slot_of_page = t->slot_of_page,
                                 .page_of_slot = t->page_of_slot,
                                 .slot_of_id = t->slot_of_id[0],
                                 .missed = t->missed[0],
                                 .misses = t->misses[0],
                                 .miss_count = t->miss_count};
        RIG_OK(r.ops->launch(stream, r.device->kernels.resolve, &args, sizeof args,
                             kvf_resolve_tasks(&args)));
        RIG_OK(r.ops->stream_wait(stream));
        for (uint32_t l = 0; l < LISTS; l++) {
            static lists seen;
            assert_true(read_lists(&r, &residency, l, &seen));
            uint32_t missed = model_resolve(&models[l], t, l);
            assert_int_equal(missed, t->miss_count[l]);
            assert_memory_equal(models[l].page_of_slot, seen.page_of_slot,
                                sizeof models[l].page_of_slot);
            misses += missed;
            hits += t->id_count[l] - missed;
        }
        if (step % 97 == 96) { /* one sequence ends: its list starts anew, the others stay */
            RIG_OK(kvf_residency_clear(&residency, 1, 1, stream));
            RIG_OK(r.ops->stream_wait(stream));
            memset(&models[1], 0xff, sizeof models[1]);
        }
    }
    assert_true(hits > 100 && misses > 100);
    rig_give_shared(&r, t);
    r.ops->stream_destroy(stream);
    kvf_residency_destroy(&residency);
    kvf_residency_destroy(&residency);
    rig_close(&r);
}

static void test_slots(void **state)
{
    rig r;
    rig_open(&r, NULL);
    kvf_residency residency;
    RIG_OK(kvf_residency_create(r.device, LISTS, PAGES, SLOTS, 320, &residency));
    char *first = kvf_residency_slot(&residency, 0, 0);
    static lists seen;
    for (uint32_t l = 0; l < LISTS; l++) {
        assert_true(read_lists(&r, &residency, l, &seen));
        for (uint32_t s = 0; s < SLOTS; s++)
            assert_ptr_equal(kvf_residency_slot(&residency, l, (int32_t)s),
                             first + (l * SLOTS + s) * 320);
    }
    seen.page_of_slot[4] = 7;
    assert_false(kvf_residency_is_valid(&residency, seen.slot_of_page, seen.page_of_slot));
    seen.slot_of_page[7] = 4;
    assert_true(kvf_residency_is_valid(&residency, seen.slot_of_page, seen.page_of_slot));
    seen.slot_of_page[8] = 4; /* two pages in one slot */
    assert_false(kvf_residency_is_valid(&residency, seen.slot_of_page, seen.page_of_slot));
    kvf_residency_destroy(&residency);

    RIG_OK(kvf_residency_create(r.device, 1, PAGES, SLOTS, 0, &residency)); /* direct: no bytes */
    assert_null(kvf_residency_slot(&residency, 0, 0));
    kvf_residency_destroy(&residency);
    assert_int_equal(kvf_residency_create(r.device, 0, PAGES, SLOTS, 0, &residency), KVF_INVALID);
    assert_int_equal(kvf_residency_create(r.device, 1, 0, SLOTS, 0, &residency), KVF_INVALID);
    assert_int_equal(
        kvf_residency_create(r.device, 1u << 31, PAGES, 1u << 30, (size_t)1 << 40, &residency),
        KVF_OUT_OF_DEVICE_MEMORY);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resolve),
        cmocka_unit_test(test_slots),
    };
    return cmocka_run_group_tests_name("residency", tests, NULL, NULL);
}
