/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The link bench: every kind of case by every method moves the bytes that it says and compares
 * them, its times are consistent, nothing is left behind; bad cases are refused by name; the line
 * through points and the percentiles are those of a slow calculation.
 */

#include "link_measure.h"

#include <math.h>

#include "kvferry/setting.h"
#include "offload_rig.h"
#include "refusals.h"

#define MIB ((uint64_t)1 << 20)

typedef struct link_rig {
    rig r;
    kvf_link *bench;
} link_rig;

static void open_link(link_rig *l)
{
    const kvf_link_bench_config config = {.memory = {.node = -1, .touch_threads = 1},
                                          .gather_threads = 2};
    rig_open(&l->r, NULL);
    RIG_OK(kvf_link_bench_open(l->r.device, &config, &l->bench));
}

static void close_link(link_rig *l)
{
    kvf_link_close(l->bench);
    rig_close(&l->r);
}

static kvf_link_case small_case(void)
{
    kvf_link_case c;
    kvf_link_case_init(&c);
    c.pages = 40;
    c.page_bytes = 4096;
    c.pool_bytes = 4 * MIB;
    c.chunk_bytes = 16 * 4096;
    c.repetitions = 3;
    c.warmup = 1;
    c.layers = 3;
    c.gap_ns = 1000;
    return c;
}

static void assert_times(const kvf_link_times *t, int is_there)
{
    assert_true(t->min_ns <= t->median_ns && t->median_ns <= t->p95_ns && t->p95_ns <= t->p99_ns &&
                t->p99_ns <= t->max_ns);
    assert_int_equal(t->max_ns > 0, is_there);
}

TEST(test_methods)
{
    link_rig l;
    open_link(&l);
    const kvf_transfer methods[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH, KVF_TRANSFER_MAPPED,
                                    KVF_TRANSFER_BATCH};
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t pattern = 0; pattern < 3; pattern++) {
            kvf_link_case c = small_case();
            kvf_link_result r;
            uint64_t samples[3];
            c.method = methods[i];
            c.pattern = (kvf_link_pattern)pattern;
            c.slots_in_order = pattern == 1;
            c.writeback_percent = pattern * 50;
            c.seed = 100 + i;
            RIG_OK(kvf_link_measure(l.bench, &c, samples, &r));
            assert_int_equal(r.bytes, 40 * 4096);
            assert_int_equal(r.verified_bytes, 2 * 40 * 4096); /* the first and the last */
            assert_int_equal(r.copies, i == 0 ? 3 : i == 1 ? 40 : 1);
            assert_int_equal(r.writeback_bytes, pattern * (40 * 4096 / 2) * 3);
            assert_int_equal(r.workers, i == 0 ? 2 : 0);
            assert_int_equal(r.blocks > 0, i == 2);
            assert_times(&r.total, 1);
            assert_times(&r.copying, 1);
            assert_times(&r.gather, i == 0);
            assert_times(&r.fetch, 0);
            kvf_link_times again;
            kvf_link_times_sum_up(samples, 3, &again);
            assert_memory_equal(&again, &r.total, sizeof again);
        }
    close_link(&l);
}

TEST(test_kinds)
{
    link_rig l;
    open_link(&l);
    for (uint32_t what = KVF_LINK_GATHER; what <= KVF_LINK_BACK; what++) {
        kvf_link_case c = small_case();
        kvf_link_result r;
        const int is_staging = what == KVF_LINK_GATHER || what == KVF_LINK_MEMCPY;
        c.what = (kvf_link_what)what;
        c.pages = is_staging ? 100 : 40; /* more than the ring */
        c.writeback_percent = what == KVF_LINK_PEAK || what == KVF_LINK_MEMCPY ? 100 : 0;
        RIG_OK(kvf_link_measure(l.bench, &c, NULL, &r));
        assert_times(&r.total, 1);
        assert_times(&r.copying,
                     what == KVF_LINK_COPY || what == KVF_LINK_PEAK || what == KVF_LINK_BACK);
        assert_times(&r.gather, what == KVF_LINK_GATHER);
        assert_times(&r.fetch, what == KVF_LINK_CADENCE);
        assert_times(&r.alone, what == KVF_LINK_TAX);
        assert_true(strlen(r.tier) > 0);
        assert_int_equal(r.touch_s_per_gib > 0, what == KVF_LINK_PIN);
        const uint64_t bytes = what == KVF_LINK_PIN ? 0 : (uint64_t)c.pages * c.page_bytes;
        assert_int_equal(r.bytes, what == KVF_LINK_CADENCE ? 3 * bytes : bytes);
        if (is_staging)
            assert_int_equal(r.workers, what == KVF_LINK_MEMCPY ? 1 : 2);
        if (is_staging)
            assert_int_equal(r.verified_bytes, 2 * 48 * 4096); /* what the ring still holds */
        else
            assert_int_equal(r.verified_bytes, bytes);
        assert_int_equal(r.writeback_bytes, what == KVF_LINK_PEAK ? 3 * bytes : 0);
    }
    close_link(&l);
}

/* The pool outlives a case, and is made anew where a case asks for another. */
TEST(test_pool)
{
    link_rig l;
    kvf_link_result r;
    open_link(&l);
    kvf_link_case c = small_case();
    RIG_OK(kvf_link_measure(l.bench, &c, NULL, &r));
    const char *host = l.bench->pool.arenas[0].host;
    const uint64_t live = l.r.context->live_bytes;
    c.page_bytes = 16384;
    RIG_OK(kvf_link_measure(l.bench, &c, NULL, &r));
    assert_ptr_equal(l.bench->pool.arenas[0].host, host);
    assert_int_equal(l.r.context->live_bytes, live);
    c.pool_bytes = 8 * MIB;
    RIG_OK(kvf_link_measure(l.bench, &c, NULL, &r));
    assert_int_equal(l.bench->pool.bytes, 8 * MIB);
    close_link(&l);
}

/* A byte that is not what it should be is found, wherever it is. */
TEST(test_wrong_bytes)
{
    link_rig l;
    kvf_link_result r;
    open_link(&l);
    kvf_link_case c = small_case();
    c.pages = 1024; /* the whole pool */
    RIG_OK(kvf_link_measure(l.bench, &c, NULL, &r));
    const size_t places[] = {0, 4095, 8 * 4096 + 100, (size_t)(4 * MIB) - 1};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        l.bench->pool.arenas[0].host[places[i]] ^= 1;
        assert_int_equal(kvf_link_measure(l.bench, &c, NULL, &r), KVF_CORRUPT);
        RIG_TELLS(&l.r, "did not arrive whole");
        l.bench->pool.arenas[0].host[places[i]] ^= 1;
    }
    RIG_OK(kvf_link_measure(l.bench, &c, NULL, &r));
    close_link(&l);
}

/* FIELD VALUE of a small case. */
static kvf_status measure_row(void *user, char *change, size_t size, kvf_error *error)
{
    link_rig *l = user;
    kvf_link_result r;
    kvf_link_case c = small_case();
    const char *value = refusals_value(change);
    if (!refusals_set(kvf_link_setting, &c, change, value))
        fail_msg("there is no field %s", change);
    const kvf_status status = kvf_link_measure(l->bench, &c, NULL, &r);
    rig_error(&l->r, error);
    return status;
}

TEST(test_bad_cases)
{
    link_rig l;
    kvf_link_result r;
    kvf_link_case c = small_case();
    open_link(&l);
    refusals_check(
        &(refusals){.path = "tests/offload/link.refusals", .call = measure_row, .user = &l});
    c.size = 8;
    assert_int_equal(kvf_link_measure(l.bench, &c, NULL, &r), KVF_INVALID);
    RIG_TELLS(&l.r, "size = 8");
    close_link(&l);
}

/* Ids are in the pool; uniform ones are distinct; runs are runs; zipf prefers few. */
TEST(test_patterns)
{
    static uint32_t ids[4096], seen[5000];
    uint64_t random = 5;
    printf("patterns: seed 5\n");
    for (uint32_t round = 0; round < 30; round++) {
        const uint32_t pool = 4096 + round * 29;
        kvf_link_case c;
        kvf_link_case_init(&c);
        c.pages = 1 + round * 141;
        for (uint32_t pattern = 0; pattern < 3; pattern++) {
            uint32_t most = 0;
            c.pattern = (kvf_link_pattern)pattern;
            memset(seen, 0, sizeof seen);
            kvf_link_choose(&c, pool, &random, ids);
            for (uint32_t i = 0; i < c.pages; i++) {
                assert_true(ids[i] < pool);
                most = kvf_max_u32(most, ++seen[ids[i]]);
                if (pattern == KVF_LINK_RUNS && i % 8 != 0)
                    assert_int_equal(ids[i], ids[i - 1] + 1);
            }
            if (pattern == KVF_LINK_UNIFORM)
                assert_int_equal(most, 1);
            if (pattern == KVF_LINK_ZIPF && c.pages > 2000)
                assert_true(most > c.pages / 20); /* 1 / H(4096) is a ninth */
        }
    }
}

TEST(test_numbers)
{
    kvf_link_line line;
    double x[50], y[50];
    for (uint32_t i = 0; i < 50; i++) {
        x[i] = (i + 1) * 1e6;
        y[i] = 12000 + 0.02 * x[i];
    }
    for (int weighted = 0; weighted < 2; weighted++) {
        assert_int_equal(kvf_link_fit(x, y, 50, weighted, &line), KVF_OK);
        assert_true(fabs(line.intercept - 12000) < 1e-3 && fabs(line.slope - 0.02) < 1e-12);
        assert_true(line.r_squared > 0.999999);
    }
    y[49] *= 2; /* an outlier: the fit says so */
    assert_int_equal(kvf_link_fit(x, y, 50, 0, &line), KVF_OK);
    assert_true(line.r_squared < 0.95 && line.r_squared > 0.3);
    assert_int_equal(kvf_link_fit(x, y, 1, 0, &line), KVF_INVALID);
    x[1] = x[0];
    assert_int_equal(kvf_link_fit(x, y, 2, 0, &line), KVF_INVALID);
    y[3] = 0;
    assert_int_equal(kvf_link_fit(x, y, 50, 1, &line), KVF_INVALID);

    uint64_t ns[200];
    kvf_link_times t;
    for (uint32_t i = 0; i < 200; i++)
        ns[i] = (i * 67 + 11) % 200 + 1; /* 1 .. 200 in disorder */
    kvf_link_times_sum_up(ns, 200, &t);
    assert_int_equal(t.min_ns, 1);
    assert_int_equal(t.median_ns, 100);
    assert_int_equal(t.p95_ns, 190);
    assert_int_equal(t.p99_ns, 198);
    assert_int_equal(t.max_ns, 200);
    kvf_link_times_sum_up(ns, 1, &t);
    assert_true(t.min_ns == 1 && t.p99_ns == 1 && t.max_ns == 1);
}

/* Whatever is refused, a case fails with a status and leaves nothing. */
TEST(test_faults)
{
    link_rig l;
    open_link(&l);
    kvf_link_case c = small_case();
    kvf_link_result r;
    uint64_t refused = 0;
    for (uint64_t at = 1;; at += 1 + at / 16) {
        rig_fault fault = {.at = at};
        const kvf_link_what kinds[] = {KVF_LINK_BOTH, KVF_LINK_GATHER, KVF_LINK_CADENCE,
                                       KVF_LINK_TAX};
        c.what = kinds[at % 4];
        RIG_OK(kvf_link_measure(l.bench, &c, NULL, &r)); /* the pool is there */
        const uint64_t live = l.r.context->live_bytes;
        kvf_device_set_fault(l.r.device, rig_refuse, &fault);
        kvf_status status = kvf_link_measure(l.bench, &c, NULL, &r);
        kvf_device_set_fault(l.r.device, NULL, NULL);
        assert_int_equal(l.r.context->live_bytes, live);
        if (status == KVF_OK && fault.refused[0] == '\0')
            break;
        /* Huge pages fall back to the next tier. */
        assert_true(status != KVF_OK || strcmp(fault.refused, "hugetlb map") == 0);
        refused++;
    }
    assert_true(refused > 10);
    printf("%llu refusals\n", (unsigned long long)refused);
    close_link(&l);
}
