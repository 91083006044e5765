/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The k largest of a list's scores, vectorised; the ids are those of topk_ref.c bit for bit. Linear
 * time.
 *
 * Knows nothing of ids. First a bound that at least k scores reach: score i is in set i % m, and
 * the k-th largest of the m >= 4k maxima of sets is reached by k of them. A second pass keeps what
 * is above the bound (less than 1.2 k of scores in random order) and the first k that equal it, so
 * equal scores, zeros above all, cost no more than others. The k-th largest of those above is
 * found exactly. A short list is its own sets. m is an odd number of vectors, so that what repeats
 * with every page, or rises and falls slowly, is spread over all sets.
 *
 * Bound: two reads of the scores, the first one from memory. Every k-th largest is found bit by bit
 * with a vectorised count; 12 to 20 counts are usual, because one that is k ends the search.
 */

#include <math.h>

#include "common/simd.h"
#include "variants.h"

#define ORDER_LOWEST ((int32_t)0x80800000u) /* of -FLT_MAX; below it nothing is taken */

/* In quarters: four sums, none of which waits for another. threshold > INT32_MIN. */
static uint32_t count_reaching(const int32_t *orders, uint32_t count, int32_t threshold)
{
    const int32_t below = threshold - 1;
    const uint32_t quarter = count / 4;
    const int32_t *second = orders + quarter, *third = second + quarter, *last = third + quarter;
    uint32_t a = 0, b = 0, c = 0, d = 0;
    for (uint32_t i = 0; i < quarter; i++) {
        a += orders[i] > below;
        b += second[i] > below;
        c += third[i] > below;
        d += last[i] > below;
    }
    for (uint32_t i = 4 * quarter; i < count; i++)
        a += orders[i] > below;
    return a + b + c + d;
}

/* A threshold that at least k of the orders reach, and all others of those that reach it equal it;
 * ORDER_LOWEST if fewer than k reach that. */
static int32_t threshold_of(const int32_t *orders, uint32_t count, uint32_t k)
{
    int32_t threshold = ORDER_LOWEST;
    uint32_t reached = count_reaching(orders, count, threshold);
    /* In turns of 2^31, 2^30 ... above ORDER_LOWEST; what lies above infinity is reached by none.
     */
    for (uint32_t step = UINT32_C(1) << 31; step && reached > k; step >>= 1) {
        const int64_t next = (int64_t)threshold + step;
        const uint32_t more = next <= INT32_MAX ? count_reaching(orders, count, (int32_t)next) : 0;
        if (more < k)
            continue;
        threshold = (int32_t)next;
        reached = more;
    }
    return threshold;
}

/* Vectors of the maxima of sets; 0 = the list is too short for its length to count. */
static uint32_t set_vectors(uint32_t count, uint32_t k)
{
    const uint32_t vectors = kvf_max_u32(32, kvf_div_ceil_u32(k, VF_LANES / 4)) | 1;
    return count / VF_LANES / vectors >= 2 ? vectors : 0;
}

static void take_maxima(const float *scores, uint32_t count, uint32_t vectors, float *maxima)
{
    const uint32_t sets = vectors * VF_LANES;
    for (uint32_t v = 0; v < sets; v += VF_LANES)
        vf_store(maxima + v, vf_max(vf_load(scores + v), vf_set(-INFINITY)));
    uint32_t i = sets;
    for (; i + 2 * sets <= count; i += 2 * sets)
        for (uint32_t v = 0; v < sets; v += VF_LANES) {
            const vf best = vf_max(vf_load(scores + i + v), vf_load(maxima + v));
            vf_store(maxima + v, vf_max(vf_load(scores + i + sets + v), best));
        }
    for (uint32_t v = 0; i + VF_LANES <= count; i += VF_LANES, v = (v + VF_LANES) % sets)
        vf_store(maxima + v, vf_max(vf_load(scores + i), vf_load(maxima + v)));
}

/* A bound that at least k of the scores reach, or ORDER_LOWEST. `work` has at least count entries.
 */
static int32_t lower_bound(const float *scores, uint32_t count, uint32_t k, uint32_t *work)
{
    const uint32_t vectors = set_vectors(count, k), sets = vectors ? vectors * VF_LANES : count;
    int32_t *orders = (int32_t *)work;
    float *maxima = (float *)(void *)work;
    if (vectors)
        take_maxima(scores, count, vectors, maxima);
    const float *from = vectors ? maxima : scores;
    for (uint32_t i = 0; i < sets; i++) {
        const float x = from[i];
        orders[i] = x > -INFINITY ? kvf_float_order(x) : INT32_MIN;
    }
    return threshold_of(orders, sets, k);
}

/* Indices of scores: those above a bound in front, ascending, and from the end of `work` downwards
 * the first ones that equal it. */
typedef struct kept {
    uint32_t *work;
    uint32_t end;
    uint32_t above;
    uint32_t equal;
} kept;

KVF_ALWAYS_INLINE void keep_bits(kept *s, uint32_t first, uint32_t above, uint32_t equal)
{
    /* One or none is usual, which shall not be a branch to guess. The entry after those that are
     * kept is free: they are fewer than the scores that were looked at. */
    s->work[s->above] = first + (uint32_t)__builtin_ctz(above | 1u << (VF_LANES - 1));
    s->above += above != 0;
    for (above &= above - 1; above; above &= above - 1)
        s->work[s->above++] = first + (uint32_t)__builtin_ctz(above);
    for (; equal; equal &= equal - 1)
        s->work[s->end - ++s->equal] = first + (uint32_t)__builtin_ctz(equal);
}

static void keep(kept *s, const float *scores, uint32_t count, int32_t bound, uint32_t k)
{
    const float at_least = kvf_order_float(bound), above = kvf_order_float(bound + 1);
    uint32_t i = 0;
    for (; i + VF_LANES <= count && s->equal < k; i += VF_LANES) {
        const vf x = vf_load(scores + i);
        const uint32_t reaching = vf_bits_ge(x, vf_set(at_least));
        if (reaching) {
            const uint32_t more = vf_bits_ge(x, vf_set(above));
            keep_bits(s, i, more, reaching & ~more);
        }
    }
    for (; i + VF_LANES <= count; i += VF_LANES)
        keep_bits(s, i, vf_bits_ge(vf_load(scores + i), vf_set(above)), 0);
    for (; i < count; i++)
        keep_bits(s, i, scores[i] >= above, scores[i] >= at_least && !(scores[i] >= above));
}

/* More than k are above the bound: of these, the k largest. */
static uint32_t take_largest(const kept *s, const float *scores, uint32_t k, uint32_t first,
                             int32_t *ids)
{
    int32_t *orders = (int32_t *)(s->work + s->above);
    KVF_ASSERT(2 * s->above <= s->end);
    for (uint32_t i = 0; i < s->above; i++)
        orders[i] = kvf_float_order(scores[s->work[i]]);
    const int32_t threshold = threshold_of(orders, s->above, k);
    uint32_t ties = k, n = 0;
    for (uint32_t i = 0; i < s->above; i++)
        ties -= orders[i] > threshold;
    for (uint32_t i = 0; n < k; i++) {
        const uint32_t is_tie = orders[i] == threshold && ties > 0;
        ids[n] = (int32_t)(first + s->work[i]);
        n += (orders[i] > threshold) | is_tie;
        ties -= is_tie;
    }
    return n;
}

/* All that are above the bound, and as many that equal it as there is room for. */
static uint32_t take_all(const kept *s, uint32_t k, uint32_t first, int32_t *ids)
{
    const uint32_t equal = kvf_min_u32(s->equal, k - s->above);
    uint32_t a = 0, e = 0;
    while (a < s->above || e < equal) {
        const uint32_t more = a < s->above ? s->work[a] : UINT32_MAX;
        const uint32_t same = e < equal ? s->work[s->end - 1 - e] : UINT32_MAX;
        ids[a + e] = (int32_t)(first + kvf_min_u32(more, same));
        a += more < same;
        e += same < more;
    }
    return a + e;
}

void KVF_SIMD_NAME(topk)(const void *args, uint32_t task)
{
    const kvf_topk_args *a = args;
    const uint32_t first = a->first ? a->first[task] : 0;
    const uint32_t count = a->count[task], k = kvf_min_u32(a->k[task], count);
    const float *scores = a->scores + (size_t)task * a->stride + first;
    int32_t *ids = a->ids + (size_t)task * a->ids_max;
    kept s = {.work = a->work + (size_t)task * a->work_stride, .end = count};
    a->id_count[task] = 0;
    if (k == 0)
        return;
    const int32_t bound = lower_bound(scores, count, k, s.work);
    keep(&s, scores, count, bound, k);
    a->id_count[task] =
        s.above > k ? take_largest(&s, scores, k, first, ids) : take_all(&s, k, first, ids);
}
