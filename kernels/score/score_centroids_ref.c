/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Queries against centroids, the specification.
 *
 * Knows nothing of what the centroids are of.
 */

#include "common/convert.h"
#include "variants.h"

void kvf_score_centroids_ref(const void *args, uint32_t task)
{
    const kvf_score_centroids_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->stride, KVF_CENTROIDS_PER_TASK);
    const uint32_t list = task / parts, first = task % parts * KVF_CENTROIDS_PER_TASK;
    const uint32_t end = kvf_min_u32(a->count[list], first + KVF_CENTROIDS_PER_TASK);
    for (uint32_t g = 0; g < a->group; g++) {
        const size_t row = (size_t)list * a->group + g;
        const int8_t *q = a->q + row * a->head_dim;
        for (uint32_t i = first; i < end; i++) {
            const kvf_centroid at = kvf_centroid_at(a, list, i);
            int32_t dot = 0;
            for (uint32_t c = 0; c < a->head_dim; c++)
                dot += at.centroid[c] * q[c];
            a->scores[row * a->stride + i] =
                (float)dot * kvf_fp16_to_float(*at.scale) * a->q_scale[row];
        }
    }
}
