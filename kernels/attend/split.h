/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SPLIT_H
#define KVF_KERNELS_SPLIT_H

/*
 * Which spans one attention task has, and whether this pass computes it. The one place that says
 * so, for the reference and for every variant: task = list * splits_max + split.
 */

#include <stdbool.h>

#include "kernels.h"

typedef struct kvf_split {
    const kvf_span *spans; /* [count] */
    uint32_t list;
    uint32_t count;
} kvf_split;

/* False if the split has no spans or belongs to the other pass; then nothing may be written. */
KVF_INLINE bool kvf_split_get(const kvf_attend_args *a, uint32_t task, kvf_split *out)
{
    const uint32_t splits_max = kvf_div_ceil_u32(a->spans_max, a->split);
    const uint32_t list = task / splits_max;
    const uint32_t first = task % splits_max * a->split;
    const uint32_t spans = a->span_count[list];
    if (first >= spans)
        return false;
    out->list = list;
    out->count = kvf_min_u32(a->split, spans - first);
    out->spans = a->spans + (size_t)list * a->spans_max + first;
    if (a->pass == KVF_PASS_ALL)
        return true;
    bool fetched = false;
    for (uint32_t i = 0; i < out->count; i++)
        fetched |= out->spans[i].home != NULL;
    return fetched == (a->pass == KVF_PASS_FETCHED);
}

#endif
