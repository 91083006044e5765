/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Centroids of stretches, the specification.
 *
 * Knows nothing of keys: what codes say is all there is (centroid_key.h).
 */

#include "centroid_key.h"
#include "variants.h"

void kvf_centroids_ref(const void *args, uint32_t task)
{
    const kvf_centroids_args *a = args;
    const kvf_paging *p = &a->paging;
    const uint32_t per_row = p->kv_heads * a->stretches, head_dim = p->shape.head_dim;
    const kvf_row *row = &a->row[task / per_row];
    const uint32_t head = task % per_row / a->stretches;
    const uint32_t i =
        kvf_stretches(p->block_size, row->sealed_before) + task % per_row % a->stretches;
    float x[KVF_HEAD_DIM_MAX] = {0.0f};
    if (i >= kvf_stretches(p->block_size, row->sealed))
        return;
    for (uint32_t g = 0; g < KVF_CENTROID_GROUPS; g++)
        kvf_centroid_add(x,
                         kvf_row_group(p, row, head, i * KVF_CENTROID_TOKENS + g * KVF_CODE_TOKENS),
                         head_dim);
    *kvf_row_centroid_scale(p, row, head, i) =
        kvf_centroid_end(kvf_row_centroid(p, row, head, i), x, head_dim);
}
