/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_CODE_KEYS_SIMD_H
#define KVF_KERNELS_SCORE_CODE_KEYS_SIMD_H

/*
 * The codes of KVF_CODE_LANES keys side by side: about 20 operations per channel and vector of
 * keys.
 *
 * Knows nothing of where codes live. Exactness: the bits of kvf_code_key (code_key.h).
 */

#include <float.h>

#include "codes_simd.h"

/* Where n2 is a number above zero. */
KVF_ALWAYS_INLINE vu has_length(vf n2)
{
    const vf zero = vf_zero(), most = vf_set(FLT_MAX);
    return (vu)(n2 > zero) & (vu)(n2 <= most);
}

/* One word of VF_LANES tokens at `x`; adds |c x| to the partial sums. */
KVF_ALWAYS_INLINE vu encode_word(const float *x, vf edge, vf part[KVF_CODE_LANES])
{
    const vf three = vf_set(3.0f), ten = vf_set(10.0f), zero = vf_zero();
    vu word = vu_set(0);
    for (uint32_t i = 0; i < KVF_CODE_LANES; i++) {
        const vf y = vf_load(x + i * KVF_CODE_LANES), size = vf_abs(y);
        const vu is_near = (vu)(size < edge), is_below = (vu)(y < zero);
        const vu code = (~(is_near ^ is_below) & 1u) | (~is_below & 2u);
        word |= code << kvf_code_shift(i);
        const vf level = (vf)vu_pick(is_near, (vu)three, (vu)ten);
        part[i] = vf_add(part[i], vf_mul(level, size));
    }
    return word;
}

/* VF_LANES tokens of a rotated tile, from lane k on. */
KVF_ALWAYS_INLINE void encode_lanes(uint32_t *words, uint16_t *scales, const float *x,
                                    uint32_t head_dim)
{
    vf part[KVF_CODE_LANES];
    for (uint32_t i = 0; i < KVF_CODE_LANES; i++)
        part[i] = vf_zero();
    for (uint32_t w = 0; w < head_dim; w += KVF_CODE_LANES)
        for (uint32_t i = 0; i < KVF_CODE_LANES; i++) {
            const vf y = vf_load(x + (w + i) * KVF_CODE_LANES);
            part[i] = vf_add(part[i], vf_mul(y, y));
        }
    const vf n2 = sum_parts(part);
    const vu is_long = has_length(n2);
    const vf edge = vf_mul(vf_set(KVF_CODE_EDGE), vf_sqrt(n2 / vf_set((float)head_dim)));
    for (uint32_t i = 0; i < KVF_CODE_LANES; i++)
        part[i] = vf_zero();
    for (uint32_t w = 0; w < head_dim; w += KVF_CODE_LANES) {
        const vu word = encode_word(x + w * KVF_CODE_LANES, edge, part);
        vu_store(words + w, vu_pick(is_long, word, vu_set(KVF_CODE_FLAT)));
    }
    const vf scale = vf_min(n2 / sum_parts(part), vf_set(65504.0f));
    vf_store_fp16(scales, (vf)((vu)scale & is_long));
}

/* A rotated tile: word w of lane l to words[w * KVF_CODE_LANES + l], its scale to scales[l]. */
KVF_ALWAYS_INLINE void code_tile_encode(uint32_t *words, uint16_t *scales, const code_tile *tile,
                                        uint32_t head_dim)
{
    for (uint32_t k = 0; k < KVF_CODE_LANES; k += VF_LANES)
        encode_lanes(words + k, scales + k, tile->at + k, head_dim);
}

#endif
