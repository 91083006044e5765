/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The runtime without a cache: settings, statuses, streams, launches, device memory, description.
 */

#include "harness.h"
#include "refusals.h"

#include <kvferry/setting.h>

#include "io_engine.h"

TEST(every_status_has_a_name_and_a_text)
{
#define CHECK(name, value, text)                                                                   \
    assert_int_equal(name, value);                                                                 \
    assert_string_equal(kvf_status_name(name), #name);                                             \
    assert_string_equal(kvf_status_text(name), text);
    KVF_STATUS_LIST(CHECK)
#undef CHECK
    assert_non_null(kvf_status_name((kvf_status)1234));
    assert_non_null(kvf_status_text((kvf_status)-1234));
    assert_string_equal(kvf_version(), "0.1.0");
}

static void *no_memory(void *user, size_t bytes, size_t alignment)
{
    return NULL;
}

/* FIELD VALUE; an allocator without free has no value. */
static kvf_status open_row(void *user, char *change, size_t size, kvf_error *error)
{
    kvf_runtime_config c = test_runtime_config();
    kvf_runtime *runtime = (kvf_runtime *)&c;
    const char *value = refusals_value(change);
    if (strcmp(change, "allocator") == 0)
        c.allocator.alloc = no_memory;
    else if (!refusals_set(kvf_runtime_setting, &c, change, value))
        fail_msg("there is no field %s", change);
    const kvf_status status = test_runtime_open(&c, &runtime, error);
    if (status == KVF_OK)
        return status; /* the table says so */
    assert_null(runtime);
    assert_int_equal(test_runtime_open(&c, &runtime, NULL), status);
    return status;
}

TEST(bad_runtime_settings_are_named)
{
    refusals_check(&(refusals){.path = "tests/runtime/handle/runtime.refusals", .call = open_row});
    kvf_runtime_config c = test_runtime_config();
    kvf_runtime *runtime = NULL;
    kvf_error error = {0};
    c.size = 3;
    assert_int_equal(test_runtime_open(&c, &runtime, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "size = 3"));
    c = test_runtime_config();
    c.numa_node = 4711;
    assert_int_equal(test_runtime_open(&c, &runtime, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "numa_node = 4711: this machine has no such node"));
}

TEST(two_runtimes_are_independent)
{
    kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *a = NULL, *b = NULL;
    test_expect(NULL, test_runtime_open(&rc, &a, NULL), KVF_OK);
    rc.threads = 3;
    test_expect(NULL, test_runtime_open(&rc, &b, NULL), KVF_OK);
    assert_int_equal(kvf_runtime_threads(a), 2);
    assert_int_equal(kvf_runtime_threads(b), 3);
    void *p = NULL;
    test_expect(a, kvf_memory_alloc(a, 0, &p), KVF_INVALID);
    assert_int_equal(kvf_runtime_error(a)->status, KVF_INVALID);
    assert_int_equal(kvf_runtime_error(b)->status, KVF_OK);
    kvf_runtime_close(a);
    kvf_runtime_close(b);
}

typedef struct adding {
    uint64_t *cells;
    uint64_t round;
} adding;

static void add_round(const void *args, uint32_t task)
{
    const adding *a = args;
    a->cells[task] = a->cells[task] * 3 + a->round + task;
}

/* Launches run in order, every task once, with the arguments of their call; copies between them. */
TEST(streams_run_in_order)
{
    static const uint32_t delays[] = {0, 77};
    if (test_on_cuda()) {
        print_message("# skipped: functions of the caller run on the host device only\n");
        skip();
    }
    for (int d = 0; d < 2; d++) {
        kvf_runtime_config rc = test_runtime_config();
        rc.threads = 3;
        test_hooks.delay_seed = delays[d];
        kvf_runtime *runtime = NULL;
        kvf_stream *stream = NULL;
        test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
        test_expect(runtime, kvf_stream_create(runtime, &stream), KVF_OK);
        void *memory = NULL;
        test_expect(runtime, kvf_memory_alloc(runtime, 100 * sizeof(uint64_t), &memory), KVF_OK);
        assert_int_equal((uintptr_t)memory % 64, 0);
        uint64_t wanted[100] = {0}, got[100], *cells = memory;
        const uint32_t rounds = d ? 40 : 1500; /* more than a queue holds */
        for (uint32_t i = 0; i < 100; i++)
            assert_int_equal(cells[i], 0);
        for (uint32_t i = 0; i < rounds; i++) {
            const adding a = {cells, i};
            test_expect(runtime, kvf_stream_launch(stream, add_round, &a, sizeof a, 100), KVF_OK);
            for (uint32_t t = 0; t < 100; t++)
                wanted[t] = wanted[t] * 3 + i + t;
        }
        test_expect(runtime, kvf_memory_copy(stream, got, cells, sizeof got), KVF_OK);
        test_expect(runtime, kvf_stream_wait(stream), KVF_OK);
        assert_memory_equal(got, wanted, sizeof got);
        char big[385] = {0};
        test_expect(runtime, kvf_stream_launch(stream, add_round, big, sizeof big, 1), KVF_INVALID);
        assert_non_null(strstr(kvf_runtime_error(runtime)->text, "385"));
        test_expect(runtime, kvf_stream_launch(stream, NULL, NULL, 0, 1), KVF_INVALID);
        kvf_stream_destroy(stream);
        kvf_memory_free(runtime, memory);
        kvf_memory_free(runtime, NULL);
        kvf_runtime_close(runtime);
    }
}

/* Braces and quotes close, and a cut text says how much it needs. */
TEST(the_description_is_json)
{
    kvf_runtime *runtime = test_runtime();
    size_t needed = 0, again = 0;
    test_expect(runtime, kvf_runtime_describe(runtime, NULL, 0, &needed), KVF_FULL);
    assert_true(needed > 2 && needed < 1u << 20);
    char *text = malloc(needed), cut[16];
    assert_non_null(text);
    test_expect(runtime, kvf_runtime_describe(runtime, text, needed, &again), KVF_OK);
    assert_int_equal(strlen(text) + 1, needed);
    assert_true(text[0] == '{' && text[strlen(text) - 1] == '}');
    int depth = 0, quoted = 0;
    for (const char *c = text; *c; c++) {
        if (*c == '\\')
            c++;
        else if (*c == '"')
            quoted = !quoted;
        else if (!quoted)
            depth += (*c == '{' || *c == '[') - (*c == '}' || *c == ']');
    }
    assert_int_equal(depth, 0);
    assert_int_equal(quoted, 0);
    test_expect(runtime, kvf_runtime_describe(runtime, cut, sizeof cut, &again), KVF_FULL);
    assert_true(strlen(cut) < sizeof cut);
    assert_int_equal(again, needed);
    free(text);
    kvf_runtime_close(runtime);
}

static int refuse_ring(void *user, const char *what)
{
    return strcmp(what, "ring") == 0;
}

/* @return whether this build can have a ring */
static bool described(kvf_runtime *runtime, const char *engine, const char *ring)
{
    static char text[1 << 16];
    char wanted[128];
    const uint64_t live = runtime->context->live_bytes;
    test_expect(runtime, kvf_runtime_describe(runtime, text, sizeof text, NULL), KVF_OK);
    snprintf(wanted, sizeof wanted, "\"disk_tier\":{\"engine\":\"%s\",\"liburing\":", engine);
    const char *tier = strstr(text, wanted);
    if (!tier)
        fail_msg("%s: %s", wanted, text);
    tier += strlen(wanted);
    const bool has_ring = strncmp(tier, "true", 4) == 0;
    if (!strstr(tier, has_ring ? ring : "\"io_uring\":\"this build has no liburing\"") ||
        !strstr(tier, "\"registered_max_bytes\":"))
        fail_msg("%s: %s", ring, text);
    assert_int_equal(runtime->context->live_bytes, live);
    return has_ring;
}

/* The engine is that of a tier, and a ring that is refused says why. No error is left behind. */
TEST(the_description_tells_of_the_disk_tier)
{
    kvf_runtime *runtime = test_runtime();
    kvf_io *io = NULL;
    test_expect(runtime, kvf_io_open(runtime->context, 80, &io), KVF_OK);
    const char *engine = io->ops->name;
    kvf_io_close(io);
    const kvf_error before = *kvf_runtime_error(runtime);
    const bool is_ring = strcmp(engine, "io_uring") == 0;
    const bool has_ring =
        described(runtime, engine, is_ring ? "\"io_uring\":\"allowed\"" : "was refused");
    assert_true(has_ring || !is_ring);
    kvf_device_set_fault(runtime->device, refuse_ring, NULL);
    assert_true(described(runtime, "preadv", "was refused") == has_ring);
    kvf_device_set_fault(runtime->device, NULL, NULL);
    assert_string_equal(kvf_runtime_error(runtime)->text, before.text);
    kvf_runtime_close(runtime);
}
