/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streams, events and launches of the host device under forced delays.
 *
 * The main property: a random program over several streams, whose order is enforced by events
 * alone, gives the bytes that running it sequentially gives.
 */

#include <stdatomic.h>

#include "offload_rig.h"

#define STREAMS    4u
#define CELLS      24u
#define CELL_WORDS 64u
#define PROGRAM    400u

typedef uint32_t cell[CELL_WORDS];

typedef struct mix_args {
    uint32_t *to;
    const uint32_t *from;
    uint32_t salt;
} mix_args;

/* Task t mixes word t: neither commutes nor repeats, so any wrong order shows. */
static void mix(const void *raw, uint32_t task)
{
    const mix_args *a = raw;
    a->to[task] = a->to[task] * 31u + (a->from[task] ^ (a->salt + task));
}

typedef struct step {
    enum { STEP_MIX, STEP_COPY, STEP_FILL, STEP_CALL } kind;
    uint32_t stream, to, from, salt;
} step;

static void run_step(const step *s, cell *cells)
{
    mix_args args = {.to = cells[s->to], .from = cells[s->from], .salt = s->salt};
    switch (s->kind) {
    case STEP_COPY:
        memcpy(cells[s->to], cells[s->from], sizeof(cell));
        break;
    case STEP_FILL:
        memset(cells[s->to], (int)(s->salt & 0xff), sizeof(cell));
        break;
    default:
        for (uint32_t t = 0; t < (s->kind == STEP_MIX ? CELL_WORDS : 1); t++)
            mix(&args, t);
    }
}

static void enqueue_step(rig *r, kvf_stream *stream, const step *s, cell *cells)
{
    mix_args args = {.to = cells[s->to], .from = cells[s->from], .salt = s->salt};
    switch (s->kind) {
    case STEP_MIX:
        RIG_OK(rig_launch(r, stream, mix, &args, sizeof args, CELL_WORDS));
        break;
    case STEP_COPY:
        if (s->salt & 1)
            RIG_OK(r->ops->copy(stream, cells[s->to], cells[s->from], sizeof(cell)));
        else
            RIG_OK(r->ops->copy_through(stream, cells[s->to], cells[s->from], sizeof(cell)));
        break;
    case STEP_FILL:
        RIG_OK(r->ops->fill(stream, cells[s->to], (int)(s->salt & 0xff), sizeof(cell)));
        break;
    case STEP_CALL:
        RIG_OK(r->ops->host_call(stream, mix, &args, sizeof args));
        break;
    }
}

static void make_program(rig_random *random, step *program)
{
    for (uint32_t i = 0; i < PROGRAM; i++) {
        step *s = &program[i];
        uint32_t dice = rig_below(random, 8);
        s->kind = dice < 4 ? STEP_MIX : dice < 6 ? STEP_COPY : dice < 7 ? STEP_CALL : STEP_FILL;
        s->stream = rig_below(random, STREAMS);
        s->to = rig_below(random, CELLS);
        do {
            s->from = rig_below(random, CELLS);
        } while (s->from == s->to);
        s->salt = (uint32_t)rig_next(random);
    }
}

/*
 * One event per cell, recorded by whoever touched the cell last, on whatever stream, over and over.
 * A step waits for both of its cells before and records both after, which is all the order there
 * is.
 */
static void run_on_streams(rig *r, const step *program, cell *cells)
{
    kvf_stream *streams[STREAMS];
    kvf_event *events[CELLS];
    for (uint32_t i = 0; i < STREAMS; i++)
        RIG_OK(r->ops->stream_create(r->device, (kvf_stream_priority)(i % 3), &streams[i]));
    for (uint32_t i = 0; i < CELLS; i++)
        events[i] = rig_event(r);
    for (uint32_t i = 0; i < PROGRAM; i++) {
        const step *s = &program[i];
        kvf_stream *stream = streams[s->stream];
        RIG_OK(r->ops->stream_wait_event(stream, events[s->to]));
        RIG_OK(r->ops->stream_wait_event(stream, events[s->from]));
        enqueue_step(r, stream, s, cells);
        RIG_OK(r->ops->event_record(events[s->to], stream));
        RIG_OK(r->ops->event_record(events[s->from], stream));
    }
    for (uint32_t i = 0; i < STREAMS; i++)
        RIG_OK(r->ops->stream_wait(streams[i]));
    for (uint32_t i = 0; i < STREAMS; i++)
        r->ops->stream_destroy(streams[i]);
}

TEST(test_random_program)
{
    static step program[PROGRAM];
    static cell expected[CELLS];
    for (uint32_t seed = 1; seed <= 6; seed++) {
        rig_random random = rig_seed("random program", seed);
        make_program(&random, program);
        rig r;
        rig_open(&r, &(rig_config){.threads = 1 + seed % 3, .delay_seed = seed * 101});
        cell *got = rig_shared(&r, sizeof expected); /* host functions are its kernels */
        for (uint32_t c = 0; c < CELLS; c++)
            for (uint32_t w = 0; w < CELL_WORDS; w++)
                expected[c][w] = got[c][w] = (uint32_t)rig_next(&random);
        for (uint32_t i = 0; i < PROGRAM; i++)
            run_step(&program[i], expected);
        run_on_streams(&r, program, got);
        assert_memory_equal(expected, got, sizeof expected);
        rig_close(&r);
    }
}

/* ---- single properties ---- */

typedef struct gate {
    atomic_int is_open;
    atomic_int count;
} gate;

static void pass_gate(const void *raw, uint32_t task)
{
    gate *g = *(gate *const *)raw;
    while (!atomic_load(&g->is_open)) {
        struct timespec time = {.tv_nsec = 100000};
        nanosleep(&time, NULL);
    }
    atomic_fetch_add(&g->count, 1);
}

/* An event recorded again elsewhere still holds back those who waited for its first record. */
RIG_TEST(test_event_recorded_again)
{
    kvf_stream *slow = rig_stream(r), *fast = rig_stream(r), *waiter = rig_stream(r);
    kvf_event *event = rig_event(r);
    assert_true(r->ops->event_is_done(event)); /* never recorded: nothing to wait for */
    RIG_OK(r->ops->event_wait(event));

    gate g = {0};
    gate *pointer = &g;
    char *bytes = rig_memory(r, 2), *seen = bytes, *flag = bytes + 1;
    RIG_OK(r->ops->host_call(slow, pass_gate, &pointer, sizeof pointer));
    RIG_OK(r->ops->fill(slow, flag, 1, 1));
    RIG_OK(r->ops->event_record(event, slow)); /* generation 1 */
    RIG_OK(r->ops->stream_wait_event(waiter, event));
    RIG_OK(r->ops->copy(waiter, seen, flag, 1));
    RIG_OK(r->ops->event_record(event, fast)); /* generation 2, fires first */
    RIG_OK(r->ops->stream_wait(fast));
    assert_true(r->ops->event_is_done(event));
    RIG_OK(r->ops->event_wait(event));
    atomic_store(&g.is_open, 1);
    RIG_OK(r->ops->stream_wait(waiter));
    char is_seen = 0;
    rig_put(r, &is_seen, seen, 1);
    assert_int_equal(is_seen, 1);
}

/* More entries than the queue holds: the caller is held back, nothing is lost or reordered. */
RIG_TEST(test_full_queue)
{
    kvf_stream *stream = rig_stream(r);
    uint32_t words[2] = {0, 0}, expected = 0;
    mix_args args = {.to = words, .from = words + 1};
    for (uint32_t i = 0; i < 5 * KVF_STREAM_QUEUE_MAX; i++) {
        args.salt = i;
        RIG_OK(rig_launch(r, stream, mix, &args, sizeof args, 1));
        expected = expected * 31u + i;
    }
    RIG_OK(r->ops->stream_wait(stream));
    assert_int_equal(words[0], expected);
}

typedef struct count_args {
    atomic_uint *counts;
} count_args;

static void count_task(const void *raw, uint32_t task)
{
    atomic_fetch_add(&((const count_args *)raw)->counts[task], 1);
}

/* Several streams share the team: every task of every launch runs exactly once. */
TEST(test_tasks_run_once)
{
    enum { TASKS = 97, LAUNCHES = 200 };
    static atomic_uint counts[STREAMS][TASKS];
    memset(counts, 0, sizeof counts);
    rig r;
    rig_open(&r, &(rig_config){.threads = 3});
    kvf_stream *streams[STREAMS];
    for (uint32_t i = 0; i < STREAMS; i++)
        RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &streams[i]));
    for (uint32_t n = 0; n < LAUNCHES; n++)
        for (uint32_t i = 0; i < STREAMS; i++) {
            count_args args = {counts[i]};
            RIG_OK(rig_launch(&r, streams[i], count_task, &args, sizeof args, n % TASKS + 1));
        }
    for (uint32_t i = 0; i < STREAMS; i++)
        r.ops->stream_destroy(streams[i]); /* waits */
    for (uint32_t i = 0; i < STREAMS; i++)
        for (uint32_t t = 0; t < TASKS; t++) {
            uint32_t expected = 0;
            for (uint32_t n = 0; n < LAUNCHES; n++)
                expected += t <= n % TASKS;
            assert_int_equal(counts[i][t], expected);
        }
    rig_close(&r);
}

RIG_TEST(test_launch_of_nothing)
{
    kvf_stream *stream = rig_stream(r);
    RIG_OK(r->ops->launch(stream, mix, NULL, 0, 0)); /* no tasks: not run */
    RIG_OK(r->ops->copy(stream, NULL, NULL, 0));
    RIG_OK(r->ops->stream_wait(stream));
}

/* An error sticks, skips later work, travels along events, and nobody waits forever. */
RIG_TEST(test_error_is_sticky)
{
    kvf_stream *a = rig_stream(r), *b = rig_stream(r);
    kvf_event *event = rig_event(r);
    char *bytes = rig_memory(r, 2);
    RIG_OK(rig_fail(r, a));
    RIG_OK(r->ops->fill(a, bytes, 'X', 1));
    RIG_OK(r->ops->event_record(event, a));
    RIG_OK(r->ops->stream_wait_event(b, event));
    RIG_OK(r->ops->fill(b, bytes + 1, 'X', 1));
    assert_int_equal(r->ops->event_wait(event), KVF_CORRUPT);
    assert_int_equal(r->ops->stream_wait(a), KVF_CORRUPT);
    assert_int_equal(r->ops->stream_wait(a), KVF_CORRUPT);
    assert_int_equal(r->ops->stream_wait(b), KVF_CORRUPT);
    /* Work that is enqueued after an error can be skipped on the host only. */
    char seen[2];
    rig_put(r, seen, bytes, sizeof seen);
    for (int i = 0; i < 2; i++)
        assert_int_equal(seen[i], r->kind == KVF_DEVICE_HOST ? 0 : 'X');
}

RIG_TEST(test_device_memory)
{
    kvf_device_properties properties;
    r->ops->properties(r->device, &properties);
    const int is_host = r->kind == KVF_DEVICE_HOST;
    assert_int_equal(properties.compute_threads, is_host ? 2 : 0);
    assert_int_equal(properties.shares_host_memory, is_host);
    assert_int_equal(properties.pins_host_memory, !is_host);
    const size_t sizes[] = {
        1, 64, 4095, ((size_t)2 << 20) - 1, (size_t)2 << 20, ((size_t)5 << 20) + 3};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *memory;
        RIG_OK(r->ops->memory_alloc(r->device, sizes[i], &memory));
        assert_int_equal((uintptr_t)memory % 64, 0);
        char *bytes = malloc(sizes[i]);
        assert_non_null(bytes);
        rig_put(r, bytes, memory, sizes[i]);
        for (size_t b = 0; b<sizes[i]; b += sizes[i]> 8192 ? 509 : 1)
            assert_int_equal(bytes[b], 0);
        free(bytes);
        rig_set(r, memory, 0x5a, sizes[i]);
        r->ops->memory_free(r->device, memory);
        assert_true(r->context->live_bytes <
                    65536); /* nothing of it is left but the device itself */
    }
    void *memory = r;
    assert_int_equal(r->ops->memory_alloc(r->device, SIZE_MAX / 2, &memory),
                     KVF_OUT_OF_DEVICE_MEMORY);
    assert_null(memory);
    r->ops->memory_free(r->device, NULL);
}

/* Past the cache or not: the same bytes, at any size and alignment, and not one more. */
RIG_TEST(test_copy_through)
{
    enum { SIZE = 70000 };
    static char sent[SIZE], seen[SIZE];
    char *from = rig_memory(r, SIZE), *to = rig_memory(r, SIZE);
    kvf_stream *stream = rig_stream(r);
    rig_random random = rig_seed("copy through", 5);
    for (size_t i = 0; i < SIZE; i++)
        sent[i] = (char)rig_next(&random);
    rig_put(r, from, sent, SIZE);
    const size_t sizes[] = {0, 1, 15, 16, 64, 16384, 16400, 65536, 65551};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t shift = 0; shift < 200; shift += 40 + i) {
            RIG_OK(r->ops->fill(stream, to, 0x77, SIZE));
            RIG_OK(r->ops->copy_through(stream, to + 64 + shift, from + shift / 2, sizes[i]));
            RIG_OK(r->ops->copy(stream, seen, to, SIZE));
            RIG_OK(r->ops->stream_wait(stream));
            assert_memory_equal(seen + 64 + shift, sent + shift / 2, sizes[i]);
            assert_int_equal(seen[63 + shift], 0x77);
            assert_int_equal(seen[64 + shift + sizes[i]], 0x77);
        }
}
