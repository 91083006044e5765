/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_DECODE_H
#define KVF_RUNTIME_DECODE_H

/*
 * A decode step, whole and in the parts that page lists and recordings share with it.
 */

#include "step.h"

/* How many rows of the step have their static set refreshed, or are verified. */
typedef struct kvf_due {
    uint32_t refreshes;
    uint32_t verifies;
} kvf_due;

/* Whether the next step of this layer, after which `sealed` blocks are sealed, refreshes its static
 * set, or is verified. */
bool kvf_refresh_is_due(const kvf_kv_group *kv_group, const kvf_layer *layer, uint32_t sealed);
bool kvf_verify_is_due(const kvf_kv_group *kv_group, const kvf_layer *layer);

/* Length, sealed blocks and what is due of every row, after one more token; blocks are there. */
void kvf_decode_note(kvf_step *step, const kvf_decode_args *args, kvf_due *due);

/* Arrays of a step in its frame; if it refreshes static sets, kvf_step_rows_after comes after it.
 * */
void kvf_decode_take(kvf_step *step);
/* Host bookkeeping of one token per row; the KV group's things are in the frame, nothing is
 * enqueued. A refusal has changed nothing. */
KVF_CHECKED kvf_status kvf_decode_prepare(kvf_step *step, const kvf_decode_args *args,
                                          kvf_stream *stream, kvf_due *due);
/* The same for queries alone: rows of what the layers have. */
KVF_CHECKED kvf_status kvf_decode_prepare_queries(kvf_step *step, const kvf_decode_args *args,
                                                  kvf_stream *stream);
/* The frame is filled: send it. */
KVF_CHECKED kvf_status kvf_decode_send(kvf_step *step);

/* Append, seal, refresh, score, choose, with queries, keys and values of the KV group's heads: ids
 * of every list, and page tables that are up to date. */
KVF_CHECKED kvf_status kvf_decode_select(kvf_step *step, const kvf_decode_args *args,
                                         const kvf_due *due);
/* From append to verification. */
KVF_CHECKED kvf_status kvf_decode_enqueue(kvf_step *step, const kvf_decode_args *args,
                                          const kvf_due *due);

/* The end of such a call. If pages could not be brought, the caller undoes it. */
KVF_CHECKED kvf_status kvf_decode_end(kvf_step *step, kvf_status status);

#endif
