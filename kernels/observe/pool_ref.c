/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Smoothing of scores along tokens, the specification. Knows nothing of heads. Windows are centred;
 * outside the vector there is zero for the average, which always divides by the full width, and
 * nothing for the maximum. The score that is there already is read only if it is combined with it.
 */

#include <math.h>

#include "variants.h"

static float combine(const kvf_pool_args *a, double x, float old)
{
    if (a->scale != 0.0f)
        x *= (double)a->scale;
    const float y = (float)x;
    if (a->combine == KVF_COMBINE_ADD)
        return (float)((double)old + x);
    return a->combine == KVF_COMBINE_MAX && old > y ? old : y;
}

void kvf_pool_ref(const void *args, uint32_t task)
{
    const kvf_pool_args *a = args;
    const float *in = a->in + (size_t)task * a->stride;
    float *out = a->out + (size_t)task * (a->out_stride ? a->out_stride : a->stride);
    const uint32_t half = a->width / 2;
    for (uint32_t j = 0; j < a->count; j++) {
        const uint32_t begin = j > half ? j - half : 0;
        const uint32_t end = a->count - j > half ? j + half + 1 : a->count;
        double sum = 0.0;
        float top = -INFINITY;
        for (uint32_t i = begin; i < end; i++) {
            sum += (double)in[i];
            top = in[i] > top ? in[i] : top;
        }
        const double x = a->average ? sum / a->width : (double)top;
        out[j] = combine(a, x, a->combine == KVF_COMBINE_SET ? 0.0f : out[j]);
    }
}
