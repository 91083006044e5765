/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The common carver: what it plans is what it carves, arrays lie apart and aligned, and nothing
 * overflows.
 */

#include "common/carve.h"

#include "common/random.h"
#include "offload_rig.h"

#define ARRAYS 6u

typedef struct tables {
    uint8_t *bytes[ARRAYS];
    uint64_t *words[ARRAYS];
} tables;

static void carve(kvf_carver *carver, const uint64_t (*shape)[3], tables *t)
{
    for (uint32_t i = 0; i < ARRAYS; i++) {
        KVF_CARVE(carver, t->bytes[i], shape[i][0]);
        KVF_CARVE(carver, t->words[i], shape[i][0], shape[i][1], shape[i][2]);
    }
}

static void check_array(const kvf_carver *carver, const void *array, size_t bytes, uint8_t mark)
{
    assert_int_equal(array != NULL, bytes != 0);
    if (bytes == 0)
        return;
    const size_t offset = (size_t)((const char *)array - carver->base);
    assert_int_equal(offset % KVF_CARVE_ALIGN, 0);
    assert_true(offset + bytes <= carver->bytes);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(((const uint8_t *)array)[i], mark);
}

TEST(a_plan_is_what_is_carved)
{
    uint64_t random = 31;
    printf("carve: seed 31\n");
    for (uint32_t round = 0; round < 100; round++) {
        uint64_t shape[ARRAYS][3];
        for (uint32_t i = 0; i < ARRAYS * 3; i++)
            shape[i / 3][i % 3] = kvf_random_below(&random, 8);
        tables t;
        kvf_carver plan = {0};
        carve(&plan, shape, &t);
        for (uint32_t i = 0; i < ARRAYS; i++)
            assert_true(!t.bytes[i] && !t.words[i]);
        kvf_carver carver = {.base = malloc(plan.bytes + 1)};
        assert_non_null(carver.base);
        carve(&carver, shape, &t);
        assert_int_equal(carver.bytes, plan.bytes);
        for (uint32_t i = 0; i < ARRAYS; i++) { /* whatever overlaps is overwritten */
            if (t.bytes[i])
                memset(t.bytes[i], (int)(2 * i), shape[i][0]);
            if (t.words[i])
                memset(t.words[i], (int)(2 * i + 1),
                       shape[i][0] * shape[i][1] * shape[i][2] * sizeof(uint64_t));
        }
        for (uint32_t i = 0; i < ARRAYS; i++) {
            check_array(&carver, t.bytes[i], shape[i][0], (uint8_t)(2 * i));
            check_array(&carver, t.words[i],
                        shape[i][0] * shape[i][1] * shape[i][2] * sizeof(uint64_t),
                        (uint8_t)(2 * i + 1));
        }
        free(carver.base);
    }
}

TEST(what_is_too_large_stays_too_large)
{
    static const uint64_t shapes[][3] = {{UINT64_MAX, 1, 1},
                                         {UINT32_MAX, UINT32_MAX, 1},
                                         {UINT32_MAX, UINT32_MAX, UINT32_MAX},
                                         {1, 1, KVF_CARVE_MAX}};
    uint64_t *array;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        kvf_carver carver = {0};
        KVF_CARVE(&carver, array, shapes[i][0], shapes[i][1], shapes[i][2]);
        assert_true(carver.bytes > KVF_CARVE_MAX);
        for (uint32_t more = 0; more < 1000; more++) {
            KVF_CARVE(&carver, array, KVF_CARVE_MAX / sizeof *array);
            assert_true(carver.bytes > KVF_CARVE_MAX);
            assert_null(array);
        }
    }
    kvf_carver carver = {0}; /* the sum of what would fit alone */
    KVF_CARVE(&carver, array, KVF_CARVE_MAX / sizeof *array);
    assert_int_equal(carver.bytes, KVF_CARVE_MAX);
    KVF_CARVE(&carver, array, 1);
    assert_true(carver.bytes > KVF_CARVE_MAX);
}
