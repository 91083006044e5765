/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_EXTENTS_H
#define KVF_OFFLOAD_EXTENTS_H

/*
 * A long run of bytes of a file, to or from many pieces of memory: in extents of one size, each
 * with a checksum, several requests at a time.
 *
 * Knows nothing of what the pieces are. Those without an address are not in memory: they go through
 * a buffer of each request, which `move` fills or empties. Requests never cross the end of an
 * extent. A piece that an engine moved only in part is asked for again; a request that makes no
 * progress TRIES_MAX times is an error. Whatever fails, nothing is in flight on return.
 */

#include "io_engine.h"

#include <stddef.h>
#include <stdint.h>

#define KVF_EXTENT_BYTES ((uint32_t)1 << 20)
#define KVF_EXTENT_DEPTH 16u

typedef struct kvf_extents {
    kvf_context *context;
    kvf_io *io;
    const char *path; /* for messages */
    int file;
    uint32_t extent_bytes;
    uint64_t offset;     /* of the first extent in the file */
    uint64_t *checksums; /* [extents] written by write, compared by read */
    /* Bytes of piece number `piece`, whose iov_base is NULL, to or from a buffer; NULL if all
     * pieces have addresses. */
    kvf_status (*move)(void *user, size_t piece, size_t offset, size_t bytes, char *buffer);
    void *user;
} kvf_extents;

static inline uint64_t kvf_extent_count(uint64_t bytes, uint32_t extent_bytes)
{
    return bytes / extent_bytes + (bytes % extent_bytes != 0);
}

/* `pieces` are the bytes in order. KVF_SYSTEM with errno, KVF_CORRUPT if a checksum differs or the
 * file ends before, KVF_OUT_OF_MEMORY. */
KVF_CHECKED kvf_status kvf_extents_write(const kvf_extents *e, const struct iovec *pieces,
                                         size_t count);
KVF_CHECKED kvf_status kvf_extents_read(const kvf_extents *e, const struct iovec *pieces,
                                        size_t count);

/*
 * 64 bits that tell whether bytes are those that were written: XXH3 of xxHash, over pieces in
 * order. Not for secrets: it finds damage, not intent. Where the build has no xxHash there is none.
 */

typedef struct kvf_checksum kvf_checksum;

/* Bytes of one, aligned to 64; the caller brings the memory. 0: this build has none. */
size_t kvf_checksum_bytes(void);
void kvf_checksum_begin(kvf_checksum *sum);
void kvf_checksum_add(kvf_checksum *sum, const void *data, size_t bytes);
uint64_t kvf_checksum_end(const kvf_checksum *sum);
/* The request of one piece. */
uint64_t kvf_checksum_of(const void *data, size_t bytes);

#endif
