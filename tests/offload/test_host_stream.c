/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streams, events and launches of the host device under forced delays.
 *
 * The main property: a random program over several streams, whose order is enforced by events
 * alone, gives the bytes that running it sequentially gives.
 */

#include <fenv.h>
#include <pthread.h>
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
        RIG_OK(r->ops->event_create(r->device, &events[i]));
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
    for (uint32_t i = 0; i < CELLS; i++)
        r->ops->event_destroy(events[i]);
    for (uint32_t i = 0; i < STREAMS; i++)
        r->ops->stream_destroy(streams[i]);
}

static void test_random_program(void **state)
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
        rig_give_shared(&r, got);
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
static void test_event_recorded_again(void **state)
{
    rig r;
    rig_open(&r, NULL);
    kvf_stream *slow, *fast, *waiter;
    kvf_event *event;
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &slow));
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &fast));
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &waiter));
    RIG_OK(r.ops->event_create(r.device, &event));
    assert_true(r.ops->event_is_done(event)); /* never recorded: nothing to wait for */
    RIG_OK(r.ops->event_wait(event));

    gate g = {0};
    gate *pointer = &g;
    char *bytes = rig_memory(&r, 2), *seen = bytes, *flag = bytes + 1;
    RIG_OK(r.ops->host_call(slow, pass_gate, &pointer, sizeof pointer));
    RIG_OK(r.ops->fill(slow, flag, 1, 1));
    RIG_OK(r.ops->event_record(event, slow)); /* generation 1 */
    RIG_OK(r.ops->stream_wait_event(waiter, event));
    RIG_OK(r.ops->copy(waiter, seen, flag, 1));
    RIG_OK(r.ops->event_record(event, fast)); /* generation 2, fires first */
    RIG_OK(r.ops->stream_wait(fast));
    assert_true(r.ops->event_is_done(event));
    RIG_OK(r.ops->event_wait(event));
    atomic_store(&g.is_open, 1);
    RIG_OK(r.ops->stream_wait(waiter));
    char is_seen = 0;
    rig_put(&r, &is_seen, seen, 1);
    assert_int_equal(is_seen, 1);

    r.ops->memory_free(r.device, bytes);
    r.ops->stream_destroy(slow);
    r.ops->stream_destroy(fast);
    r.ops->stream_destroy(waiter);
    r.ops->event_destroy(event);
    rig_close(&r);
}

/* More entries than the queue holds: the caller is held back, nothing is lost or reordered. */
static void test_full_queue(void **state)
{
    rig r;
    rig_open(&r, NULL);
    kvf_stream *stream;
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &stream));
    uint32_t words[2] = {0, 0}, expected = 0;
    mix_args args = {.to = words, .from = words + 1};
    for (uint32_t i = 0; i < 5 * KVF_STREAM_QUEUE_MAX; i++) {
        args.salt = i;
        RIG_OK(rig_launch(&r, stream, mix, &args, sizeof args, 1));
        expected = expected * 31u + i;
    }
    RIG_OK(r.ops->stream_wait(stream));
    assert_int_equal(words[0], expected);
    r.ops->stream_destroy(stream);
    rig_close(&r);
}

typedef struct count_args {
    atomic_uint *counts;
} count_args;

static void count_task(const void *raw, uint32_t task)
{
    atomic_fetch_add(&((const count_args *)raw)->counts[task], 1);
}

/* Several streams share the team: every task of every launch runs exactly once. */
static void test_tasks_run_once(void **state)
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

static void test_bad_launch(void **state)
{
    rig r;
    rig_open(&r, NULL);
    kvf_stream *stream;
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &stream));
    char args[KVF_LAUNCH_ARGS_MAX + 1] = {0};
    kvf_error error;
    assert_int_equal(r.ops->launch(stream, mix, args, sizeof args, 1), KVF_INVALID);
    assert_non_null(strstr(rig_error(&r, &error), "257 bytes"));
    RIG_OK(r.ops->launch(stream, mix, NULL, 0, 0)); /* no tasks: not run */
    RIG_OK(r.ops->copy(stream, NULL, NULL, 0));
    RIG_OK(r.ops->stream_wait(stream));
    r.ops->stream_destroy(stream);
    rig_close(&r);
}

typedef struct fail_args {
    rig *r;
    kvf_stream *stream;
} fail_args;

static void fail_stream(const void *raw, uint32_t task)
{
    const fail_args *a = raw;
    a->r->ops->stream_fail(a->stream, KVF_CORRUPT);
}

/* An error sticks, skips later work, travels along events, and nobody waits forever. */
static void test_error_is_sticky(void **state)
{
    rig r;
    rig_open(&r, NULL);
    kvf_stream *a, *b;
    kvf_event *event;
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &a));
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &b));
    RIG_OK(r.ops->event_create(r.device, &event));
    char *bytes = rig_memory(&r, 2);
    fail_args args = {&r, a};
    RIG_OK(r.ops->host_call(a, fail_stream, &args, sizeof args));
    RIG_OK(r.ops->fill(a, bytes, 'X', 1));
    RIG_OK(r.ops->event_record(event, a));
    RIG_OK(r.ops->stream_wait_event(b, event));
    RIG_OK(r.ops->fill(b, bytes + 1, 'X', 1));
    assert_int_equal(r.ops->event_wait(event), KVF_CORRUPT);
    assert_int_equal(r.ops->stream_wait(a), KVF_CORRUPT);
    assert_int_equal(r.ops->stream_wait(a), KVF_CORRUPT);
    assert_int_equal(r.ops->stream_wait(b), KVF_CORRUPT);
    /* What is enqueued behind an error can be skipped on the host only. */
    char seen[2];
    rig_put(&r, seen, bytes, sizeof seen);
    for (int i = 0; i < 2; i++)
        assert_int_equal(seen[i], r.kind == KVF_DEVICE_HOST ? 0 : 'X');
    r.ops->memory_free(r.device, bytes);
    r.ops->stream_destroy(a);
    r.ops->stream_destroy(b);
    r.ops->event_destroy(event);
    rig_close(&r);
}

static void test_device_memory(void **state)
{
    rig r;
    rig_open(&r, NULL);
    kvf_device_properties properties;
    r.ops->properties(r.device, &properties);
    const int is_host = r.kind == KVF_DEVICE_HOST;
    assert_int_equal(properties.compute_threads, is_host ? 2 : 0);
    assert_int_equal(properties.shares_host_memory, is_host);
    assert_int_equal(properties.pins_host_memory, !is_host);
    const size_t sizes[] = {
        1, 64, 4095, ((size_t)2 << 20) - 1, (size_t)2 << 20, ((size_t)5 << 20) + 3};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *memory;
        RIG_OK(r.ops->memory_alloc(r.device, sizes[i], &memory));
        assert_int_equal((uintptr_t)memory % 64, 0);
        char *bytes = malloc(sizes[i]);
        assert_non_null(bytes);
        rig_put(&r, bytes, memory, sizes[i]);
        for (size_t b = 0; b<sizes[i]; b += sizes[i]> 8192 ? 509 : 1)
            assert_int_equal(bytes[b], 0);
        free(bytes);
        rig_set(&r, memory, 0x5a, sizes[i]);
        r.ops->memory_free(r.device, memory);
        assert_true(r.context->live_bytes <
                    65536); /* nothing of it is left but the device itself */
    }
    void *memory = &r;
    assert_int_equal(r.ops->memory_alloc(r.device, SIZE_MAX / 2, &memory),
                     KVF_OUT_OF_DEVICE_MEMORY);
    assert_null(memory);
    r.ops->memory_free(r.device, NULL);
    rig_close(&r);
}

/* Past the cache or not: the same bytes, at any size and alignment, and not one more. */
static void test_copy_through(void **state)
{
    enum { SIZE = 70000 };
    rig r;
    rig_open(&r, NULL);
    static char sent[SIZE], seen[SIZE];
    char *from = rig_memory(&r, SIZE), *to = rig_memory(&r, SIZE);
    kvf_stream *stream;
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &stream));
    rig_random random = rig_seed("copy through", 5);
    for (size_t i = 0; i < SIZE; i++)
        sent[i] = (char)rig_next(&random);
    rig_put(&r, from, sent, SIZE);
    const size_t sizes[] = {0, 1, 15, 16, 64, 16384, 16400, 65536, 65551};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t shift = 0; shift < 200; shift += 40 + i) {
            RIG_OK(r.ops->fill(stream, to, 0x77, SIZE));
            RIG_OK(r.ops->copy_through(stream, to + 64 + shift, from + shift / 2, sizes[i]));
            RIG_OK(r.ops->copy(stream, seen, to, SIZE));
            RIG_OK(r.ops->stream_wait(stream));
            assert_memory_equal(seen + 64 + shift, sent + shift / 2, sizes[i]);
            assert_int_equal(seen[63 + shift], 0x77);
            assert_int_equal(seen[64 + shift + sizes[i]], 0x77);
        }
    r.ops->memory_free(r.device, from);
    r.ops->memory_free(r.device, to);
    r.ops->stream_destroy(stream);
    rig_close(&r);
}

/* ---- work that its waiter does: of the host device ---- */

/* A stream whose work was waited for at once, so that the next is left to a waiter: at the latest
 * here, on a machine that does not take its threads away in between. */
static kvf_stream *open_waited(rig *r)
{
    kvf_stream *stream;
    RIG_OK(r->ops->stream_create(r->device, KVF_PRIORITY_NORMAL, &stream));
    uint32_t words[2] = {0, 0};
    mix_args args = {.to = words, .from = words + 1};
    for (uint32_t i = 0; i < 3; i++) {
        RIG_OK(rig_launch(r, stream, mix, &args, sizeof args, 1));
        RIG_OK(r->ops->stream_wait(stream));
    }
    return stream;
}

typedef struct place {
    pthread_t thread;
    float third;
} place;

/* Who runs, and how it rounds. */
static void tell_place(const void *raw, uint32_t task)
{
    place *p = *(place *const *)raw;
    const volatile float one = 1.0f, three = 3.0f;
    p->thread = pthread_self();
    p->third = one / three;
}

/* A wait behind a call does what was called itself, and rounds as the stream's thread does. */
static void test_waiter_runs_work(void **state)
{
    rig r;
    rig_open(&r, &(rig_config){.threads = 1});
    kvf_stream *stream = open_waited(&r);
    place seen = {0}, *pointer = &seen;
    const int rounding = fegetround();
    bool was_here = false;
    assert_int_equal(fesetround(FE_DOWNWARD), 0);
    for (uint32_t i = 0; i < 10000 && !was_here; i++) {
        RIG_OK(rig_launch(&r, stream, tell_place, &pointer, sizeof pointer, 1));
        RIG_OK(r.ops->stream_wait(stream));
        was_here = pthread_equal(seen.thread, pthread_self());
        assert_true(seen.third > 1.0 / 3.0); /* downwards it would be less */
    }
    assert_int_equal(fegetround(), FE_DOWNWARD);
    assert_int_equal(fesetround(rounding), 0);
    assert_true(was_here);
    r.ops->stream_destroy(stream);
    rig_close(&r);
}

static void sleep_us(uint32_t us)
{
    struct timespec time = {.tv_nsec = (long)us * 1000};
    nanosleep(&time, NULL);
}

static void raise_flag(const void *raw, uint32_t task)
{
    atomic_store(*(atomic_int *const *)raw, 1);
}

/* For half a minute at most. */
static bool is_raised(atomic_int *flag)
{
    for (uint32_t i = 0; i < 300000 && !atomic_load(flag); i++)
        sleep_us(100);
    return atomic_load(flag);
}

/* Work that was left to a waiter happens too where nobody waits, where another stream or a poll
 * does, and where the stream ends. */
static void test_left_work_happens(void **state)
{
    enum { NOBODY, STREAM, EVENT, POLL, END, WAYS };
    rig r;
    rig_open(&r, NULL);
    for (uint32_t way = 0; way < WAYS; way++) {
        kvf_stream *left = open_waited(&r), *other;
        kvf_event *event;
        RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &other));
        RIG_OK(r.ops->event_create(r.device, &event));
        atomic_int flag = 0, *pointer = &flag;
        RIG_OK(r.ops->host_call(left, raise_flag, &pointer, sizeof pointer));
        RIG_OK(r.ops->event_record(event, left));
        if (way == STREAM) {
            RIG_OK(r.ops->stream_wait_event(other, event));
            RIG_OK(r.ops->stream_wait(other));
            assert_true(atomic_load(&flag));
        }
        if (way == EVENT) {
            RIG_OK(r.ops->event_wait(event));
            assert_true(atomic_load(&flag));
        }
        for (uint32_t i = 0; way == POLL && i < 300000 && r.ops->event_is_done(event) != 1; i++)
            sleep_us(100);
        if (way == END)
            r.ops->stream_destroy(left);
        assert_true(way == NOBODY ? is_raised(&flag) : atomic_load(&flag));
        if (way != END)
            r.ops->stream_destroy(left);
        r.ops->stream_destroy(other);
        r.ops->event_destroy(event);
    }
    rig_close(&r);
}

/* An entry that is held until it is let go, and who runs it. */
typedef struct held {
    rig *r;
    kvf_stream *stream;
    pthread_t runner;
    atomic_int is_running, is_open;
    kvf_status status;
} held;

static void hold(const void *raw, uint32_t task)
{
    held *h = *(held *const *)raw;
    h->runner = pthread_self();
    atomic_store(&h->is_running, 1);
    (void)is_raised(&h->is_open);
}

static void *run_held(void *raw)
{
    held *h = raw;
    h->status = h->r->ops->host_call(h->stream, hold, &h, sizeof h);
    if (h->status == KVF_OK)
        h->status = h->r->ops->stream_wait(h->stream);
    return NULL;
}

/* A waiter stops at what it waits for. What came meanwhile happens without anybody: by now the
 * worker sleeps, and whoever enqueued it saw that somebody ran. */
static bool work_behind_a_waiter_happens(rig *r)
{
    held h = {.r = r, .stream = open_waited(r)};
    atomic_int flag = 0, *pointer = &flag;
    pthread_t waiter;
    assert_int_equal(pthread_create(&waiter, NULL, run_held, &h), 0);
    assert_true(is_raised(&h.is_running));
    sleep_us(50000); /* for longer than the worker looks */
    RIG_OK(r->ops->host_call(h.stream, raise_flag, &pointer, sizeof pointer));
    atomic_store(&h.is_open, 1);
    const bool by_waiter = pthread_equal(h.runner, waiter);
    assert_int_equal(pthread_join(waiter, NULL), 0);
    RIG_OK(h.status);
    assert_true(is_raised(&flag));
    r->ops->stream_destroy(h.stream);
    return by_waiter;
}

static void test_work_behind_a_waiter(void **state)
{
    rig r;
    bool by_waiter = false;
    rig_open(&r, &(rig_config){.threads = 1});
    for (uint32_t i = 0; i < 100 && !by_waiter; i++)
        by_waiter = work_behind_a_waiter_happens(&r);
    assert_true(by_waiter);
    rig_close(&r);
}

typedef struct crowd {
    rig *r;
    kvf_stream *stream;
    uint32_t seed;
    uint32_t *total;   /* of all, changed by entries alone */
    uint32_t *entries; /* own */
    kvf_status status;
} crowd;

static void count_two(const void *raw, uint32_t task)
{
    uint32_t *const *two = raw;
    ++*two[0];
    ++*two[1];
}

enum { CROWD = 3, CROWD_ENTRIES = 400 };

/* One to four entries, a pause or none, a wait behind which all of them are done. */
static void *enqueue_and_wait(void *raw)
{
    crowd *c = raw;
    rig_random random = {c->seed * 0x9e3779b97f4a7c15u | 1u};
    uint32_t *two[2] = {c->total, c->entries};
    for (uint32_t n = 0; n < CROWD_ENTRIES && c->status == KVF_OK;) {
        for (uint32_t more = 1 + rig_below(&random, 4); more > 0 && n < CROWD_ENTRIES; more--, n++)
            if (c->status == KVF_OK)
                c->status = rig_launch(c->r, c->stream, count_two, two, sizeof two, 1);
        if (rig_below(&random, 4) == 0)
            sleep_us(rig_below(&random, 300));
        if (c->status == KVF_OK)
            c->status = c->r->ops->stream_wait(c->stream);
        if (*c->entries != n)
            c->status = KVF_CORRUPT;
    }
    return NULL;
}

/* Waiters of one stream, its worker and each other: entries run one at a time, and all of them. */
static void test_many_waiters(void **state)
{
    for (uint32_t seed = 0; seed < 3; seed++) {
        rig r;
        rig_open(&r, &(rig_config){.threads = 1 + seed, .delay_seed = seed * 17});
        kvf_stream *stream = open_waited(&r);
        pthread_t threads[CROWD];
        crowd crowds[CROWD];
        uint32_t *counts = rig_shared(&r, (CROWD + 1) * sizeof *counts);
        for (uint32_t i = 0; i < CROWD; i++) {
            crowds[i] = (crowd){.r = &r,
                                .stream = stream,
                                .seed = 1 + seed * CROWD + i,
                                .total = counts,
                                .entries = counts + 1 + i};
            assert_int_equal(pthread_create(&threads[i], NULL, enqueue_and_wait, &crowds[i]), 0);
        }
        for (uint32_t i = 0; i < CROWD; i++) {
            assert_int_equal(pthread_join(threads[i], NULL), 0);
            RIG_OK(crowds[i].status);
            assert_int_equal(counts[1 + i], CROWD_ENTRIES);
        }
        assert_int_equal(counts[0], CROWD * CROWD_ENTRIES);
        rig_give_shared(&r, counts);
        r.ops->stream_destroy(stream);
        rig_close(&r);
    }
}

/* An error of what a waiter runs is that of the stream. */
static void test_error_of_left_work(void **state)
{
    rig r;
    rig_open(&r, NULL);
    kvf_stream *stream = open_waited(&r);
    fail_args args = {&r, stream};
    char *bytes = rig_memory(&r, 1), seen = 0;
    RIG_OK(r.ops->host_call(stream, fail_stream, &args, sizeof args));
    RIG_OK(r.ops->fill(stream, bytes, 'X', 1));
    assert_int_equal(r.ops->stream_wait(stream), KVF_CORRUPT);
    assert_int_equal(r.ops->stream_wait(stream), KVF_CORRUPT);
    rig_put(&r, &seen, bytes, 1);
    assert_int_equal(seen, 0);
    r.ops->memory_free(r.device, bytes);
    r.ops->stream_destroy(stream);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_program), cmocka_unit_test(test_event_recorded_again),
        cmocka_unit_test(test_full_queue),     cmocka_unit_test(test_tasks_run_once),
        cmocka_unit_test(test_bad_launch),     cmocka_unit_test(test_error_is_sticky),
        cmocka_unit_test(test_device_memory),  cmocka_unit_test(test_copy_through),
    };
    const struct CMUnitTest of_host[] = {
        cmocka_unit_test(test_waiter_runs_work),     cmocka_unit_test(test_left_work_happens),
        cmocka_unit_test(test_work_behind_a_waiter), cmocka_unit_test(test_many_waiters),
        cmocka_unit_test(test_error_of_left_work),
    };
    int failed = cmocka_run_group_tests_name("streams", tests, NULL, NULL);
    if (rig_kind() == KVF_DEVICE_HOST)
        failed += cmocka_run_group_tests_name("waiters of the host device", of_host, NULL, NULL);
    return failed;
}
