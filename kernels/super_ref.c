/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Boxes over the boxes of consecutive pages, the specification.
 *
 * Knows nothing of keys. The box contains every box that it was built from, so no page of it scores
 * higher than it does.
 */

#include <math.h>

#include "common/convert.h"
#include "page_rows.h"
#include "variants.h"

static void build_super(const kvf_super_args *a, uint32_t list, uint32_t super)
{
    const uint32_t first = super * KVF_SUPER_PAGES * a->subs;
    const uint32_t end = kvf_min_u32(a->pages[list] * a->subs, first + KVF_SUPER_PAGES * a->subs);
    const size_t elements = 2 * (size_t)a->head_dim;
    const uint16_t *boxes = a->digests[list];
    uint16_t *to = (uint16_t *)a->supers[list] + super * elements;
    for (uint32_t d = 0; d < a->head_dim; d++) {
        float lo = INFINITY, hi = -INFINITY;
        for (uint32_t b = first; b < end; b++) {
            const float x = kvf_bf16_to_float(boxes[b * elements + d]);
            const float y = kvf_bf16_to_float(boxes[b * elements + a->head_dim + d]);
            lo = x < lo ? x : lo;
            hi = y > hi ? y : hi;
        }
        to[d] = kvf_bf16_from_float(lo);
        to[a->head_dim + d] = kvf_bf16_from_float(hi);
    }
}

void kvf_super_ref(const void *args, uint32_t task)
{
    const kvf_super_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->supers_max, KVF_SUPER_TASK);
    const uint32_t list = task / parts, begin = task % parts * KVF_SUPER_TASK;
    const uint32_t supers = kvf_div_ceil_u32(a->pages[list], KVF_SUPER_PAGES);
    const uint32_t first = kvf_min_u32(supers, a->first ? a->first[list] : 0);
    const uint32_t count = kvf_min_u32(supers - first, a->count ? a->count[list] : a->supers_max);
    for (uint32_t i = begin; i < kvf_min_u32(count, begin + KVF_SUPER_TASK); i++)
        build_super(a, list, first + i);
}
