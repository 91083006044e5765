/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_STREAMING_HEADS_H
#define KVF_RUNTIME_STREAMING_HEADS_H

/*
 * Heads of both kinds in one call: packed apart and put together again, and what the streaming ones
 * do in between.
 *
 * Knows rings and the frame of a call, and nothing of inner caches. A ring holds the pages of the
 * sink and the newest pages; it does not grow. A chunk is written next to the ring and attended
 * from there, and what the ring keeps of it is copied afterwards: so the ring need not have room
 * for a chunk, and what a query sees does not depend on how the prompt was cut.
 */

#include "masked.h"
#include "step.h"

#define KVF_MASKED_JOBS_MAX 10u

typedef struct kvf_masked_call {
    kvf_step *step;
    const kvf_masked_layer *layer;
    const void *q, *k, *v; /* the caller's; q NULL = append only */
    void *out;
    float *lse;    /* may be NULL */
    uint32_t rows; /* tokens of a chunk, or sequences of a batch */
    bool is_chunk;
    bool is_mixed;         /* heads of both kinds: they are packed */
    const uint32_t *heads; /* layer->heads on the device */
    kvf_heads_args pack, unpack;
} kvf_masked_call;

/* Where the heads of a kind are: packed, or the caller's where there is one kind only. */
typedef struct kvf_masked_heads {
    const void *q, *k, *v;
    void *out;
    float *lse;
} kvf_masked_heads;
kvf_masked_heads kvf_masked_heads_of(const kvf_masked_call *call, bool is_streaming);

/* Into the frame, before it is sent: what pack and unpack move. A step may be dry in what takes. */
void kvf_masked_take_jobs(kvf_masked_call *call);

/* A chunk of one sequence; lengths do not count it yet. */
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
kvf_streaming_chunk kvf_streaming_take_chunk(const kvf_masked_call *call,
                                             const kvf_sequence *sequence);
/* As much as a chunk may take, in a dry step. */
void kvf_streaming_take_most(const kvf_masked_call *call);
KVF_CHECKED kvf_status kvf_streaming_prefill(const kvf_masked_call *call,
                                             const kvf_streaming_chunk *chunk);

/* Rows of a batch, with the new token, though lengths do not count it yet. */
const kvf_row *kvf_streaming_take_rows(const kvf_masked_call *call, kvf_sequence *const *sequences);
KVF_CHECKED kvf_status kvf_streaming_decode(const kvf_masked_call *call, const kvf_row *row);

/* The ring of a layer of a sequence, in device memory; NULL if it has no streaming head. */
char *kvf_streaming_ring(const kvf_sequence *sequence, uint32_t layer, size_t *bytes);
/* A copy of it on the host: what it has no token for becomes 0. */
void kvf_streaming_scrub(const kvf_cache *cache, uint32_t layer, uint32_t length, char *copy);

/* The rings of a fork. */
KVF_CHECKED kvf_status kvf_streaming_fork(kvf_step *step, const kvf_sequence *parent,
                                          const kvf_sequence *child);

#endif
