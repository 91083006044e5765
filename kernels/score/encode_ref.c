/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Codes of keys, the specification; codes.h defines them.
 *
 * Knows nothing of where code groups live. Every key gets a code: one that is not finite, or zero,
 * gets the scale 0, so that it draws no attention and disturbs no other.
 */

#include <float.h>
#include <math.h>

#include "codes.h"
#include "variants.h"

/* In the order of codes.h. */
static float sum_terms(const float *term, uint32_t count)
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
static uint32_t code_of(float x, float edge)
{
    const uint32_t far = !(fabsf(x) < edge);
    return x < 0.0f ? 1 - far : 2 + far;
}

/* The words of one token, KVF_CODE_LANES apart; returns its scale. */
static uint16_t encode_token(uint32_t *words, float *x, uint32_t head_dim)
{
    static const float level[4] = {-10.0f, -3.0f, 3.0f, 10.0f};
    float term[KVF_HEAD_DIM_MAX];
    kvf_code_rotate(x, head_dim);
    for (uint32_t i = 0; i < head_dim; i++)
        term[i] = x[i] * x[i];
    const float n2 = sum_terms(term, head_dim);
    const int is_flat = !(n2 > 0.0f && n2 <= FLT_MAX);
    const float edge = KVF_CODE_EDGE * sqrtf(n2 / (float)head_dim);
    for (uint32_t w = 0; w < head_dim / KVF_CODE_LANES; w++) {
        uint32_t word = 0;
        for (uint32_t i = 0; i < KVF_CODE_LANES; i++) {
            const float y = x[w * KVF_CODE_LANES + i];
            const uint32_t code = code_of(y, edge);
            word |= code << kvf_code_shift(i);
            term[w * KVF_CODE_LANES + i] = level[code] * y;
        }
        words[w * KVF_CODE_LANES] = is_flat ? KVF_CODE_FLAT : word;
    }
    const float scale = n2 / sum_terms(term, head_dim);
    return is_flat ? 0 : kvf_fp16_from_float(scale < 65504.0f ? scale : 65504.0f);
}

void kvf_encode_ref(const void *args, uint32_t task)
{
    const kvf_encode_args *a = args;
    const kvf_digest_job *job = &a->jobs[task];
    const uint32_t head_dim = a->shape.head_dim;
    if (!job->page)
        return;
    for (uint32_t t = 0; t < job->count; t++) {
        const void *key = kvf_page_key(&a->shape, job->page, t);
        char *group = (char *)job->digest + t / KVF_CODE_TOKENS * kvf_code_bytes(head_dim);
        uint32_t *words =
            (uint32_t *)(void *)group + kvf_code_word(head_dim, t % KVF_CODE_TOKENS, 0);
        uint16_t *scales = (uint16_t *)(void *)(group + kvf_code_scales(head_dim));
        float x[KVF_HEAD_DIM_MAX];
        for (uint32_t i = 0; i < head_dim; i++)
            x[i] = kvf_element_get(key, a->shape.dtype, i);
        scales[t % KVF_CODE_TOKENS] = encode_token(words, x, head_dim);
    }
}
