/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_DEVICE_H
#define KVF_OFFLOAD_DEVICE_H

/*
 * One device: memory, host registration, streams, events, copies, launches, properties; one const
 * table of operations per kind of device. `device_host.c` is the embedded default: a stream is a
 * FIFO with a worker, an event a fence, a launch is spread over a team of compute threads.
 * `device_cuda.c` is an NVIDIA GPU through the CUDA runtime.
 *
 * Everything that takes a stream is enqueue-only and in order on that stream; nothing waits on the
 * caller except kvf_stream_wait, kvf_event_wait and a full queue. An error inside a stream is
 * sticky and comes out of the next wait.
 */

#include "context.h"
#include "kernels.h"

#define KVF_STREAM_QUEUE_MAX 1024u
#define KVF_LAUNCH_ARGS_MAX  384u

typedef struct kvf_device kvf_device;
typedef struct kvf_event kvf_event;
typedef struct kvf_graph kvf_graph;
/* kvf_stream is the public opaque type; every stream belongs to one device. */

typedef enum kvf_stream_priority {
    KVF_PRIORITY_LOW,
    KVF_PRIORITY_NORMAL,
    KVF_PRIORITY_HIGH
} kvf_stream_priority;

typedef struct kvf_device_config {
    uint32_t threads;     /* compute threads of the host device, >= 1 */
    const uint32_t *cpus; /* OS indices to pin them to; NULL = unpinned */
    uint32_t isa_mask;
    uint32_t delay_seed; /* non-zero: streams pause at random, to shake out ordering bugs */
    uint32_t ordinal;    /* of the CUDA device */
    bool starts_late;    /* CUDA: no kernel starts before all in front of it is done */
} kvf_device_config;

typedef struct kvf_device_properties {
    char name[64];
    char pci_address[16]; /* "" if none */
    int32_t numa_node;    /* -1 = unknown */
    uint64_t memory_bytes;
    bool shares_host_memory; /* host memory can be read in place, `direct` is possible */
    uint32_t compute_threads;
    bool pins_host_memory; /* registration pins pages */
    /* The rest is 0 on the host device. */
    char uuid[48];
    uint32_t driver_version, runtime_version; /* 1000 * major + 10 * minor */
    uint32_t compute_major, compute_minor;
    uint32_t multiprocessors;
    uint64_t shared_memory_max; /* per block, with opt-in */
    bool is_coherent; /* it reads the host's memory by the host's page tables, as a GH200 does */
    uint32_t link_generation, link_width; /* of PCIe, the most it can do; 0 = unknown */
    bool can_capture;                     /* work can be recorded in graphs */
    bool can_copy_batch;                  /* copy_batch is a call of the driver */
    bool can_capture_batch;               /* ... and may be recorded */
} kvf_device_properties;

typedef struct kvf_device_ops {
    kvf_device_kind kind;
    const char *name;
    void (*close)(kvf_device *device);
    void (*properties)(const kvf_device *device, kvf_device_properties *out);

    /* Zeroed, 64-byte aligned. */
    kvf_status (*memory_alloc)(kvf_device *device, size_t bytes, void **out);
    /* The same, resident as it is written; NULL: there is no such memory. */
    kvf_status (*memory_on_demand)(kvf_device *device, size_t bytes, void **out);
    void (*memory_free)(kvf_device *device, void *pointer);
    /* Bytes that could be had now, of the host device half; 0 = unknown. */
    uint64_t (*memory_left)(kvf_device *device);
    /* Pin host memory and make it visible; *alias is what kernels and copies use. KVF_UNSUPPORTED:
     * no memory but that of host_alloc can be. */
    kvf_status (*host_register)(kvf_device *device, void *host, size_t bytes, void **alias);
    void (*host_unregister)(kvf_device *device, void *host, size_t bytes);
    /* Host memory that the device allocates: pinned, visible, zeroed. NULL where host_register
     * never is KVF_UNSUPPORTED. */
    kvf_status (*host_alloc)(kvf_device *device, size_t bytes, void **host, void **alias);
    void (*host_free)(kvf_device *device, void *host);

    kvf_status (*stream_create)(kvf_device *device, kvf_stream_priority priority, kvf_stream **out);
    void (*stream_destroy)(kvf_stream *stream); /* waits; NULL is fine */
    kvf_status (*stream_wait)(kvf_stream *stream);
    /* An event that only orders, or one that tells the time as well: on CUDA that costs every
     * record a write after all that comes before. */
    kvf_status (*event_create)(kvf_device *device, bool is_timed, kvf_event **out);
    void (*event_destroy)(kvf_event *event); /* NULL is fine; never while work refers to it */
    kvf_status (*event_record)(kvf_event *event, kvf_stream *stream);
    /* Waits for the record that was enqueued last before this call. */
    kvf_status (*stream_wait_event)(kvf_stream *stream, kvf_event *event);
    kvf_status (*event_wait)(kvf_event *event); /* host waits */
    /* 1 if what comes before the event is done; -1: the device could not say, or is lost. */
    int (*event_is_done)(kvf_event *event);
    /* Time between two records of timed events that are done, on the clock of the stream's
     * device. */
    kvf_status (*event_elapsed)(kvf_event *from, kvf_event *to, uint64_t *ns);

    kvf_status (*copy)(kvf_stream *stream, void *to, const void *from, size_t bytes);
    /* The same for bytes that nobody reads soon: past the cache, where there is that choice. */
    kvf_status (*copy_through)(kvf_stream *stream, void *to, const void *from, size_t bytes);
    /* to[i] <- from[i], `bytes` each, in one submission; the arrays are the host's and are read
     * before return. Every address is the device's alias or device memory. KVF_UNSUPPORTED where
     * properties say so, and in a capture that would lose it. */
    kvf_status (*copy_batch)(kvf_stream *stream, void *const *to, const void *const *from,
                             size_t bytes, uint32_t count);
    kvf_status (*fill)(kvf_stream *stream, void *to, int byte, size_t bytes);
    /* A kernel over `tasks` tasks; args copied. tasks == 0 enqueues nothing. */
    kvf_status (*launch)(kvf_stream *stream, kvf_task_fn kernel, const void *args,
                         size_t args_bytes, uint32_t tasks);
    /* A function of the host in stream order. It must not call the device: on CUDA that is an error
     * of the driver. */
    kvf_status (*host_call)(kvf_stream *stream, kvf_task_fn fn, const void *args,
                            size_t args_bytes);
    /* From inside a host_call on `stream`: make `status` its sticky error, which comes out of its
     * next wait and, along events, of waits for others. On the host device later copies, fills and
     * launches are skipped; events and host calls still happen, so nobody waits forever. On
     * CUDA nothing that is enqueued can be skipped: it runs, and the error may also come out of
     * streams that waited for an earlier event of this one. */
    void (*stream_fail)(kvf_stream *stream, kvf_status status);

    int (*is_capturing)(kvf_stream *stream); /* -1: the device could not say */

    /* The rest is NULL on the host device. A stream of the caller, named by the device's own handle
     * (cudaStream_t); destroy gives back the wrapper only. */
    kvf_status (*stream_wrap)(kvf_device *device, void *native, kvf_stream **out);
    void *(*stream_native)(kvf_stream *stream);

    /* Record what is enqueued on `stream`, and on streams that wait for its events and that it
     * waits for in the end, instead of running it. KVF_UNSUPPORTED where properties say so. */
    kvf_status (*capture_begin)(kvf_stream *stream);
    kvf_status (*capture_end)(kvf_stream *stream, kvf_graph **out);
    uint32_t (*graph_nodes)(const kvf_graph *graph); /* how many it has */
    kvf_status (*graph_launch)(kvf_graph *graph, kvf_stream *stream);
    void (*graph_destroy)(kvf_graph *graph); /* NULL is fine */
} kvf_device_ops;

struct kvf_device {
    const kvf_device_ops *ops;
    kvf_context *context;
    kvf_kernels kernels;
};

/* First member of every stream and event, so that generic code reaches the device. */
struct kvf_stream {
    kvf_device *device;
};
struct kvf_event {
    kvf_device *device;
};

/* Enqueue a kernel of the device's table: `args` is its kvf_<op>_args, taken by value. */
#define KVF_ENQUEUE(stream, op, args)                                                              \
    ((stream)->device->ops->launch((stream), (stream)->device->kernels.op, &(args), sizeof(args),  \
                                   kvf_##op##_tasks(&(args))))

/* AUTO: the CUDA device where the build, the driver and a GPU are there, else the host device. */
KVF_CHECKED kvf_status kvf_device_open(kvf_context *context, kvf_device_kind kind,
                                       const kvf_device_config *config, kvf_device **out);
void kvf_device_close(kvf_device *device); /* NULL is fine */

/* Refuses a stream of the caller's that is NULL, or of another device than the rest of the call. */
KVF_CHECKED kvf_status kvf_stream_check(const kvf_device *device, const kvf_stream *stream);

/* Test hook: every alloc, register, stream and event creation asks this first; non-zero return =
 * fail. NULL = off. It is the hook of the device's context: maps and threads ask it too. */
void kvf_device_set_fault(kvf_device *device, kvf_fault_fn fn, void *user);

/* Why there is no CUDA device: "" if there is one. Borrowed from `text`. */
const char *kvf_device_cuda_absence(char text[256]);

/* A word of registered host memory that a kernel and host threads hand to each other. */
static inline uint32_t kvf_word_load(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void kvf_word_store(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

#endif
