/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What matmul_dnnl.c does, without oneDNN: plain loops, for builds whose products are cuBLAS's. The
 * host device still runs, slowly, and `kvferry info` says by what.
 */

#include <stdio.h>

#include "common/convert.h"
#include "matmul.h"

struct kvf_matmul {
    int unused;
};

bool kvf_matmul_bf16_native(void)
{
    return false; /* so nobody creates a handle */
}

void kvf_matmul_describe(char *text, size_t capacity)
{
    snprintf(text, capacity, "plain C, built without oneDNN");
}

kvf_status kvf_matmul_create(kvf_matmul **out)
{
    *out = NULL;
    return KVF_UNSUPPORTED;
}

void kvf_matmul_destroy(kvf_matmul *matmul)
{
    (void)matmul;
}

bool kvf_matmul_fp32(const kvf_matmul_shape *s, const float *a, const float *b, float *c,
                     bool accumulate)
{
    for (uint32_t r = 0; r < s->rows; r++)
        for (uint32_t o = 0; o < s->outputs; o++) {
            const float *x = a + (size_t)r * s->a_stride, *w = b + (size_t)o * s->b_stride;
            float *y = c + (size_t)r * s->c_stride + o, sum = 0.0f;
            for (uint32_t i = 0; i < s->inputs; i++)
                sum += x[i] * w[i];
            *y = accumulate ? *y + sum : sum;
        }
    return true;
}

bool kvf_matmul_bf16(kvf_matmul *matmul, const kvf_matmul_shape *s, const uint16_t *a,
                     const uint16_t *b, float *c)
{
    (void)matmul;
    for (uint32_t r = 0; r < s->rows; r++)
        for (uint32_t o = 0; o < s->outputs; o++) {
            const uint16_t *x = a + (size_t)r * s->a_stride, *w = b + (size_t)o * s->b_stride;
            float sum = 0.0f;
            for (uint32_t i = 0; i < s->inputs; i++)
                sum += kvf_bf16_to_float(x[i]) * kvf_bf16_to_float(w[i]);
            c[(size_t)r * s->c_stride + o] = sum;
        }
    return true;
}
