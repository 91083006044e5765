/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Digest of a page, vectorised over channels. Bound: reading the keys once from memory.
 *
 * Knows nothing of digests' whereabouts. Exactness: minmax has the bits of digest_ref.c; the two
 * means are fp32 sums of terms that are scaled first, so that they cannot overflow, then one
 * rounding to bf16.
 */

#include <math.h>

#include "common/simd.h"
#include "variants.h"

typedef struct channels {
    _Alignas(64) float lo[KVF_HEAD_DIM_MAX];
    _Alignas(64) float hi[KVF_HEAD_DIM_MAX];
} channels;

KVF_ALWAYS_INLINE vf2 vf2_set(float x)
{
    return (vf2){vf_set(x), vf_set(x)};
}

KVF_ALWAYS_INLINE void box_minmax(const kvf_shape *s, const void *page, uint64_t live, uint32_t d,
                                  const kvf_dtype dtype, vf2 *lo, vf2 *hi)
{
    *lo = vf2_set(INFINITY);
    *hi = vf2_set(-INFINITY);
    for (; live; live &= live - 1) {
        const void *key = kvf_page_key(s, page, (uint32_t)__builtin_ctzll(live));
        vf2 x = vf_load2(key, dtype, d, s->head_dim - d);
        lo->a = vf_min(x.a, lo->a);
        lo->b = vf_min(x.b, lo->b);
        hi->a = vf_max(x.a, hi->a);
        hi->b = vf_max(x.b, hi->b);
    }
}

/* Mean of the keys, or of their distance from a centre. */
KVF_ALWAYS_INLINE vf2 box_mean(const kvf_shape *s, const void *page, uint64_t live, uint32_t d,
                               const kvf_dtype dtype, const vf2 *centre)
{
    const vf share = vf_set(1.0f / (float)__builtin_popcountll(live));
    vf2 mean = vf2_set(0.0f);
    for (; live; live &= live - 1) {
        const void *key = kvf_page_key(s, page, (uint32_t)__builtin_ctzll(live));
        vf2 x = vf_load2(key, dtype, d, s->head_dim - d);
        if (centre) {
            x.a = vf_abs(vf_sub(x.a, centre->a));
            x.b = vf_abs(vf_sub(x.b, centre->b));
        }
        mean.a = vf_fma(x.a, share, mean.a);
        mean.b = vf_fma(x.b, share, mean.b);
    }
    return mean;
}

KVF_ALWAYS_INLINE void build_box(const kvf_digest_args *a, const void *page, uint64_t live,
                                 const kvf_dtype dtype, channels *out)
{
    const kvf_shape *s = &a->shape;
    for (uint32_t d = 0; d < s->head_dim; d += VF_PAIR) {
        vf2 lo, hi;
        if (a->kind == KVF_DIGEST_MEAN && live) {
            lo = hi = box_mean(s, page, live, d, dtype, NULL);
        } else {
            box_minmax(s, page, live, d, dtype, &lo, &hi);
        }
        if (a->kind == KVF_DIGEST_CUBOID_MEAN && live) {
            const vf half = vf_set(0.5f);
            vf2 centre = {vf_fma(half, lo.a, vf_mul(half, hi.a)),
                          vf_fma(half, lo.b, vf_mul(half, hi.b))};
            vf2 radius = box_mean(s, page, live, d, dtype, &centre);
            lo = (vf2){vf_sub(centre.a, radius.a), vf_sub(centre.b, radius.b)};
            hi = (vf2){vf_add(centre.a, radius.a), vf_add(centre.b, radius.b)};
        }
        vf_store2(out->lo + d, dtype, lo);
        vf_store2(out->hi + d, dtype, hi);
    }
}

static void store_box(uint16_t *to, const channels *box, uint32_t head_dim, int outwards)
{
    uint16_t *hi = to + head_dim;
    if (!outwards) {
        vf_round_array(to, KVF_BF16, box->lo, head_dim);
        vf_round_array(hi, KVF_BF16, box->hi, head_dim);
        return;
    }
    for (uint32_t d = 0; d < head_dim; d++)
        to[d] = kvf_bf16_down(box->lo[d]);
    for (uint32_t d = 0; d < head_dim; d++)
        hi[d] = kvf_bf16_up(box->hi[d]);
}

void KVF_SIMD_NAME(digest)(const void *args, uint32_t task)
{
    const kvf_digest_args *a = args;
    const kvf_digest_job *job = &a->jobs[task];
    if (!job->page)
        return;
    const uint32_t head_dim = a->shape.head_dim, tokens = a->shape.page_size / a->subs;
    if (!job->page)
        return;
    const uint64_t all = kvf_live_bits(kvf_min_u32(job->count, a->shape.page_size), job->skip);
    for (uint32_t sub = 0; sub < a->subs; sub++) {
        const uint64_t live = all & kvf_live_bits(tokens, 0) << (sub * tokens);
        channels box;
        if (a->shape.dtype == KVF_BF16)
            build_box(a, job->page, live, KVF_BF16, &box);
        else if (a->shape.dtype == KVF_FP16)
            build_box(a, job->page, live, KVF_FP16, &box);
        else
            build_box(a, job->page, live, KVF_FP32, &box);
        store_box((uint16_t *)job->digest + (size_t)sub * 2 * head_dim, &box, head_dim,
                  a->kind == KVF_DIGEST_MINMAX || live == 0);
    }
}
