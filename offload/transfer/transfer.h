/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_TRANSFER_H
#define KVF_OFFLOAD_TRANSFER_H

/*
 * The transfer engine: brings scattered pages from the host pool into slots on the device.
 *
 * A request names its pages by two address arrays and a count that all live on the device and are
 * written by earlier work on the same stream; the caller never waits for them. Methods stand behind
 * one table (`transfer_<name>.c`), all delivering the same bytes. `mapped` is work of the device
 * alone and can be recorded. The others need a thread of the host: the engine has one of its own,
 * which learns of a request through a word of mapped memory, so no function that a stream calls
 * ever calls the device.
 *
 * Knows nothing of heads, layers or sequences.
 */

#include "device.h"
#include "settings.h"
#include "staging.h"

/*
 * A team of workers, pinned to cores of one node, that copies scattered blocks into a staging
 * chunk.
 *
 * The caller works too: a team of one has no thread of its own. Workers spin briefly, then sleep.
 * They run the copy kernel of the device's table, in units of kvf_gather_per_task blocks.
 */

typedef struct kvf_gather kvf_gather;

KVF_CHECKED kvf_status kvf_gather_create(kvf_device *device, uint32_t threads,
                                         const uint32_t *cpus /* [threads] or NULL */,
                                         kvf_gather **out);
void kvf_gather_destroy(kvf_gather *gather);

/* Blocks of one task: 64 KiB of them. Small against a chunk, so that workers end together; large
 * against a claim, and against what a task reads before its prefetching has caught up. */
static inline uint32_t kvf_gather_per_task(size_t block_bytes)
{
    return block_bytes < 65536 ? (uint32_t)(65536 / block_bytes) : 1;
}

/* to[i] <- from[i] for all i, done on return. One caller at a time. */
void kvf_gather_run(kvf_gather *gather, const kvf_copy_args *args);

/* The same in two steps: between them workers and guests are at it already. `args` must live until
 * end. */
void kvf_gather_begin(kvf_gather *gather, const kvf_copy_args *args);
void kvf_gather_end(kvf_gather *gather);

/* From any other thread that has nothing better to do: take part in what is being gathered, if
 * anything. */
void kvf_gather_help(kvf_gather *gather);

#define KVF_TRANSFER_METHODS (KVF_NAMES_HIGH(KVF_TRANSFER_LIST) + 1)
/* Requests by size: bucket b has 2^b .. 2^(b+1) - 1 pages, the last one all that are larger. */
#define KVF_TRANSFER_BUCKETS 17u

typedef struct kvf_transfer_engine kvf_transfer_engine;

/* Which method takes which requests. Those that the device takes must be neighbours. */
typedef struct kvf_transfer_choice {
    kvf_transfer method[KVF_TRANSFER_BUCKETS];
} kvf_transfer_choice;

typedef struct kvf_transfer_config {
    /* AUTO: as `choice` says; without one, direct where the device shares host memory, else
     * kvf_transfer_choice_default */
    kvf_transfer method;
    size_t page_bytes;
    uint32_t pages_max;      /* of one request */
    uint32_t requests_max;   /* in flight at once (one per layer is enough) */
    size_t chunk_bytes;      /* of staging; 0 = 1 MiB, at least one page */
    uint32_t depth;          /* of staging; 0 = 3 */
    uint32_t gather_threads; /* >= 1 */
    const uint32_t *gather_cpus;
    uint32_t blocks;               /* of the device that `mapped` takes; 0 = 8 */
    kvf_host_memory_config memory; /* policy for staging */
    /* Where the pages live, so that workers find an alias's host address;
     * outlives the engine. NULL: aliases are host addresses. */
    const kvf_host_memory *pool;
    const kvf_transfer_choice *choice; /* of AUTO; borrowed for the call */
    uint32_t first_ticket;             /* tests: about where tickets begin */
} kvf_transfer_config;

/* Addresses are device aliases; all three arrays are device memory, valid until `done`. */
typedef struct kvf_transfer_request {
    const void *const *from; /* [*count] pages */
    void *const *to;         /* [*count] slots */
    const uint32_t *count;   /* [1], <= pages_max */
} kvf_transfer_request;

typedef struct kvf_transfer_stats {
    uint64_t pages,
        bytes;       /* by methods on the engine's thread; `mapped` leaves counts to the device */
    uint64_t copies; /* chunks, pages or batches submitted; `mapped`: requests */
    uint64_t gather_ns; /* workers filling staging */
    uint64_t copy_ns;   /* timed on the stream that copies */
    uint64_t waits;     /* times that staging was full */
} kvf_transfer_stats;

/* The values in force; 0 where no method in use has them. */
typedef struct kvf_transfer_shape {
    uint32_t workers, depth, blocks;
    uint32_t pages_per_copy; /* 0 = all of a request */
    size_t chunk_bytes;
} kvf_transfer_shape;

KVF_CHECKED kvf_status kvf_transfer_open(kvf_device *device, const kvf_transfer_config *config,
                                         kvf_transfer_engine **out);
/* Requests that are on their way are finished first. NULL is fine. */
void kvf_transfer_close(kvf_transfer_engine *engine);

/* The method in force; AUTO if it differs by size. */
kvf_transfer kvf_transfer_method(const kvf_transfer_engine *engine);
const char *kvf_transfer_name(kvf_transfer method);

/* The method that AUTO stands for where that does not depend on sizes; AUTO where it does. */
kvf_transfer kvf_transfer_in_force(kvf_transfer method, int shares_memory);
/* If not, pages are attended where they lie, which needs a device that shares host memory. */
bool kvf_transfer_moves(kvf_transfer method);
/* If not, it needs a thread of the host for every request. */
bool kvf_transfer_can_record(kvf_transfer method);
void kvf_transfer_shape_read(const kvf_transfer_engine *engine, kvf_transfer_shape *out);

/*
 * Enqueue one request: it begins after everything now on `stream`, and runs beside what follows
 * there. Pair it with kvf_transfer_join, which makes `stream` wait for it. With `direct`, both do
 * nothing. KVF_BUSY if requests_max are in flight (nothing was queued). KVF_UNSUPPORTED while
 * `stream` is recorded, unless `mapped` takes part; then it takes requests of every size. Submit
 * and join of one request are both recorded or both not.
 */
KVF_CHECKED kvf_status kvf_transfer_submit(kvf_transfer_engine *engine,
                                           const kvf_transfer_request *request, kvf_stream *stream,
                                           uint32_t *ticket);
/* A request that failed makes `stream` fail: its next wait says why. Once per ticket. Where a
 * thread of the host has a part in it and the device has memory of its own, the caller waits until
 * that thread has enqueued the copies, so that no stream waits for what is not enqueued. */
KVF_CHECKED kvf_status kvf_transfer_join(kvf_transfer_engine *engine, uint32_t ticket,
                                         kvf_stream *stream);

/* After KVF_BUSY: wait on the host until one more request can be submitted. */
KVF_CHECKED kvf_status kvf_transfer_wait_room(kvf_transfer_engine *engine);

/* Memory that opening reserves: pinned memory for staging, words and lists that the device writes;
 * device memory where chunks land before they are scattered. */
void kvf_transfer_needs(const kvf_device *device, const kvf_transfer_config *config,
                        uint64_t *host_bytes, uint64_t *device_bytes);
/* Exact after the streams involved are waited for. */
void kvf_transfer_stats_read(kvf_transfer_engine *engine, kvf_transfer_stats *out);
void kvf_transfer_stats_reset(kvf_transfer_engine *engine);

/* AUTO's choice on a device that was never measured: `mapped`, whatever the size. */
kvf_transfer_choice kvf_transfer_choice_default(void);

static inline uint32_t kvf_transfer_bucket(uint32_t pages)
{
    uint32_t bucket = 0;
    while (pages > 1 && bucket + 1 < KVF_TRANSFER_BUCKETS) {
        pages >>= 1;
        bucket++;
    }
    return bucket;
}

#endif
