/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Hidden states that wait, in memory and in a file: states come back with their bytes however they
 * were cut, every refusal and every failure has a name, and nothing of a failure is left.
 */

#include "harness.h"

#include <errno.h>
#include <stdatomic.h>
#include <unistd.h>

#include <kvferry/prune.h>

#include "common/random.h"

#define SEED        23u
#define STATE_BYTES 49152u /* a window of a file has 85 of them */
#define STATES      200u

typedef struct states_world {
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_hidden *hidden;
    char *host;       /* [STATES] states, as the device may see them */
    void *pinned;     /* of `host`, as it is freed */
    char *host_alias; /* as the device sees it */
    void *device;     /* [STATES] */
    char *wanted;     /* [STATES] */
} states_world;

static const char *const folders[] = {NULL, "/tmp"};

static void states_open(states_world *w, const char *folder)
{
    const kvf_runtime_config rc = test_runtime_config();
    void *alias = NULL;
    *w = (states_world){0};
    assert_int_equal(test_runtime_open(&rc, &w->runtime, NULL), KVF_OK);
    test_ok(w, kvf_stream_create(w->runtime, &w->stream));
    test_ok(w, kvf_pinned_alloc(w->runtime, STATES * STATE_BYTES, &w->pinned, &alias));
    test_ok(w, kvf_memory_alloc(w->runtime, STATES * STATE_BYTES, &w->device));
    test_ok(w, kvf_hidden_open(w->runtime, STATE_BYTES, STATES, folder, &w->hidden));
    w->host = w->pinned;
    w->host_alias = alias;
    w->wanted = calloc(STATES, STATE_BYTES);
    assert_non_null(w->wanted);
}

static void states_close(states_world *w)
{
    test_ok(w, kvf_stream_wait(w->stream));
    kvf_hidden_close(w->hidden);
    kvf_memory_free(w->runtime, w->device);
    kvf_pinned_free(w->runtime, w->pinned);
    kvf_stream_destroy(w->stream);
    kvf_runtime_close(w->runtime);
    free(w->wanted);
}

/* New bytes for some states. */
static kvf_status put(states_world *w, uint32_t first, uint32_t count, uint64_t *random)
{
    const size_t at = (size_t)first * STATE_BYTES, bytes = (size_t)count * STATE_BYTES;
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

static kvf_status get(states_world *w, uint32_t first, uint32_t count)
{
    const kvf_status status = kvf_hidden_get(w->hidden, first, count, w->device, w->stream);
    if (status == KVF_OK)
        test_ok(w,
                kvf_memory_copy(w->stream, w->host_alias, w->device, (size_t)count * STATE_BYTES));
    test_ok(w, kvf_stream_wait(w->stream));
    return status;
}

static void expect_states(states_world *w, uint32_t first, uint32_t count)
{
    test_ok(w, get(w, first, count));
    assert_memory_equal(w->host, w->wanted + (size_t)first * STATE_BYTES,
                        (size_t)count * STATE_BYTES);
}

TEST(states_come_back)
{
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        uint64_t random = test_seed(SEED);
        states_world w;
        states_open(&w, folders[i]);
        test_ok(&w, put(&w, 0, STATES, &random));
        for (uint32_t round = 0; round < test_afford(12); round++) {
            const uint32_t first = kvf_random_below(&random, STATES);
            const uint32_t count = kvf_random_below(&random, STATES - first + 1);
            test_ok(&w, put(&w, first, count, &random));
            const uint32_t other = kvf_random_below(&random, STATES);
            expect_states(&w, other, kvf_random_below(&random, STATES - other + 1));
        }
        expect_states(&w, 0, STATES);
        states_close(&w);
    }
}

/* The planned bytes are taken, and those of one state or one buffer. */
TEST(what_is_planned_is_taken)
{
    kvf_runtime *runtime = test_runtime();
    kvf_hidden_plan memory, disk;
    kvf_hidden_plan_make(STATE_BYTES, STATES, 0, &memory);
    kvf_hidden_plan_make(STATE_BYTES, STATES, 1, &disk);
    assert_int_equal(memory.host_bytes, STATES * STATE_BYTES);
    assert_int_equal(memory.disk_bytes, 0);
    assert_int_equal(disk.host_bytes, (4u << 20) / STATE_BYTES * STATE_BYTES);
    assert_int_equal(disk.disk_bytes, STATES * STATE_BYTES);
    kvf_hidden_plan_make(6u << 20, 3, 1, &disk);
    assert_int_equal(disk.host_bytes, 6u << 20);
    kvf_hidden_plan_make(100, 3, 1, &disk);
    assert_int_equal(disk.host_bytes, 300);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        kvf_hidden *hidden = NULL;
        const uint64_t before = runtime->context->live_bytes;
        kvf_hidden_plan plan;
        kvf_hidden_plan_make(STATE_BYTES, STATES, folders[i] != NULL, &plan);
        test_expect(runtime, kvf_hidden_open(runtime, STATE_BYTES, STATES, folders[i], &hidden),
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
static void sweep(states_world *w, const char *what, int code)
{
    uint64_t random = test_seed(SEED);
    const bool writes = strcmp(what, "tier write") == 0;
    uint32_t failures = 0;
    test_ok(w, put(w, 0, STATES, &random));
    kvf_device_set_fault(w->runtime->device, test_refuse, (void *)what);
    for (int n = 1;; n++) {
        const uint64_t live = w->runtime->context->live_bytes;
        atomic_store(&test_refuse_in, n);
        const kvf_status status = writes ? put(w, 0, STATES, &random) : get(w, 0, STATES);
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
        test_ok(w, put(w, 0, STATES, &random));
        expect_states(w, 0, STATES);
    }
    assert_int_equal(failures, 3); /* buffers of 85 states */
    kvf_device_set_fault(w->runtime->device, NULL, NULL);
}

TEST(a_file_that_fails_is_named)
{
    states_world w;
    states_open(&w, "/tmp");
    sweep(&w, "tier write", ENOSPC);
    sweep(&w, "tier read", EIO);
    states_close(&w);
}

static kvf_status open_hidden(void *user, kvf_error *error)
{
    kvf_hidden *hidden = NULL;
    const kvf_status status = kvf_hidden_open(user, STATE_BYTES, STATES, "/tmp", &hidden);
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
    states_world w;
    kvf_hidden *hidden = (kvf_hidden *)&w;
    states_open(&w, NULL);
    test_refused(w.runtime, kvf_hidden_open(w.runtime, 0, 1, NULL, &hidden), KVF_INVALID,
                 "state_bytes = 0, states_max = 1: a state takes 1 to 67108864 bytes, and "
                 "there is at least one");
    assert_null(hidden);
    test_refused(w.runtime, kvf_hidden_open(w.runtime, 8, 0, NULL, &hidden), KVF_INVALID,
                 "state_bytes = 8, states_max = 0: a state takes 1 to 67108864 bytes, and "
                 "there is at least one");
    test_refused(w.runtime, kvf_hidden_open(w.runtime, (64u << 20) + 1, 1, NULL, &hidden),
                 KVF_INVALID,
                 "state_bytes = 67108865, states_max = 1: a state takes 1 to 67108864 bytes, "
                 "and there is at least one");
    test_refused(w.runtime, kvf_hidden_open(w.runtime, 8, 1, "/nowhere", &hidden), KVF_SYSTEM,
                 "/nowhere: a file cannot be made there: No such file or directory");
    test_refused(w.runtime, kvf_hidden_put(w.hidden, STATES, 1, w.device, w.stream), KVF_INVALID,
                 "first = 200, count = 1: there is room for 200 states");
    test_refused(w.runtime, kvf_hidden_get(w.hidden, 1, STATES, w.device, w.stream), KVF_INVALID,
                 "first = 1, count = 200: there is room for 200 states");
    test_refused(w.runtime, kvf_hidden_get(w.hidden, 201, 0, w.device, w.stream), KVF_INVALID,
                 "first = 201, count = 0: there is room for 200 states");
    test_refused(w.runtime, kvf_hidden_put(w.hidden, 0, 2, NULL, w.stream), KVF_INVALID,
                 "states is NULL with count = 2");
    test_ok(&w, kvf_hidden_put(w.hidden, STATES, 0, NULL, w.stream));
    states_close(&w);
}
