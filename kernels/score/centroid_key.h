/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_CENTROID_KEY_H
#define KVF_KERNELS_SCORE_CENTROID_KEY_H

/*
 * The centroid of a segment from its code groups, in plain C: the specification (see centroids in
 * score_args.h).
 *
 * Knows nothing of where groups and centroids lie. A product of a scale and a level is exact, so
 * every order of multiplying and adding has these bits, fused or not.
 */

#include <float.h>
#include <math.h>

#include "codes.h"
#include "common/convert.h"
#include "score_args.h"

/* x [head_dim] += the keys of a group, as their codes have them. */
static inline void kvf_centroid_add(float *x, kvf_code_group group, uint32_t head_dim)
{
    static const float level[4] = {-10.0f, -3.0f, 3.0f, 10.0f};
    const uint32_t *words = (const uint32_t *)(const void *)group.words;
    const uint16_t *scales = (const uint16_t *)(const void *)group.scales;
    for (uint32_t t = 0; t < KVF_CODE_TOKENS; t++) {
        const uint32_t *token = words + kvf_code_word(head_dim, t, 0);
        const float scale = kvf_fp16_to_float(scales[t]);
        for (uint32_t i = 0; i < head_dim; i++) {
            const uint32_t word = token[i / KVF_CODE_LANES * KVF_CODE_LANES];
            x[i] = x[i] + scale * level[word >> kvf_code_shift(i % KVF_CODE_LANES) & 3];
        }
    }
}

/* From the sum of a segment: levels to centroid [head_dim]; returns their scale. */
static inline uint16_t kvf_centroid_end(int8_t *centroid, float *x, uint32_t head_dim)
{
    float largest = 0.0f;
    for (uint32_t c = 0; c < head_dim; c++) {
        x[c] = x[c] * (1.0f / KVF_CENTROID_TOKENS);
        largest = fmaxf(largest, fabsf(x[c]));
    }
    const float unit = 127.0f / largest, scale = largest / 127.0f;
    const int is_flat = !(unit <= FLT_MAX);
    for (uint32_t c = 0; c < head_dim; c++)
        centroid[c] = is_flat ? 0 : (int8_t)rintf(x[c] * unit);
    return is_flat ? 0 : kvf_fp16_from_float(scale < 65504.0f ? scale : 65504.0f);
}

#endif
