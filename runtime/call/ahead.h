/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_AHEAD_H
#define KVF_RUNTIME_AHEAD_H

/*
 * What calls have to know of pages that are on their way ahead of need; see speculate.h. All
 * functions do nothing if dims.ahead_max is 0.
 */

#include "step.h"

/* What the step enqueues from here on runs beside what the caller enqueues after the call: the
 * step's stream is the cache's own now, and the end of the call is there. So the next call, on
 * whatever stream, comes after it, but for transfers, which go on until they are joined. */
KVF_CHECKED kvf_status kvf_ahead_leave(kvf_step *step);
/* A recorded call has no end of its own: this is where it is, and what comes after it. */
KVF_CHECKED kvf_status kvf_ahead_mark_end(kvf_step *step);
KVF_CHECKED kvf_status kvf_ahead_await_end(kvf_step *step);
/* Before slots are given away: what the last step of this layer began has arrived. */
KVF_CHECKED kvf_status kvf_ahead_join(kvf_step *step);
/* Join one, if it is open. */
KVF_CHECKED kvf_status kvf_ahead_join_one(kvf_step *step, kvf_part *part, kvf_ahead *ahead);
/* Join every layer's of a part. */
KVF_CHECKED kvf_status kvf_ahead_settle(kvf_step *step, kvf_part *part);
/* Forget what a row has. */
KVF_CHECKED kvf_status kvf_ahead_clear(kvf_step *step, const kvf_layer *state);
/* Bits of the slots of a row, and the words of one list. */
uint32_t *kvf_ahead_marks(const kvf_part *part, size_t row);
uint32_t kvf_ahead_words(const kvf_part *part);

#endif
