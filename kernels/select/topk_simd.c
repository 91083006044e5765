/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The k largest of a row, vectorised; the ids are those of topk_ref.c bit for bit. Linear time.
 *
 * Knows nothing of ids. First a bound: of the maxima of many small disjoint sets, the k-th largest
 * is reached by at least k elements, so nothing below it can be taken. A second pass keeps what
 * reaches the bound (little more than k in practice), and an exact radix selection among those
 * finds the last value taken.
 */

#include <math.h>

#include "common/simd.h"
#include "variants.h"

/* Vectors per set: the maxima must be several times k for the bound to be tight. */
#define SET_VECTORS_MAX 16u

/* Orders like the scores; -0 equals +0. For numbers above -infinity only. */
KVF_ALWAYS_INLINE uint32_t key_of(float x)
{
    uint32_t u = kvf_float_bits(x + 0.0f);
    return u >> 31 ? ~u : u | 0x80000000u;
}

KVF_ALWAYS_INLINE float float_of_key(uint32_t key)
{
    return kvf_bits_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/* The k-th largest, 1 <= k <= count, of values[index[i]], or of values[i] if index is NULL. */
static uint32_t kth_key(const float *values, const uint32_t *index, uint32_t count, uint32_t k)
{
    uint32_t prefix = 0, mask = 0;
    for (uint32_t shift = 32; shift > 0;) {
        uint32_t histogram[256] = {0};
        shift -= 8;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t key = key_of(values[index ? index[i] : i]);
            histogram[key >> shift & 255u] += (key & mask) == prefix;
        }
        uint32_t digit = 255;
        while (histogram[digit] < k)
            k -= histogram[digit--];
        prefix |= digit << shift;
        mask |= 255u << shift;
    }
    return prefix;
}

/*
 * A value that at least k of the scores reach; -FLT_MAX if the row is too short to say more. `work`
 * holds at least count entries.
 */
static float lower_bound(const float *scores, uint32_t count, uint32_t k, float *work)
{
    uint32_t vectors = SET_VECTORS_MAX;
    while (vectors > 1 && count / vectors / 4 < k)
        vectors /= 2;
    const uint32_t step = vectors * VF_LANES;
    if (vectors == 1 || count < step)
        return -0x1.fffffep127f;
    uint32_t sets = 0, valid = 0;
    for (uint32_t i = 0; i + step <= count; i += step, sets += VF_LANES) {
        vf best = vf_set(-INFINITY);
        for (uint32_t v = 0; v < vectors; v++)
            best = vf_max(vf_load(scores + i + v * VF_LANES), best);
        vf_store(work + sets, best);
    }
    for (uint32_t i = 0; i < sets; i++)
        if (work[i] > -INFINITY)
            work[valid++] = work[i];
    if (valid < k)
        return -0x1.fffffep127f;
    return float_of_key(kth_key(work, NULL, valid, k));
}

/* Indices of the scores >= bound, ascending. */
static uint32_t keep_reaching(const float *scores, uint32_t count, float bound, uint32_t *kept)
{
    uint32_t n = 0, i = 0;
    for (; i + VF_LANES <= count; i += VF_LANES)
        for (uint32_t bits = vf_bits_ge(vf_load(scores + i), vf_set(bound)); bits; bits &= bits - 1)
            kept[n++] = i + (uint32_t)__builtin_ctz(bits);
    for (; i < count; i++)
        if (scores[i] >= bound)
            kept[n++] = i;
    return n;
}

void KVF_SIMD_NAME(topk)(const void *args, uint32_t task)
{
    const kvf_topk_args *a = args;
    const uint32_t first = a->first ? a->first[task] : 0;
    const uint32_t count = a->count[task], k = a->k[task];
    const float *scores = a->scores + (size_t)task * a->stride + first;
    int32_t *ids = a->ids + (size_t)task * a->ids_max;
    uint32_t *work = a->work + (size_t)task * a->work_stride;
    a->id_count[task] = 0;
    if (k == 0 || count == 0)
        return;
    const float bound = lower_bound(scores, count, k, (float *)(void *)work);
    const uint32_t kept = keep_reaching(scores, count, bound, work);
    uint32_t threshold = 0, ties = 0, above = 0, n = 0;
    if (kept > k) {
        threshold = kth_key(scores, work, kept, k);
        for (uint32_t i = 0; i < kept; i++)
            above += key_of(scores[work[i]]) > threshold;
        ties = k - above;
    }
    for (uint32_t i = 0; i < kept; i++) {
        const uint32_t key = key_of(scores[work[i]]);
        if (key < threshold || (key == threshold && ties == 0))
            continue;
        ties -= key == threshold;
        ids[n++] = (int32_t)(first + work[i]);
    }
    a->id_count[task] = n;
}
