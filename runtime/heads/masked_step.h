/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_MASKED_STEP_H
#define KVF_RUNTIME_MASKED_STEP_H

/*
 * Chunks of a prompt and decode steps of a cache with a head mask, and the parts of a step that a
 * recording shares.
 */

#include "masked.h"
#include "step.h"

/* As large as the largest call. */
size_t kvf_masked_frame_bytes(kvf_cache *cache);

/* Arguments were checked. */
KVF_CHECKED kvf_status kvf_masked_prefill(kvf_cache *cache, const kvf_prefill_args *args,
                                          kvf_stream *stream);
KVF_CHECKED kvf_status kvf_masked_decode(kvf_cache *cache, const kvf_decode_args *args,
                                         kvf_stream *stream);

/* The end of a call that an inner cache refused: nothing of the outer one has changed, unless the
 * inner one broke. */
kvf_status kvf_masked_end_refused(kvf_step *step, const kvf_cache *inner, kvf_status status);

/* What a step has in its frame, with the tokens that lengths do not count yet; in a dry step, as
 * much as any layer's. */
void kvf_masked_step_fill(kvf_step *step, const kvf_decode_args *args);
/* The same, and the launches; the inner cache is being recorded. */
KVF_CHECKED kvf_status kvf_masked_step_record(kvf_step *step, const kvf_decode_args *args);
/* Bookkeeping of the outer cache. */
void kvf_masked_step_note(kvf_cache *cache, const kvf_decode_args *args);

#endif
