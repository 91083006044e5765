/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_TRANSFER_METHOD_H
#define KVF_OFFLOAD_TRANSFER_METHOD_H

/*
 * What the transfer engine and its methods share: the engine, its requests in flight, one table per
 * method.
 *
 * The engine owns the requests and their order; a method owns what carries the bytes. Invariant:
 * request slot s holds ticket t with t % requests_max == s, and is written again only after its
 * `done` has fired.
 */

#include <stdatomic.h>

#include "transfer.h"

typedef struct kvf_transfer_slot {
    kvf_transfer_request request;
    kvf_event *begin; /* on the caller's stream: the arrays are written */
    kvf_event *done;  /* on the transfer stream */
    uint32_t ticket;
} kvf_transfer_slot;

typedef struct kvf_transfer_counters {
    atomic_uint_fast64_t pages, bytes, copies, gather_ns, copy_ns, waits;
} kvf_transfer_counters;

typedef struct kvf_transfer_ops {
    kvf_transfer method;
    const char *name;
    /* Reserve what the method needs; on failure close is called, which must take a half-open
     * engine. */
    kvf_status (*open)(kvf_transfer_engine *engine);
    void (*close)(kvf_transfer_engine *engine);
    /* In stream order on the transfer stream's own thread: move all pages, return when they
     * arrived. NULL: the method moves nothing. */
    kvf_status (*move)(kvf_transfer_engine *engine, const kvf_transfer_request *request,
                       uint32_t count);
    void (*needs)(const kvf_transfer_config *config, uint64_t *host_bytes, uint64_t *device_bytes);
} kvf_transfer_ops;

extern const kvf_transfer_ops kvf_transfer_direct_ops;
extern const kvf_transfer_ops kvf_transfer_gather_ops;
extern const kvf_transfer_ops kvf_transfer_each_ops;

struct kvf_transfer_engine {
    kvf_device *device;
    const kvf_transfer_ops *ops;
    kvf_transfer_config config;
    kvf_stream *stream;       /* takes requests in order; NULL for direct */
    kvf_stream *copy_stream;  /* carries the copies */
    kvf_transfer_slot *slots; /* [requests_max] */
    uint32_t next_ticket;
    uint64_t copy_began_ns; /* on copy_stream's thread only */
    void *method;           /* of the method */
    kvf_transfer_counters counters;
};

/* Bracket copies on copy_stream; the time between goes to copy_ns. */
kvf_status kvf_transfer_clock_start(kvf_transfer_engine *engine);
kvf_status kvf_transfer_clock_stop(kvf_transfer_engine *engine);

static inline void kvf_transfer_count(atomic_uint_fast64_t *counter, uint64_t amount)
{
    atomic_fetch_add_explicit(counter, amount, memory_order_relaxed);
}

#endif
