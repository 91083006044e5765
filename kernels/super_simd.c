/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Boxes over the boxes of consecutive pages, vectorised over channels; the bits of super_ref.c.
 * Bound: reading the digests once from memory. Knows nothing of keys.
 */

#include <math.h>

#include "page_rows.h"
#include "simd.h"
#include "variants.h"

static void build_super(const kvf_super_args *a, uint32_t list, uint32_t super)
{
    const uint32_t first = super * KVF_SUPER_PAGES * a->subs, head_dim = a->head_dim;
    const uint32_t end = kvf_min_u32(a->pages[list] * a->subs, first + KVF_SUPER_PAGES * a->subs);
    const uint16_t *boxes = a->digests[list];
    uint16_t *to = (uint16_t *)a->supers[list] + (size_t)super * 2 * head_dim;
    _Alignas(64) float lo[KVF_HEAD_DIM_MAX], hi[KVF_HEAD_DIM_MAX];
    for (uint32_t d = 0; d < head_dim; d += VF_PAIR) {
        vf2 low = {vf_set(INFINITY), vf_set(INFINITY)};
        vf2 high = {vf_set(-INFINITY), vf_set(-INFINITY)};
        for (uint32_t b = first; b < end; b++) {
            const uint16_t *box = boxes + (size_t)b * 2 * head_dim;
            const vf2 x = vf_load2(box, KVF_BF16, d, head_dim - d);
            const vf2 y = vf_load2(box + head_dim, KVF_BF16, d, head_dim - d);
            low = (vf2){vf_min(x.a, low.a), vf_min(x.b, low.b)};
            high = (vf2){vf_max(y.a, high.a), vf_max(y.b, high.b)};
        }
        vf_store2(lo + d, KVF_BF16, low);
        vf_store2(hi + d, KVF_BF16, high);
    }
    vf_round_row(to, KVF_BF16, lo, head_dim);
    vf_round_row(to + head_dim, KVF_BF16, hi, head_dim);
}

void KVF_SIMD_NAME(super)(const void *args, uint32_t task)
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
