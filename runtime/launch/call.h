/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_CALL_H
#define KVF_RUNTIME_CALL_H

/*
 * One call on its way: the frame that carries its arguments, its rows with what they share, and the
 * stream.
 *
 * Knows nothing of what the call does. Everything a launch reads on the device was put into the
 * frame before kvf_call_send, or is written by earlier launches of the same stream.
 */

#include "cache.h"
#include "score/score_args.h"

/* The caller's own selection, in device memory: one of both, or by digest. */
typedef struct kvf_caller_selection {
    const float *scores; /* [rows, KV heads of the layer, stride] */
    const int32_t *ids;  /* the same shape */
    uint32_t stride;
} kvf_caller_selection;

/* Per score list of a KV group that has centroids; a hot head has count 0 and NULL. */
typedef struct kvf_coarse_lists {
    const int8_t *const *centroids;
    const uint16_t *const *scales;
    const uint32_t *count;             /* ranked: whole segments but the first */
    const uint32_t *take;              /* of these, the best that are scored by codes */
    const uint32_t *blocks;            /* sealed */
    const uint64_t *const *unfiltered; /* bits of the row; `bits` has those that are left */
} kvf_coarse_lists;

/* Codes of physical blocks, under block tables of the caller. */
typedef struct kvf_block_codes {
    const uint32_t *physical; /* see kvf_score_codes_args; NULL = codes are at `digests` */
    kvf_physical_codes codes;
    kvf_physical_centroids centroids; /* of a KV group with coarse heads */
} kvf_block_codes;

/* Rows that have blocks in common, of a cache with codes; see score_args.h and kvf_call_share. */
typedef struct kvf_shared_rows {
    const uint32_t *order;
    const uint32_t *common;
    uint32_t any;   /* 1: there are such rows, so what one misses others may miss too */
    uint32_t tiles; /* 1: a whole tile may be scored for several rows at once */
} kvf_shared_rows;

typedef struct kvf_call {
    kvf_cache *cache;
    kvf_stream *stream;
    kvf_frame *frame;
    kvf_kv_group *kv_group; /* whose pages it is about; NULL = all heads stream */
    uint32_t layer;
    uint32_t index;           /* of the layer in the KV group */
    uint32_t rows;            /* tokens; those of a sequence follow each other */
    kvf_layer *const *states; /* [rows], in cache->states; NULL = the call is dry */
    kvf_row *row_host;        /* [rows], in the frame */
    const kvf_row *row;       /* the same on the device */
    kvf_row *row_after_host;  /* [rows] with the stores that a refresh of this call brings into */
    const kvf_row *row_after; /* force; NULL if there is none */
    void **pool_host;         /* addresses of the blocks that this call seals */
    uint32_t *block_of_host;  /* which blocks of the pool these are */
    const uint32_t *new_block_of; /* the same on the device */
    uint32_t sealed_blocks;       /* of all rows, by this call */
    void **arena_host;            /* where a prefill chunk puts them first, if there is an arena */
    void *const *pool;            /* pool_host on the device, for such a chunk */
    const void *q;
    const kvf_decode_args
        *caller;         /* whose numbers the launch that appends rounds; NULL: others do */
    uint32_t is_rotated; /* 1: that launch rotates queries, too */
    kvf_caller_selection caller_selection;
    const uint32_t
        *heads;      /* of the layer, by those of the KV group, on the device; NULL = the same */
    uint32_t stride; /* of score rows: most sealed pages of a row, at least 1 */
    /* 1: the step is recorded, or its frame is for a recording: sizes are maxima, so that they do
     * not change, and it seals nothing. Or its rows are what a replay seals. */
    uint32_t is_recorded;

    /* 1: a fused step, with few launches, of kernels that do several phases. Pages that are missed
     * come with the launch that attends; where rows have blocks in common, in one before it, so
     * that a page comes once. 0: a launch per phase, so every transfer method serves the step and
     * phases can be timed. The bits are the same. */
    uint32_t is_fused;

    /* per list, on the device, in the frame */
    const void *const *digests;      /* of score lists: those of the head, of all blocks */
    const uint32_t *const *block_of; /* of score lists; see score_args.h */
    const uint64_t *const *bits;     /* of score lists; NULL: no token is left out */
    const uint32_t *pages;           /* of score lists */
    kvf_coarse_lists coarse;
    kvf_shared_rows shared;
    kvf_block_codes by_block;
    const uint32_t *choose_pages; /* of lists that are chosen for */

    const uint64_t *masks; /* of the chosen pages; NULL = none */
    uint32_t ticket;       /* of the transfer */
    uint32_t
        is_late; /* > 0: pages that the step chose are not addressable yet; see addressable.h */
    uint32_t is_undone; /* 1: blocks did not come; what was enqueued is to be undone */
} kvf_call;

static inline const kvf_layer_attention *kvf_call_attention(const kvf_call *call)
{
    return &call->cache->attention[call->layer];
}

/* Choices of the call's lists, as kernels take them. */
kvf_choices kvf_call_choices(const kvf_call *call, const kvf_choice *choice);

/* Launch a kernel of the table: arguments by value. */
#define KVF_LAUNCH(call, op, args) KVF_ENQUEUE((call)->stream, op, args)

/* Take the next frame, waiting for the oldest call if all are in flight, and put the cache's work
 * in order after its last call. */
KVF_CHECKED kvf_status kvf_call_begin(kvf_cache *cache, kvf_stream *stream, kvf_call *call);

/* Room for `count` elements in the frame: `array` is where the host writes them, `seen` where the
 * device will read them. Both are NULL if there are none, and of a dry call, which has no memory
 * and no sequences: it only finds out how large a frame is (kvf_call_measure). */
#define KVF_TAKE(call, array, seen, count)                                                         \
    ((array) = kvf_call_take((call), sizeof *(array), (count)),                                    \
     (seen) = kvf_call_seen((call), (array)), (void)sizeof((array) == (seen)))
void *kvf_call_take(kvf_call *call, size_t size, size_t count);
const void *kvf_call_seen(const kvf_call *call, const void *array);

/* The call is of this layer of these sequences, which seal nothing yet. Where a sequence has
 * several rows, only the first of its tokens may seal a block. */
void kvf_call_at(kvf_call *call, uint32_t layer, kvf_sequence *const *sequences, uint32_t rows);

/* The row is that of the first token of its sequence in this call. */
static inline bool kvf_call_is_first(const kvf_call *call, uint32_t row)
{
    return row == 0 || call->states[row] != call->states[row - 1];
}

/* Its state when the row's token was the newest: of its rows, all but the last are in the past. */
kvf_layer kvf_call_state(const kvf_call *call, uint32_t row);

/* Rows of different sequences from `first` on; at its end: the first row after them. */
uint32_t kvf_call_turn(const kvf_call *call, uint32_t first);

/* Where the arrays of a row are, and what the host knows of it. */
kvf_row kvf_call_row(const kvf_kv_group *kv_group, const kvf_layer *state);

/* Rows of the call, from what the host knows after its bookkeeping. A dry call says how many pages
 * it seals. */
void kvf_call_rows(kvf_call *call);

/* Per-list pointers and counts, for scoring, choosing and resolving. */
void kvf_call_lists(kvf_call *call);

/* Copy the frame to the device. */
KVF_CHECKED kvf_status kvf_call_send(kvf_call *call);

/* Record the end of the call. Call it even if enqueueing failed; keeps a failure as cache->broken.
 */
KVF_CHECKED kvf_status kvf_call_end(kvf_call *call, kvf_status status);

/* A call that is refused with `status`, and may have enqueued what changes nothing. */
kvf_status kvf_call_refuse(kvf_call *call, kvf_status status);

/* Time since the last stamp goes to *sum, in stream order; NULL starts the clock. */
KVF_CHECKED kvf_status kvf_call_stamp(kvf_call *call, uint64_t *sum);

/* Tables of a row that hold another sequence's data are cleared, in stream order. */
KVF_CHECKED kvf_status kvf_call_clear(kvf_call *call, kvf_layer *state);

/*
 * Queries, keys and values of the caller.
 *
 * Everything after a call's first launch sees them in the element type. Where they come in fp32
 * that launch rounds them, once, into room of the cache; else they are read where they are.
 */

typedef struct kvf_inputs {
    const void *q, *k, *v; /* NULL: there are none */
} kvf_inputs;

/* Where those of a call are seen. */
kvf_inputs kvf_inputs_seen(const kvf_cache *cache, const void *q, const void *k, const void *v);
/* Make it so, for the first `rows` rows; nothing where they are read where they are. */
KVF_CHECKED kvf_status kvf_inputs_round(kvf_call *call, const void *q, const void *k, const void *v,
                                        uint32_t rows);
/* The shape of outputs: that of pages, in the type that the caller wants. */
kvf_shape kvf_out_shape(const kvf_cache *cache, const kvf_shape *shape);

/*
 * Rows of a step that have sealed blocks in common: forks, and tokens of one sequence. A
 * function of the tokens of a block alone, as codes and pages are, is the same for all of them.
 *
 * Knows tables of blocks, and nothing of who forked from whom.
 */

/* How many rows one look should serve at most. A tile that is scored for many rows is one task;
 * where a step has few tiles, fewer rows at once leave something to do for the whole device. */
uint32_t kvf_call_rows_at_once(const kvf_call *call, const kvf_device_properties *device);

/* call->shared, for rows that are known, of `most` rows at once, >= 1. */
void kvf_call_share(kvf_call *call, uint32_t most);

/*
 * Quantized pages in full precision, for what looks at a row's tokens otherwise than a step's
 * attention.
 *
 * A KV group that quantizes pages has room for one row in full precision, `tables.scratch.blocks`.
 * Whoever needs it fills it, in stream order, and it holds until the next one does: nothing of it
 * is remembered. A *view* is a row whose table names that room for sealed blocks, and which has no
 * slots.
 */

/* Blocks first .. first + count - 1 of a row on the device, whose table names the pool. *view gets
 * the view of the row. */
KVF_CHECKED kvf_status kvf_dequantized_row(const kvf_call *call, const kvf_kv_group *kv_group,
                                           const kvf_row *row, uint32_t first, uint32_t count,
                                           const kvf_row **view);
/* Row `index` of the call with all its sealed blocks; the row itself where pages are exact. */
KVF_CHECKED kvf_status kvf_dequantized_view(kvf_call *call, uint32_t index, const kvf_row **view);

/* The view that kvf_dequantized_view gave. */
static inline const kvf_row *kvf_dequantized_last(const kvf_call *call, uint32_t index)
{
    return kvf_quantizes_pages(call->kv_group) ? call->kv_group->tables.scratch.view
                                               : call->row + index;
}

#endif
