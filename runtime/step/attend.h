/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_ATTEND_H
#define KVF_RUNTIME_ATTEND_H

/*
 * From chosen pages to attention.
 */

#include "call.h"

/* Slots, the misses on their way, and spans. */
KVF_CHECKED kvf_status kvf_call_place(kvf_call *call);
KVF_CHECKED kvf_status kvf_call_attend(kvf_call *call, void *out, float *lse);
/* Whether the next step of this layer is verified. */
bool kvf_verify_is_due(const kvf_kv_group *kv_group, const kvf_layer *layer);
/* Attend densely to row `index` and compare. */
KVF_CHECKED kvf_status kvf_call_verify(kvf_call *call, uint32_t index, const void *out,
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
    /* NULL or 0: those of the call's KV group. */
    float *partial_o;
    float *partial_lse;
    const float *sinks;
    uint32_t heads; /* of sinks */
} kvf_attention;
KVF_CHECKED kvf_status kvf_call_attend_to(const kvf_call *call, const kvf_attention *a);

#endif
