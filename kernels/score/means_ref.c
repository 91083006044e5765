/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Means of stretches, the specification.
 *
 * Knows nothing of keys: what codes say is all there is (mean_key.h).
 */

#include "mean_key.h"
#include "variants.h"

void kvf_means_ref(const void *args, uint32_t task)
{
    const kvf_means_args *a = args;
    const kvf_paging *p = &a->paging;
    const uint32_t per_row = p->kv_heads * a->stretches, head_dim = p->shape.head_dim;
    const kvf_row *row = &a->row[task / per_row];
    const uint32_t head = task % per_row / a->stretches;
    const uint32_t i =
        kvf_stretches(p->block_size, row->sealed_before) + task % per_row % a->stretches;
    float x[KVF_HEAD_DIM_MAX] = {0.0f};
    if (i >= kvf_stretches(p->block_size, row->sealed))
        return;
    for (uint32_t g = 0; g < KVF_MEAN_GROUPS; g++)
        kvf_mean_add(x, kvf_row_group(p, row, head, i * KVF_MEAN_TOKENS + g * KVF_CODE_TOKENS),
                     head_dim);
    *kvf_row_mean_scale(p, row, head, i) = kvf_mean_end(kvf_row_mean(p, row, head, i), x, head_dim);
}
