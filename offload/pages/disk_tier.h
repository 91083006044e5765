/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_DISK_TIER_H
#define KVF_OFFLOAD_DISK_TIER_H

/*
 * A page pool that is larger than its memory: bundles of neighbouring blocks, each with a place in
 * a private file, some of them also in a page frame in memory.
 *
 * Knows neither tokens nor streams. A bundle that is in memory stays there until the next call
 * (kvf_disk_tier_call) if this one wanted it or writes it; whatever is given up was last used by
 * earlier calls, and `drain` has waited for those. Invariants: what a bundle holds is in its
 * page frame, or in the file, or in both and equal; a page frame is of one bundle; a bundle is
 * written only while nothing writes into it.
 *
 * Reads are waited for by kvf_disk_tier_bring. Writes are submitted when page frames run short,
 * after the reads, KVF_DISK_WRITES of them at most; a call waits for one only if it needs that page
 * frame. One thread owns the tier; kvf_disk_tier_copy_out may be called by others meanwhile.
 */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "host_memory.h"
#include "io_engine.h"
#include "plain_file.h"

/*
 * Which page frame is given up next: recency and frequency of use, where what is used comes in
 * turns.
 *
 * Knows neither files nor pages. A group is a set of bundles that calls ask for in turn, as steps
 * do the layers of a model. A bundle has a history: which of the last sixteen calls for its group
 * used it, the latest as the highest bit. The smallest history goes; of equals, that whose group
 * had its turn last, because it waits longest for the next. So a group does not drive out what the
 * following ones are about to use. Only some page frames are compared, so a choice costs constant
 * time.
 */

#define KVF_DISK_COMPARED 64u /* page frames per choice */

typedef struct kvf_disk_use {
    uint32_t turn; /* of its group, when it was used last */
    uint16_t group, history;
} kvf_disk_use;

typedef struct kvf_disk_turn {
    uint64_t call;  /* the latest for this group */
    uint32_t turns; /* calls for it */
} kvf_disk_turn;

typedef struct kvf_disk_policy {
    uint32_t page_frames;
    uint32_t hand;
    const uint32_t *bundles; /* [page frames] who lies there */
    kvf_disk_use *uses;      /* [bundles] zeros at first; kept when a bundle goes */
    kvf_disk_turn *groups;   /* zeros at first */
} kvf_disk_policy;

/* Whether a page frame may be given up; or written, so that it may. Some bundle lies there. */
typedef bool (*kvf_disk_may)(const void *user, uint32_t page_frame);

/* Once per call; calls grow from 1 on. */
void kvf_disk_policy_use(kvf_disk_policy *p, uint32_t bundle, uint32_t group, uint64_t call);
void kvf_disk_policy_drop(kvf_disk_policy *p, uint32_t bundle); /* nobody will want it */

/* The next to go; UINT32_MAX if none may. */
uint32_t kvf_disk_policy_victim(kvf_disk_policy *p, kvf_disk_may may, const void *user);
/* The first that may, in the order in which the hand will come: what victim is likely to want
 * soon. Looks at `most` page frames at most. */
uint32_t kvf_disk_policy_next(const kvf_disk_policy *p, uint32_t most, kvf_disk_may may,
                              const void *user);

#define KVF_DISK_READS        64u
#define KVF_DISK_WRITES       16u
#define KVF_DISK_REQUESTS     (KVF_DISK_READS + KVF_DISK_WRITES)
#define KVF_DISK_NONE         UINT32_MAX
#define KVF_DISK_COMING       (UINT32_MAX - 1) /* a read is on its way into that page frame */
#define KVF_DISK_BUNDLE_MIN   ((size_t)128 << 10)
#define KVF_DISK_FRAMES_LEAST 4u

typedef struct kvf_disk_tier_config {
    const char *folder;
    const kvf_host_memory *memory; /* page frames one after the other; granule = bundle_bytes */
    const kvf_io_ops *engine;      /* NULL = the best there is */
    size_t bundle_bytes;           /* a multiple of KVF_DISK_ALIGNMENT */
    uint32_t bundles, page_frames;
    uint32_t groups; /* of bundles; calls for them come in turn */
    /* Until all that earlier calls enqueued is done. */
    kvf_status (*drain)(void *user);
    void *user;
} kvf_disk_tier_config;

typedef struct kvf_disk_stats {
    uint64_t wanted, read; /* bundles, once per call; of which from the file */
    uint64_t bytes_read, bytes_written;
    uint64_t wait_ns; /* for reads */
} kvf_disk_stats;

typedef struct kvf_bundle {
    uint64_t call;         /* the latest that wanted it; 0 = none */
    uint64_t written_call; /* the latest that enqueued a write into it */
    uint64_t arrival;
    char *device; /* where the device sees it, or will; NULL = it has no page frame and gets none */
    uint32_t page_frame; /* UINT32_MAX = none */
    bool is_dirty, is_in_file, is_writing, is_reading;
} kvf_bundle;

typedef struct kvf_disk_request {
    struct iovec piece; /* what is left */
    uint64_t offset;
    uint32_t bundle, page_frame;
    bool is_write;
    uint32_t tries;
} kvf_disk_request;

/* Only disk_tier.c writes its fields. */
typedef struct kvf_disk_tier {
    kvf_context *context;
    kvf_disk_tier_config config;
    kvf_disk_file file;
    kvf_io *io;
    char *tables;
    kvf_bundle *bundles;   /* [bundles] */
    uint32_t *page_frames; /* [page frames] its bundle; KVF_DISK_NONE, KVF_DISK_COMING */
    uint32_t *wanted;      /* [page frames] bundles to bring */
    uint32_t wanted_count;
    bool is_crowded;
    bool has_read; /* this call */
    bool is_asked; /* of what is wanted; then since when, and how it began */
    uint64_t asked_ns;
    kvf_status asked;
    kvf_disk_policy policy;
    uint32_t free_page_frames, free_from; /* how many, and where to look */
    uint32_t dirty;
    uint64_t call, drained, arrivals;
    pthread_mutex_t lock;
    bool has_lock;

    kvf_disk_request requests[KVF_DISK_REQUESTS];
    uint32_t idle[KVF_DISK_REQUESTS]; /* numbers of requests that are free */
    uint32_t idle_count;
    uint32_t reads_in_flight, writes_in_flight;
    int read_error, write_error; /* the latest, or 0 */
    kvf_disk_stats stats;
} kvf_disk_tier;

/* The file is made in `folder`, mode 0600, without a name, and its room is reserved. KVF_SYSTEM
 * with errno, KVF_OUT_OF_MEMORY. */
KVF_CHECKED kvf_status kvf_disk_tier_open(kvf_context *context, const kvf_disk_tier_config *config,
                                          kvf_disk_tier **out);
void kvf_disk_tier_close(kvf_disk_tier *tier); /* NULL is fine; no other thread uses it */
uint64_t kvf_disk_tier_table_bytes(uint32_t bundles, uint32_t page_frames, uint32_t groups);

/* A new call: what the one before wanted may go. */
void kvf_disk_tier_call(kvf_disk_tier *tier);
/* This call uses the bundle, for a group below config.groups. It is in memory after the next bring.
 */
void kvf_disk_tier_want(kvf_disk_tier *tier, uint32_t bundle, uint32_t group);
/* The reads of all that are wanted begin; what fails is told by the next bring, which has to follow
 * in this call. True if some are still on their way: they have a place by now. */
bool kvf_disk_tier_ask(kvf_disk_tier *tier);
/* All that are wanted, asked for or not. On failure none of those that were missing came, and none
 * is in flight. KVF_FULL (without a message) if more are wanted at once than there are page frames,
 * KVF_SYSTEM. */
KVF_CHECKED kvf_status kvf_disk_tier_bring(kvf_disk_tier *tier);
/* Bytes of a bundle that this call brought are written by what it enqueues. */
void kvf_disk_tier_write(kvf_disk_tier *tier, uint32_t bundle);
/* Nothing in it is of use any more. */
void kvf_disk_tier_empty(kvf_disk_tier *tier, uint32_t bundle);
/* The end of a call: begin to write what may soon have to go. */
void kvf_disk_tier_start_writes(kvf_disk_tier *tier);

/* Number of its latest place in memory; grows. 0 = never. */
uint64_t kvf_disk_tier_arrival(const kvf_disk_tier *tier, uint32_t bundle);
uint64_t kvf_disk_tier_arrivals(const kvf_disk_tier *tier); /* the latest */
/* As the CPU and the device see it, or NULL if it is not in memory. */
char *kvf_disk_tier_host(const kvf_disk_tier *tier, uint32_t bundle);
char *kvf_disk_tier_device(const kvf_disk_tier *tier, uint32_t bundle);
/* The latter also of a bundle that is on its way, while it is not there yet. */
char *kvf_disk_tier_place(const kvf_disk_tier *tier, uint32_t bundle);
bool kvf_disk_tier_is_coming(const kvf_disk_tier *tier, uint32_t bundle);

/* Bytes of a bundle wherever they are. Thread: any, while the bundle is not empty. Errors go to
 * `context`. */
KVF_CHECKED kvf_status kvf_disk_tier_copy_out(kvf_disk_tier *tier, kvf_context *context,
                                              uint32_t bundle, size_t offset, size_t bytes,
                                              char *to);
/* Bytes into a bundle wherever it is; nothing enqueued uses it. */
KVF_CHECKED kvf_status kvf_disk_tier_copy_in(kvf_disk_tier *tier, uint32_t bundle, size_t offset,
                                             size_t bytes, const char *from);

void kvf_disk_tier_stats(const kvf_disk_tier *tier, kvf_disk_stats *out);
void kvf_disk_tier_stats_reset(kvf_disk_tier *tier);
/* Walks everything: whether the invariants hold. */
bool kvf_disk_tier_is_valid(const kvf_disk_tier *tier);

#endif
