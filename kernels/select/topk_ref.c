/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The k largest of a list's scores, the specification: a token or page is taken iff fewer than k
 * candidates come before it in the order (score descending, index ascending).
 *
 * Knows nothing of what the ids mean. Ids come out ascending; -infinity and NaN are never taken.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

/* Orders like the scores: a larger key is a larger score; 0 is never taken. -0 equals +0. */
static uint32_t key_of(float x)
{
    if (isnan(x) || x == -INFINITY)
        return 0;
    uint32_t u = kvf_float_bits(x + 0.0f);
    return u >> 31 ? ~u : u | 0x80000000u;
}

void kvf_topk_ref(const void *args, uint32_t task)
{
    const kvf_topk_args *a = args;
    const uint32_t first = a->first ? a->first[task] : 0;
    const uint32_t count = a->count[task];
    const float *scores = a->scores + (size_t)task * a->stride + first;
    int32_t *ids = a->ids + (size_t)task * a->ids_max;
    uint32_t wanted = a->k[task], valid = 0;
    for (uint32_t i = 0; i < count; i++)
        valid += key_of(scores[i]) != 0;
    wanted = kvf_min_u32(wanted, valid);

    /* The largest key that at least `wanted` candidates reach, found bit by bit. */
    uint32_t threshold = 0;
    for (uint32_t bit = 0x80000000u; bit && wanted; bit >>= 1) {
        uint32_t reached = 0;
        for (uint32_t i = 0; i < count; i++)
            reached += key_of(scores[i]) >= (threshold | bit);
        if (reached >= wanted)
            threshold |= bit;
    }
    uint32_t above = 0;
    for (uint32_t i = 0; i < count; i++)
        above += key_of(scores[i]) > threshold;
    uint32_t ties = wanted - kvf_min_u32(wanted, above), n = 0;
    for (uint32_t i = 0; i < count && n < wanted; i++) {
        uint32_t key = key_of(scores[i]);
        if (key > threshold || (key == threshold && ties > 0)) {
            ties -= key == threshold;
            ids[n++] = (int32_t)(first + i);
        }
    }
    a->id_count[task] = n;
}
