/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_WRITEBACK_H
#define KVF_OFFLOAD_WRITEBACK_H

/*
 * Sealed blocks from the device to the host pool, without starving what comes the other way.
 *
 * Blocks that lie together on both sides become one copy, and no copy is larger than a chunk, so
 * that a page which is needed now waits for one chunk at most (20 us at 50 GB/s and 1 MiB) and
 * never for a whole prefill. The order on the stream is that of the blocks. Knows nothing of pages.
 */

#include "device.h"

#define KVF_WRITEBACK_CHUNK_BYTES ((size_t)1 << 20)

typedef struct kvf_writeback_block {
    const void *from; /* device memory */
    void *to;         /* of the pool, at its device alias */
} kvf_writeback_block;

typedef struct kvf_writeback_job {
    const kvf_writeback_block *blocks; /* [count] on the host; read before return */
    uint32_t count;
    size_t block_bytes;
    size_t chunk_bytes; /* 0 = KVF_WRITEBACK_CHUNK_BYTES */
} kvf_writeback_job;

/*
 * Enqueue the copies on `stream`, which should be one of low priority that waits for the event of
 * whatever wrote the blocks. The caller records an event afterwards where somebody depends on it: a
 * block may be overwritten on the device, and a pool block may be read, once that has fired.
 * *copies grows by the copies enqueued; NULL is fine. On failure some may have been enqueued.
 */
KVF_CHECKED kvf_status kvf_writeback_enqueue(kvf_stream *stream, const kvf_writeback_job *args,
                                             uint64_t *copies);

#endif
