/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_TILE_SIMD_H
#define KVF_KERNELS_TILE_SIMD_H

/*
 * A tile of queries against a tile of keys, as a small matrix product in fp32.
 *
 * This file knows strips of six queries and panels of VF_PAIR columns; prefill and observe know
 * whose they are. Six by two vectors are twelve accumulators, which hides the latency of the
 * multiply-add and leaves registers for the two panel vectors and a broadcast. Panels are
 * contiguous, so that no power-of-two stride meets the cache. Columns beyond the keys hold copies
 * of the last key: finite whenever the keys are, and never looked at.
 */

#include <math.h>

#include "cap_simd.h"
#include "paging.h"

#define TILE_KEYS    64u
#define TILE_QUERIES 48u
#define TILE_WIDTH   256u /* channels; of wider queries there are half as many */
#define STRIP        6u

/* Queries of a tile: what they take of the stack and the cache is the same at any width. */
KVF_INLINE uint32_t tile_queries(uint32_t head_dim)
{
    return head_dim > TILE_WIDTH ? TILE_QUERIES * TILE_WIDTH / KVF_HEAD_DIM_MAX : TILE_QUERIES;
}

/* Queries in strips: element d of query r is at [r / 6][d][r % 6]; queries beyond the count are
 * zero. */
typedef struct query_strips {
    _Alignas(64) float at[TILE_QUERIES * TILE_WIDTH];
} query_strips;

/* Logits, then weights. */
typedef struct tile_scores {
    _Alignas(64) float at[TILE_QUERIES][TILE_KEYS];
} tile_scores;

KVF_ALWAYS_INLINE void strips_put(query_strips *q, uint32_t query, const void *from,
                                  const kvf_shape *s, float scale)
{
    float wide[KVF_HEAD_DIM_MAX];
    float *to = q->at + (size_t)(query / STRIP) * STRIP * s->head_dim + query % STRIP;
    if (s->dtype == KVF_BF16)
        vf_widen_array(wide, from, KVF_BF16, s->head_dim);
    else
        vf_widen_array(wide, from, s->dtype, s->head_dim);
    for (uint32_t d = 0; d < s->head_dim; d++)
        to[d * STRIP] = wide[d] * scale;
}

/* Fills the last strip with zero queries. */
KVF_ALWAYS_INLINE void strips_finish(query_strips *q, uint32_t queries, const kvf_shape *s)
{
    for (uint32_t query = queries; query % STRIP; query++)
        for (uint32_t d = 0; d < s->head_dim; d++)
            q->at[(size_t)(query / STRIP) * STRIP * s->head_dim + d * STRIP + query % STRIP] = 0.0f;
}

/* Keys, transposed: element d of key j is at k[j / VF_PAIR][d][j % VF_PAIR]. Repeats the last key.
 */
KVF_ALWAYS_INLINE void panels_put_keys(float *k, const void **keys, uint32_t count,
                                       const kvf_shape *s, const kvf_dtype dtype)
{
    for (uint32_t j = count; j % VF_PAIR; j++)
        keys[j] = keys[count - 1];
    for (uint32_t j = 0; j < count; j += VF_TRANSPOSE) {
        float *to = k + (size_t)(j / VF_PAIR) * VF_PAIR * s->head_dim + j % VF_PAIR;
        for (uint32_t d = 0; d < s->head_dim; d += VF_TRANSPOSE)
            vf_transpose_keys(to + (size_t)d * VF_PAIR, VF_PAIR, keys + j, dtype, d);
    }
    /* Whole panels are multiplied: fill what the last one lacks. */
    for (uint32_t j = (uint32_t)kvf_round_up(count, VF_TRANSPOSE); j % VF_PAIR; j += VF_TRANSPOSE) {
        float *to = k + (size_t)(j / VF_PAIR) * VF_PAIR * s->head_dim + j % VF_PAIR;
        for (uint32_t d = 0; d < s->head_dim; d += VF_TRANSPOSE)
            vf_transpose_keys(to + (size_t)d * VF_PAIR, VF_PAIR, keys + j, dtype, d);
    }
}

/*
 * c[r][0 .. VF_PAIR) (+)= sum over k < steps of a[r, k] panel[k][0 .. VF_PAIR), r < 6. a[r, k]
 * is at a[r * a_stride + k * a_step].
 */
KVF_ALWAYS_INLINE void multiply_strip(float *c, size_t c_stride, const float *a,
                                      const size_t a_stride, const size_t a_step,
                                      const float *panel, uint32_t steps, const int accumulate)
{
    vf acc[STRIP][2];
    for (uint32_t r = 0; r < STRIP; r++) {
        acc[r][0] = accumulate ? vf_load(c + r * c_stride) : vf_zero();
        acc[r][1] = accumulate ? vf_load(c + r * c_stride + VF_LANES) : vf_zero();
    }
    for (uint32_t k = 0; k < steps; k++) {
        const vf b0 = vf_load(panel + (size_t)k * VF_PAIR);
        const vf b1 = vf_load(panel + (size_t)k * VF_PAIR + VF_LANES);
        for (uint32_t r = 0; r < STRIP; r++) {
            const vf x = vf_set(a[r * a_stride + k * a_step]);
            acc[r][0] = vf_fma(x, b0, acc[r][0]);
            acc[r][1] = vf_fma(x, b1, acc[r][1]);
        }
    }
    for (uint32_t r = 0; r < STRIP; r++) {
        vf_store(c + r * c_stride, acc[r][0]);
        vf_store(c + r * c_stride + VF_LANES, acc[r][1]);
    }
}

/* Logits of all strips from `strip` on against `keys` keys. */
KVF_ALWAYS_INLINE void tile_logits(tile_scores *s, const query_strips *q, const float *k,
                                   uint32_t strip, uint32_t queries, uint32_t keys,
                                   uint32_t head_dim)
{
    for (uint32_t j = 0; j < keys; j += VF_PAIR)
        for (uint32_t i = strip; i * STRIP < queries; i++)
            multiply_strip(&s->at[i * STRIP][j], TILE_KEYS, q->at + (size_t)i * STRIP * head_dim, 1,
                           STRIP, k + (size_t)j * head_dim, head_dim, 0);
}

/* -infinity from `visible` to the end of the last vector of `keys`; returns the largest entry. */
KVF_ALWAYS_INLINE float logits_mask_top(float *logits, uint32_t visible, uint32_t keys)
{
    for (uint32_t j = visible; j < kvf_round_up(keys, VF_LANES); j++)
        logits[j] = -INFINITY;
    vf best = vf_set(-INFINITY);
    for (uint32_t j = 0; j < keys; j += VF_LANES)
        best = vf_max(vf_load(logits + j), best);
    float lane[VF_LANES], top = -INFINITY;
    vf_store(lane, best);
    for (uint32_t i = 0; i < VF_LANES; i++)
        top = lane[i] > top ? lane[i] : top;
    return top;
}

/* The logits become 2^(logit - base); returns their sum. */
KVF_ALWAYS_INLINE float logits_soften(float *logits, float base, uint32_t keys)
{
    vf sum = vf_zero();
    for (uint32_t j = 0; j < keys; j += VF_LANES) {
        vf weight = vf_exp2(vf_sub(vf_load(logits + j), vf_set(base)));
        vf_store(logits + j, weight);
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
