/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rotated queries in int8, the specification; codes.h defines them.
 *
 * Knows nothing of heads or lists. A query that is not finite becomes zero and its scale 0, which
 * gives all tokens the same weight.
 */

#include <float.h>
#include <math.h>

#include "codes.h"
#include "variants.h"

static float rotate_query(int8_t *to, float *x, uint32_t head_dim, float softmax_scale)
{
    uint32_t top = 0; /* bits, whose order is that of magnitudes; NaN is above all numbers */
    kvf_code_rotate(x, head_dim);
    for (uint32_t i = 0; i < head_dim; i++)
        top = kvf_max_u32(top, kvf_float_bits(x[i]) & 0x7fffffffu);
    const float largest = kvf_bits_float(top), unit = 127.0f / largest;
    const int is_flat = !(largest <= FLT_MAX && unit <= FLT_MAX);
    for (uint32_t i = 0; i < head_dim; i++)
        to[i] = is_flat ? 0 : (int8_t)nearbyintf(x[i] * unit);
    const float scale = largest / 127.0f * softmax_scale;
    return is_flat ? 0.0f : scale < KVF_QUERY_SCALE_MAX ? scale : KVF_QUERY_SCALE_MAX;
}

void kvf_rotate_ref(const void *args, uint32_t task)
{
    const kvf_rotate_args *a = args;
    const uint32_t end = kvf_min_u32(a->queries, (task + 1) * KVF_ROTATE_QUERIES);
    for (uint32_t r = task * KVF_ROTATE_QUERIES; r < end; r++) {
        const size_t first = (size_t)r * a->head_dim;
        float x[KVF_HEAD_DIM_MAX];
        for (uint32_t i = 0; i < a->head_dim; i++)
            x[i] = kvf_element_get(a->q, a->dtype, first + i);
        a->y_scale[r] = rotate_query(a->y + first, x, a->head_dim, a->scale);
    }
}
