/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of pages, vectorised. Bound it aims at: reading the digests once from memory.
 *
 * Knows nothing of candidates. With q+ = max(q, 0) and q- = min(q, 0), max(q lo, q hi) = q+ hi + q-
 * lo as lo <= hi, so an element costs two multiply-adds per query. An empty box has lo = +inf; its
 * sum may be anything and is replaced. Exactness: fp32 sums in a fixed order.
 */

#include <math.h>

#include "common/simd.h"
#include "variants.h"

#define BOXES_MAX (KVF_SCORE_PAGES * 4u)
#define AHEAD     4096u /* bytes; also past the end, where nobody reads */

typedef struct queries {
    _Alignas(64) float plus[4][KVF_HEAD_DIM_MAX]; /* paired order of bf16, padded with zeros */
    _Alignas(64) float minus[4][KVF_HEAD_DIM_MAX];
} queries;

KVF_ALWAYS_INLINE void split_query(queries *x, uint32_t g, const void *q, const kvf_shape *s)
{
    float wide[KVF_HEAD_DIM_MAX + VF_PAIR] = {0.0f};
    vf_widen_array(wide, q, s->dtype, s->head_dim);
    for (uint32_t d = 0; d < s->head_dim; d += VF_PAIR)
        for (uint32_t i = 0; i < VF_PAIR; i++) {
            float value = wide[d + 2 * (i % VF_LANES) + i / VF_LANES];
            x->plus[g][d + i] = value < 0.0f ? 0.0f : value;
            x->minus[g][d + i] = value < 0.0f ? value : 0.0f;
        }
}

/* Sums of `boxes` = 8 / heads boxes: to[box * heads + head]. */
KVF_ALWAYS_INLINE void score_boxes(const queries *x, const uint32_t heads, uint32_t head_dim,
                                   const uint16_t *const *box, float *to)
{
    const uint32_t boxes = 8 / heads;
    /* As many bytes are prefetched as are read, evenly: the core drops prefetches in bursts. */
    const char *ahead = (const char *)box[0] + AHEAD;
    vf acc[8];
    for (uint32_t i = 0; i < 8; i++)
        acc[i] = vf_zero();
    for (uint32_t d = 0; d < head_dim; d += VF_PAIR) {
        const uint32_t left = head_dim - d;
        for (uint32_t half = 0; half < 2; half++) {
            /* hi with q+, then lo with q-: two boxes at a time share every query vector */
            for (uint32_t i = 0; i < boxes * VF_PAIR * 2; i += 64)
                __builtin_prefetch(ahead + (d * 2 + half * VF_PAIR) * boxes * 2 + i, 0, 2);
            for (uint32_t k = 0; k < boxes; k += 2) {
                const uint16_t *first = box[k] + (half ? 0 : head_dim);
                const uint16_t *second = box[k + 1] + (half ? 0 : head_dim);
                vf2 y0 = vf_load2(first, KVF_BF16, d, left);
                vf2 y1 = vf_load2(second, KVF_BF16, d, left);
                for (uint32_t g = 0; g < heads; g++) {
                    const float *q = half ? x->minus[g] + d : x->plus[g] + d;
                    vf qa = vf_load(q), qb = vf_load(q + VF_LANES);
                    VF_KEEP(qa);
                    VF_KEEP(qb);
                    vf *even = &acc[k * heads + g], *odd = &acc[(k + 1) * heads + g];
                    *even = vf_fma(y0.a, qa, *even);
                    *odd = vf_fma(y1.a, qa, *odd);
                    *even = vf_fma(y0.b, qb, *even);
                    *odd = vf_fma(y1.b, qb, *odd);
                }
            }
        }
    }
    for (uint32_t i = 0; i < 8; i += 4)
        vf_sum4(to + i, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
}

/* Heads `first` .. `first + heads - 1` of a list against `count` pages from `page`. */
KVF_ALWAYS_INLINE void score_heads(const kvf_score_args *a, uint32_t list, uint32_t first,
                                   const uint32_t heads, uint32_t page, uint32_t count)
{
    const uint32_t head_dim = a->shape.head_dim;
    const uint32_t per_step = 8 / heads, boxes = count * a->subs;
    const uint32_t shift = (uint32_t)__builtin_ctz(a->subs);
    const size_t box_elements = 2 * (size_t)head_dim;
    const uint16_t *digests[KVF_SCORE_PAGES];
    float sums[BOXES_MAX * 4 + 8];
    queries x;
    for (uint32_t g = 0; g < heads; g++)
        split_query(
            &x, g,
            kvf_offset(a->q, ((size_t)list * a->group + first + g) * kvf_key_bytes(&a->shape)),
            &a->shape);
    for (uint32_t p = 0; p < count; p++)
        digests[p] = kvf_score_digest(a, list, page + p);
    for (uint32_t b = 0; b < boxes; b += per_step) {
        const uint16_t *box[8];
        for (uint32_t k = 0; k < per_step; k++) {
            const uint32_t at = kvf_min_u32(b + k, boxes - 1);
            box[k] = digests[at >> shift] + (at & (a->subs - 1)) * box_elements;
        }
        score_boxes(&x, heads, head_dim, box, sums + b * heads);
    }
    float *out = a->scores + ((size_t)list * a->group + first) * a->pages_max + page;
    const uint64_t *bits = a->bits ? a->bits[list] : NULL;
    for (uint32_t p = 0; p < count; p++) {
        float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        const uint32_t subs = kvf_score_counts(a, bits, page + p) ? a->subs : 0;
        for (uint32_t sub = 0; sub < subs; sub++) {
            const uint32_t b = p * a->subs + sub;
            const uint16_t *lo = digests[p] + sub * box_elements;
            if (kvf_bf16_to_float(lo[0]) > kvf_bf16_to_float(lo[head_dim]))
                continue;
            for (uint32_t g = 0; g < heads; g++) {
                float sum = sums[b * heads + g];
                best[g] = sum > best[g] ? sum : best[g];
            }
        }
        for (uint32_t g = 0; g < heads; g++)
            out[(size_t)g * a->pages_max + p] = best[g];
    }
}

/* All heads of a list against `count` pages from `page`. */
static void score_range(const kvf_score_args *a, uint32_t list, uint32_t page, uint32_t count)
{
    const kvf_subgroup sub = kvf_subgroup_whole(a->sub, a->group);
    const uint32_t end = sub.first + sub.count;
    uint32_t g = sub.first;
    for (; g + 4 <= end; g += 4)
        score_heads(a, list, g, 4, page, count);
    if (g + 2 <= end) {
        score_heads(a, list, g, 2, page, count);
        g += 2;
    }
    if (g < end)
        score_heads(a, list, g, 1, page, count);
}

void KVF_SIMD_NAME(score)(const void *args, uint32_t task)
{
    const kvf_score_args *a = args;
    const uint32_t tiles = kvf_div_ceil_u32(a->pages_max, KVF_SCORE_PAGES);
    const uint32_t list = task / tiles;
    const uint32_t page = task % tiles * KVF_SCORE_PAGES;
    if (page >= a->pages[list])
        return;
    score_range(a, list, page, kvf_min_u32(a->pages[list] - page, KVF_SCORE_PAGES));
}
