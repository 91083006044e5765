/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_CODE_KEY_H
#define KVF_KERNELS_SCORE_CODE_KEY_H

/*
 * The code of one key in plain C, as codes.h defines it: for references.
 *
 * Knows nothing of where codes live. Every key gets one: a key that is not finite, or zero, gets
 * the scale 0, so that it draws no attention and disturbs no other.
 */

#include <float.h>
#include <math.h>

#include "codes.h"

/* In the order of codes.h. */
static inline float kvf_code_sum_terms(const float *term, uint32_t count)
{
    float part[KVF_CODE_LANES] = {0.0f};
    for (uint32_t i = 0; i < count; i++)
        part[i % KVF_CODE_LANES] += term[i];
    for (uint32_t step = KVF_CODE_LANES / 2; step; step /= 2)
        for (uint32_t i = 0; i < step; i++)
            part[i] += part[i + step];
    return part[0];
}

/* The stored code of x. */
static inline uint32_t kvf_code_of(float x, float edge)
{
    const uint32_t far = !(fabsf(x) < edge);
    return x < 0.0f ? 1 - far : 2 + far;
}

/* The words of one token, KVF_CODE_LANES apart; returns its scale. */
static inline uint16_t kvf_code_key(uint32_t *words, float *x, uint32_t head_dim)
{
    static const float level[4] = {-10.0f, -3.0f, 3.0f, 10.0f};
    float term[KVF_HEAD_DIM_MAX];
    kvf_code_rotate(x, head_dim);
    for (uint32_t i = 0; i < head_dim; i++)
        term[i] = x[i] * x[i];
    const float n2 = kvf_code_sum_terms(term, head_dim);
    const int is_flat = !(n2 > 0.0f && n2 <= FLT_MAX);
    const float edge = KVF_CODE_EDGE * sqrtf(n2 / (float)head_dim);
    for (uint32_t w = 0; w < head_dim / KVF_CODE_LANES; w++) {
        uint32_t word = 0;
        for (uint32_t i = 0; i < KVF_CODE_LANES; i++) {
            const float y = x[w * KVF_CODE_LANES + i];
            const uint32_t code = kvf_code_of(y, edge);
            word |= code << kvf_code_shift(i);
            term[w * KVF_CODE_LANES + i] = level[code] * y;
        }
        words[w * KVF_CODE_LANES] = is_flat ? KVF_CODE_FLAT : word;
    }
    const float scale = n2 / kvf_code_sum_terms(term, head_dim);
    return is_flat ? 0 : kvf_fp16_from_float(scale < 65504.0f ? scale : 65504.0f);
}

#endif
