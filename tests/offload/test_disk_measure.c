/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The disk bench: every kind of pass by every engine moves the bytes that it says and compares
 * them, with nothing left behind in its folder; bad cases, refusals and failures have a name, and
 * the next pass is right again.
 */

#include "link_measure.h"

#include <dirent.h>
#include <errno.h>
#include <unistd.h>

#include "kvferry/setting.h"
#include "offload_rig.h"
#include "refusals.h"

#define BYTES ((uint64_t)16 << 20)

typedef struct disk_rig {
    kvf_context *context;
    kvf_disk *disk;
    char folder[32];
    rig_fault fault;
    int says;
} disk_rig;

static int answer(void *user, const char *what)
{
    disk_rig *d = user;
    return rig_refuse(&d->fault, what) ? d->says : 0;
}

static void open_disk(disk_rig *d)
{
    *d = (disk_rig){.folder = "/tmp/kvf-disk-XXXXXX", .says = 1};
    assert_non_null(mkdtemp(d->folder));
    const kvf_allocator allocator = {.alloc = rig_alloc, .free = rig_free, .user = &d->fault};
    assert_int_equal(kvf_context_create(&allocator, NULL, NULL, &d->context), KVF_OK);
    d->context->fault = answer;
    d->context->fault_user = d;
    assert_int_equal(kvf_disk_bench_open(d->context, d->folder, BYTES, &d->disk), KVF_OK);
}

static void close_disk(disk_rig *d)
{
    kvf_disk_close(d->disk);
    assert_int_equal(d->context->live_bytes, 0);
    kvf_context_destroy(d->context);
    assert_int_equal(rmdir(d->folder), 0); /* nothing is there */
}

static kvf_disk_case small_case(void)
{
    kvf_disk_case c;
    kvf_disk_case_init(&c);
    c.extent_bytes = 16384;
    c.extents = 100;
    c.depth = 16;
    return c;
}

/* KVF_OK, or what this machine lacks. */
static kvf_status measure(disk_rig *d, const kvf_disk_case *c, kvf_disk_result *r)
{
    const kvf_status status = kvf_disk_measure(d->disk, c, r);
    assert_true(status == KVF_OK || status == KVF_UNSUPPORTED);
    return status;
}

TEST(every_kind_of_pass)
{
    disk_rig d;
    uint32_t passes = 0;
    open_disk(&d);
    for (uint32_t i = 0; i < 3 * 2 * 2 * 2; i++) {
        kvf_disk_case c = small_case();
        kvf_disk_result r;
        c.what = (kvf_disk_what)(i % 3);
        c.engine = (kvf_disk_engine)(i / 3 % 2);
        c.direct = i / 6 % 2;
        c.extent_bytes = i < 12 ? 16384 : 1 << 20;
        c.extents = i < 12 ? 100 : 16;
        if (measure(&d, &c, &r) != KVF_OK) {
            assert_true(c.direct || c.engine == KVF_DISK_URING);
            continue;
        }
        passes++;
        assert_int_equal(r.bytes, c.extents * c.extent_bytes);
        assert_int_equal(r.verified_bytes, c.what == KVF_DISK_WRITE ? 0 : 16 * c.extent_bytes);
        assert_int_equal(r.align > 1, c.direct);
        assert_true(r.ns >= r.request.max_ns && r.request.min_ns > 0);
        assert_true(c.engine == KVF_DISK_URING || r.kept == 0);
    }
    assert_true(passes >= 6); /* through the cache, without a ring */
    close_disk(&d);
}

/* FIELD VALUE & FIELD VALUE ... of a small case. */
static kvf_status measure_row(void *user, char *change, size_t size, kvf_error *error)
{
    disk_rig *d = user;
    kvf_disk_result r;
    kvf_disk_case c = small_case();
    for (char *field = change, *next; field; field = next) {
        const char *value = refusals_part(field, &next);
        if (!refusals_set(kvf_disk_setting, &c, field, value))
            fail_msg("there is no field %s", field);
    }
    const kvf_status status = kvf_disk_measure(d->disk, &c, &r);
    kvf_context_error(d->context, error);
    return status;
}

TEST(bad_cases_are_refused)
{
    disk_rig d;
    kvf_disk *other = NULL;
    open_disk(&d);
    refusals_check(
        &(refusals){.path = "tests/offload/disk.refusals", .call = measure_row, .user = &d});
    assert_int_equal(kvf_disk_bench_open(d.context, d.folder, BYTES + 1, &other), KVF_INVALID);
    assert_int_equal(kvf_disk_bench_open(d.context, "/nowhere", BYTES, &other), KVF_SYSTEM);
    kvf_disk_close(NULL);
    close_disk(&d);
}

/* Memory, files and rings: each refused once, and completions that fail or are partial. */
TEST(each_refusal_once)
{
    const int says[] = {1, -EAGAIN, 4096};
    disk_rig d;
    open_disk(&d);
    for (uint32_t i = 0; i < 4 * 3; i++) {
        kvf_disk_case c = small_case();
        c.engine = (kvf_disk_engine)(i % 2);
        c.what = i / 2 % 2 ? KVF_DISK_WRITE : KVF_DISK_RANDOM;
        c.direct = 0;
        c.extents = 8;
        c.depth = 4;
        d.says = says[i / 4];
        for (uint64_t at = 1;; at++) {
            kvf_disk_result r;
            d.fault = (rig_fault){.at = at};
            const kvf_status status = kvf_disk_measure(d.disk, &c, &r);
            const int was_refused = d.fault.refused[0] != 0;
            d.fault = (rig_fault){0};
            assert_true(status == KVF_OK || was_refused || c.engine == KVF_DISK_URING);
            assert_int_equal(measure(&d, &c, &r), kvf_disk_measure(d.disk, &c, &r));
            if (!was_refused)
                break;
            assert_true(at < 500);
        }
    }
    static const char *const names[] = {"file open", "file reserve", "file write"};
    for (uint32_t i = 0; i < 3; i++) {
        kvf_disk *other = NULL;
        d.fault = (rig_fault){.at = 1, .only = names[i]};
        assert_int_equal(kvf_disk_bench_open(d.context, d.folder, BYTES, &other), KVF_SYSTEM);
        assert_null(other);
    }
    close_disk(&d);
}
