/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streams and events of the CUDA device, and the errors that host calls leave on them.
 *
 * A stream here is a cudaStream_t of its own, without order against the default stream, or one of
 * the caller. CUDA knows nothing of errors of this library, so every stream carries the set of
 * streams that it has waited for, through events, since it was made: the error of any of them comes
 * out of its next wait. That may be one that happened after the event it waited for, and work
 * enqueued after the error still runs; both are said in device.h.
 *
 * Invariant: a bit in any set names a living stream. A stream that ends gives its error to all
 * whose sets name it, and leaves them.
 */

#include "cuda_device.h"

#include <string.h>
#include <time.h>

#define WAITS 2u /* for the work of a stream that is destroyed */

/* ---- sets of streams ---- */

static void set_add(kvf_cuda_set *set, uint32_t index)
{
    atomic_fetch_or(&set->bits[index / 64], UINT64_C(1) << index % 64);
}

/* 1 if the set had it. */
static bool set_remove(kvf_cuda_set *set, uint32_t index)
{
    const uint64_t bit = UINT64_C(1) << index % 64;
    return (atomic_fetch_and(&set->bits[index / 64], ~bit) & bit) != 0;
}

static void set_join(kvf_cuda_set *set, kvf_cuda_set *other)
{
    for (uint32_t i = 0; i < KVF_CUDA_STREAMS_MAX / 64; i++)
        atomic_fetch_or(&set->bits[i], atomic_load(&other->bits[i]));
}

static void set_assign(kvf_cuda_set *set, kvf_cuda_set *other)
{
    for (uint32_t i = 0; i < KVF_CUDA_STREAMS_MAX / 64; i++)
        atomic_store(&set->bits[i], atomic_load(&other->bits[i]));
}

/* The device's lock is held. */
static void sticky_set(kvf_cuda_sticky *sticky, const kvf_error *error)
{
    if (error->status == KVF_OK || sticky->error.status != KVF_OK)
        return;
    sticky->error = *error;
    atomic_store(&sticky->status, error->status);
}

/* `own`, or the first error of a stream in the set. */
static kvf_status status_of(kvf_cuda_device *device, const kvf_cuda_sticky *own, kvf_cuda_set *set)
{
    kvf_error error;
    pthread_mutex_lock(&device->lock);
    error = own->error;
    for (uint32_t i = 0; i < KVF_CUDA_STREAMS_MAX && error.status == KVF_OK; i++)
        if ((atomic_load(&set->bits[i / 64]) >> i % 64 & 1) && device->streams[i])
            error = device->streams[i]->sticky.error;
    pthread_mutex_unlock(&device->lock);
    return kvf_fail_again(device->base.context, error.status, &error);
}

/* ---- streams ---- */

static int take_index(kvf_cuda_device *device, kvf_cuda_stream *stream)
{
    bool is_full = true;
    pthread_mutex_lock(&device->lock);
    for (uint32_t i = 0; i < KVF_CUDA_STREAMS_MAX && is_full; i++)
        if (!device->streams[i]) {
            device->streams[i] = stream;
            stream->index = i;
            set_add(&stream->upstream, i);
            is_full = false;
        }
    const uint64_t number = ++device->stream_total;
    if (device->delay_seed != 0)
        stream->delay_state = (device->delay_seed + number * 7919u) * 0x9e3779b97f4a7c15u | 1u;
    pthread_mutex_unlock(&device->lock);
    return !is_full;
}

static void give_index(kvf_cuda_device *device, kvf_cuda_stream *stream)
{
    pthread_mutex_lock(&device->lock);
    device->streams[stream->index] = NULL;
    for (uint32_t i = 0; i < KVF_CUDA_STREAMS_MAX; i++)
        if (device->streams[i] && set_remove(&device->streams[i]->upstream, stream->index))
            sticky_set(&device->streams[i]->sticky, &stream->sticky.error);
    for (kvf_cuda_event *e = device->events; e; e = e->next)
        if (set_remove(&e->upstream, stream->index))
            sticky_set(&e->sticky, &stream->sticky.error);
    pthread_mutex_unlock(&device->lock);
}

static void free_stream(kvf_cuda_stream *stream)
{
    kvf_context *context = stream->base.device->context;
    pthread_cond_destroy(&stream->returned);
    pthread_mutex_destroy(&stream->lock);
    kvf_free(context, stream->calls);
    kvf_free(context, stream);
}

/* Everything but the handle. */
static kvf_status make_stream(kvf_cuda_device *device, kvf_cuda_stream **out)
{
    kvf_context *context = device->base.context;
    kvf_cuda_stream *stream =
        kvf_context_refuses(context, "stream") ? NULL : kvf_alloc(context, 1, sizeof *stream);
    if (!stream)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a stream (%zu bytes)", sizeof *stream);
    stream->base.device = &device->base;
    stream->calls = kvf_alloc(context, KVF_CUDA_CALLS_MAX, sizeof *stream->calls);
    if (!stream->calls) {
        kvf_free(context, stream);
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a stream's calls");
    }
    pthread_condattr_t attributes;
    if (pthread_mutex_init(&stream->lock, NULL) != 0 || pthread_condattr_init(&attributes) != 0 ||
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) != 0 ||
        pthread_cond_init(&stream->returned, &attributes) != 0) {
        kvf_free(context, stream->calls);
        kvf_free(context, stream);
        KVF_FAIL(context, KVF_SYSTEM, "a lock for a stream could not be made");
    }
    pthread_condattr_destroy(&attributes);
    if (!take_index(device, stream)) {
        free_stream(stream);
        KVF_FAIL(context, KVF_FULL,
                 "%u streams of the CUDA device are alive, which is the limit; destroy some",
                 KVF_CUDA_STREAMS_MAX);
    }
    *out = stream;
    return KVF_OK;
}

kvf_status kvf_cuda_stream_create(kvf_device *base, kvf_stream_priority priority, kvf_stream **out)
{
    kvf_cuda_device *device = kvf_cuda_of(base);
    kvf_cuda_stream *stream = NULL;
    kvf_cuda_caller before;
    *out = NULL;
    KVF_TRY(make_stream(device, &stream));
    const int priorities[] = {[KVF_PRIORITY_LOW] = device->priority_low,
                              [KVF_PRIORITY_NORMAL] =
                                  (device->priority_low + device->priority_high) / 2,
                              [KVF_PRIORITY_HIGH] = device->priority_high};
    kvf_status status = kvf_cuda_enter(device, &before);
    if (status == KVF_OK)
        status =
            kvf_cuda_leave_after(device, before,
                                 cudaStreamCreateWithPriority(
                                     &stream->handle, cudaStreamNonBlocking, priorities[priority]),
                                 "a stream could not be created");
    if (status != KVF_OK) {
        give_index(device, stream);
        free_stream(stream);
        return status;
    }
    stream->is_owned = true;
    *out = &stream->base;
    return KVF_OK;
}

kvf_status kvf_cuda_stream_wrap(kvf_device *base, void *native, kvf_stream **out)
{
    kvf_cuda_stream *stream = NULL;
    *out = NULL;
    KVF_TRY(make_stream(kvf_cuda_of(base), &stream));
    stream->handle = native;
    *out = &stream->base;
    return KVF_OK;
}

void *kvf_cuda_stream_native(kvf_stream *stream)
{
    return kvf_cuda_of_stream(stream)->handle;
}

kvf_status kvf_cuda_stream_wait(kvf_stream *base)
{
    kvf_cuda_stream *stream = kvf_cuda_of_stream(base);
    kvf_cuda_device *device = kvf_cuda_device_of(base);
    kvf_cuda_caller before;
    KVF_TRY(kvf_cuda_enter_relaxed(device, &before));
    const kvf_status status = kvf_cuda_leave_after(
        device, before, cudaStreamSynchronize(stream->handle), "work on a stream failed");
    return status != KVF_OK ? status : status_of(device, &stream->sticky, &stream->upstream);
}

void kvf_cuda_stream_destroy(kvf_stream *base)
{
    if (!base)
        return;
    kvf_cuda_stream *stream = kvf_cuda_of_stream(base);
    kvf_cuda_device *device = kvf_cuda_device_of(base);
    kvf_cuda_caller before;
    kvf_cuda_enter_release(device, &before);
    /* Memory that its work uses is given back next, so one refusal is not taken for an answer. */
    for (uint32_t i = 0; i < WAITS; i++)
        if (kvf_cuda_failed(device, cudaStreamSynchronize(stream->handle),
                            "work on a stream failed") == KVF_OK)
            break;
    if (stream->is_owned)
        (void)kvf_cuda_failed(device, cudaStreamDestroy(stream->handle),
                              "a stream could not be destroyed");
    kvf_cuda_leave(device, before);
    kvf_cuda_calls_settle(stream);
    give_index(device, stream);
    free_stream(stream);
}

void kvf_cuda_stream_fail(kvf_stream *stream, kvf_status status)
{
    kvf_cuda_device *device = kvf_cuda_device_of(stream);
    const kvf_error error = kvf_context_told(device->base.context, status);
    pthread_mutex_lock(&device->lock);
    sticky_set(&kvf_cuda_of_stream(stream)->sticky, &error);
    pthread_mutex_unlock(&device->lock);
}

/* ---- events ---- */

static kvf_cuda_event *of_event(kvf_event *event)
{
    return (kvf_cuda_event *)(void *)event;
}

kvf_status kvf_cuda_event_create(kvf_device *base, bool is_timed, kvf_event **out)
{
    const unsigned flags = is_timed ? cudaEventDefault : cudaEventDisableTiming;
    kvf_cuda_device *device = kvf_cuda_of(base);
    kvf_context *context = base->context;
    kvf_cuda_caller before;
    *out = NULL;
    kvf_cuda_event *event =
        kvf_context_refuses(context, "event") ? NULL : kvf_alloc(context, 1, sizeof *event);
    if (!event)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for an event (%zu bytes)", sizeof *event);
    event->base.device = base;
    kvf_status status = kvf_cuda_enter(device, &before);
    if (status == KVF_OK)
        status =
            kvf_cuda_leave_after(device, before, cudaEventCreateWithFlags(&event->handle, flags),
                                 "an event could not be created");
    if (status != KVF_OK) {
        kvf_free(context, event);
        return status;
    }
    pthread_mutex_lock(&device->lock);
    event->next = device->events;
    event->link = &device->events;
    if (event->next)
        event->next->link = &event->next;
    device->events = event;
    pthread_mutex_unlock(&device->lock);
    *out = &event->base;
    return KVF_OK;
}

void kvf_cuda_event_destroy(kvf_event *base)
{
    kvf_cuda_caller before;
    if (!base)
        return;
    kvf_cuda_event *event = of_event(base);
    kvf_cuda_device *device = kvf_cuda_of(base->device);
    kvf_cuda_enter_release(device, &before);
    (void)kvf_cuda_leave_after(device, before, cudaEventDestroy(event->handle),
                               "an event could not be destroyed");
    pthread_mutex_lock(&device->lock);
    *event->link = event->next;
    if (event->next)
        event->next->link = event->link;
    pthread_mutex_unlock(&device->lock);
    kvf_free(base->device->context, event);
}

kvf_status kvf_cuda_event_record(kvf_event *base, kvf_stream *stream_base)
{
    kvf_cuda_event *event = of_event(base);
    kvf_cuda_stream *stream = kvf_cuda_of_stream(stream_base);
    kvf_cuda_device *device = kvf_cuda_of(base->device);
    kvf_cuda_caller before;
    KVF_TRY(kvf_cuda_enter(device, &before));
    const kvf_status status =
        kvf_cuda_leave_after(device, before, cudaEventRecord(event->handle, stream->handle),
                             "an event could not be recorded");
    if (atomic_load(&event->sticky.status) != KVF_OK) { /* it was of an earlier record */
        pthread_mutex_lock(&device->lock);
        event->sticky.error.status = KVF_OK;
        atomic_store(&event->sticky.status, KVF_OK);
        pthread_mutex_unlock(&device->lock);
    }
    set_assign(&event->upstream, &stream->upstream);
    return status;
}

kvf_status kvf_cuda_stream_wait_event(kvf_stream *stream_base, kvf_event *base)
{
    kvf_cuda_event *event = of_event(base);
    kvf_cuda_stream *stream = kvf_cuda_of_stream(stream_base);
    kvf_cuda_device *device = kvf_cuda_of(base->device);
    kvf_cuda_caller before;
    KVF_TRY(kvf_cuda_enter(device, &before));
    const kvf_status status = kvf_cuda_leave_after(
        device, before, cudaStreamWaitEvent(stream->handle, event->handle, cudaEventWaitDefault),
        "a stream could not wait for an event");
    set_join(&stream->upstream, &event->upstream);
    if (atomic_load(&event->sticky.status) != KVF_OK) {
        pthread_mutex_lock(&device->lock);
        sticky_set(&stream->sticky, &event->sticky.error);
        pthread_mutex_unlock(&device->lock);
    }
    return status;
}

kvf_status kvf_cuda_event_wait(kvf_event *base)
{
    kvf_cuda_event *event = of_event(base);
    kvf_cuda_device *device = kvf_cuda_of(base->device);
    kvf_cuda_caller before;
    KVF_TRY(kvf_cuda_enter_relaxed(device, &before));
    const kvf_status status = kvf_cuda_leave_after(
        device, before, cudaEventSynchronize(event->handle), "work before an event failed");
    return status != KVF_OK ? status : status_of(device, &event->sticky, &event->upstream);
}

int kvf_cuda_event_is_done(kvf_event *base)
{
    kvf_cuda_device *device = kvf_cuda_of(base->device);
    kvf_cuda_caller before;
    if (kvf_cuda_enter_relaxed(device, &before) != KVF_OK)
        return -1; /* the wait says why */
    const cudaError_t error = cudaEventQuery(of_event(base)->handle);
    if (error == cudaErrorNotReady)
        (void)cudaGetLastError();
    else
        (void)kvf_cuda_failed(device, error, "work before an event failed");
    kvf_cuda_leave(device, before);
    if (error == cudaSuccess)
        return 1;
    return error == cudaErrorNotReady ? 0 : -1;
}

kvf_status kvf_cuda_event_elapsed(kvf_event *from, kvf_event *to, uint64_t *ns)
{
    kvf_cuda_device *device = kvf_cuda_of(from->device);
    float ms = 0.0f;
    kvf_cuda_caller before;
    *ns = 0;
    KVF_TRY(kvf_cuda_enter_relaxed(device, &before));
    const cudaError_t error =
        cudaEventElapsedTime(&ms, of_event(from)->handle, of_event(to)->handle);
    kvf_status status;
    if (error == cudaErrorNotReady || error == cudaErrorInvalidResourceHandle) {
        (void)cudaGetLastError();
        status = kvf_fail(device->base.context, KVF_INVALID, (int)error,
                          "time between two events that are not both recorded and done");
    } else {
        status = kvf_cuda_failed(device, error, "the time between two events could not be had");
    }
    kvf_cuda_leave(device, before);
    if (status == KVF_OK && ms > 0.0f)
        *ns = (uint64_t)((double)ms * 1e6);
    return status;
}
