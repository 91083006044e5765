/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_STREAMING_HEADS_H
#define KVF_RUNTIME_STREAMING_HEADS_H

/*
 * Heads of both kinds in one call: packed apart and put together again, and what the streaming ones
 * do in between.
 *
 * Knows rings and the frame of a call, and nothing of KV groups. A chunk is written next to the
 * ring and attended from there, and what the ring keeps of it is copied afterwards: so the ring
 * need not have room for a chunk, and what a query sees does not depend on how the prompt was cut.
 */

#include "call.h"
#include "rings.h"

#define KVF_HEADS_JOBS_MAX 10u

/* A call on a layer, by its heads; the functions below do nothing if no head of it streams, where
 * they do not say otherwise. */
typedef struct kvf_heads_work {
    kvf_call *call;
    uint32_t streaming;    /* heads */
    const void *q, *k, *v; /* the caller's; q NULL = append only */
    void *out;
    float *lse;      /* may be NULL */
    uint32_t tokens; /* of a chunk, or one of each row of a batch */
    bool is_chunk;
    bool is_mixed;         /* heads of both kinds: they are packed */
    const uint32_t *heads; /* of the layer (kvf_layer_group), on the device */
    const kvf_row *row;    /* [tokens] of a batch, on the device */
    kvf_heads_args pack_jobs, unpack_jobs;
} kvf_heads_work;
/* Without the caller's buffers. */
kvf_heads_work kvf_heads_work_of(kvf_call *call, uint32_t tokens);

/* Where the heads of a kind are: packed, or the caller's where there is one kind only. */
typedef struct kvf_packed_heads {
    const void *q, *k, *v;
    void *out;
    float *lse;
} kvf_packed_heads;
kvf_packed_heads kvf_heads_packed(const kvf_heads_work *work, bool is_streaming);

/* Into the frame, before it is sent: what pack and unpack move. For a cache with rings. */
void kvf_heads_take_jobs(kvf_heads_work *work);
KVF_CHECKED kvf_status kvf_heads_pack(const kvf_heads_work *work);
KVF_CHECKED kvf_status kvf_heads_unpack(const kvf_heads_work *work);

/* A chunk of one sequence, of a layer with streaming heads. */
typedef struct kvf_streaming_chunk {
    kvf_ring ring;
    char *blocks;              /* of the sequence's ring */
    uint32_t base;             /* tokens before the chunk */
    uint32_t shift;            /* pages between sink and window, left out of `window` */
    void *const *chunk;        /* on the device: pages that the chunk is written to */
    const void *const *window; /* on the device: pages that are attended, see shift */
    kvf_copy_args keep;        /* pages of the chunk that the ring takes over */
    const kvf_row *row;        /* on the device */
} kvf_streaming_chunk;
kvf_streaming_chunk kvf_streaming_take_chunk(const kvf_heads_work *work);
/* Bytes of a frame that the arrays of so many rows of a batch take, or of the largest chunk (one
 * row); 0 without rings. */
size_t kvf_streaming_frame_bytes(const kvf_cache *cache, uint32_t rows, bool is_chunk);
KVF_CHECKED kvf_status kvf_streaming_prefill(const kvf_heads_work *work,
                                             const kvf_streaming_chunk *chunk);

/* A step's call, with room for its streaming heads in the frame, after that of the KV group. */
kvf_heads_work kvf_heads_take_step(kvf_call *call, const kvf_decode_args *args);
/* A batch, of a layer with streaming heads. */
KVF_CHECKED kvf_status kvf_streaming_decode(const kvf_heads_work *work);

/* A copy of a ring on the host: what it has no token for becomes 0. */
void kvf_streaming_scrub(const kvf_cache *cache, uint32_t layer, uint32_t length, char *copy);

#endif
