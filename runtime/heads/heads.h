/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_HEADS_H
#define KVF_RUNTIME_HEADS_H

/*
 * Chunks of a prompt and decode steps of a layer: pages of the layer's part, rings of the heads
 * that stream, or both; and the pieces of a step that a recording shares.
 */

#include "decode.h"
#include "streaming_heads.h"

/* Arguments were checked. */
KVF_CHECKED kvf_status kvf_heads_prefill(kvf_cache *cache, const kvf_prefill_args *args,
                                         kvf_stream *stream);
KVF_CHECKED kvf_status kvf_heads_decode(kvf_cache *cache, const kvf_decode_args *args,
                                        kvf_stream *stream);
/* Queries alone, of a layer without streaming heads. */
KVF_CHECKED kvf_status kvf_heads_decode_queries(kvf_cache *cache, const kvf_decode_args *args,
                                                kvf_stream *stream);

/* The same with args->tokens: as many calls as there are tokens, to the bit. */
KVF_CHECKED kvf_status kvf_heads_decode_several(kvf_cache *cache, const kvf_decode_args *args,
                                                kvf_stream *stream);

/* Room of a step's streaming heads in the frame, after that of the part; nothing where there
 * are none. */
kvf_heads_call kvf_heads_take_step(kvf_step *step, const kvf_decode_args *args);
/* As much as any chunk, and any step of so many rows, has in its frame: for dry steps. */
void kvf_heads_take_chunk_dry(kvf_step *step);
void kvf_heads_take_step_dry(kvf_step *step);
/* All launches of a step. */
KVF_CHECKED kvf_status kvf_heads_enqueue_step(kvf_heads_call *call, const kvf_decode_args *args,
                                              const kvf_due *due);
/* Bookkeeping of rings, when the step's is done. */
void kvf_heads_note_step(kvf_step *step);

#endif
