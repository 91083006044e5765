/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_DECODE_H
#define KVF_RUNTIME_DECODE_H

/*
 * Decode steps of a layer: pages of the layer's KV group, rings of the heads that stream, or both;
 * and the parts of a step that page lists and recordings share with it. Arguments were checked.
 */

#include "pages.h"
#include "streaming_heads.h"

/* With args->tokens: as many calls as there are tokens, to the bit. A call that fails has no effect
 * (undo.h). */
KVF_CHECKED kvf_status kvf_layer_decode(kvf_cache *cache, const kvf_decode_args *args,
                                        kvf_stream *stream);
/* Queries alone, of a layer without streaming heads. */
KVF_CHECKED kvf_status kvf_layer_decode_queries(kvf_cache *cache, const kvf_decode_args *args,
                                                kvf_stream *stream);

/*
 * The parts, in their order.
 */

/* Host bookkeeping of one token per row; the KV group's things are in the frame, nothing is
 * enqueued. A refusal has changed nothing. */
KVF_CHECKED kvf_status kvf_decode_prepare(kvf_call *call, const kvf_decode_args *args,
                                          kvf_stream *stream, kvf_due *due);
/* Its note of the rows: length, sealed blocks and what is due of every row, and counts; blocks are
 * there. */
void kvf_decode_note(kvf_call *call, const kvf_decode_args *args, kvf_due *due);
/* The frame is filled: send it. */
KVF_CHECKED kvf_status kvf_decode_send(kvf_call *call);
/* All launches. */
KVF_CHECKED kvf_status kvf_decode_enqueue(const kvf_heads_work *work, const kvf_decode_args *args,
                                          const kvf_due *due);
/* Then kvf_call_close: if pages could not be brought, the caller undoes it. */

#endif
