/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Work that whoever waits for a stream of the host device does itself.
 *
 * The main properties: it happens once, in order, whoever comes, and where nobody comes; numbers
 * are rounded and errors are kept as if the stream's own thread had done it.
 */

#include <fenv.h>
#include <pthread.h>
#include <stdatomic.h>

#include "offload_rig.h"

static void raise_flag(const void *raw, uint32_t task)
{
    atomic_store(*(atomic_int *const *)raw, 1);
}

/* A stream whose work was waited for at once, so that the next is left to a waiter: at the latest
 * here, on a machine that does not take its threads away in between. */
static kvf_stream *open_waited(rig *r)
{
    kvf_stream *stream;
    RIG_OK(r->ops->stream_create(r->device, KVF_PRIORITY_NORMAL, &stream));
    atomic_int flag, *pointer = &flag;
    for (uint32_t i = 0; i < 3; i++) {
        RIG_OK(rig_launch(r, stream, raise_flag, &pointer, sizeof pointer, 1));
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

/* A wait after a call does what was called itself, and rounds as the stream's thread does. */
TEST(test_waiter_runs_work)
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

/* For half a minute at most. */
static bool is_raised(atomic_int *flag)
{
    for (uint32_t i = 0; i < 300000 && !atomic_load(flag); i++)
        sleep_us(100);
    return atomic_load(flag);
}

/* Work that was left to a waiter happens too where nobody waits, where another stream or a poll
 * does, and where the stream ends. */
RIG_TEST(test_left_work_happens)
{
    enum { NOBODY, STREAM, EVENT, POLL, END, WAYS };
    for (uint32_t way = 0; way < WAYS; way++) {
        kvf_stream *left = open_waited(r), *other = rig_stream(r);
        kvf_event *event = rig_event(r);
        atomic_int flag = 0, *pointer = &flag;
        RIG_OK(r->ops->host_call(left, raise_flag, &pointer, sizeof pointer));
        RIG_OK(r->ops->event_record(event, left));
        if (way == STREAM) {
            RIG_OK(r->ops->stream_wait_event(other, event));
            RIG_OK(r->ops->stream_wait(other));
            assert_true(atomic_load(&flag));
        }
        if (way == EVENT) {
            RIG_OK(r->ops->event_wait(event));
            assert_true(atomic_load(&flag));
        }
        for (uint32_t i = 0; way == POLL && i < 300000 && r->ops->event_is_done(event) != 1; i++)
            sleep_us(100);
        if (way == END)
            r->ops->stream_destroy(left);
        assert_true(way == NOBODY ? is_raised(&flag) : atomic_load(&flag));
        if (way != END)
            r->ops->stream_destroy(left);
    }
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

/* A waiter stops at what it waits for. Work that came meanwhile happens without anybody: by now the
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

TEST(test_work_behind_a_waiter)
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

/* One to four entries, a pause or none, a wait after which all of them are done. */
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
TEST(test_many_waiters)
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
        r.ops->stream_destroy(stream);
        rig_close(&r);
    }
}

/* An error of what a waiter runs is that of the stream. */
RIG_TEST(test_error_of_left_work)
{
    kvf_stream *stream = open_waited(r);
    char *bytes = rig_memory(r, 1), seen = 0;
    RIG_OK(rig_fail(r, stream));
    RIG_OK(r->ops->fill(stream, bytes, 'X', 1));
    assert_int_equal(r->ops->stream_wait(stream), KVF_CORRUPT);
    assert_int_equal(r->ops->stream_wait(stream), KVF_CORRUPT);
    rig_put(r, &seen, bytes, 1);
    assert_int_equal(seen, 0);
    r->ops->stream_destroy(stream);
}
