/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Hidden states that wait, in memory and in a file: rows come back with their bytes however they
 * were cut, every refusal and every failure has a name, and nothing of a failure is left.
 */

#include "harness.h"

#include <errno.h>
#include <stdatomic.h>
#include <unistd.h>

#include <kvferry/prune.h>

#include "common/random.h"

#define SEED      23u
#define ROW_BYTES 49152u /* a window of a file has 85 of them */
#define ROWS      200u

typedef struct rows_world {
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_hidden *hidden;
    char *host;       /* [ROWS] rows, as the device may see them */
    void *pinned;     /* of `host`, as it is freed */
    char *host_alias; /* as the device sees it */
    void *device;     /* [ROWS] */
    char *wanted;     /* [ROWS] */
} rows_world;

static const char *const folders[] = {NULL, "/tmp"};

static void rows_open(rows_world *w, const char *folder)
{
    const kvf_runtime_config rc = test_runtime_config();
    void *alias = NULL;
    *w = (rows_world){0};
    assert_int_equal(test_runtime_open(&rc, &w->runtime, NULL), KVF_OK);
    test_ok(w, kvf_stream_create(w->runtime, &w->stream));
    test_ok(w, kvf_pinned_alloc(w->runtime, ROWS * ROW_BYTES, &w->pinned, &alias));
    test_ok(w, kvf_memory_alloc(w->runtime, ROWS * ROW_BYTES, &w->device));
    test_ok(w, kvf_hidden_open(w->runtime, ROW_BYTES, ROWS, folder, &w->hidden));
    w->host = w->pinned;
    w->host_alias = alias;
    w->wanted = calloc(ROWS, ROW_BYTES);
    assert_non_null(w->wanted);
}

static void rows_close(rows_world *w)
{
    test_ok(w, kvf_stream_wait(w->stream));
    kvf_hidden_close(w->hidden);
    kvf_memory_free(w->runtime, w->device);
    kvf_pinned_free(w->runtime, w->pinned);
    kvf_stream_destroy(w->stream);
    kvf_runtime_close(w->runtime);
    free(w->wanted);
}

/* New bytes for some rows. */
static kvf_status put(rows_world *w, uint32_t first, uint32_t count, uint64_t *random)
{
    const size_t at = (size_t)first * ROW_BYTES, bytes = (size_t)count * ROW_BYTES;
    for (size_t i = 0; i < bytes; i += 8) {
        const uint64_t word = kvf_random_next(random);
        memcpy(w->wanted + at + i, &word, sizeof word);
    }
    memcpy(w->host, w->wanted + at, bytes);
    test_ok(w, kvf_memory_copy(w->stream, w->device, w->host_alias, bytes));
    const kvf_status status = kvf_hidden_put(w->hidden, first, count, w->device, w->stream);
    test_ok(w, kvf_stream_wait(w->stream));
    return status;
}

static kvf_status get(rows_world *w, uint32_t first, uint32_t count)
{
    const kvf_status status = kvf_hidden_get(w->hidden, first, count, w->device, w->stream);
    if (status == KVF_OK)
        test_ok(w, kvf_memory_copy(w->stream, w->host_alias, w->device, (size_t)count * ROW_BYTES));
    test_ok(w, kvf_stream_wait(w->stream));
    return status;
}

static void expect_rows(rows_world *w, uint32_t first, uint32_t count)
{
    test_ok(w, get(w, first, count));
    assert_memory_equal(w->host, w->wanted + (size_t)first * ROW_BYTES, (size_t)count * ROW_BYTES);
}

TEST(rows_come_back)
{
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        uint64_t random = test_seed(SEED);
        rows_world w;
        rows_open(&w, folders[i]);
        test_ok(&w, put(&w, 0, ROWS, &random));
        for (uint32_t round = 0; round < test_afford(12); round++) {
            const uint32_t first = kvf_random_below(&random, ROWS);
            const uint32_t count = kvf_random_below(&random, ROWS - first + 1);
            test_ok(&w, put(&w, first, count, &random));
            const uint32_t other = kvf_random_below(&random, ROWS);
            expect_rows(&w, other, kvf_random_below(&random, ROWS - other + 1));
        }
        expect_rows(&w, 0, ROWS);
        rows_close(&w);
    }
}

/* The planned bytes are taken, and those of one row or one window. */
TEST(what_is_planned_is_taken)
{
    kvf_runtime *runtime = test_runtime();
    kvf_hidden_plan memory, disk;
    kvf_hidden_plan_make(ROW_BYTES, ROWS, 0, &memory);
    kvf_hidden_plan_make(ROW_BYTES, ROWS, 1, &disk);
    assert_int_equal(memory.host_bytes, ROWS * ROW_BYTES);
    assert_int_equal(memory.disk_bytes, 0);
    assert_int_equal(disk.host_bytes, (4u << 20) / ROW_BYTES * ROW_BYTES);
    assert_int_equal(disk.disk_bytes, ROWS * ROW_BYTES);
    kvf_hidden_plan_make(6u << 20, 3, 1, &disk);
    assert_int_equal(disk.host_bytes, 6u << 20);
    kvf_hidden_plan_make(100, 3, 1, &disk);
    assert_int_equal(disk.host_bytes, 300);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        kvf_hidden *hidden = NULL;
        const uint64_t before = runtime->context->live_bytes;
        kvf_hidden_plan plan;
        kvf_hidden_plan_make(ROW_BYTES, ROWS, folders[i] != NULL, &plan);
        test_expect(runtime, kvf_hidden_open(runtime, ROW_BYTES, ROWS, folders[i], &hidden),
                    KVF_OK);
        const uint64_t taken = runtime->context->live_bytes - before;
        /* The CUDA device counts what it registers once more. */
        const uint64_t planned = plan.host_bytes * (test_on_cuda() ? 2u : 1u);
        if (taken < planned || taken > planned + (64u << 10))
            fail_msg("%llu bytes are taken, %llu are planned", (unsigned long long)taken,
                     (unsigned long long)plan.host_bytes);
        kvf_hidden_close(hidden);
        assert_int_equal(runtime->context->live_bytes, before);
    }
    kvf_hidden_close(NULL);
    kvf_runtime_close(runtime);
}

/* ---- failures ---- */

/* Request n of a call fails, for all n: it is named, and the next call does all of it. */
static void sweep(rows_world *w, const char *what, int code)
{
    uint64_t random = test_seed(SEED);
    const bool writes = strcmp(what, "tier write") == 0;
    uint32_t failures = 0;
    test_ok(w, put(w, 0, ROWS, &random));
    kvf_device_set_fault(w->runtime->device, test_refuse, (void *)what);
    for (int n = 1;; n++) {
        const uint64_t live = w->runtime->context->live_bytes;
        atomic_store(&test_refuse_in, n);
        const kvf_status status = writes ? put(w, 0, ROWS, &random) : get(w, 0, ROWS);
        const bool is_done = atomic_exchange(&test_refuse_in, 0) > 0;
        assert_int_equal(w->runtime->context->live_bytes, live);
        if (is_done) {
            assert_int_equal(status, KVF_OK);
            break;
        }
        failures++;
        const kvf_error *error = kvf_runtime_error(w->runtime);
        assert_int_equal(status, KVF_SYSTEM);
        assert_int_equal(error->foreign, code);
        if (!strstr(error->text, writes ? "disk_path: writing" : "disk_path: reading"))
            fail_msg("%s", error->text);
        test_ok(w, put(w, 0, ROWS, &random));
        expect_rows(w, 0, ROWS);
    }
    assert_int_equal(failures, 3); /* windows of 85 rows */
    kvf_device_set_fault(w->runtime->device, NULL, NULL);
}

TEST(a_file_that_fails_is_named)
{
    rows_world w;
    rows_open(&w, "/tmp");
    sweep(&w, "tier write", ENOSPC);
    sweep(&w, "tier read", EIO);
    rows_close(&w);
}

static kvf_status open_hidden(void *user, kvf_error *error)
{
    kvf_hidden *hidden = NULL;
    const kvf_status status = kvf_hidden_open(user, ROW_BYTES, ROWS, "/tmp", &hidden);
    *error = *kvf_runtime_error(user);
    assert_true((status == KVF_OK) == (hidden != NULL));
    kvf_hidden_close(hidden);
    return status;
}

TEST(each_refusal_at_open)
{
    kvf_runtime *runtime = test_runtime();
    assert_true(test_refuse_each(runtime, open_hidden, runtime) >= 2); /* the file, and its room */
    kvf_runtime_close(runtime);
}

TEST(wrong_calls_are_refused)
{
    rows_world w;
    kvf_hidden *hidden = (kvf_hidden *)&w;
    rows_open(&w, NULL);
    test_refused(w.runtime, kvf_hidden_open(w.runtime, 0, 1, NULL, &hidden), KVF_INVALID,
                 "row_bytes = 0, rows_max = 1: a row has 1 to 67108864 bytes, and there is one or "
                 "more");
    assert_null(hidden);
    test_refused(w.runtime, kvf_hidden_open(w.runtime, 8, 0, NULL, &hidden), KVF_INVALID,
                 "row_bytes = 8, rows_max = 0: a row has 1 to 67108864 bytes, and there is one or "
                 "more");
    test_refused(w.runtime, kvf_hidden_open(w.runtime, (64u << 20) + 1, 1, NULL, &hidden),
                 KVF_INVALID,
                 "row_bytes = 67108865, rows_max = 1: a row has 1 to 67108864 bytes, and there is "
                 "one or more");
    test_refused(w.runtime, kvf_hidden_open(w.runtime, 8, 1, "/nowhere", &hidden), KVF_SYSTEM,
                 "/nowhere: a file cannot be made there: No such file or directory");
    test_refused(w.runtime, kvf_hidden_put(w.hidden, ROWS, 1, w.device, w.stream), KVF_INVALID,
                 "first = 200, count = 1: there is room for 200 rows");
    test_refused(w.runtime, kvf_hidden_get(w.hidden, 1, ROWS, w.device, w.stream), KVF_INVALID,
                 "first = 1, count = 200: there is room for 200 rows");
    test_refused(w.runtime, kvf_hidden_get(w.hidden, 201, 0, w.device, w.stream), KVF_INVALID,
                 "first = 201, count = 0: there is room for 200 rows");
    test_refused(w.runtime, kvf_hidden_put(w.hidden, 0, 2, NULL, w.stream), KVF_INVALID,
                 "rows is NULL with count = 2");
    test_ok(&w, kvf_hidden_put(w.hidden, ROWS, 0, NULL, w.stream));
    rows_close(&w);
}
