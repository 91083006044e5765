/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Centroids of segments that were written, the specification and the only host form.
 *
 * Knows nothing of keys: what codes say is all there is (score/centroid_key.h). Invariant:
 * is_centroid of a segment is 1 only if whoever set it makes its centroids in this launch, or an
 * earlier one did.
 */

#include "score/centroid_key.h"
#include "variants.h"

/* Centroids of all coarse heads of the segment that begins in a physical block. */
static void average(const kvf_average_args *a, uint32_t block)
{
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t segment = block / kvf_segment_blocks(c), head_dim = p->shape.head_dim;
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        const uint32_t number = c->coarse.number[a->layer * p->kv_heads + h];
        float x[KVF_HEAD_DIM_MAX] = {0.0f};
        if (number == UINT32_MAX)
            continue;
        const size_t at = (size_t)number * c->coarse.segments + segment;
        for (uint32_t g = 0; g < KVF_CENTROID_GROUPS; g++)
            kvf_centroid_add(x, kvf_segment_group(a, block, h, g), head_dim);
        c->coarse.scales[at] = kvf_centroid_end(c->coarse.centroids + at * head_dim, x, head_dim);
    }
}

void kvf_average_ref(const void *args, uint32_t task)
{
    const kvf_average_args *a = args;
    const kvf_physical_blocks *c = a->blocks;
    const uint32_t parts = kvf_div_ceil_u32(a->segments_max, KVF_AVERAGE_SEGMENTS);
    const uint32_t number = task / parts, first = 1 + task % parts * KVF_AVERAGE_SEGMENTS;
    const uint32_t *physical = c->physical + (size_t)number * c->paging.blocks_max;
    const uint32_t end =
        kvf_min_u32(1 + kvf_physical_ranked(c, number), first + KVF_AVERAGE_SEGMENTS);
    for (uint32_t i = first; i < end; i++) {
        const uint32_t block = physical[i * kvf_segment_blocks(c)];
        uint32_t *is_centroid = kvf_physical_is_centroid(c, a->layer, block);
        if (__atomic_load_n(is_centroid, __ATOMIC_RELAXED) == 0 &&
            __atomic_exchange_n(is_centroid, 1, __ATOMIC_RELAXED) == 0)
            average(a, block);
    }
}
