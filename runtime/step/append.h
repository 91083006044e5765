/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_APPEND_H
#define KVF_RUNTIME_APPEND_H

/*
 * The host's side of appending to one layer of one sequence: limits, blocks, positions. Shared by
 * prefill and decode. And what chunks append, seal and attend to, with the prefill arena.
 */

#include "step.h"

/* KVF_FULL or KVF_INVALID, in words; `positions` may be NULL. */
KVF_CHECKED kvf_status kvf_append_check(kvf_cache *cache, const kvf_layer *layer, uint32_t tokens,
                                        const uint32_t *positions);
/* KVF_FULL: the pool has no block left. */
KVF_CHECKED kvf_status kvf_append_full(const kvf_kv_group *kv_group);
/* Host blocks for those that `tokens` more tokens seal; a failure leaves none acquired.
 * Acquire makes them addressable, to be written; reserve does not. */
KVF_CHECKED kvf_status kvf_append_reserve(kvf_layer *layer, uint32_t tokens);
KVF_CHECKED kvf_status kvf_append_acquire(kvf_layer *layer, uint32_t tokens);
/* Undo acquire, for blocks layer->sealed .. end-1. */
void kvf_append_release(kvf_layer *layer, uint32_t end);
/* Length, positions and sealed blocks after the tokens. */
void kvf_append_note(kvf_layer *layer, uint32_t tokens, const uint32_t *positions);

/* A chunk of a prompt; arguments were checked. Host bookkeeping, and what the KV group has in the
 * frame; a refusal has changed nothing. */
KVF_CHECKED kvf_status kvf_prefill_prepare(kvf_step *step, const kvf_prefill_args *args,
                                           kvf_stream *stream);
/* Where its blocks go; then the frame may be sent. */
KVF_CHECKED kvf_status kvf_prefill_place(kvf_step *step);
/* All launches, with queries, keys and values of the KV group's heads. */
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

/*
 * A chunk where pages are quantized: of a prompt, or of tokens that are kept.
 *
 * Invariant: token i attends to what a decode step of it would find: blocks that are sealed once it
 * is appended as they are quantized, and the others and the sink exactly. So chunks change nothing.
 */

/* Append a chunk whose first token is number `base`, seal what leaves the window, and attend,
 * unless the chunk has no queries. */
KVF_CHECKED kvf_status kvf_prefill_quantized(kvf_step *step, const kvf_prefill_args *args,
                                             uint32_t base);
/* Append kept tokens of the layer once more: the chunk has them in full precision, without queries.
 * Quantized tokens move as they are, where their page is sealed again. */
KVF_CHECKED kvf_status kvf_carry_quantized(kvf_step *step, const kvf_prefill_args *args,
                                           uint32_t base, const kvf_carried *carried);

/*
 * The prefill arena: device memory for the sealed blocks of one layer of one sequence, so that
 * chunks of that layer attend to memory of the device, and its blocks are written back meanwhile.
 *
 * Present where pages are moved to be attended, unless device_bytes leaves no room for it.
 * Block b of the owner is block b of the arena. Invariants: of the owner, page tables name the
 * arena for blocks first .. end-1 and the pool for blocks below first; of everybody else they name
 * the pool. A chunk attends with first == 0. Whoever leaves has waited for its write-back.
 */

/* The arena belongs to this layer from now on; the page tables of the owner before it go to the
 * pool. Call it before the bookkeeping of new blocks: `sealed` blocks lie in the pool. */
KVF_CHECKED kvf_status kvf_arena_take(kvf_step *step, kvf_layer *layer, uint32_t sealed);
/* The owner's blocks below `first` come to the arena: from their slots, or over the link, once for
 * however many queries look at them. */
KVF_CHECKED kvf_status kvf_arena_fill(kvf_step *step);
/* The layer, if it is the owner, has only `sealed` blocks left. Blocks after them may be written
 * on the step's stream. */
KVF_CHECKED kvf_status kvf_arena_shorten(kvf_step *step, const kvf_layer *layer, uint32_t sealed);
/* The blocks that this call of the owner seals: the page tables will name the arena for them.
 * Before kvf_step_send. */
void kvf_arena_place(kvf_step *step);
/* After they are complete: on their way to the pool. */
KVF_CHECKED kvf_status kvf_arena_write_back(kvf_step *step);
/* The owner leaves if it is a row of the step. */
KVF_CHECKED kvf_status kvf_arena_leave_rows(kvf_step *step);
/* The owner leaves if it is a layer of this sequence. */
KVF_CHECKED kvf_status kvf_arena_leave_sequence(kvf_step *step, const kvf_sequence *sequence);
/* Whoever it is leaves, and no write-back is left in flight: the pool of the KV group may be
 * written on the step's stream. */
KVF_CHECKED kvf_status kvf_arena_settle(kvf_step *step, kvf_kv_group *kv_group);
/* The host waits if this block is still on its way. */
void kvf_arena_wait_block(const kvf_layer *layer, uint32_t block);

/* Blocks to the pool on the write-back stream: from[i] to to[i], neighbours in one copy. */
KVF_CHECKED kvf_status kvf_write_back(kvf_kv_group *kv_group, void *const *to,
                                      const void *const *from, uint32_t count);

#endif
