/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_DRAW_MASS_H
#define KVF_MODEL_DRAW_MASS_H

/*
 * How likely tokens are, in whole numbers: what sampling.c and draw_simd.c share.
 *
 * A token's mass is 2^40 exp((logit - largest) / temperature), cut to an integer. Sums of integers
 * have no order, so every instruction set draws the same token. It knows numbers, no rows.
 * Invariant: a mass follows from settings and two logits, bit for bit, on every machine.
 */

#include "common/convert.h"
#include "common/random.h"

#include <stddef.h>

/* Settings of a row, and where its draws are. */
typedef struct kvf_draw_settings {
    uint64_t state;    /* of the draws */
    double penalty;    /* of tokens seen */
    uint64_t share;    /* top-p in 2^-64; 0 = all */
    uint64_t mass_min; /* min-p: 1 ... KVF_MASS_ONE */
    uint32_t scale;    /* log2(e) / temperature is scale x 2^exponent */
    int32_t exponent;
    uint32_t top_k; /* 0 = all */
    uint32_t is_greedy;
} kvf_draw_settings;

/* The mass of the likeliest token. Those below 2^-40 of it have none: all of 2^18 are less than the
 * rounding of a softmax in fp32. */
#define KVF_MASS_ONE (UINT64_C(1) << 40)
/* The distance of tokens without mass. */
#define KVF_DRAW_FAR (UINT64_C(41) << 32)

/* Tokens are put in order by bins of their distance, 1/32 octave wide; one more for none. */
#define KVF_DRAW_BIN_SHIFT 27u
#define KVF_DRAW_BINS      (41u * 32u)

/* How much is wanted: tokens of top-k, the share of top-p, or a draw. */
typedef enum kvf_draw_goal { KVF_DRAW_COUNT, KVF_DRAW_SHARE, KVF_DRAW_TOKEN } kvf_draw_goal;

KVF_INLINE float kvf_draw_penalize(float logit, double penalty)
{
    return (float)(logit > 0.0f ? (double)logit / penalty : (double)logit * penalty);
}

KVF_INLINE int kvf_draw_is_finite(float x)
{
    return (kvf_float_bits(x) & 0x7f800000u) != 0x7f800000u;
}

/* A token that comes first is likelier, or equal and has the lower id. */
KVF_INLINE uint64_t kvf_draw_key(float logit, uint32_t id)
{
    const uint32_t rank = ~((uint32_t)kvf_float_order(logit) ^ 0x80000000u);
    return (uint64_t)rank << 32 | id;
}

/* How many times the mass halves from the largest logit to this one, in 2^-32; both are finite. */
KVF_INLINE uint64_t kvf_draw_distance(const kvf_draw_settings *s, float highest, float logit)
{
    const uint32_t bits = kvf_float_bits(highest - logit), field = bits >> 23;
    const uint64_t product =
        (uint64_t)((bits & 0x7fffffu) | (field ? 0x800000u : 0)) * (uint64_t)s->scale;
    const int32_t shift = (int32_t)(field ? field : 1) - 150 + s->exponent + 32;
    if (product == 0)
        return 0;
    if (field == 255 || shift >= 38 || (shift > 0 && product >= KVF_DRAW_FAR >> shift))
        return KVF_DRAW_FAR;
    if (shift > 0)
        return product << shift;
    const uint64_t distance = shift > -64 ? product >> -shift : 0;
    return distance < KVF_DRAW_FAR ? distance : KVF_DRAW_FAR;
}

/* 2^40 x 2^-distance: the series of 2^-f for what is after the point, in 32 bits. */
KVF_INLINE uint64_t kvf_draw_mass(uint64_t distance)
{
    const uint64_t f = (uint32_t)distance;
    uint64_t sum = 30;
    sum = 437u - (f * sum >> 32);
    sum = 5676u - (f * sum >> 32);
    sum = 65510u - (f * sum >> 32);
    sum = 661577u - (f * sum >> 32);
    sum = 5726720u - (f * sum >> 32);
    sum = 41309550u - (f * sum >> 32);
    sum = 238388332u - (f * sum >> 32);
    sum = 1031764991u - (f * sum >> 32);
    sum = 2977044472u - (f * sum >> 32);
    return (((UINT64_C(1) << 32) - (f * sum >> 32)) << 8) >> (distance >> 32);
}

/* The upper half of a product. */
KVF_INLINE uint64_t kvf_draw_part(uint64_t a, uint64_t b)
{
    const uint64_t low = (a & 0xffffffffu) * (b & 0xffffffffu), high = (a >> 32) * (b >> 32);
    const uint64_t left = (a >> 32) * (b & 0xffffffffu), right = (a & 0xffffffffu) * (b >> 32);
    const uint64_t middle = (low >> 32) + (left & 0xffffffffu) + (right & 0xffffffffu);
    return high + (left >> 32) + (right >> 32) + (middle >> 32);
}

/* Among tokens, likeliest first, the last one that is wanted is the first with which their weights
 * are at least this. 1 ... total; @p random is used by a draw. */
KVF_INLINE uint64_t kvf_draw_wanted(const kvf_draw_settings *s, kvf_draw_goal goal, uint64_t total,
                                    uint64_t random)
{
    if (goal == KVF_DRAW_TOKEN)
        return kvf_draw_part(random, total) + 1;
    const uint64_t wanted = goal == KVF_DRAW_COUNT ? s->top_k : kvf_draw_part(s->share, total);
    return wanted == 0 ? 1 : wanted < total ? wanted : total;
}

/*
 * Passes over all tokens of a row of logits, once per instruction set: what a draw spends its time
 * on.
 *
 * It knows numbers, no settings beyond draw_mass.h. Invariant: every instruction set gives the bits
 * of draw_mass.h.
 */

/** The bin of tokens that have no mass. */
#define KVF_DRAW_NO_BIN KVF_DRAW_BINS

typedef struct kvf_draw_kernels {
    const char *name;
    /** The first of the largest finite logits; @p count if there is none. */
    size_t (*largest)(const float *logits, size_t count);
    /** Masses, and distances in bins; logits that are not finite have none. */
    void (*weigh)(const kvf_draw_settings *settings, float highest, const float *logits,
                  size_t count, uint64_t *mass, uint16_t *bin);
} kvf_draw_kernels;

/** The best that the CPU has and @p isa_mask (kvf_isa) allows. Never NULL. */
const kvf_draw_kernels *kvf_draw_kernels_choose(uint32_t isa_mask);

#endif
