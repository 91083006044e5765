/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Work on streams of the CUDA device: copies, fills, kernels, host calls.
 *
 * Everything enqueues and returns; only a stream with KVF_CUDA_CALLS_MAX host calls on their way
 * holds its caller back. With a delay seed, every fourth entry is preceded by a pause of up to 200
 * microseconds in stream order, as on the host device, to shake out what nothing orders. Invariant:
 * the arguments of a host call lie in the stream's ring until it has returned, or in the graph
 * that recorded it.
 */

#include "cuda_device.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/random.h"

#define DELAY_NS_MAX 200000u
#define WAIT_NS      10000000 /* between looks at a stream whose ring is full */

/* ---- pauses ---- */

static void CUDART_CB pause_stream(void *ns)
{
    const struct timespec time = {.tv_nsec = (long)(uintptr_t)ns};
    nanosleep(&time, NULL);
}

static cudaError_t delay(kvf_cuda_stream *stream)
{
    if (stream->delay_state == 0 || kvf_cuda_is_capturing(&stream->base) != 0)
        return cudaSuccess;
    const uint64_t x = kvf_random_next(&stream->delay_state);
    if ((x >> 32 & 3) != 0)
        return cudaSuccess;
    return cudaLaunchHostFunc(stream->handle, pause_stream,
                              (void *)(uintptr_t)((x >> 40) % DELAY_NS_MAX));
}

/* Make the device current and pause now and then. Ends in kvf_cuda_leave_after. */
static kvf_status enter(kvf_cuda_stream *stream, kvf_cuda_caller *before)
{
    kvf_cuda_device *device = kvf_cuda_device_of(&stream->base);
    KVF_TRY(kvf_cuda_enter(device, before));
    const kvf_status status =
        kvf_cuda_failed(device, delay(stream), "a pause could not be enqueued");
    if (status != KVF_OK)
        kvf_cuda_leave(device, *before);
    return status;
}

/* ---- bytes ---- */

kvf_status kvf_cuda_copy(kvf_stream *base, void *to, const void *from, size_t bytes)
{
    kvf_cuda_stream *stream = kvf_cuda_of_stream(base);
    kvf_cuda_caller before;
    if (bytes == 0)
        return KVF_OK;
    KVF_TRY(enter(stream, &before));
    return kvf_cuda_leave_after(kvf_cuda_device_of(base), before,
                                cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream->handle),
                                "a copy could not be enqueued");
}

kvf_status kvf_cuda_copy_batch(kvf_stream *base, void *const *to, const void *const *from,
                               size_t bytes, uint32_t count)
{
    kvf_cuda_stream *stream = kvf_cuda_of_stream(base);
    kvf_cuda_device *device = kvf_cuda_device_of(base);
    kvf_cuda_caller before;
    if (bytes == 0 || count == 0)
        return KVF_OK; /* the driver refuses both */
    if (!device->properties.can_copy_batch)
        KVF_FAIL(base->device->context, KVF_UNSUPPORTED,
                 "batches of copies need an NVIDIA driver for CUDA 12.8 or later; use another "
                 "transfer method");
    if (!stream->handle)
        KVF_FAIL(base->device->context, KVF_UNSUPPORTED,
                 "the driver takes no batch of copies on the default stream; use one of your own");
    const int is_capturing = device->properties.can_capture_batch ? 0 : kvf_cuda_is_capturing(base);
    if (is_capturing < 0)
        return KVF_DEVICE_FAILED;
    if (is_capturing)
        KVF_FAIL(base->device->context, KVF_UNSUPPORTED,
                 "this driver loses a batch of copies that is recorded in a graph (13.1 is the "
                 "first that does not); use transfer mapped");
    KVF_TRY(enter(stream, &before));
    return kvf_cuda_leave_after(
        kvf_cuda_device_of(base), before,
        kvf_cuda_driver_batch(&device->driver, to, from, bytes, count, stream->handle),
        "a batch of copies could not be enqueued");
}

kvf_status kvf_cuda_fill(kvf_stream *base, void *to, int byte, size_t bytes)
{
    kvf_cuda_stream *stream = kvf_cuda_of_stream(base);
    kvf_cuda_caller before;
    if (bytes == 0)
        return KVF_OK;
    KVF_TRY(enter(stream, &before));
    return kvf_cuda_leave_after(kvf_cuda_device_of(base), before,
                                cudaMemsetAsync(to, byte, bytes, stream->handle),
                                "a fill could not be enqueued");
}

/* ---- kernels ---- */

kvf_status kvf_cuda_launch_tasks(kvf_stream *base, kvf_task_fn kernel, const void *args,
                                 size_t args_bytes, uint32_t tasks)
{
    kvf_cuda_stream *stream = kvf_cuda_of_stream(base);
    const kvf_cuda_launch_fn launch = (kvf_cuda_launch_fn)(void (*)(void))kernel;
    kvf_cuda_caller before;
    KVF_ASSERT(args_bytes <= KVF_LAUNCH_ARGS_MAX);
    if (tasks == 0)
        return KVF_OK;
    KVF_TRY(enter(stream, &before));
    return kvf_cuda_leave_after(kvf_cuda_device_of(base), before,
                                (cudaError_t)launch(args, tasks, stream->handle),
                                "a kernel could not be launched");
}

/* ---- host calls ---- */

static void CUDART_CB run_call(void *raw)
{
    kvf_cuda_call *call = raw;
    kvf_cuda_stream *stream = call->stream;
    if (!stream) {
        call->fn(call->args, 0);
        return;
    }
    pthread_mutex_lock(&stream->lock);
    stream->is_calling = true;
    pthread_mutex_unlock(&stream->lock);
    call->fn(call->args, 0);
    pthread_mutex_lock(&stream->lock);
    stream->is_calling = false;
    stream->calls_done++;
    pthread_cond_signal(&stream->returned);
    pthread_mutex_unlock(&stream->lock);
}

void kvf_cuda_calls_settle(kvf_cuda_stream *stream)
{
    /* One that was about to begin when the device was lost begins well within this. */
    const struct timespec until = kvf_clock_in(CLOCK_MONOTONIC, WAIT_NS);
    int code = 0;
    pthread_mutex_lock(&stream->lock);
    while (stream->is_calling || (stream->calls_done != stream->calls_made && code != ETIMEDOUT))
        code = stream->is_calling
                   ? pthread_cond_wait(&stream->returned, &stream->lock)
                   : pthread_cond_timedwait(&stream->returned, &stream->lock, &until);
    pthread_mutex_unlock(&stream->lock);
}

/* Whether the stream will run nothing more: CUDA drops host calls after an error. */
static bool is_broken(kvf_cuda_stream *stream)
{
    kvf_cuda_device *device = kvf_cuda_device_of(&stream->base);
    kvf_cuda_caller before;
    if (kvf_cuda_enter_relaxed(device, &before) == KVF_OK) {
        const cudaError_t error = cudaStreamQuery(stream->handle);
        if (error == cudaErrorNotReady)
            (void)cudaGetLastError();
        else if (error != cudaSuccess)
            (void)kvf_cuda_failed(device, error, "work on a stream failed");
        kvf_cuda_leave(device, before);
    }
    return atomic_load(&device->lost) != 0;
}

/* The next entry of the ring, once it is free; NULL if it never will be. */
static kvf_cuda_call *take_call(kvf_cuda_stream *stream)
{
    bool is_lost = false;
    pthread_mutex_lock(&stream->lock);
    while (stream->calls_made - stream->calls_done >= KVF_CUDA_CALLS_MAX && !is_lost) {
        const struct timespec until = kvf_clock_in(CLOCK_MONOTONIC, WAIT_NS);
        if (pthread_cond_timedwait(&stream->returned, &stream->lock, &until) == ETIMEDOUT) {
            pthread_mutex_unlock(&stream->lock);
            is_lost = is_broken(stream);
            pthread_mutex_lock(&stream->lock);
        }
    }
    kvf_cuda_call *call =
        is_lost ? NULL : &stream->calls[stream->calls_made++ % KVF_CUDA_CALLS_MAX];
    pthread_mutex_unlock(&stream->lock);
    if (call)
        call->stream = stream;
    return call;
}

/* A call that was taken and not enqueued. Only the enqueuing thread moves calls_made. */
static void give_call(kvf_cuda_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    stream->calls_made--;
    pthread_mutex_unlock(&stream->lock);
}

kvf_status kvf_cuda_host_call(kvf_stream *base, kvf_task_fn fn, const void *args, size_t args_bytes)
{
    kvf_cuda_stream *stream = kvf_cuda_of_stream(base);
    kvf_cuda_device *device = kvf_cuda_device_of(base);
    kvf_cuda_caller before;
    KVF_ASSERT(args_bytes <= KVF_LAUNCH_ARGS_MAX);
    KVF_TRY(enter(stream, &before));
    const int is_capturing = kvf_cuda_is_capturing(base);
    if (is_capturing < 0) {
        kvf_cuda_leave(device, before);
        return KVF_DEVICE_FAILED;
    }
    kvf_cuda_call *call = is_capturing ? kvf_cuda_graph_call(device) : take_call(stream);
    if (!call) {
        kvf_cuda_leave(device, before);
        if (atomic_load(&device->lost) != 0)
            return kvf_cuda_failed(device, cudaErrorUnknown, "a host call");
        KVF_FAIL(device->base.context, KVF_OUT_OF_MEMORY,
                 "no memory for a recorded host call (%zu bytes)", sizeof *call);
    }
    call->fn = fn;
    if (args_bytes > 0)
        memcpy(call->args, args, args_bytes);
    const cudaError_t error = cudaLaunchHostFunc(stream->handle, run_call, call);
    if (error != cudaSuccess && call->stream)
        give_call(stream);
    return kvf_cuda_leave_after(device, before, error, "a host call could not be enqueued");
}
