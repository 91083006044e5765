/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The row operations in plain C: next to matrix products they take a few per cent of a step.
 *
 * It knows nothing of layers or threads. Invariant: as in layer_ops.h.
 */

#include "layer_ops.h"
#include "common/convert.h"

#include <math.h>

#define PARTIAL_SUMS 8u

double kvf_dot(const float *a, const float *b, size_t count)
{
    float partial[PARTIAL_SUMS] = {0};
    double sum = 0.0;
    size_t i = 0;
    for (; i + PARTIAL_SUMS <= count; i += PARTIAL_SUMS)
        for (size_t p = 0; p < PARTIAL_SUMS; p++)
            partial[p] += a[i + p] * b[i + p];
    for (; i < count; i++)
        sum += (double)a[i] * (double)b[i];
    for (size_t p = 0; p < PARTIAL_SUMS; p++)
        sum += (double)partial[p];
    return sum;
}

void kvf_rms_norm(const float *x, const float *weight, size_t count, double eps, float *y)
{
    float scale = (float)(1.0 / sqrt(kvf_dot(x, x, count) / (double)count + eps));
    for (size_t i = 0; i < count; i++)
        y[i] = x[i] * scale * weight[i];
}

void kvf_rope_angles(const float *inv_freq, size_t count, float scaling, uint32_t position,
                     float *cosine, float *sine)
{
    for (size_t i = 0; i < count; i++) {
        /* The product is rounded to fp32 before cos and sin, as HF Transformers does: at position
         * 100,000 the rounding shows, and models were trained with it. */
        float angle = (float)position * inv_freq[i];
        cosine[i] = scaling * cosf(angle);
        sine[i] = scaling * sinf(angle);
    }
}

void kvf_rope_rotate(float *x, size_t count, const float *cosine, const float *sine)
{
    for (size_t i = 0; i < count; i++) {
        float a = x[i], b = x[i + count];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + count] = b * cosine[i] + a * sine[i];
    }
}

void kvf_swiglu(const float *gate, const float *up, size_t count, float *y)
{
    for (size_t i = 0; i < count; i++)
        y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

void kvf_numbers_widen(const void *from, kvf_dtype dtype, size_t count, float *to)
{
    if (dtype == KVF_FP32)
        memcpy(to, from, count * sizeof *to);
    else
        for (size_t i = 0; i < count; i++)
            to[i] = kvf_element_get(from, dtype, i);
}

void kvf_numbers_narrow(const float *from, kvf_dtype dtype, size_t count, void *to)
{
    if (dtype == KVF_FP32)
        memcpy(to, from, count * sizeof *from);
    else
        for (size_t i = 0; i < count; i++)
            kvf_element_set(to, dtype, i, from[i]);
}
