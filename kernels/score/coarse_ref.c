/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Coarse ranking, the specification: centroids of segments, queries against them, and the pages
 * that remain to be scored.
 */

#include <string.h>

#include "centroid_key.h"
#include "common/convert.h"
#include "variants.h"

/*
 * Centroids of segments, the specification.
 *
 * Knows nothing of keys: what codes say is all there is (centroid_key.h).
 */

void kvf_centroids_ref(const void *args, uint32_t task)
{
    const kvf_centroids_args *a = args;
    const kvf_paging *p = &a->paging;
    const uint32_t per_row = p->kv_heads * a->segments, head_dim = p->shape.head_dim;
    const kvf_row *row = &a->row[task / per_row];
    const uint32_t head = task % per_row / a->segments;
    const uint32_t i =
        kvf_segments(p->block_size, row->sealed_before) + task % per_row % a->segments;
    float x[KVF_HEAD_DIM_MAX] = {0.0f};
    if (i >= kvf_segments(p->block_size, row->sealed))
        return;
    for (uint32_t g = 0; g < KVF_CENTROID_GROUPS; g++)
        kvf_centroid_add(x,
                         kvf_row_group(p, row, head, i * KVF_CENTROID_TOKENS + g * KVF_CODE_TOKENS),
                         head_dim);
    *kvf_row_centroid_scale(p, row, head, i) =
        kvf_centroid_end(kvf_row_centroid(p, row, head, i), x, head_dim);
}

/*
 * Queries against centroids, the specification.
 *
 * Knows nothing of what the centroids are of.
 */

void kvf_score_centroids_ref(const void *args, uint32_t task)
{
    const kvf_score_centroids_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->stride, KVF_CENTROIDS_PER_TASK);
    const uint32_t list = task / parts, first = task % parts * KVF_CENTROIDS_PER_TASK;
    const uint32_t end = kvf_min_u32(a->count[list], first + KVF_CENTROIDS_PER_TASK);
    for (uint32_t g = 0; g < a->group; g++) {
        const size_t query = (size_t)list * a->group + g;
        const int8_t *q = a->q + query * a->head_dim;
        for (uint32_t i = first; i < end; i++) {
            const kvf_centroid at = kvf_centroid_at(a, list, i);
            int32_t dot = 0;
            for (uint32_t c = 0; c < a->head_dim; c++)
                dot += at.centroid[c] * q[c];
            a->scores[query * a->stride + i] =
                (float)dot * kvf_fp16_to_float(*at.scale) * a->q_scale[query];
        }
    }
}

/*
 * Bits of the blocks that stay, the specification. Knows nothing of scores.
 */

void kvf_filter_ref(const void *args, uint32_t task)
{
    const kvf_filter_args *a = args;
    const uint64_t *from = a->from[task];
    const int32_t *ids = a->ids + (size_t)task * a->ids_max;
    uint64_t *bits = a->bits + (size_t)task * a->blocks_max;
    const uint32_t per = KVF_CENTROID_TOKENS / a->block_size;
    if (!from)
        return;
    const uint32_t blocks = a->blocks[task], whole = kvf_segments(a->block_size, blocks) * per;
    memcpy(bits, from, blocks * sizeof *bits);
    if (whole > per)
        memset(bits + per, 0xff, (whole - per) * sizeof *bits);
    for (uint32_t i = 0; i < a->id_count[task]; i++)
        for (uint32_t k = 0; k < per; k++) {
            const uint32_t b = ((uint32_t)ids[i] + 1) * per + k;
            bits[b] = from[b];
        }
}
