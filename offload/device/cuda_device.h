/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_CUDA_DEVICE_H
#define KVF_OFFLOAD_CUDA_DEVICE_H

/*
 * Shared by the files of the CUDA device: the device, its streams and events, errors, the calls of
 * the driver that are looked up at run time.
 *
 * Nothing outside device_cuda.c and cuda_*.c includes this. Invariants: every call
 * into CUDA is made with the device of the kvf_device current, and the caller's current device is
 * the same afterwards; every code that CUDA returns goes through kvf_cuda_failed, which leaves no
 * last error behind.
 */

#include <stdatomic.h>

#include <cuda_runtime_api.h>

#include "cuda_kernels.h"
#include "device.h"

/* Streams alive at once. Bounds the sets of streams below. */
#define KVF_CUDA_STREAMS_MAX 256u
/* Host calls of one stream that have not run yet; the next one waits. */
#define KVF_CUDA_CALLS_MAX   256u

/* ---- calls of the driver, looked up by name and version; NULL where the driver is older ---- */

/* CUmemcpyAttributes and CUmemLocation, which headers before 12.8 lack. */
typedef struct kvf_cuda_copy_attributes {
    int source_order; /* 1: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM */
    struct {
        int type, id;
    } source_hint, destination_hint;
    unsigned flags;
} kvf_cuda_copy_attributes;

typedef int (*kvf_cuda_batch_fn)(unsigned long long *to, unsigned long long *from, size_t *sizes,
                                 size_t count, kvf_cuda_copy_attributes *attributes,
                                 size_t *first_index, size_t attributes_count, void *stream);
typedef int (*kvf_cuda_batch_12_fn)(unsigned long long *to, unsigned long long *from, size_t *sizes,
                                    size_t count, kvf_cuda_copy_attributes *attributes,
                                    size_t *first_index, size_t attributes_count, size_t *failed,
                                    void *stream);
typedef struct kvf_cuda_driver {
    kvf_cuda_batch_fn batch;       /* of 13.0 */
    kvf_cuda_batch_12_fn batch_12; /* of 12.8 */
    int (*context_get)(void **context);
    int (*context_set)(void *context);
    int (*primary_retain)(void **context, int ordinal);
    int (*primary_release)(int ordinal);
} kvf_cuda_driver;

/* ---- the device ---- */

/* The first error of a stream or an event. */
typedef struct kvf_cuda_sticky {
    atomic_int status; /* a look at error.status without the lock */
    kvf_error error;   /* guarded by the device's lock */
} kvf_cuda_sticky;

/* A set of streams, by index. */
typedef struct kvf_cuda_set {
    atomic_uint_fast64_t bits[KVF_CUDA_STREAMS_MAX / 64];
} kvf_cuda_set;

typedef struct kvf_cuda_stream kvf_cuda_stream;
typedef struct kvf_cuda_event kvf_cuda_event;
typedef struct kvf_cuda_block kvf_cuda_block;

typedef struct kvf_cuda_device {
    kvf_device base; /* first member */
    int ordinal;
    uint32_t delay_seed;
    bool starts_late;                /* and this is counted: kvf_cuda_refuse_early_starts */
    int priority_low, priority_high; /* the numerically greatest and least */
    kvf_cuda_driver driver;
    void *context; /* the device's primary context, which the runtime's calls use; retained */
    kvf_device_properties properties;
    atomic_int lost;        /* the cudaError_t that ended it, 0 while it lives */
    cudaStream_t own;       /* zeroes memory, and probes at open */
    pthread_mutex_t lock;   /* guards what follows */
    kvf_cuda_block *blocks; /* memory and registrations that are alive */
    kvf_cuda_stream *streams[KVF_CUDA_STREAMS_MAX]; /* by index; NULL = free */
    kvf_cuda_event *events;                         /* list */
    uint32_t stream_total;                          /* ever created, seeds the delays */
    kvf_graph *recording;                           /* under capture on this device, NULL if none */
} kvf_cuda_device;

/* A host call on its way, or one that a graph keeps. */
typedef struct kvf_cuda_call {
    kvf_cuda_stream *stream; /* NULL: it belongs to a graph */
    struct kvf_cuda_call *next;
    kvf_task_fn fn;
    _Alignas(16) char args[KVF_LAUNCH_ARGS_MAX];
} kvf_cuda_call;

struct kvf_cuda_stream {
    kvf_stream base; /* first member */
    cudaStream_t handle;
    bool is_owned;          /* not the caller's, wrapped */
    uint32_t index;         /* in device->streams */
    kvf_cuda_sticky sticky; /* what stream_fail set */
    kvf_cuda_set upstream;  /* streams whose failures come out of this one; itself is one of them */
    uint64_t delay_state;   /* 0 = no delays */
    pthread_mutex_t lock;
    pthread_cond_t returned;
    kvf_cuda_call *calls; /* [KVF_CUDA_CALLS_MAX], ring */
    uint64_t calls_made;  /* guarded by lock */
    uint64_t calls_done;  /* guarded by lock; made - done <= KVF_CUDA_CALLS_MAX */
    bool is_calling;      /* guarded by lock: a host call runs now */
};

struct kvf_cuda_event {
    kvf_event base; /* first member */
    cudaEvent_t handle;
    kvf_cuda_sticky sticky; /* of streams that are gone */
    kvf_cuda_set upstream;  /* of the stream that recorded it last, then */
    kvf_cuda_event *next, **link;
};

static inline kvf_cuda_device *kvf_cuda_of(const kvf_device *device)
{
    return (kvf_cuda_device *)(void *)(uintptr_t)device;
}

static inline kvf_cuda_stream *kvf_cuda_of_stream(kvf_stream *stream)
{
    return (kvf_cuda_stream *)(void *)stream;
}

static inline kvf_cuda_device *kvf_cuda_device_of(kvf_stream *stream)
{
    return kvf_cuda_of(stream->device);
}

/* ---- errors: cuda_error.c ---- */

/* The settings of a thread before a call of this library. The context is asked for, and not the
 * device: a thread may have none, and cudaSetDevice would make one on the device that it has never
 * used, which takes memory there. */
typedef struct kvf_cuda_caller {
    void *context;
    bool is_relaxed; /* captures of other threads forbid it nothing now; before, `mode` said */
    enum cudaStreamCaptureMode mode;
} kvf_cuda_caller;

/* Make the device current; kvf_cuda_leave undoes it. KVF_DEVICE_FAILED once the device is lost. */
KVF_CHECKED kvf_status kvf_cuda_enter(kvf_cuda_device *device, kvf_cuda_caller *before);
void kvf_cuda_leave(const kvf_cuda_device *device, kvf_cuda_caller before);
/* The same after a call of CUDA, whose answer is kvf_cuda_failed's. */
kvf_status kvf_cuda_leave_after(kvf_cuda_device *device, kvf_cuda_caller before, cudaError_t error,
                                const char *what);
/* The same for calls that CUDA forbids every thread while any is in a capture of global mode, as
 * PyTorch's are: waits, looks at events, memory. They have no part in what is captured, and to be
 * refused would make that capture void. */
KVF_CHECKED kvf_status kvf_cuda_enter_relaxed(kvf_cuda_device *device, kvf_cuda_caller *before);
/* The same for giving things back, which goes on whatever CUDA says: what a lost device held is
 * still given back to the driver, which answers with the error and keeps nothing. */
void kvf_cuda_enter_release(kvf_cuda_device *device, kvf_cuda_caller *before);

/* Translate `error`, record it with `what` failed, clear it; KVF_OK for cudaSuccess. An error that
 * CUDA cannot recover from makes the device lost. */
kvf_status kvf_cuda_failed(kvf_cuda_device *device, cudaError_t error, const char *what);

/* After which every call of the process on this device fails. */
bool kvf_cuda_is_fatal(cudaError_t error);

/* Before there is a device: how many there are, or why none can be used. */
int kvf_cuda_count(char text[256]);

/* ---- memory and registration: cuda_memory.c ---- */

kvf_status kvf_cuda_memory_alloc(kvf_device *device, size_t bytes, void **out);
void kvf_cuda_memory_free(kvf_device *device, void *pointer);
uint64_t kvf_cuda_memory_left(kvf_device *device);
kvf_status kvf_cuda_host_register(kvf_device *device, void *host, size_t bytes, void **alias);
void kvf_cuda_host_unregister(kvf_device *device, void *host, size_t bytes);
kvf_status kvf_cuda_host_alloc(kvf_device *device, size_t bytes, void **host, void **alias);
void kvf_cuda_host_free(kvf_device *device, void *host);

/* ---- streams and events: cuda_stream.c ---- */

kvf_status kvf_cuda_stream_create(kvf_device *device, kvf_stream_priority priority,
                                  kvf_stream **out);
kvf_status kvf_cuda_stream_wrap(kvf_device *device, void *native, kvf_stream **out);
void *kvf_cuda_stream_native(kvf_stream *stream);
void kvf_cuda_stream_destroy(kvf_stream *stream);
kvf_status kvf_cuda_stream_wait(kvf_stream *stream);
void kvf_cuda_stream_fail(kvf_stream *stream, kvf_status status);
kvf_status kvf_cuda_event_create(kvf_device *device, bool is_timed, kvf_event **out);
void kvf_cuda_event_destroy(kvf_event *event);
kvf_status kvf_cuda_event_record(kvf_event *event, kvf_stream *stream);
kvf_status kvf_cuda_stream_wait_event(kvf_stream *stream, kvf_event *event);
kvf_status kvf_cuda_event_wait(kvf_event *event);
int kvf_cuda_event_is_done(kvf_event *event);
kvf_status kvf_cuda_event_elapsed(kvf_event *from, kvf_event *to, uint64_t *ns);

/* ---- work on streams: cuda_work.c ---- */

kvf_status kvf_cuda_copy(kvf_stream *stream, void *to, const void *from, size_t bytes);
kvf_status kvf_cuda_copy_batch(kvf_stream *stream, void *const *to, const void *const *from,
                               size_t bytes, uint32_t count);
kvf_status kvf_cuda_fill(kvf_stream *stream, void *to, int byte, size_t bytes);
kvf_status kvf_cuda_launch_tasks(kvf_stream *stream, kvf_task_fn kernel, const void *args,
                                 size_t args_bytes, uint32_t tasks);
kvf_status kvf_cuda_host_call(kvf_stream *stream, kvf_task_fn fn, const void *args,
                              size_t args_bytes);
/* Before a stream is freed: until no host call of it runs, or ever will. At once unless the device
 * was lost meanwhile, for then CUDA does not say when the one that ran has returned. */
void kvf_cuda_calls_settle(kvf_cuda_stream *stream);

/* ---- graphs: cuda_graph.c ---- */

kvf_status kvf_cuda_capture_begin(kvf_stream *stream);
kvf_status kvf_cuda_capture_end(kvf_stream *stream, kvf_graph **out);
int kvf_cuda_is_capturing(kvf_stream *stream);
kvf_status kvf_cuda_graph_launch(kvf_graph *graph, kvf_stream *stream);
uint32_t kvf_cuda_graph_nodes(const kvf_graph *graph);
void kvf_cuda_graph_destroy(kvf_graph *graph);

/* Memory for a host call that the recording under way keeps; NULL if there is none. */
kvf_cuda_call *kvf_cuda_graph_call(kvf_cuda_device *device);

/* ---- the driver: cuda_driver.c ---- */

/* Find the calls, and make sure of the device's context. kvf_cuda_driver_close undoes it, half-open
 * too. */
KVF_CHECKED kvf_status kvf_cuda_driver_open(kvf_cuda_device *device);
void kvf_cuda_driver_close(kvf_cuda_device *device);

/* One batch of `count` copies; the device is current. Returns a cudaError_t. */
cudaError_t kvf_cuda_driver_batch(const kvf_cuda_driver *driver, void *const *to,
                                  const void *const *from, size_t bytes, uint32_t count,
                                  cudaStream_t stream);

/* Features that can only be found out by trying: fills can_capture, can_copy_batch and
 * can_capture_batch. The device is current. */
kvf_status kvf_cuda_driver_probe(kvf_cuda_device *device);

/* ---- opening: device_cuda.c ---- */

KVF_CHECKED kvf_status kvf_device_cuda_open(kvf_context *context, const kvf_device_config *config,
                                            kvf_device **out);

#endif
