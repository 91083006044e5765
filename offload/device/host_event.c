/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Events of the host device: fences whose generation grows with every record.
 *
 * Knows nothing of streams. Invariants: a generation g is complete iff g <= floor or bit g - floor
 * - 1 of ahead is set, and floor <= recorded <= floor + RECORDS_MAX: an event that is recorded
 * again elsewhere before the first record fired does not fire early for those who wait for the
 * first.
 */

#include "host_stream.h"

#include <stdatomic.h>

#include "common/clock.h"

#define SPIN_NS     5000u
#define SPIN_TURNS  16u
#define RECORDS_MAX 64u

typedef struct host_event {
    kvf_event base; /* first member */
    bool is_timed;
    pthread_mutex_t lock;
    pthread_cond_t fired;
    uint64_t recorded;            /* guarded by lock: generation enqueued last */
    kvf_stream *stream;           /* guarded by lock: that records it; alive until it is complete */
    void (*wake)(kvf_stream *);   /* guarded by lock: its worker begins */
    uint64_t floor;               /* guarded by lock: all up to here are complete */
    uint64_t ahead;               /* guarded by lock: complete ones above floor */
    atomic_uint_fast64_t changes; /* grows when one completes; what spinning waiters watch */
    kvf_error error;              /* guarded by lock: first one of a stream that recorded it */
    uint64_t time_ns;             /* guarded by lock: of the latest generation that completed */
    uint64_t time_of;             /* guarded by lock: that generation */
} host_event;

static host_event *of_event(kvf_event *event)
{
    return (host_event *)(void *)event;
}

static bool event_is_complete(const host_event *event, uint64_t generation)
{
    if (generation <= event->floor)
        return true;
    return (int)(event->ahead >> (generation - event->floor - 1) & 1);
}

/* Somebody waits for the generation that was enqueued last; under the lock. */
static void wake(const host_event *event)
{
    if (!event_is_complete(event, event->recorded))
        event->wake(event->stream);
}

void kvf_host_event_complete(kvf_event *base, uint64_t generation, const kvf_error *error)
{
    host_event *event = of_event(base);
    pthread_mutex_lock(&event->lock);
    KVF_ASSERT(generation > event->floor && generation <= event->floor + RECORDS_MAX);
    event->ahead |= (uint64_t)1 << (generation - event->floor - 1);
    while (event->ahead & 1) {
        event->ahead >>= 1;
        event->floor++;
    }
    if (error && event->error.status == KVF_OK)
        event->error = *error;
    if (generation > event->time_of) {
        event->time_of = generation;
        event->time_ns = kvf_now_ns();
    }
    atomic_fetch_add_explicit(&event->changes, 1, memory_order_relaxed);
    pthread_cond_broadcast(&event->fired);
    pthread_mutex_unlock(&event->lock);
}

kvf_status kvf_host_event_await(kvf_event *base, uint64_t generation)
{
    host_event *event = of_event(base);
    pthread_mutex_lock(&event->lock);
    if (!event_is_complete(event, generation)) {
        uint64_t seen = atomic_load_explicit(&event->changes, memory_order_relaxed);
        pthread_mutex_unlock(&event->lock);
        uint64_t until = kvf_now_ns() + SPIN_NS;
        do {
            for (unsigned i = 0; i < SPIN_TURNS; i++)
                kvf_pause();
        } while (atomic_load_explicit(&event->changes, memory_order_relaxed) == seen &&
                 kvf_now_ns() < until);
        pthread_mutex_lock(&event->lock);
    }
    while (!event_is_complete(event, generation))
        pthread_cond_wait(&event->fired, &event->lock);
    kvf_status status = event->error.status;
    pthread_mutex_unlock(&event->lock);
    /* An error stays as it is once there is one. */
    return kvf_fail_again(base->device->context, status, &event->error);
}

kvf_status kvf_host_event_create(kvf_device *device, bool is_timed, kvf_event **out)
{
    *out = NULL;
    kvf_context *context = device->context;
    host_event *event =
        kvf_context_refuses(context, "event") ? NULL : kvf_alloc(context, 1, sizeof *event);
    if (!event)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for an event (%zu bytes)", sizeof *event);
    event->base.device = device;
    event->is_timed = is_timed;
    atomic_init(&event->changes, 0);
    if (pthread_mutex_init(&event->lock, NULL) != 0 ||
        pthread_cond_init(&event->fired, NULL) != 0) {
        kvf_free(context, event);
        KVF_FAIL(context, KVF_SYSTEM, "a lock for an event could not be made");
    }
    *out = &event->base;
    return KVF_OK;
}

void kvf_host_event_destroy(kvf_event *base)
{
    if (!base)
        return;
    host_event *event = of_event(base);
    pthread_mutex_lock(&event->lock);
    KVF_ASSERT(event->floor == event->recorded);
    pthread_mutex_unlock(&event->lock);
    pthread_cond_destroy(&event->fired);
    pthread_mutex_destroy(&event->lock);
    kvf_free(base->device->context, event);
}

uint64_t kvf_host_event_next(kvf_event *base, kvf_stream *stream, void (*wake_up)(kvf_stream *))
{
    host_event *event = of_event(base);
    pthread_mutex_lock(&event->lock);
    while (event->recorded - event->floor >= RECORDS_MAX) {
        wake(event);
        pthread_cond_wait(&event->fired, &event->lock);
    }
    const uint64_t generation = ++event->recorded;
    event->stream = stream;
    event->wake = wake_up;
    pthread_mutex_unlock(&event->lock);
    return generation;
}

uint64_t kvf_host_event_recorded(kvf_event *base, const kvf_stream *stream)
{
    host_event *event = of_event(base);
    pthread_mutex_lock(&event->lock);
    const uint64_t generation = event->recorded;
    if (event->stream != stream)
        wake(event);
    pthread_mutex_unlock(&event->lock);
    return generation;
}

kvf_status kvf_host_event_wait(kvf_event *base)
{
    return kvf_host_event_await(base, kvf_host_event_recorded(base, NULL));
}

int kvf_host_event_is_done(kvf_event *base)
{
    host_event *event = of_event(base);
    pthread_mutex_lock(&event->lock);
    bool is_done = event_is_complete(event, event->recorded);
    wake(event);
    pthread_mutex_unlock(&event->lock);
    return is_done;
}

/* When the latest record fired; 0 if there is none, or it has not yet. */
static uint64_t event_time(host_event *event)
{
    pthread_mutex_lock(&event->lock);
    const uint64_t ns = event->time_of == event->recorded ? event->time_ns : 0;
    pthread_mutex_unlock(&event->lock);
    return ns;
}

kvf_status kvf_host_event_elapsed(kvf_event *from, kvf_event *to, uint64_t *ns)
{
    const uint64_t began = event_time(of_event(from)), ended = event_time(of_event(to));
    *ns = 0;
    if (!of_event(from)->is_timed || !of_event(to)->is_timed || began == 0 || ended == 0)
        KVF_FAIL(from->device->context, KVF_INVALID,
                 "time between two events that are not both timed, recorded and done");
    if (ended > began)
        *ns = ended - began;
    return KVF_OK;
}
