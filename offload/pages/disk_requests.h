/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_DISK_REQUESTS_H
#define KVF_OFFLOAD_DISK_REQUESTS_H

/*
 * Inside the disk tier: its fields, and bundles on their way between berths and the file.
 *
 * Requests know nothing of calls and policies. What an engine moved in part is asked for again from
 * the last multiple of KVF_DISK_ALIGNMENT on; what makes no progress several times has failed.
 * Invariant: a request in flight has its berth for itself, but for readers of what is written.
 */

#include <pthread.h>

#include "disk_tier.h"

#define KVF_DISK_REQUESTS (KVF_DISK_READS + KVF_DISK_WRITES)
#define KVF_DISK_NONE     UINT32_MAX
#define KVF_DISK_COMING   (UINT32_MAX - 1) /* a read is on its way into that berth */

typedef struct kvf_bundle {
    uint64_t call;         /* the latest that wanted it; 0 = none */
    uint64_t written_call; /* the latest that enqueued a write into it */
    uint64_t arrival;
    char *device;   /* where the device sees it, or will; NULL = it has no berth and gets none */
    uint32_t berth; /* UINT32_MAX = none */
    bool is_dirty, is_in_file, is_writing, is_reading;
} kvf_bundle;

typedef struct kvf_disk_request {
    struct iovec piece; /* what is left */
    uint64_t offset;
    uint32_t bundle, berth;
    bool is_write;
    uint32_t tries;
} kvf_disk_request;

struct kvf_disk_tier {
    kvf_context *context;
    kvf_disk_tier_config config;
    kvf_disk_file file;
    kvf_io *io;
    char *tables;
    kvf_bundle *bundles; /* [bundles] */
    uint32_t *berths;    /* [berths] bundle that lies there; KVF_DISK_NONE, KVF_DISK_COMING */
    uint32_t *wanted;    /* [berths] bundles to bring */
    uint32_t wanted_count;
    bool is_crowded;
    bool has_read; /* this call */
    bool is_asked; /* of what is wanted; then since when, and how it began */
    uint64_t asked_ns;
    kvf_status asked;
    kvf_disk_policy policy;
    uint32_t free_berths, free_from; /* how many, and where to look */
    uint32_t dirty;
    uint64_t call, settled, arrivals;
    pthread_mutex_t lock;
    bool has_lock;

    kvf_disk_request requests[KVF_DISK_REQUESTS];
    uint32_t idle[KVF_DISK_REQUESTS]; /* numbers of requests that are free */
    uint32_t idle_count;
    uint32_t reads_in_flight, writes_in_flight;
    int read_error, write_error; /* the latest, or 0 */
    kvf_disk_stats stats;
};

KVF_CHECKED kvf_status kvf_disk_requests_open(kvf_disk_tier *t, const kvf_io_ops *engine);
void kvf_disk_requests_close(kvf_disk_tier *t); /* waits for what is in flight */

/* A bundle on its way; waits for a request to be free. */
KVF_CHECKED kvf_status kvf_disk_read(kvf_disk_tier *t, uint32_t bundle, uint32_t berth);
KVF_CHECKED kvf_status kvf_disk_write(kvf_disk_tier *t, uint32_t bundle, uint32_t berth);
/* Waits for one that is in flight. What ended is told by kvf_disk_arrived, kvf_disk_written and the
 * errors of the tier. */
void kvf_disk_reap(kvf_disk_tier *t);
/* What has ended, without waiting. */
void kvf_disk_poll(kvf_disk_tier *t);
/* The error of a request, in words. */
kvf_status kvf_disk_failed(const kvf_disk_tier *t, bool is_write, int code);

/* Of disk_tier.c. */
char *kvf_disk_berth(const kvf_disk_tier *t, uint32_t berth, bool for_device);
void kvf_disk_arrived(kvf_disk_tier *t, uint32_t bundle, uint32_t berth, bool is_whole);
void kvf_disk_written(kvf_disk_tier *t, uint32_t bundle);

#endif
