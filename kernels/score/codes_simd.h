/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_CODES_SIMD_H
#define KVF_KERNELS_SCORE_CODES_SIMD_H

/*
 * Rotation and sums of codes.h for KVF_CODE_LANES vectors side by side: a lane is a vector, so
 * nothing is ever added across lanes, and every lane does what the reference does, in its order.
 *
 * Knows vectors, not whether they are keys or queries. Vectors in a tile are transposed: channel i
 * of vector r is at [i][r].
 */

#include "codes.h"
#include "common/simd.h"

typedef struct code_tile {
    _Alignas(64) float at[KVF_HEAD_DIM_MAX * KVF_CODE_LANES];
} code_tile;

KVF_ALWAYS_INLINE void butterfly(vf *a, vf *b)
{
    const vf x = *a, y = *b;
    *a = vf_add(x, y);
    *b = vf_sub(x, y);
}

/* One stage of `channels` channels, or two: stride, then 2 * stride. */
KVF_ALWAYS_INLINE void stages(float *at, uint32_t channels, uint32_t stride, const int count)
{
    const size_t step = (size_t)stride * KVF_CODE_LANES;
    for (uint32_t i = 0; i < channels; i += stride << count)
        for (size_t k = 0; k < step; k += VF_LANES) {
            float *x = at + (size_t)i * KVF_CODE_LANES + k;
            vf r0 = vf_load(x), r1 = vf_load(x + step);
            butterfly(&r0, &r1);
            if (count == 2) {
                vf r2 = vf_load(x + 2 * step), r3 = vf_load(x + 3 * step);
                butterfly(&r2, &r3);
                butterfly(&r0, &r2);
                butterfly(&r1, &r3);
                vf_store(x + 2 * step, r2);
                vf_store(x + 3 * step, r3);
            }
            vf_store(x, r0);
            vf_store(x + step, r1);
        }
}

/* The signs of a rotation, which begin it and end its inverse. */
static inline void code_tile_signs(code_tile *tile, uint32_t head_dim)
{
    for (uint32_t i = 0; i < head_dim; i++)
        for (uint32_t k = 0; k < KVF_CODE_LANES; k += VF_LANES) {
            float *x = tile->at + i * KVF_CODE_LANES + k;
            vu_store(x, vu_load(x) ^ vu_set(kvf_code_sign(i)));
        }
}

/* All of a rotation but its signs. */
static inline void code_tile_turn(code_tile *tile, uint32_t head_dim)
{
    for (uint32_t first = 0, block; first < head_dim; first += block) {
        float *at = tile->at + (size_t)first * KVF_CODE_LANES;
        block = kvf_code_block(head_dim - first);
        uint32_t stride = 1;
        for (; 2 * stride < block; stride *= 4)
            stages(at, block, stride, 2);
        if (stride < block)
            stages(at, block, stride, 1);
        const vf unit = vf_set(kvf_code_unit(block));
        for (uint32_t i = 0; i < block * KVF_CODE_LANES; i += VF_LANES)
            vf_store(at + i, vf_mul(vf_load(at + i), unit));
    }
}

static inline void code_tile_rotate(code_tile *tile, uint32_t head_dim)
{
    code_tile_signs(tile, head_dim);
    code_tile_turn(tile, head_dim);
}

/* Vectors of keys or queries into a tile. */
KVF_ALWAYS_INLINE void code_tile_put(code_tile *tile, const void *const vectors[KVF_CODE_LANES],
                                     kvf_dtype dtype, uint32_t head_dim)
{
    for (uint32_t r = 0; r < KVF_CODE_LANES; r += VF_TRANSPOSE)
        for (uint32_t i = 0; i < head_dim; i += VF_TRANSPOSE)
            vf_transpose_keys(tile->at + (size_t)i * KVF_CODE_LANES + r, KVF_CODE_LANES,
                              vectors + r, dtype, i);
}

static inline void code_tile_fill(code_tile *tile, const void *const vectors[KVF_CODE_LANES],
                                  kvf_dtype dtype, uint32_t head_dim)
{
    if (dtype == KVF_BF16)
        code_tile_put(tile, vectors, KVF_BF16, head_dim);
    else if (dtype == KVF_FP16)
        code_tile_put(tile, vectors, KVF_FP16, head_dim);
    else
        code_tile_put(tile, vectors, KVF_FP32, head_dim);
    code_tile_rotate(tile, head_dim);
}

/* Partial sums become their sum. */
KVF_ALWAYS_INLINE vf sum_parts(vf part[KVF_CODE_LANES])
{
    for (uint32_t step = KVF_CODE_LANES / 2; step; step /= 2)
        for (uint32_t i = 0; i < step; i++)
            part[i] = vf_add(part[i], part[i + step]);
    return part[0];
}

#endif
