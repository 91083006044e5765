/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The shape of attention over tokens, the specification: entropy, mass of the largest, variance.
 *
 * Knows nothing of heads or layers, only of vectors. Values that are not positive numbers count as
 * 0. All sums are in double, in the order of the vector; of equal values at the edge of the largest
 * it does not matter which ones are taken.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

#define DIGIT_BITS 11u
#define DIGITS     (1u << DIGIT_BITS)

/* Positive numbers order like their bits. */
static uint32_t key_of(float x)
{
    return x > 0.0f ? kvf_float_bits(x) : 0;
}

/* The n-th largest key that is not 0, digit by digit from the top; 0 if there are fewer. */
static uint32_t key_of_rank(const float *vector, uint32_t count, uint32_t n)
{
    uint32_t prefix = 0, mask = 0;
    for (uint32_t top = 32; top > 0;) {
        const uint32_t bits = kvf_min_u32(top, DIGIT_BITS), shift = top - bits;
        const uint32_t last = (1u << bits) - 1;
        uint32_t held[DIGITS] = {0}, digit = last;
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t key = key_of(vector[i]);
            held[key >> shift & last] += key != 0 && (key & mask) == prefix;
        }
        while (digit > 0 && held[digit] < n)
            n -= held[digit--];
        if (held[digit] < n)
            return 0;
        prefix |= digit << shift;
        mask |= last << shift;
        top = shift;
    }
    return prefix;
}

void kvf_profile_ref(const void *args, uint32_t task)
{
    const kvf_profile_args *a = args;
    const float *vector = a->scores + (size_t)task * a->stride;
    float *out = a->out + (size_t)task * KVF_PROFILE_VALUES;
    const uint32_t top = kvf_min_u32(a->top, a->count);
    double total = 0.0, entropy = 0.0, mass = 0.0, squares = 0.0;
    for (uint32_t i = 0; i < a->count; i++)
        total += vector[i] > 0.0f ? (double)vector[i] : 0.0;
    out[0] = out[1] = out[2] = 0.0f;
    if (!(total > 0.0))
        return;
    const uint32_t edge = top ? key_of_rank(vector, a->count, top) : UINT32_MAX;
    uint32_t above = 0;
    for (uint32_t i = 0; i < a->count; i++) {
        const double share = vector[i] > 0.0f ? (double)vector[i] / total : 0.0;
        const double distance = share - 1.0 / a->count;
        if (share > 0.0)
            entropy -= share * log(share);
        squares += distance * distance;
        if (key_of(vector[i]) > edge) {
            mass += share;
            above++;
        }
    }
    if (top)
        mass += (double)(top - above) * ((double)kvf_bits_float(edge) / total);
    out[0] = (float)entropy;
    out[1] = (float)mass;
    out[2] = (float)(squares / a->count);
}
