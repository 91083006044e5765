/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_DECODE_H
#define KVF_RUNTIME_DECODE_H

/*
 * A decode step, whole and in the parts that page lists and recordings share with it.
 */

#include "step.h"

/* How many rows of the step have their static set renewed, or are verified. */
typedef struct kvf_due {
    uint32_t refreshes;
    uint32_t verifies;
} kvf_due;

/* One step of a layer; arguments were checked. */
KVF_CHECKED kvf_status kvf_decode_step(kvf_cache *cache, const kvf_decode_args *args,
                                       kvf_stream *stream);

/* Whether the next step of this layer, after which `sealed` blocks are sealed, renews its static
 * set, or is verified. */
bool kvf_refresh_is_due(const kvf_cache *cache, const kvf_layer *layer, uint32_t sealed);
bool kvf_verify_is_due(const kvf_cache *cache, const kvf_layer *layer);

/* Length, sealed blocks and what is due of every row, after one more token; blocks are there. */
void kvf_decode_note(kvf_cache *cache, const kvf_decode_args *args, uint32_t *sealed_before,
                     kvf_due *due);

/* What a step has in its frame; if it renews static sets, kvf_step_rows_after comes behind it. */
void kvf_decode_take(kvf_step *step, const uint32_t *sealed_before);
/* As much of it as a dry step finds out. */
void kvf_decode_take_dry(kvf_step *step);
/* Host bookkeeping of one token per row; the frame is filled, nothing is enqueued. A refusal has
 * changed nothing. */
KVF_CHECKED kvf_status kvf_decode_prepare(kvf_step *step, const kvf_decode_args *args,
                                          kvf_stream *stream, kvf_due *due);

/* The end of such a call. If pages could not be read from disk, the tokens are taken back. */
KVF_CHECKED kvf_status kvf_decode_end(kvf_step *step, kvf_status status);

/* Append, seal, refresh, score, choose: ids of every list, and page tables that are up to date. */
KVF_CHECKED kvf_status kvf_decode_select(kvf_step *step, const kvf_decode_args *args,
                                         const kvf_due *due);

/* All of it: append to verification. */
KVF_CHECKED kvf_status kvf_decode_enqueue(kvf_step *step, const kvf_decode_args *args,
                                          const kvf_due *due);

#endif
