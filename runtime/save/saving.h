/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SAVING_H
#define KVF_RUNTIME_SAVING_H

/*
 * Saving a sequence to a file while its cache goes on, and making one from a file.
 *
 * A save takes its own copy of whatever later calls write, in the order of the cache's work, and
 * holds the sealed blocks, which nobody writes while they are held; a thread of its own writes the
 * file. snapshot.h says what a snapshot of a layer is.
 */

#include <kvferry/save.h>

#include "extents.h"
#include "plain_file.h"
#include "snapshot.h"

/* A piece of the bytes of a sequence that has no address that lasts. */
typedef struct kvf_piece_block {
    kvf_page_pool *pool;
    kvf_block block;
} kvf_piece_block;

/* Bytes of a sequence, one after the other, as they lie in a file. */
typedef struct kvf_pieces {
    struct iovec *of;
    kvf_piece_block *blocks; /* [count] of those without an address */
    size_t count;
    bool has_blocks; /* there are such */
} kvf_pieces;
/* There is room for them. Neighbours in memory become one. */
void kvf_pieces_add(kvf_pieces *pieces, void *at, size_t bytes);
void kvf_pieces_add_block(kvf_pieces *pieces, kvf_page_pool *pool, kvf_block block, size_t bytes);

struct kvf_save {
    kvf_cache *cache;
    char *path;
    char *buffer; /* of the header */
    kvf_saved_header header;
    uint32_t extent_bytes;

    /* one granule per layer, at the same distance, in pinned memory */
    kvf_host_memory memory;
    size_t granule;
    uint64_t *fault; /* of the sequence, as of the call */
    uint32_t generation;

    kvf_block **blocks; /* [layers] held, of the layer's KV group */
    kvf_pieces pieces;

    kvf_event *taken;
    pthread_t thread;
    uint32_t is_done; /* atomic */
    kvf_error error;  /* why there is no file; the thread's until it is done */
};

KVF_CHECKED kvf_status kvf_save_begin(kvf_cache *cache, const kvf_save_args *args,
                                      kvf_stream *stream, kvf_save **out);
/* Waits for the thread, releases what is held, and hands its error to the cache's context. */
KVF_CHECKED kvf_status kvf_save_end(kvf_save *save);

/* Where snapshot and what follows it are for layer `index`, in memory of equal granules. */
kvf_seen kvf_granule(const kvf_host_memory *memory, size_t granule, uint32_t index);
KVF_CHECKED kvf_status kvf_granules_create(kvf_cache *cache, size_t granule, uint32_t count,
                                           kvf_host_memory *out);

/* A file that is open for reading, and its header. */
typedef struct kvf_saved_file {
    kvf_context *context;
    const kvf_runtime *runtime;
    const char *path;
    int file; /* -1 = none */
    uint64_t bytes;
    char *buffer;
    kvf_saved_header header;
} kvf_saved_file;

/* *out is to be closed even on failure. */
KVF_CHECKED kvf_status kvf_saved_open(const kvf_runtime *runtime, const char *path,
                                      kvf_saved_file *out);
/* An engine for such files, with errors in `context`. */
KVF_CHECKED kvf_status kvf_saved_engine(const kvf_runtime *runtime, kvf_context *context,
                                        kvf_io **out);
/* The layers' bytes into pieces, checked. */
KVF_CHECKED kvf_status kvf_saved_fill(const kvf_saved_file *f, const kvf_pieces *pieces);
/* ... and only checked. */
KVF_CHECKED kvf_status kvf_saved_check(const kvf_saved_file *f);
void kvf_saved_close(kvf_saved_file *f);

/* `is_exact` is set if the sequence continues as it would have. */
KVF_CHECKED kvf_status kvf_restore(kvf_cache *cache, const kvf_restore_args *args,
                                   kvf_stream *stream, kvf_sequence **out);

#endif
