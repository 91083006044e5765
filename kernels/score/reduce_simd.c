/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of query heads into scores of lists, vectorised. Bound: the exponentials.
 *
 * Knows nothing of groups or layers. The weights of a head are kept on the stack until their sum is
 * known, and computed a second time beyond KEPT_MAX pages. NaN counts as -infinity and +infinity as
 * the largest float, as in reduce_ref.c. Exactness: fp32 sums, exponentials to 3e-7.
 */

#include <float.h>
#include <math.h>

#include "cap_simd.h"
#include "variants.h"

#define KEPT_MAX 4096u /* 16 KiB of stack */

KVF_ALWAYS_INLINE float tame_one(float x)
{
    return x > FLT_MAX ? FLT_MAX : x == x ? x : -INFINITY;
}

/* min and max return their second operand for NaN. */
KVF_ALWAYS_INLINE vf tame(vf x)
{
    return vf_min(vf_max(x, vf_set(-INFINITY)), vf_set(FLT_MAX));
}

static float top_score(const float *scores, uint32_t pages)
{
    vf best = vf_set(-INFINITY), other = best; /* two, because one would wait for itself */
    uint32_t p = 0;
    for (; p + 2 * VF_LANES <= pages; p += 2 * VF_LANES) {
        best = vf_max(vf_load(scores + p), best);
        other = vf_max(vf_load(scores + p + VF_LANES), other);
    }
    best = vf_max(other, best);
    float lane[VF_LANES], top = -INFINITY;
    vf_store(lane, best);
    for (uint32_t i = 0; i < VF_LANES; i++)
        top = lane[i] > top ? lane[i] : top;
    for (; p < pages; p++)
        top = scores[p] > top ? scores[p] : top;
    return tame_one(top);
}

/* Up to VF_LANES scores, padded with -infinity. */
KVF_ALWAYS_INLINE vf load_part(const float *scores, uint32_t left)
{
    if (left >= VF_LANES)
        return vf_load(scores);
    float lane[VF_LANES];
    for (uint32_t i = 0; i < VF_LANES; i++)
        lane[i] = i < left ? scores[i] : -INFINITY;
    return vf_load(lane);
}

KVF_ALWAYS_INLINE void store_part(float *scores, uint32_t left, vf x)
{
    if (left >= VF_LANES) {
        vf_store(scores, x);
        return;
    }
    float lane[VF_LANES];
    vf_store(lane, x);
    memcpy(scores, lane, left * sizeof *scores);
}

/* A score, scaled and capped. */
KVF_ALWAYS_INLINE vf logit_of(const kvf_reduce_args *a, vf x)
{
    return vf_capped(vf_mul(tame(x), vf_set(a->scale)), a->cap);
}

/* `top`: the largest score, or with a cap the largest logit. */
KVF_ALWAYS_INLINE vf weight_of(const kvf_reduce_args *a, vf x, float top)
{
    if (a->cap > 0.0f)
        return vf_exp2(vf_mul(vf_sub(logit_of(a, x), vf_set(top)), vf_set(KVF_LOG2E)));
    return vf_exp2(vf_mul(vf_sub(tame(x), vf_set(top)), vf_set(a->scale * KVF_LOG2E)));
}

/* out += the head's share of the mean of softmaxes. */
static void add_softmax(const kvf_reduce_args *a, const float *scores, float *out, uint32_t pages)
{
    float kept[KEPT_MAX]; /* weights before they are scaled, of the first pages */
    float top = top_score(scores, pages);
    if (top == -INFINITY)
        return;
    if (a->cap > 0.0f)
        top = logit_of(a, vf_set(top))[0];
    vf sum = vf_zero();
    for (uint32_t p = 0; p < pages; p += VF_LANES) {
        vf weight = weight_of(a, load_part(scores + p, pages - p), top);
        sum = vf_add(sum, weight);
        if (p < KEPT_MAX)
            vf_store(kept + p, weight);
    }
    float lane[VF_LANES], total = 0.0f;
    vf_store(lane, sum);
    for (uint32_t i = 0; i < VF_LANES; i++)
        total += lane[i];
    const vf share = vf_set(1.0f / (total * (float)a->heads));
    for (uint32_t p = 0; p < pages; p += VF_LANES) {
        vf weight =
            p < KEPT_MAX ? vf_load(kept + p) : weight_of(a, load_part(scores + p, pages - p), top);
        vf old = load_part(out + p, pages - p);
        store_part(out + p, pages - p, vf_fma(weight, share, old));
    }
}

static void reduce_heads(const kvf_reduce_args *a, const float *scores, float *out, uint32_t pages,
                         const int sum)
{
    for (uint32_t p = 0; p < pages; p += VF_LANES) {
        vf x = vf_zero();
        for (uint32_t r = 0; r < a->heads; r++) {
            vf y = tame(load_part(scores + (size_t)r * a->pages_max + p, pages - p));
            if (sum && a->cap > 0.0f)
                y = logit_of(a, y);
            x = r == 0 ? y : sum ? vf_add(x, y) : vf_max(y, x);
        }
        store_part(out + p, pages - p, x);
    }
}

void KVF_SIMD_NAME(reduce)(const void *args, uint32_t task)
{
    const kvf_reduce_args *a = args;
    const uint32_t pages = a->pages[task];
    const float *scores = a->scores + (size_t)task * a->heads * a->pages_max;
    float *out = a->out + (size_t)task * a->pages_max;
    if (a->kind != KVF_GROUP_MEAN_SOFTMAX) {
        reduce_heads(a, scores, out, pages, a->kind == KVF_GROUP_SUM);
        return;
    }
    memset(out, 0, pages * sizeof *out);
    for (uint32_t r = 0; r < a->heads; r++)
        add_softmax(a, scores + (size_t)r * a->pages_max, out, pages);
    /* A weight of zero may be an underflow; only a page without any score is out. */
    for (uint32_t p = 0; p < pages; p++) {
        if (out[p] != 0.0f)
            continue;
        float top = -INFINITY;
        for (uint32_t r = 0; r < a->heads; r++) {
            float x = scores[(size_t)r * a->pages_max + p];
            top = x > top ? x : top;
        }
        out[p] = top == -INFINITY ? -INFINITY : 0.0f;
    }
}
