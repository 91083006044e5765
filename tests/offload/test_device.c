/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Operations of a device that only some callers need: words of kernels, elapsed times, batches,
 * streams of the caller, graphs. On the host device, or on CUDA where the environment asks for it.
 */

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "offload_rig.h"
#include "topology.h"

#define ROUNDS 200u
#define BYTES  4096u

/* ---- words ---- */

/* A list of nothing, as `gather` publishes its own: after all earlier work, the words `request`
 * and `done` hold the ticket. They lie at 64 and 128 of the memory, whose first word stays 0. */
static kvf_status publish(kvf_stream *stream, char *s, uint32_t ticket)
{
    const kvf_publish_args args = {.ticket = ticket,
                                   .count = (const uint32_t *)(void *)s,
                                   .out_count = (uint32_t *)(void *)(s + 32),
                                   .request = (uint32_t *)(void *)(s + 64),
                                   .done = (uint32_t *)(void *)(s + 128)};
    return KVF_ENQUEUE(stream, publish, args);
}

static const uint32_t *word_of(const char *s)
{
    return (const uint32_t *)(const void *)(s + 64);
}

typedef struct reader {
    char *shared;
    uint32_t wrong;
} reader;

#define NUMBERS_AT 512u /* of the shared memory */

/* Whoever sees word i sees number i. */
static void *read_all(void *raw)
{
    reader *r = raw;
    for (uint32_t i = 1; i <= ROUNDS; i++) {
        while ((int32_t)(kvf_word_load(word_of(r->shared)) - i) < 0) {
            const struct timespec time = {.tv_nsec = 1000};
            nanosleep(&time, NULL);
        }
        r->wrong += ((const uint32_t *)(const void *)(r->shared + NUMBERS_AT))[i] != 3 * i;
    }
    return NULL;
}

/* A stream hands numbers to a thread; the caller enqueues everything and waits once. */
TEST(test_words)
{
    for (uint32_t seed = 0; seed < 2; seed++) {
        rig r;
        rig_open(&r, &(rig_config){.delay_seed = seed});
        kvf_stream *stream = rig_stream(&r);
        reader reads = {.shared = rig_shared(&r, BYTES)};
        uint32_t given[ROUNDS + 1], *numbers = rig_memory(&r, sizeof given);
        for (uint32_t i = 0; i <= ROUNDS; i++)
            given[i] = 3 * i;
        rig_put(&r, numbers, given, sizeof given);
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, read_all, &reads), 0);
        for (uint32_t i = 1; i <= ROUNDS; i++) {
            RIG_OK(r.ops->copy(stream, reads.shared + NUMBERS_AT + 4 * i, numbers + i, 4));
            RIG_OK(publish(stream, reads.shared, i));
        }
        RIG_OK(r.ops->stream_wait(stream));
        pthread_join(thread, NULL);
        assert_int_equal(reads.wrong, 0);
        rig_close(&r);
    }
}

/* ---- times ---- */

static void sleep_ms(const void *raw, uint32_t task)
{
    const struct timespec time = {.tv_nsec = *(const long *)raw * 1000000};
    nanosleep(&time, NULL);
}

RIG_TEST(test_elapsed)
{
    kvf_stream *stream = rig_stream(r);
    kvf_event *from, *to, *untimed = rig_event(r);
    uint64_t ns = 1;
    const long ms = 20;
    RIG_OK(r->ops->event_create(r->device, true, &from));
    RIG_OK(r->ops->event_create(r->device, true, &to));
    assert_int_equal(r->ops->event_elapsed(from, to, &ns), KVF_INVALID); /* never recorded */
    RIG_OK(r->ops->event_record(from, stream));
    RIG_OK(r->ops->host_call(stream, sleep_ms, &ms, sizeof ms));
    RIG_OK(r->ops->event_record(to, stream));
    RIG_OK(r->ops->event_record(untimed, stream));
    RIG_OK(r->ops->event_wait(untimed));
    RIG_OK(r->ops->event_elapsed(from, to, &ns));
    assert_true(ns >= 19500000u);
    assert_int_equal(r->ops->event_elapsed(from, untimed, &ns), KVF_INVALID);
    r->ops->event_destroy(from);
    r->ops->event_destroy(to);
}

/* ---- batches ---- */

RIG_TEST(test_batch)
{
    enum { COPIES = 600, SIZE = 64 }; /* more than one call of the driver takes */
    kvf_stream *stream = rig_stream(r);
    char *from = rig_memory(r, COPIES * SIZE), *to = rig_memory(r, COPIES * SIZE);
    void *targets[COPIES];
    const void *sources[COPIES];
    static char sent[COPIES * SIZE], seen[COPIES * SIZE];
    for (uint32_t i = 0; i < COPIES; i++)
        memset(sent + i * SIZE, (int)(i * 7 + 1), SIZE);
    rig_put(r, from, sent, sizeof sent);
    for (uint32_t i = 0; i < COPIES; i++) {
        sources[i] = from + i * SIZE;
        targets[i] = to + i * 37 % COPIES * SIZE;
    }
    RIG_OK(r->ops->copy_batch(stream, targets, sources, 0, COPIES));
    RIG_OK(r->ops->copy_batch(stream, targets, sources, SIZE, 0));
    RIG_OK(r->ops->copy_batch(stream, targets, sources, SIZE, COPIES));
    memset(targets, 0, sizeof targets); /* they were read */
    RIG_OK(r->ops->stream_wait(stream));
    rig_put(r, seen, to, sizeof seen);
    for (uint32_t i = 0; i < COPIES; i++)
        assert_memory_equal(seen + i * 37 % COPIES * SIZE, sent + i * SIZE, SIZE);
}

/* ---- streams of the caller, and graphs ---- */

RIG_TEST(test_wrapped_stream)
{
    kvf_stream *stream = rig_stream(r), *wrapped;
    if (r->kind != KVF_DEVICE_HOST) {
        void *native = r->ops->stream_native(stream);
        char *bytes = rig_memory(r, 2), seen[2];
        RIG_OK(r->ops->stream_wrap(r->device, native, &wrapped));
        assert_ptr_equal(r->ops->stream_native(wrapped), native);
        RIG_OK(r->ops->fill(stream, bytes, 5, 1)); /* one order for both names */
        RIG_OK(r->ops->copy(wrapped, bytes + 1, bytes, 1));
        r->ops->stream_destroy(wrapped); /* waits, and leaves the stream */
        rig_put(r, seen, bytes, sizeof seen);
        assert_int_equal(seen[1], 5);
        RIG_OK(r->ops->fill(stream, bytes, 6, 1));
        RIG_OK(r->ops->stream_wait(stream));
        rig_put(r, seen, bytes, sizeof seen);
        assert_int_equal(seen[0], 6);
    }
}

static void add(const void *raw, uint32_t task)
{
    uint32_t *const *number = raw;
    **number += 10;
}

/* Recorded work does not run; what runs is what was recorded, as often as it is launched. */
static void record_and_replay(rig *r, kvf_stream *stream, kvf_stream *side)
{
    kvf_graph *graph = NULL, *none = (kvf_graph *)(void *)r;
    kvf_event *fork = rig_event(r), *join = rig_event(r);
    uint32_t *words = rig_memory(r, 2 * sizeof *words), added = 0, *number = &added;
    char *s = rig_shared(r, BYTES);
    assert_false(r->ops->is_capturing(stream));
    RIG_OK(r->ops->capture_begin(stream));
    assert_true(r->ops->is_capturing(stream));
    assert_int_equal(r->ops->capture_begin(side), KVF_BUSY);
    RIG_OK(r->ops->copy(stream, words + 1, words, sizeof *words));
    RIG_OK(r->ops->event_record(fork, stream));
    RIG_OK(r->ops->stream_wait_event(side, fork));
    RIG_OK(r->ops->host_call(side, add, &number, sizeof number));
    RIG_OK(r->ops->event_record(join, side));
    RIG_OK(r->ops->stream_wait_event(stream, join));
    RIG_OK(publish(stream, s, 9));
    RIG_OK(r->ops->capture_end(stream, &graph));
    assert_false(r->ops->is_capturing(stream));
    assert_int_equal(kvf_word_load(word_of(s)), 0);
    assert_int_equal(added, 0);
    for (uint32_t i = 1; i <= 3; i++) {
        uint32_t seen[2] = {i * 100, 0};
        rig_put(r, words, seen, sizeof *seen);
        memset(s, 0, BYTES);
        RIG_OK(r->ops->graph_launch(graph, stream));
        RIG_OK(r->ops->stream_wait(stream));
        rig_put(r, seen, words, sizeof seen);
        assert_int_equal(seen[1], i * 100);
        assert_int_equal(added, i * 10);
        assert_int_equal(kvf_word_load(word_of(s)), 9);
    }
    assert_int_equal(r->ops->capture_end(stream, &none), KVF_INVALID);
    assert_null(none);
    r->ops->graph_destroy(graph);
}

RIG_TEST(test_graphs)
{
    kvf_stream *stream = rig_stream(r), *side = rig_stream(r);
    kvf_device_properties properties;
    r->ops->properties(r->device, &properties);
    assert_int_equal(r->ops->is_capturing(stream), 0);
    if (properties.can_capture) {
        r->ops->graph_destroy(NULL);
        record_and_replay(r, stream, side);
    }
}

/* ---- what the machine says ---- */

TEST(test_pci_link)
{
    static const struct {
        const char *address;
        uint32_t generation, width;
    } cases[] = {{"0000:3b:00.0", 5, 16},
                 {"0000:af:00.0", 4, 8},
                 {"0000:00:04.0", 0, 0},
                 {"0000:99:00.0", 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t generation = 77, width = 77;
        kvf_pci_link_read(KVF_TEST_DATA "/sysfs", cases[i].address, &generation, &width);
        assert_int_equal(generation, cases[i].generation);
        assert_int_equal(width, cases[i].width);
    }
}

/* A card of generation 5 with 16 lanes, below a switch that does not say its speed, in a slot of
 * generation 4 with 8 lanes: the link is that of the slot. */
TEST(test_pci_link_of_slot)
{
    static const struct {
        const char *folder, *speed, *width;
    } steps[] = {
        {"0000:00:01.0", "16.0 GT/s PCIe\n", "8\n"},
        {"0000:00:01.0/0000:01:00.0", "Unknown\n", "0\n"},
        {"0000:00:01.0/0000:01:00.0/0000:02:08.0", "32.0 GT/s PCIe\n", "16\n"},
        {"0000:00:01.0/0000:01:00.0/0000:02:08.0/0000:03:00.0", "32.0 GT/s PCIe\n", "16\n"}};
    rig_tree t = {.root = "/tmp/kvf-link-XXXXXX"};
    assert_non_null(mkdtemp(t.root));
    rig_tree_put(&t, "bus/pci/devices/none", "");
    rig_tree_put(&t, "devices/pci0000:00/max_link_width", "1\n"); /* of no bridge */
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        char path[256], target[256];
        const char *address = strrchr(steps[i].folder, '/');
        address = address ? address + 1 : steps[i].folder;
        snprintf(path, sizeof path, "devices/pci0000:00/%s/max_link_speed", steps[i].folder);
        rig_tree_put(&t, path, steps[i].speed);
        snprintf(path, sizeof path, "devices/pci0000:00/%s/max_link_width", steps[i].folder);
        rig_tree_put(&t, path, steps[i].width);
        snprintf(path, sizeof path, "%s/bus/pci/devices/%s", t.root, address);
        snprintf(target, sizeof target, "../../../devices/pci0000:00/%s", steps[i].folder);
        assert_int_equal(symlink(target, path), 0);
        uint32_t generation = 77, width = 77;
        kvf_pci_link_read(t.root, address, &generation, &width);
        assert_int_equal(generation, 4);
        assert_int_equal(width, 8);
    }
    rig_tree_remove(&t);
}
