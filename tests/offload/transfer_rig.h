/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_OFFLOAD_TRANSFER_RIG_H
#define KVF_TESTS_OFFLOAD_TRANSFER_RIG_H

/*
 * Helpers of the tests of transfer: pages of a pool, slots with guards between them, and requests
 * that name both, as the device sees them.
 *
 * Knows nothing of methods. Sources are never written after they are filled.
 */

#include "transfer.h"

#include <stdatomic.h>

#include "offload_rig.h"
#include "page_pool.h"

#define SOURCES  200u
#define SLOTS    96u
#define REQUESTS 12u
#define GUARD    0xa5

/* Requests as the device sees them; filled by work on the stream, never by the caller. */
typedef struct tables {
    const void *from[REQUESTS][SLOTS];
    void *to[REQUESTS][SLOTS];
    uint32_t count[REQUESTS];
} tables;

typedef struct plan {
    size_t page_bytes;
    uint32_t count[REQUESTS];
    uint32_t source[REQUESTS][SLOTS];
    uint32_t slot[REQUESTS][SLOTS];
} plan;

typedef struct bench_memory {
    kvf_page_pool pool; /* [SOURCES] blocks of a page, in several arenas */
    char *slots;        /* device [REQUESTS, region_bytes] */
    char *mirror;       /* the same, once it was copied: what is checked */
    tables *device;     /* shared: host functions write it, in stream order */
} bench_memory;

/* Slots of one request; the slots of odd ones end before it does. */
size_t plan_region_bytes(const plan *p);

void plan_make(plan *p, rig_random *random, size_t page_bytes);

/* All but the pool goes with the rig. */
void transfer_open_memory(rig *r, const plan *p, bench_memory *m);

typedef struct write_args {
    const plan *plan;
    const bench_memory *memory;
    uint32_t request;
} write_args;

/* A task: fills the tables of a request. */
void transfer_write_request(const void *raw, uint32_t task);

typedef struct check_args {
    const plan *plan;
    const bench_memory *memory;
    uint32_t request;
    atomic_uint *wrong;
} check_args;

/*
 * Enqueues, after a join: every page is there, every guard is whole, every other slot untouched.
 */
void transfer_check(rig *r, const check_args *check, kvf_stream *stream);

/* Fills the tables on the stream and submits; waits for room where there is none. */
void transfer_enqueue(rig *r, kvf_transfer_engine *engine, const plan *p, const bench_memory *m,
                      uint32_t q, kvf_stream *stream, uint32_t *ticket);

/* Memory and an engine for a plan, which brings all requests: right bytes, and nothing else is
 * touched. The caller closes the engine and the pool. */
kvf_transfer_engine *transfer_run(rig *r, kvf_transfer_config *config, const plan *p,
                                  bench_memory *m);

kvf_transfer_config transfer_engine_config(kvf_transfer method, size_t page_bytes);

#endif
