/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_TRANSFER_H
#define KVF_OFFLOAD_TRANSFER_H

/*
 * The transfer engine: brings scattered pages from the host pool into slots on the device.
 *
 * A request names its pages by two address arrays and a count that all live on the device and are
 * written by earlier work on the same stream; the caller never waits for them. Methods stand behind
 * one table
 * (`transfer_<name>.c`), all enqueue-only, all delivering the same bytes. `done` fires when the
 * last byte of the request has arrived; work that waits for it sees the bytes.
 *
 * Knows nothing of heads, layers or sequences.
 */

#include "gather.h"
#include "staging.h"

typedef struct kvf_transfer_engine kvf_transfer_engine;

typedef struct kvf_transfer_config {
    kvf_transfer method; /* AUTO: direct where the device shares host memory */
    size_t page_bytes;
    uint32_t pages_max;      /* of one request */
    uint32_t requests_max;   /* in flight at once (one per layer is enough) */
    size_t chunk_bytes;      /* of staging; 0 = 1 MiB, at least one page */
    uint32_t depth;          /* of staging; 0 = 3 */
    uint32_t gather_threads; /* >= 1 */
    const uint32_t *gather_cpus;
    kvf_host_memory_config memory; /* policy for staging */
} kvf_transfer_config;

/* Addresses are device aliases; all three arrays are device memory, valid until `done`. */
typedef struct kvf_transfer_request {
    const void *const *from; /* [*count] pages */
    void *const *to;         /* [*count] slots */
    const uint32_t *count;   /* [1], <= pages_max */
} kvf_transfer_request;

typedef struct kvf_transfer_stats {
    uint64_t pages, bytes, copies;
    uint64_t gather_ns; /* workers filling staging */
    uint64_t copy_ns;   /* timed on the stream that copies */
    uint64_t waits;     /* times that staging was full */
} kvf_transfer_stats;

KVF_MUST_CHECK kvf_status kvf_transfer_open(kvf_device *device, const kvf_transfer_config *config,
                                            kvf_transfer_engine **out);
void kvf_transfer_close(kvf_transfer_engine *engine);

/* The method in force; never AUTO. */
kvf_transfer kvf_transfer_method(const kvf_transfer_engine *engine);
const char *kvf_transfer_name(kvf_transfer method);

/*
 * Enqueue one request: it begins after everything now on `stream`, and runs beside what follows
 * there. Pair it with kvf_transfer_join, which makes `stream` wait for it. With `direct`, both do
 * nothing. KVF_BUSY if requests_max are in flight (nothing was queued).
 */
KVF_MUST_CHECK kvf_status kvf_transfer_submit(kvf_transfer_engine *engine,
                                              const kvf_transfer_request *request,
                                              kvf_stream *stream, uint32_t *ticket);
KVF_MUST_CHECK kvf_status kvf_transfer_join(kvf_transfer_engine *engine, uint32_t ticket,
                                            kvf_stream *stream);

/* After KVF_BUSY: wait on the host until one more request can be submitted. */
KVF_MUST_CHECK kvf_status kvf_transfer_wait_room(kvf_transfer_engine *engine);

/* Bytes of staging reserved. */
uint64_t kvf_transfer_host_bytes(const kvf_transfer_engine *engine);
/* Bytes of device memory reserved: where chunks land before they are scattered. */
uint64_t kvf_transfer_device_bytes(const kvf_transfer_engine *engine);
/* The same two numbers before anything is opened. */
void kvf_transfer_needs(const kvf_device *device, const kvf_transfer_config *config,
                        uint64_t *host_bytes, uint64_t *device_bytes);
/* Exact after the streams involved are waited for. */
void kvf_transfer_stats_read(kvf_transfer_engine *engine, kvf_transfer_stats *out);
void kvf_transfer_stats_reset(kvf_transfer_engine *engine);

#endif
