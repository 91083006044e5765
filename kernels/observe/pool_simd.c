/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Smoothing of scores along tokens, vectorised over tokens; the ends go one by one. Exactness: the
 * maximum has the bits of pool_ref.c, the average is an fp32 sum in order of position.
 */

#include <math.h>

#include "common/simd.h"
#include "variants.h"

/* out[0 .. count) takes the pooled values x. */
KVF_ALWAYS_INLINE void combine(const kvf_pool_args *a, const float *x, float *out, uint32_t count)
{
    const float scale = a->scale != 0.0f ? a->scale : 1.0f;
    for (uint32_t i = 0; i < count; i++) {
        float y = x[i] * scale;
        if (a->combine == KVF_COMBINE_ADD)
            y += out[i];
        else if (a->combine == KVF_COMBINE_MAX)
            y = out[i] > y ? out[i] : y;
        out[i] = y;
    }
}

static void pool_one(const kvf_pool_args *a, const float *in, float *out, uint32_t j)
{
    const uint32_t half = a->width / 2;
    const uint32_t begin = j > half ? j - half : 0;
    const uint32_t end = a->count - j > half ? j + half + 1 : a->count;
    float sum = 0.0f, top = -INFINITY;
    for (uint32_t i = begin; i < end; i++) {
        sum += in[i];
        top = in[i] > top ? in[i] : top;
    }
    const float x = a->average ? sum * (1.0f / (float)a->width) : top; /* as below */
    combine(a, &x, out + j, 1);
}

void KVF_SIMD_NAME(pool)(const void *args, uint32_t task)
{
    const kvf_pool_args *a = args;
    const float *in = a->in + (size_t)task * a->stride;
    float *out = a->out + (size_t)task * (a->out_stride ? a->out_stride : a->stride);
    const uint32_t half = a->width / 2;
    uint32_t j = 0;
    for (; j < a->count && j < half; j++)
        pool_one(a, in, out, j);
    for (; j + VF_LANES + half <= a->count; j += VF_LANES) {
        vf sum = vf_zero(), top = vf_set(-INFINITY);
        for (uint32_t i = 0; i < a->width; i++) {
            vf x = vf_load(in + j - half + i);
            sum = vf_add(sum, x);
            top = vf_max(x, top);
        }
        float x[VF_LANES];
        vf_store(x, a->average ? vf_mul(sum, vf_set(1.0f / (float)a->width)) : top);
        combine(a, x, out + j, VF_LANES);
    }
    for (; j < a->count; j++)
        pool_one(a, in, out, j);
}
