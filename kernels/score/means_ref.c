/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Means of stretches, the specification.
 *
 * Knows nothing of keys: what codes say is all there is. A product of a scale and a level is exact,
 * so every order of multiplying and adding has these bits, fused or not.
 */

#include <float.h>
#include <math.h>

#include "codes.h"
#include "common/convert.h"
#include "variants.h"

/* x += the key of token `token` of a list, as its code has it. */
static void add_key(float *x, const char *codes, uint32_t token, uint32_t head_dim)
{
    static const float level[4] = {-10.0f, -3.0f, 3.0f, 10.0f};
    const char *group = codes + token / KVF_CODE_TOKENS * kvf_code_bytes(head_dim);
    const uint32_t t = token % KVF_CODE_TOKENS;
    const uint32_t *words = (const uint32_t *)(const void *)group + kvf_code_word(head_dim, t, 0);
    const uint16_t *scales = (const uint16_t *)(const void *)(group + kvf_code_scales(head_dim));
    const float scale = kvf_fp16_to_float(scales[t]);
    for (uint32_t i = 0; i < head_dim; i++) {
        const uint32_t word = words[i / KVF_CODE_LANES * KVF_CODE_LANES];
        x[i] = x[i] + scale * level[word >> kvf_code_shift(i % KVF_CODE_LANES) & 3];
    }
}

void kvf_means_ref(const void *args, uint32_t task)
{
    const kvf_means_args *a = args;
    const kvf_paging *p = &a->paging;
    const uint32_t per_row = p->kv_heads * a->stretches, head_dim = p->shape.head_dim;
    const kvf_row *row = &a->row[task / per_row];
    const uint32_t head = task % per_row / a->stretches;
    const uint32_t i =
        kvf_stretches(p->block_size, row->sealed_before) + task % per_row % a->stretches;
    float x[KVF_HEAD_DIM_MAX] = {0.0f}, largest = 0.0f;
    if (i >= kvf_stretches(p->block_size, row->sealed))
        return;
    for (uint32_t t = 0; t < KVF_MEAN_TOKENS; t++)
        add_key(x, kvf_row_digest(p, row, 0, head), i * KVF_MEAN_TOKENS + t, head_dim);
    for (uint32_t c = 0; c < head_dim; c++) {
        x[c] = x[c] * (1.0f / KVF_MEAN_TOKENS);
        largest = fmaxf(largest, fabsf(x[c]));
    }
    const float unit = 127.0f / largest, scale = largest / 127.0f;
    const int is_flat = !(unit <= FLT_MAX);
    for (uint32_t c = 0; c < head_dim; c++)
        kvf_row_mean(p, row, head, i)[c] = is_flat ? 0 : (int8_t)rintf(x[c] * unit);
    *kvf_row_mean_scale(p, row, head, i) =
        is_flat ? 0 : kvf_fp16_from_float(scale < 65504.0f ? scale : 65504.0f);
}
