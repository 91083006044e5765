/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rotated queries in int8, 16 queries side by side. Bound: a step has few of them.
 *
 * Knows nothing of heads or lists. Exactness: the bits of rotate_ref.c.
 */

#include <float.h>

#include "codes_simd.h"
#include "variants.h"

/* VF_LANES queries of a rotated tile become integers, in place; their scales go to `scales`. */
KVF_ALWAYS_INLINE void round_lanes(float *x, float *scales, uint32_t head_dim, float softmax_scale)
{
    vi top = (vi){0}; /* bits, whose order is that of magnitudes; NaN is above all numbers */
    for (uint32_t i = 0; i < head_dim; i++) {
        const vi bits = (vi)vf_abs(vf_load(x + i * KVF_CODE_LANES));
        const vi larger = bits > top;
        top = (larger & bits) | (~larger & top);
    }
    const vf largest = (vf)top, unit = vf_set(127.0f) / largest, most = vf_set(FLT_MAX);
    const vu is_sound = (vu)(largest <= most) & (vu)(unit <= most);
    const vf magic = vf_set(0x1.8p23f); /* adding it rounds to an integer, in the low bits */
    for (uint32_t i = 0; i < head_dim; i++) {
        const vf y = vf_add(vf_mul(vf_load(x + i * KVF_CODE_LANES), unit), magic);
        vu_store(x + i * KVF_CODE_LANES, (vu)y & is_sound);
    }
    const vf scale = vf_mul(largest / vf_set(127.0f), vf_set(softmax_scale));
    vu_store(scales, (vu)vf_min(scale, vf_set(KVF_QUERY_SCALE_MAX)) & is_sound);
}

void KVF_SIMD_NAME(rotate)(const void *args, uint32_t task)
{
    const kvf_rotate_args *a = args;
    const uint32_t first = task * KVF_ROTATE_QUERIES;
    const uint32_t queries = kvf_min_u32(KVF_ROTATE_QUERIES, a->queries - first);
    const size_t query_bytes = a->head_dim * kvf_dtype_bytes(a->dtype);
    const void *from[KVF_CODE_LANES];
    float scales[KVF_CODE_LANES];
    code_tile tile;
    for (uint32_t r = 0; r < KVF_CODE_LANES; r++)
        from[r] = kvf_offset(a->q, (first + kvf_min_u32(r, queries - 1)) * query_bytes);
    code_tile_fill(&tile, from, a->dtype, a->head_dim);
    for (uint32_t k = 0; k < KVF_CODE_LANES; k += VF_LANES)
        round_lanes(tile.at + k, scales + k, a->head_dim, a->scale);
    for (uint32_t r = 0; r < queries; r++) {
        int8_t *y = a->y + (size_t)(first + r) * a->head_dim;
        for (uint32_t i = 0; i < a->head_dim; i++)
            y[i] = (int8_t)kvf_float_bits(tile.at[i * KVF_CODE_LANES + r]);
        a->y_scale[first + r] = scales[r];
    }
}
