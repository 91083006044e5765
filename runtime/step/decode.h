/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_DECODE_H
#define KVF_RUNTIME_DECODE_H

/*
 * A decode step, whole and in its parts: refreshes of static sets, attention, and what page lists
 * and recordings share with it.
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

/*
 * Refreshing the static set of a row.
 */

/* Rows again, with the other store where a refresh is due, and the host's note of it. */
void kvf_step_rows_after(kvf_step *step);

/* Refresh the static set of row `index` of the step. */
KVF_CHECKED kvf_status kvf_static_refresh(kvf_step *step, uint32_t index);
/* The same with scores of the caller, which `put` puts into token_score. */
KVF_CHECKED kvf_status kvf_static_seed(kvf_step *step, uint32_t index, const float *scores,
                                       kvf_status (*put)(kvf_step *step, const float *scores));

/*
 * From chosen pages to attention.
 */

/* Slots, the misses on their way, and spans. */
KVF_CHECKED kvf_status kvf_step_place(kvf_step *step);
KVF_CHECKED kvf_status kvf_step_attend(kvf_step *step, void *out, float *lse);
/* Attend densely to row `index` and compare. */
KVF_CHECKED kvf_status kvf_step_verify(kvf_step *step, uint32_t index, const void *out,
                                       const float *lse);
/* Partial results of `lists` lists, then merged. */
typedef struct kvf_attention {
    kvf_shape shape; /* of a span */
    uint32_t lists;
    uint32_t group;
    uint32_t spans_max;
    const void *q;
    const kvf_span *spans;
    const uint32_t *span_count;
    void *out;
    float *lse;
} kvf_attention;
KVF_CHECKED kvf_status kvf_step_pass(kvf_step *step, const kvf_attention *a, kvf_pass pass);
KVF_CHECKED kvf_status kvf_step_merge(kvf_step *step, const kvf_attention *a);

/*
 * Page lists: chosen here and attended by the caller, or the other way round. Arguments were
 * checked.
 */

/* Most pages of one list. */
uint32_t kvf_lists_pages_max(const kvf_cache *cache);
KVF_CHECKED kvf_status kvf_lists_select(kvf_cache *cache, const kvf_decode_args *args,
                                        const kvf_page_lists *lists, kvf_stream *stream);
KVF_CHECKED kvf_status kvf_lists_attend(kvf_cache *cache, const kvf_decode_args *args,
                                        const kvf_page_lists *lists, kvf_stream *stream);
/* To args->out, in full precision. */
KVF_CHECKED kvf_status kvf_lists_read(kvf_cache *cache, const kvf_decode_args *args,
                                      const kvf_page_lists *lists, kvf_stream *stream);
/* Where a page is; the host waits if it is on its way. */
const void *kvf_lists_page_address(const kvf_sequence *sequence, uint32_t layer, uint32_t kv_head,
                                   uint32_t page);

#endif
