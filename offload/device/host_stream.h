/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_HOST_STREAM_H
#define KVF_OFFLOAD_HOST_STREAM_H

/*
 * Streams and events of the host device: what `device_host.c` puts into its table.
 *
 * A stream is a bounded FIFO with a worker, whose work its waiters do where they come first; an
 * event is a fence whose generation grows with every record. Knows nothing of memory or of what is
 * launched.
 */

#include "device.h"
#include "host_team.h"

typedef struct kvf_host_device {
    kvf_device base; /* first member */
    kvf_team *team;
    kvf_device_config config;
    char name[64];
    pthread_mutex_t lock;
    uint64_t registered_bytes;   /* guarded by lock */
    uint32_t registered_regions; /* guarded by lock */
    uint32_t stream_count;       /* guarded by lock: alive */
    uint32_t stream_total;       /* guarded by lock: ever created, seeds the delays */
} kvf_host_device;

KVF_CHECKED kvf_status kvf_device_host_open(kvf_context *context, const kvf_device_config *config,
                                            kvf_device **out);

kvf_status kvf_host_stream_create(kvf_device *device, kvf_stream_priority priority,
                                  kvf_stream **out);
void kvf_host_stream_destroy(kvf_stream *stream);
kvf_status kvf_host_stream_wait(kvf_stream *stream);
kvf_status kvf_host_event_create(kvf_device *device, bool is_timed, kvf_event **out);
void kvf_host_event_destroy(kvf_event *event);
kvf_status kvf_host_event_record(kvf_event *event, kvf_stream *stream);
kvf_status kvf_host_stream_wait_event(kvf_stream *stream, kvf_event *event);
kvf_status kvf_host_event_wait(kvf_event *event);
int kvf_host_event_is_done(kvf_event *event);
kvf_status kvf_host_event_elapsed(kvf_event *from, kvf_event *to, uint64_t *ns);

/* A stream's part in an event: the generation of a record to come on it (waits while 64 are on
 * their way; who waits for it calls `wake` with the stream), the one enqueued last, for which
 * `stream` is going to wait, completing one, and waiting for one (generation 0 is always complete),
 * which returns the event's error. `error` NULL: there is none. */
uint64_t kvf_host_event_next(kvf_event *event, kvf_stream *stream, void (*wake)(kvf_stream *));
uint64_t kvf_host_event_recorded(kvf_event *event, const kvf_stream *stream);
void kvf_host_event_complete(kvf_event *event, uint64_t generation, const kvf_error *error);
kvf_status kvf_host_event_await(kvf_event *event, uint64_t generation);

kvf_status kvf_host_copy(kvf_stream *stream, void *to, const void *from, size_t bytes);
kvf_status kvf_host_copy_through(kvf_stream *stream, void *to, const void *from, size_t bytes);
kvf_status kvf_host_copy_batch(kvf_stream *stream, void *const *to, const void *const *from,
                               size_t bytes, uint32_t count);
kvf_status kvf_host_fill(kvf_stream *stream, void *to, int byte, size_t bytes);
kvf_status kvf_host_launch(kvf_stream *stream, kvf_task_fn kernel, const void *args,
                           size_t args_bytes, uint32_t tasks);
kvf_status kvf_host_host_call(kvf_stream *stream, kvf_task_fn fn, const void *args,
                              size_t args_bytes);
void kvf_host_stream_fail(kvf_stream *stream, kvf_status status);

#endif
