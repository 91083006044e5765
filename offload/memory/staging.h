/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_STAGING_H
#define KVF_OFFLOAD_STAGING_H

/*
 * A ring of pinned chunks between scattered host pages and the device.
 *
 * reserve -> fill -> submit -> done: a chunk is reserved by one thread, filled by the gather
 * workers, submitted as one copy, and free again when the event recorded after its copy has fired.
 * Depth and chunk size are fixed at create; reserve blocks (counted) while every chunk is in
 * flight, try_reserve says KVF_BUSY.
 *
 * Invariant: chunks reserved or in flight <= depth; they are used and returned in ring order.
 */

#include "host_memory.h"

typedef struct kvf_staging kvf_staging;

typedef struct kvf_staging_config {
    size_t chunk_bytes;            /* 512 KiB .. 1 MiB is right for PCIe */
    uint32_t depth;                /* 3: gather | copy | free */
    kvf_host_memory_config memory; /* bytes and granule are filled in by create */
} kvf_staging_config;

typedef struct kvf_chunk {
    char *host;   /* where workers write */
    char *device; /* alias that a copy or a kernel reads */
    size_t bytes;
    uint32_t index;
} kvf_chunk;

KVF_CHECKED kvf_status kvf_staging_create(kvf_context *context, kvf_device *device,
                                          const kvf_staging_config *config, kvf_staging **out);
void kvf_staging_destroy(kvf_staging *staging);

KVF_CHECKED kvf_status kvf_staging_reserve(kvf_staging *staging, kvf_chunk *out);     /* may wait */
KVF_CHECKED kvf_status kvf_staging_try_reserve(kvf_staging *staging, kvf_chunk *out); /* KVF_BUSY */
/* The chunk is in use until everything now on `stream` is done. */
KVF_CHECKED kvf_status kvf_staging_submit(kvf_staging *staging, const kvf_chunk *chunk,
                                          kvf_stream *stream);

#endif
