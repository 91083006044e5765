/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_HEADS_H
#define KVF_RUNTIME_HEADS_H

/*
 * Decode steps of a layer: pages of the layer's KV group, rings of the heads that stream, or both.
 */

#include "decode.h"
#include "streaming_heads.h"

/* Arguments were checked. With args->tokens: as many calls as there are tokens, to the bit. A call
 * that fails has no effect (undo.h). */
KVF_CHECKED kvf_status kvf_layer_decode(kvf_cache *cache, const kvf_decode_args *args,
                                        kvf_stream *stream);
/* Queries alone, of a layer without streaming heads. */
KVF_CHECKED kvf_status kvf_layer_decode_queries(kvf_cache *cache, const kvf_decode_args *args,
                                                kvf_stream *stream);

/* One step, of rows of different sequences, and those that args->tokens asks for; they are undone
 * by kvf_layer_decode. */
KVF_CHECKED kvf_status kvf_layer_step(kvf_cache *cache, const kvf_decode_args *args,
                                      kvf_stream *stream);
KVF_CHECKED kvf_status kvf_layer_steps(kvf_cache *cache, const kvf_decode_args *args,
                                       kvf_stream *stream);

/* Room of a step's streaming heads in the frame, after that of the KV group; nothing where there
 * are none. */
kvf_heads_call kvf_heads_take_step(kvf_step *step, const kvf_decode_args *args);
/* All launches of a step. */
KVF_CHECKED kvf_status kvf_heads_enqueue_step(kvf_heads_call *call, const kvf_decode_args *args,
                                              const kvf_due *due);
/* Bookkeeping of rings, when the step's is done. */
void kvf_heads_note_step(kvf_step *step);

#endif
