/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_TILE_SIMD_H
#define KVF_KERNELS_TILE_SIMD_H

/*
 * A tile of query rows against a tile of keys, as a small matrix product in fp32.
 *
 * This file knows strips of six rows and panels of VF_PAIR columns; prefill and observe know what
 * the rows mean. Six by two vectors are twelve accumulators, which hides the latency of the
 * multiply-add and leaves registers for the two panel vectors and a broadcast. Panels are
 * contiguous, so that no power-of-two stride meets the cache. Columns beyond the keys hold copies
 * of the last key: finite whenever the keys are, and never looked at.
 */

#include <math.h>

#include "cap_simd.h"
#include "paging.h"

#define TILE_KEYS  64u
#define TILE_ROWS  48u
#define TILE_WIDTH 256u /* channels; rows that are wider come in half as many */
#define STRIP      6u

/* Rows of a tile: what they take of the stack and the cache is the same at any width. */
KVF_INLINE uint32_t tile_rows(uint32_t head_dim)
{
    return head_dim > TILE_WIDTH ? TILE_ROWS * TILE_WIDTH / KVF_HEAD_DIM_MAX : TILE_ROWS;
}

/* Queries in strips: element d of row r is at [r / 6][d][r % 6]; rows beyond the count are zero. */
typedef struct query_strips {
    _Alignas(64) float at[TILE_ROWS * TILE_WIDTH];
} query_strips;

/* Logits, then weights. */
typedef struct tile_scores {
    _Alignas(64) float at[TILE_ROWS][TILE_KEYS];
} tile_scores;

KVF_ALWAYS_INLINE void strips_put(query_strips *q, uint32_t row, const void *from,
                                  const kvf_shape *s, float scale)
{
    float wide[KVF_HEAD_DIM_MAX];
    float *to = q->at + (size_t)(row / STRIP) * STRIP * s->head_dim + row % STRIP;
    if (s->dtype == KVF_BF16)
        vf_widen_array(wide, from, KVF_BF16, s->head_dim);
    else
        vf_widen_array(wide, from, s->dtype, s->head_dim);
    for (uint32_t d = 0; d < s->head_dim; d++)
        to[d * STRIP] = wide[d] * scale;
}

/* Fills the last strip with zero rows. */
KVF_ALWAYS_INLINE void strips_finish(query_strips *q, uint32_t rows, const kvf_shape *s)
{
    for (uint32_t row = rows; row % STRIP; row++)
        for (uint32_t d = 0; d < s->head_dim; d++)
            q->at[(size_t)(row / STRIP) * STRIP * s->head_dim + d * STRIP + row % STRIP] = 0.0f;
}

/* Keys, transposed: element d of key j is at k[j / VF_PAIR][d][j % VF_PAIR]. Repeats the last row.
 */
KVF_ALWAYS_INLINE void panels_put_keys(float *k, const void **rows, uint32_t count,
                                       const kvf_shape *s, const kvf_dtype dtype)
{
    for (uint32_t j = count; j % VF_PAIR; j++)
        rows[j] = rows[count - 1];
    for (uint32_t j = 0; j < count; j += VF_TRANSPOSE) {
        float *to = k + (size_t)(j / VF_PAIR) * VF_PAIR * s->head_dim + j % VF_PAIR;
        for (uint32_t d = 0; d < s->head_dim; d += VF_TRANSPOSE)
            vf_transpose_keys(to + (size_t)d * VF_PAIR, VF_PAIR, rows + j, dtype, d);
    }
    /* Whole panels are multiplied: fill what the last one lacks. */
    for (uint32_t j = (uint32_t)kvf_round_up(count, VF_TRANSPOSE); j % VF_PAIR; j += VF_TRANSPOSE) {
        float *to = k + (size_t)(j / VF_PAIR) * VF_PAIR * s->head_dim + j % VF_PAIR;
        for (uint32_t d = 0; d < s->head_dim; d += VF_TRANSPOSE)
            vf_transpose_keys(to + (size_t)d * VF_PAIR, VF_PAIR, rows + j, dtype, d);
    }
}

/*
 * c[r][0 .. VF_PAIR) (+)= sum over k < steps of a[r, k] panel[k][0 .. VF_PAIR), six rows. a[r, k]
 * is at a[r * a_row + k * a_step].
 */
KVF_ALWAYS_INLINE void multiply_strip(float *c, size_t c_row, const float *a, const size_t a_row,
                                      const size_t a_step, const float *panel, uint32_t steps,
                                      const int accumulate)
{
    vf acc[STRIP][2];
    for (uint32_t r = 0; r < STRIP; r++) {
        acc[r][0] = accumulate ? vf_load(c + r * c_row) : vf_zero();
        acc[r][1] = accumulate ? vf_load(c + r * c_row + VF_LANES) : vf_zero();
    }
    for (uint32_t k = 0; k < steps; k++) {
        const vf b0 = vf_load(panel + (size_t)k * VF_PAIR);
        const vf b1 = vf_load(panel + (size_t)k * VF_PAIR + VF_LANES);
        for (uint32_t r = 0; r < STRIP; r++) {
            const vf x = vf_set(a[r * a_row + k * a_step]);
            acc[r][0] = vf_fma(x, b0, acc[r][0]);
            acc[r][1] = vf_fma(x, b1, acc[r][1]);
        }
    }
    for (uint32_t r = 0; r < STRIP; r++) {
        vf_store(c + r * c_row, acc[r][0]);
        vf_store(c + r * c_row + VF_LANES, acc[r][1]);
    }
}

/* Logits of all strips from `strip` on against `keys` keys. */
KVF_ALWAYS_INLINE void tile_logits(tile_scores *s, const query_strips *q, const float *k,
                                   uint32_t strip, uint32_t rows, uint32_t keys, uint32_t head_dim)
{
    for (uint32_t j = 0; j < keys; j += VF_PAIR)
        for (uint32_t i = strip; i * STRIP < rows; i++)
            multiply_strip(&s->at[i * STRIP][j], TILE_KEYS, q->at + (size_t)i * STRIP * head_dim, 1,
                           STRIP, k + (size_t)j * head_dim, head_dim, 0);
}

/* -infinity from `visible` to the end of the last vector of `keys`; returns the largest entry. */
KVF_ALWAYS_INLINE float row_mask_top(float *row, uint32_t visible, uint32_t keys)
{
    for (uint32_t j = visible; j < kvf_round_up(keys, VF_LANES); j++)
        row[j] = -INFINITY;
    vf best = vf_set(-INFINITY);
    for (uint32_t j = 0; j < keys; j += VF_LANES)
        best = vf_max(vf_load(row + j), best);
    float lane[VF_LANES], top = -INFINITY;
    vf_store(lane, best);
    for (uint32_t i = 0; i < VF_LANES; i++)
        top = lane[i] > top ? lane[i] : top;
    return top;
}

/* The row becomes 2^(row - base); returns its sum. */
KVF_ALWAYS_INLINE float row_soften(float *row, float base, uint32_t keys)
{
    vf sum = vf_zero();
    for (uint32_t j = 0; j < keys; j += VF_LANES) {
        vf weight = vf_exp2(vf_sub(vf_load(row + j), vf_set(base)));
        vf_store(row + j, weight);
        sum = vf_add(sum, weight);
    }
    float lane[VF_LANES], total = 0.0f;
    vf_store(lane, sum);
    for (uint32_t i = 0; i < VF_LANES; i++)
        total += lane[i];
    return total;
}

KVF_ALWAYS_INLINE float exp2_one(float x)
{
    float lane[VF_LANES];
    vf_store(lane, vf_exp2(vf_set(x)));
    return lane[0];
}

#endif
