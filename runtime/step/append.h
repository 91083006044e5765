/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_APPEND_H
#define KVF_RUNTIME_APPEND_H

/*
 * The host's side of appending to one layer of one sequence: limits, blocks, positions. Shared by
 * prefill and decode. Knows nothing of streams.
 */

#include "step.h"

/* KVF_FULL or KVF_INVALID, in words; `positions` may be NULL. */
KVF_CHECKED kvf_status kvf_append_check(kvf_cache *cache, const kvf_layer *layer, uint32_t tokens,
                                        const uint32_t *positions);
/* KVF_FULL: the pool has no block left. */
KVF_CHECKED kvf_status kvf_append_full(const kvf_part *part);
/* Host blocks for those that `tokens` more tokens seal; a failure leaves none acquired.
 * Acquire makes them addressable, to be written; reserve does not. */
KVF_CHECKED kvf_status kvf_append_reserve(kvf_layer *layer, uint32_t tokens);
KVF_CHECKED kvf_status kvf_append_acquire(kvf_layer *layer, uint32_t tokens);
/* Undo acquire, for blocks layer->sealed .. end-1. */
void kvf_append_release(kvf_layer *layer, uint32_t end);
/* Length, positions and sealed blocks after the tokens. */
void kvf_append_note(kvf_layer *layer, uint32_t tokens, const uint32_t *positions);

/* A chunk of a prompt; arguments were checked. Host bookkeeping, and what the part has in the
 * frame; a refusal has changed nothing. */
KVF_CHECKED kvf_status kvf_prefill_prepare(kvf_step *step, const kvf_prefill_args *args,
                                           kvf_stream *stream);
/* Where its blocks go; then the frame may be sent. */
KVF_CHECKED kvf_status kvf_prefill_place(kvf_step *step);
/* All launches, with queries, keys and values of the part's heads. */
KVF_CHECKED kvf_status kvf_prefill_enqueue(kvf_step *step, const kvf_prefill_args *args);
/* A whole chunk of queries alone, of the layer's newest tokens; arguments were checked. */
KVF_CHECKED kvf_status kvf_prefill_queries(kvf_cache *cache, const kvf_prefill_args *args,
                                           kvf_stream *stream);
/* Where tokens that are kept were quantized, in device memory; see carry in move_args.h. */
typedef struct kvf_carried {
    const void *const *from; /* [blocks] */
    const uint32_t *ids;     /* [kv_heads, stride] */
    uint32_t blocks;
    uint32_t stride;
} kvf_carried;

/* A chunk of tokens that the layer has had before, without queries (args->q is NULL): what is
 * known of queries and of the footprint stays. They go to the blocks that the layer holds.
 * `carried` is looked at where pages are quantized. */
KVF_CHECKED kvf_status kvf_append_again(kvf_cache *cache, const kvf_prefill_args *args,
                                        const kvf_carried *carried, kvf_stream *stream);

/* Blocks sealed_before .. sealed-1 of every row once more, read where the tables say: bits, sink
 * and boxes. Codes are of their tokens alone, and forks may have them too: they stay. */
KVF_CHECKED kvf_status kvf_step_seal_again(kvf_step *step);
/* Seal: bits, sink and digests of the pages that this call completes, and their way from
 * the ring to the pool. Flip: wait for that and point the page tables there. */
KVF_CHECKED kvf_status kvf_step_seal(kvf_step *step);
/* A chunk that begins at token `base` into blocks of a table on the device, noting what is not
 * finite; and its attention over them, if it has queries. */
KVF_CHECKED kvf_status kvf_chunk_repack(kvf_step *step, const kvf_prefill_args *args, uint32_t base,
                                        void *const *blocks);
KVF_CHECKED kvf_status kvf_chunk_attend(kvf_step *step, const kvf_prefill_args *args, uint32_t base,
                                        void *const *blocks);
/* The blocks that this call seals: bits, sink, digests. Rows of the step name their present place.
 * `chunk_fault` is of a chunk that begins at token `chunk_first`, or NULL. */
KVF_CHECKED kvf_status kvf_step_seal_blocks(kvf_step *step, const uint32_t *chunk_fault,
                                            uint32_t chunk_first);
/* Pages of these blocks into slots, while their bytes are at hand. */
KVF_CHECKED kvf_status kvf_step_admit(kvf_step *step);
/* Page tables of the step's rows: sealed blocks in the pool, the others in the ring. */
KVF_CHECKED kvf_status kvf_step_point_tables(kvf_step *step);
KVF_CHECKED kvf_status kvf_step_flip(kvf_step *step);

#endif
