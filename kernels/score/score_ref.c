/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of pages, the specification: an upper bound of q.k over the keys of each box.
 *
 * Knows nothing of which pages are candidates beyond bits. A box is empty iff its first channel has
 * lo > hi.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

static float box_score(const uint16_t *lo, const void *q, kvf_dtype dtype, uint32_t head_dim)
{
    const uint16_t *hi = lo + head_dim;
    if (kvf_bf16_to_float(lo[0]) > kvf_bf16_to_float(hi[0]))
        return -INFINITY;
    double sum = 0.0;
    for (uint32_t d = 0; d < head_dim; d++) {
        double x = (double)kvf_element_get(q, dtype, d);
        double low = x * (double)kvf_bf16_to_float(lo[d]);
        double high = x * (double)kvf_bf16_to_float(hi[d]);
        sum += low > high ? low : high;
    }
    return (float)sum;
}

void kvf_score_ref(const void *args, uint32_t task)
{
    const kvf_score_args *a = args;
    const uint32_t tiles = kvf_div_ceil_u32(a->pages_max, KVF_SCORE_PAGES);
    const uint32_t list = task / tiles;
    const uint32_t first = task % tiles * KVF_SCORE_PAGES;
    const uint32_t end = kvf_min_u32(a->pages[list], first + KVF_SCORE_PAGES);
    const uint32_t head_dim = a->shape.head_dim;
    const uint64_t *bits = a->bits ? a->bits[list] : NULL;
    const kvf_subgroup sub = kvf_subgroup_whole(a->sub, a->group);
    for (uint32_t g = sub.first; g < sub.first + sub.count; g++) {
        const size_t query = (size_t)list * a->group + g;
        const void *q = kvf_offset(a->q, query * kvf_key_bytes(&a->shape));
        for (uint32_t p = first; p < end; p++) {
            const uint16_t *digest = kvf_score_digest(a, list, p);
            const uint32_t boxes = kvf_score_counts(a, bits, p) ? a->subs : 0;
            float best = -INFINITY;
            for (uint32_t box = 0; box < boxes; box++) {
                float x =
                    box_score(digest + (size_t)box * 2 * head_dim, q, a->shape.dtype, head_dim);
                best = x > best ? x : best;
            }
            a->scores[query * a->pages_max + p] = best;
        }
    }
}
