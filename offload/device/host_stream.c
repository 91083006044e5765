/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streams of the host device.
 *
 * Entries are executed off a ring of KVF_STREAM_QUEUE_MAX in order, one at a time: by the stream's
 * worker, or by whoever waits for them and finds that nobody is at it. Arguments lie inside the
 * entries, so enqueueing allocates nothing. Waiting threads spin for a few microseconds and then
 * sleep: the machine may have fewer cores than there are streams.
 *
 * To wake the worker takes longer than a short call does. So where the last wait came soon after
 * the little that it waited for, the next work is left to the waiter, and the worker only looks now
 * and then whether somebody came for it. It is called where anything else waits: another stream, a
 * poll.
 *
 * Invariants: done <= enqueued <= done + KVF_STREAM_QUEUE_MAX; an entry is written only while it is
 * outside [done, enqueued); who executes has is_running, and gives it up only when nothing is left
 * or after calling the worker.
 */

#include "host_stream.h"

#include <errno.h>
#include <fenv.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/random.h"
#include "host_team.h"

#define SPIN_NS       5000u
#define SPIN_TURNS    16u
/* A wait for so few entries, so soon after the first of them, leaves the next ones to itself. Work
 * that takes longer to enqueue is begun meanwhile. */
#define FEW           64u
#define SOON_NS       300000u
/* How often the worker looks for entries that are left to a waiter, and for how many looks without
 * one. */
#define LOOK_NS       1000000u
#define LOOKS         10u
/* Whoever finds the queue full sleeps until this many entries are free: one wake-up for all of
 * them. */
#define QUEUE_REFILL  256u
/* One call of the copy kernel: its four streams then stay within a page of memory each. */
#define THROUGH_BYTES ((size_t)16384)

typedef enum entry_kind {
    ENTRY_COPY,
    ENTRY_FILL,
    ENTRY_LAUNCH,
    ENTRY_CALL,
    ENTRY_RECORD,
    ENTRY_WAIT
} entry_kind;

typedef struct entry {
    entry_kind kind;
    union {
        struct {
            void *to;
            const void *from;
            size_t bytes;
            bool is_through;
        } copy;
        struct {
            void *to;
            int byte;
            size_t bytes;
        } fill;
        struct {
            kvf_task_fn fn;
            uint32_t tasks;
            _Alignas(16) char args[KVF_LAUNCH_ARGS_MAX];
        } launch;
        struct {
            kvf_event *event;
            uint64_t generation;
        } sync;
    } u;
} entry;

typedef struct host_stream {
    kvf_stream base; /* first member */
    kvf_host_device *device;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t filled;         /* the worker sleeps here */
    pthread_cond_t drained;        /* those who wait for room or for the end sleep here */
    atomic_uint_fast64_t enqueued; /* changed under lock */
    atomic_uint_fast64_t done;     /* changed under lock */
    bool is_worker_asleep;         /* guarded by lock: until it is called, and does not look */
    bool is_running;               /* guarded by lock: somebody executes entry `done` */
    bool is_left;                  /* guarded by lock: to waiters, and the worker looks */
    uint64_t waited;               /* guarded by lock: entries in front of the last wait */
    uint64_t filled_ns;            /* guarded by lock: the first entry after it; 0 = none */
    uint64_t wake_at;              /* guarded by lock: least `done` that somebody sleeps for */
    bool is_closing;               /* guarded by lock */
    kvf_error error;               /* guarded by lock: sticky */
    uint64_t delay_state;          /* of who runs; 0 = no delays */
    kvf_team_job job;              /* of who runs */
    fenv_t environment;            /* of the worker, for numbers: waiters run in it too */
    entry *ring;                   /* [KVF_STREAM_QUEUE_MAX] */
} host_stream;

static host_stream *of_stream(kvf_stream *stream)
{
    return (host_stream *)(void *)stream;
}

/* ---- execution ---- */

static kvf_status stream_status(host_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    kvf_status status = stream->error.status;
    pthread_mutex_unlock(&stream->lock);
    return status;
}

void kvf_host_stream_fail(kvf_stream *base, kvf_status status)
{
    host_stream *stream = of_stream(base);
    pthread_mutex_lock(&stream->lock);
    if (stream->error.status == KVF_OK)
        stream->error = kvf_context_told(base->device->context, status);
    pthread_mutex_unlock(&stream->lock);
}

/* One pause in four, up to 200 us: enough to reverse any order that nothing enforces. */
static void delay(host_stream *stream)
{
    if (stream->delay_state == 0)
        return;
    const uint64_t x = kvf_random_next(&stream->delay_state);
    if ((x >> 32 & 3) != 0)
        return;
    struct timespec time = {.tv_sec = 0, .tv_nsec = (long)((x >> 40) % 200000u)};
    nanosleep(&time, NULL);
}

/* Streaming stores save reading what is about to be overwritten: a third of the memory traffic. */
static void copy_bytes(const host_stream *stream, const entry *e)
{
    if (!e->u.copy.is_through) {
        memcpy(e->u.copy.to, e->u.copy.from, e->u.copy.bytes);
        return;
    }
    for (size_t i = 0; i < e->u.copy.bytes; i += THROUGH_BYTES) {
        size_t left = e->u.copy.bytes - i;
        const void *from = (const char *)e->u.copy.from + i;
        void *to = (char *)e->u.copy.to + i;
        kvf_copy_args args = {.bytes = left < THROUGH_BYTES ? left : THROUGH_BYTES,
                              .count = 1,
                              .per_task = 1,
                              .stream = 1,
                              .from = &from,
                              .to = &to};
        stream->device->base.kernels.copy(&args, 0);
    }
}

static void execute(host_stream *stream, const entry *e)
{
    delay(stream);
    kvf_status status = stream_status(stream);
    switch (e->kind) {
    case ENTRY_COPY:
        if (status == KVF_OK)
            copy_bytes(stream, e);
        break;
    case ENTRY_FILL:
        if (status == KVF_OK)
            memset(e->u.fill.to, e->u.fill.byte, e->u.fill.bytes);
        break;
    case ENTRY_LAUNCH:
        if (status == KVF_OK)
            kvf_team_run(stream->device->team, &stream->job, e->u.launch.fn, e->u.launch.args,
                         e->u.launch.tasks);
        break;
    case ENTRY_CALL:
        e->u.launch.fn(e->u.launch.args, 0);
        break;
    case ENTRY_RECORD:
        /* An error stays as it is once there is one, so it is read without the lock. */
        kvf_host_event_complete(e->u.sync.event, e->u.sync.generation,
                                status == KVF_OK ? NULL : &stream->error);
        break;
    case ENTRY_WAIT:
        status = kvf_host_event_await(e->u.sync.event, e->u.sync.generation);
        if (status != KVF_OK)
            kvf_host_stream_fail(&stream->base, status);
        break;
    }
}

/* Spin until more than `count` entries were enqueued, or for SPIN_NS. */
static void spin_for_more(const host_stream *stream, uint64_t count)
{
    uint64_t until = kvf_now_ns() + SPIN_NS;
    do {
        for (unsigned i = 0; i < SPIN_TURNS; i++) {
            if (atomic_load_explicit(&stream->enqueued, memory_order_relaxed) > count)
                return;
            kvf_pause();
        }
    } while (kvf_now_ns() < until);
}

static bool is_empty(const host_stream *stream)
{
    return atomic_load_explicit(&stream->enqueued, memory_order_relaxed) ==
           atomic_load_explicit(&stream->done, memory_order_relaxed);
}

/* The entries there are the worker's, also where it was left; under the lock. A worker that is just
 * ending a look sees it too. */
static void call_worker(host_stream *stream)
{
    if (stream->is_running || is_empty(stream))
        return;
    stream->is_left = false;
    pthread_cond_signal(&stream->filled);
}

/* Entries up to `target`, unless somebody is at it; under the lock, which is let go meanwhile. */
static void run(host_stream *stream, uint64_t target)
{
    uint64_t done = atomic_load_explicit(&stream->done, memory_order_relaxed);
    if (stream->is_running)
        return;
    stream->is_running = true;
    while (done < target && !is_empty(stream)) {
        pthread_mutex_unlock(&stream->lock);
        execute(stream, &stream->ring[done % KVF_STREAM_QUEUE_MAX]);
        pthread_mutex_lock(&stream->lock);
        done++;
        atomic_store_explicit(&stream->done, done, memory_order_relaxed);
        if (done >= stream->wake_at) {
            stream->wake_at = UINT64_MAX;
            pthread_cond_broadcast(&stream->drained);
        }
    }
    stream->is_running = false;
}

/* ---- the worker ---- */

/* LOOK_NS, or until it is called; under the lock. @return whether it was called */
static bool doze(host_stream *stream)
{
    const struct timespec until = kvf_clock_in(CLOCK_MONOTONIC, LOOK_NS);
    return pthread_cond_timedwait(&stream->filled, &stream->lock, &until) != ETIMEDOUT;
}

/* Where nobody comes for entries, or there are none for a while, the next one wakes the worker. */
static void rest(host_stream *stream)
{
    uint64_t seen = 0;
    for (uint32_t looks = 0; stream->is_left; looks++) {
        const uint64_t enqueued = atomic_load_explicit(&stream->enqueued, memory_order_relaxed);
        looks = enqueued == seen ? looks : 0;
        seen = enqueued;
        if (doze(stream))
            return;
        const bool is_late =
            !stream->is_running && !is_empty(stream) && kvf_now_ns() - stream->filled_ns >= SOON_NS;
        if (is_late || looks >= LOOKS)
            stream->is_left = false;
    }
    if (stream->is_closing || (!stream->is_running && !is_empty(stream)))
        return;
    stream->is_worker_asleep = true;
    pthread_cond_wait(&stream->filled, &stream->lock);
    stream->is_worker_asleep = false;
}

static void *stream_main(void *argument)
{
    host_stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    while (!stream->is_closing || !is_empty(stream)) {
        if (stream->is_running || is_empty(stream)) {
            rest(stream);
            continue;
        }
        run(stream, UINT64_MAX);
        const uint64_t done = atomic_load_explicit(&stream->done, memory_order_relaxed);
        pthread_mutex_unlock(&stream->lock);
        spin_for_more(stream, done);
        pthread_mutex_lock(&stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

/* ---- streams ---- */

/* Its timeouts are on the clock that nobody sets. */
static bool init_filled(pthread_cond_t *filled)
{
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes) != 0)
        return false;
    const bool is_done = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
                         pthread_cond_init(filled, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    return is_done;
}

static kvf_status stream_init(host_stream *stream, kvf_host_device *device,
                              kvf_stream_priority priority)
{
    kvf_context *context = device->base.context;
    stream->base.device = &device->base;
    stream->device = device;
    atomic_init(&stream->enqueued, 0);
    atomic_init(&stream->done, 0);
    stream->wake_at = UINT64_MAX;
    stream->ring = kvf_alloc(context, KVF_STREAM_QUEUE_MAX, sizeof *stream->ring);
    if (!stream->ring)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a stream's queue (%zu bytes)",
                 KVF_STREAM_QUEUE_MAX * sizeof *stream->ring);
    pthread_mutex_lock(&device->lock);
    uint32_t number = ++device->stream_total;
    pthread_mutex_unlock(&device->lock);
    if (device->config.delay_seed != 0)
        stream->delay_state =
            (device->config.delay_seed + (uint64_t)number * 7919u) * 0x9e3779b97f4a7c15u | 1u;
    char name[16];
    snprintf(name, sizeof name, "kvf-stream-%u", number % 1000u);
    /* A thread begins with the environment of the one that starts it. */
    if (fegetenv(&stream->environment) != 0 ||
        kvf_team_job_init(&stream->job, (int)priority) != KVF_OK ||
        pthread_mutex_init(&stream->lock, NULL) != 0 || !init_filled(&stream->filled) ||
        pthread_cond_init(&stream->drained, NULL) != 0)
        KVF_FAIL(context, KVF_SYSTEM, "a lock for a stream could not be made");
    return kvf_thread_start(context, &stream->thread, name, -1, stream_main, stream);
}

kvf_status kvf_host_stream_create(kvf_device *base, kvf_stream_priority priority, kvf_stream **out)
{
    *out = NULL;
    kvf_host_device *device = (kvf_host_device *)(void *)base;
    kvf_context *context = base->context;
    host_stream *stream =
        kvf_context_refuses(context, "stream") ? NULL : kvf_alloc(context, 1, sizeof *stream);
    if (!stream)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a stream (%zu bytes)", sizeof *stream);
    kvf_status status = stream_init(stream, device, priority);
    if (status != KVF_OK) {
        kvf_free(context, stream->ring);
        kvf_free(context, stream);
        return status;
    }
    pthread_mutex_lock(&device->lock);
    device->stream_count++;
    pthread_mutex_unlock(&device->lock);
    *out = &stream->base;
    return KVF_OK;
}

void kvf_host_stream_destroy(kvf_stream *base)
{
    if (!base)
        return;
    host_stream *stream = of_stream(base);
    kvf_host_device *device = stream->device;
    kvf_context *context = device->base.context;
    pthread_mutex_lock(&stream->lock);
    stream->is_closing = true;
    pthread_cond_signal(&stream->filled);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    kvf_team_job_fini(&stream->job);
    pthread_cond_destroy(&stream->drained);
    pthread_cond_destroy(&stream->filled);
    pthread_mutex_destroy(&stream->lock);
    kvf_free(context, stream->ring);
    kvf_free(context, stream);
    pthread_mutex_lock(&device->lock);
    device->stream_count--;
    pthread_mutex_unlock(&device->lock);
}

/* ---- waiting ---- */

/* Entries up to `target` that nobody is at, in the numbers' environment of the worker, so that a
 * caller's own (flushing of subnormals, rounding) changes no bits; under the lock. A caller with
 * little stack leaves them to the worker. */
static void help(host_stream *stream, uint64_t target)
{
    fenv_t own;
    if (stream->is_running || is_empty(stream))
        return;
    if (kvf_stack_left() < KVF_KERNEL_STACK_BYTES) {
        call_worker(stream);
        return;
    }
    fegetenv(&own);
    fesetenv(&stream->environment);
    run(stream, target);
    fesetenv(&own);
    call_worker(stream); /* what is left is nobody's */
}

/* Until `target` entries are done; under the lock. */
static void await_done(host_stream *stream, uint64_t target)
{
    help(stream, target);
    if (atomic_load_explicit(&stream->done, memory_order_relaxed) >= target)
        return;
    pthread_mutex_unlock(&stream->lock);
    const uint64_t until = kvf_now_ns() + SPIN_NS;
    while (atomic_load_explicit(&stream->done, memory_order_relaxed) < target &&
           kvf_now_ns() < until)
        kvf_pause();
    pthread_mutex_lock(&stream->lock);
    while (atomic_load_explicit(&stream->done, memory_order_relaxed) < target) {
        if (target < stream->wake_at)
            stream->wake_at = target;
        pthread_cond_wait(&stream->drained, &stream->lock);
    }
}

kvf_status kvf_host_stream_wait(kvf_stream *base)
{
    host_stream *stream = of_stream(base);
    KVF_ASSERT_DEBUG(!pthread_equal(pthread_self(), stream->thread));
    pthread_mutex_lock(&stream->lock);
    const uint64_t target = atomic_load_explicit(&stream->enqueued, memory_order_relaxed);
    if (stream->filled_ns)
        stream->is_left =
            target - stream->waited <= FEW && kvf_now_ns() - stream->filled_ns < SOON_NS;
    stream->waited = target;
    stream->filled_ns = 0;
    await_done(stream, target);
    kvf_status status = stream->error.status;
    pthread_mutex_unlock(&stream->lock);
    return kvf_fail_again(base->device->context, status, &stream->error);
}

/* Somebody waits for what is in the stream, and not by kvf_host_stream_wait: its worker begins. */
static void wake_worker(kvf_stream *base)
{
    host_stream *stream = of_stream(base);
    pthread_mutex_lock(&stream->lock);
    call_worker(stream);
    pthread_mutex_unlock(&stream->lock);
}

/* ---- enqueueing ---- */

/* Room for one entry, and the lock with it. */
static entry *begin_entry(host_stream *stream, entry_kind kind)
{
    pthread_mutex_lock(&stream->lock);
    uint64_t enqueued = atomic_load_explicit(&stream->enqueued, memory_order_relaxed);
    while (enqueued - atomic_load_explicit(&stream->done, memory_order_relaxed) >=
           KVF_STREAM_QUEUE_MAX) {
        KVF_ASSERT_DEBUG(!pthread_equal(pthread_self(), stream->thread));
        await_done(stream, enqueued - KVF_STREAM_QUEUE_MAX + QUEUE_REFILL);
        enqueued = atomic_load_explicit(&stream->enqueued, memory_order_relaxed);
    }
    entry *e = &stream->ring[enqueued % KVF_STREAM_QUEUE_MAX];
    e->kind = kind;
    return e;
}

static void end_entry(host_stream *stream)
{
    atomic_fetch_add_explicit(&stream->enqueued, 1, memory_order_relaxed);
    if (!stream->filled_ns)
        stream->filled_ns = kvf_now_ns();
    if (stream->is_worker_asleep)
        call_worker(stream);
    pthread_mutex_unlock(&stream->lock);
}

static kvf_status enqueue_copy(kvf_stream *base, void *to, const void *from, size_t bytes,
                               bool is_through)
{
    if (bytes == 0)
        return KVF_OK;
    host_stream *stream = of_stream(base);
    entry *e = begin_entry(stream, ENTRY_COPY);
    e->u.copy.to = to;
    e->u.copy.from = from;
    e->u.copy.bytes = bytes;
    e->u.copy.is_through = is_through;
    end_entry(stream);
    return KVF_OK;
}

kvf_status kvf_host_copy(kvf_stream *stream, void *to, const void *from, size_t bytes)
{
    return enqueue_copy(stream, to, from, bytes, false);
}

kvf_status kvf_host_copy_through(kvf_stream *stream, void *to, const void *from, size_t bytes)
{
    /* The copy kernel takes multiples of 16. */
    return enqueue_copy(stream, to, from, bytes, bytes % 16 == 0);
}

kvf_status kvf_host_copy_batch(kvf_stream *stream, void *const *to, const void *const *from,
                               size_t bytes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        KVF_TRY(kvf_host_copy(stream, to[i], from[i], bytes));
    return KVF_OK;
}

kvf_status kvf_host_fill(kvf_stream *base, void *to, int byte, size_t bytes)
{
    if (bytes == 0)
        return KVF_OK;
    host_stream *stream = of_stream(base);
    entry *e = begin_entry(stream, ENTRY_FILL);
    e->u.fill.to = to;
    e->u.fill.byte = byte;
    e->u.fill.bytes = bytes;
    end_entry(stream);
    return KVF_OK;
}

static kvf_status enqueue_fn(kvf_stream *base, entry_kind kind, kvf_task_fn fn, const void *args,
                             size_t args_bytes, uint32_t tasks)
{
    KVF_ASSERT(args_bytes <= KVF_LAUNCH_ARGS_MAX);
    if (tasks == 0)
        return KVF_OK;
    host_stream *stream = of_stream(base);
    entry *e = begin_entry(stream, kind);
    e->u.launch.fn = fn;
    e->u.launch.tasks = tasks;
    if (args_bytes > 0)
        memcpy(e->u.launch.args, args, args_bytes);
    end_entry(stream);
    return KVF_OK;
}

kvf_status kvf_host_launch(kvf_stream *stream, kvf_task_fn kernel, const void *args,
                           size_t args_bytes, uint32_t tasks)
{
    return enqueue_fn(stream, ENTRY_LAUNCH, kernel, args, args_bytes, tasks);
}

kvf_status kvf_host_host_call(kvf_stream *stream, kvf_task_fn fn, const void *args,
                              size_t args_bytes)
{
    return enqueue_fn(stream, ENTRY_CALL, fn, args, args_bytes, 1);
}

static kvf_status enqueue_sync(kvf_stream *base, entry_kind kind, kvf_event *event,
                               uint64_t generation)
{
    host_stream *stream = of_stream(base);
    entry *e = begin_entry(stream, kind);
    e->u.sync.event = event;
    e->u.sync.generation = generation;
    end_entry(stream);
    return KVF_OK;
}

kvf_status kvf_host_event_record(kvf_event *event, kvf_stream *stream)
{
    return enqueue_sync(stream, ENTRY_RECORD, event,
                        kvf_host_event_next(event, stream, wake_worker));
}

kvf_status kvf_host_stream_wait_event(kvf_stream *stream, kvf_event *event)
{
    return enqueue_sync(stream, ENTRY_WAIT, event, kvf_host_event_recorded(event, stream));
}
