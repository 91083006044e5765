/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_GATHER_H
#define KVF_OFFLOAD_GATHER_H

/*
 * A team of workers, pinned to cores of one node, that copies scattered blocks into a staging
 * chunk.
 *
 * The caller works too: a team of one has no thread of its own. Workers spin briefly, then sleep.
 * They run the copy kernel of the device's table, in units of kvf_gather_per_task blocks.
 */

#include "device.h"

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

#endif
