/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Built once per instruction set (KVF_LINEAR_VARIANT names the build): eight tokens at a time with
 * AVX-512, four with AVX2, else one. The numbers are those of draw_mass.h, step by step: products
 * of 32 bits, shifts, differences.
 *
 * It knows arrays only. Invariant: the bits of kvf_draw_distance and kvf_draw_mass.
 */

#include "draw_mass.h"

#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 8u
typedef __m512i whole;

/* The bits of highest - logit. */
static inline whole load_gap(const float *logits, float highest)
{
    return _mm512_cvtepu32_epi64(
        _mm256_castps_si256(_mm256_sub_ps(_mm256_set1_ps(highest), _mm256_loadu_ps(logits))));
}

#define MULTIPLY(a, b)    _mm512_mul_epu32(a, b)
#define DOWN(a, n)        _mm512_srli_epi64(a, n)
#define UP_BY(a, n)       _mm512_sllv_epi64(a, n)
#define DOWN_BY(a, n)     _mm512_srlv_epi64(a, n)
#define WHERE(test, a, b) _mm512_mask_mov_epi64(b, test, a)
#define EQUAL(a, b)       _mm512_cmpeq_epi64_mask(a, b)
#define MORE(a, b)        _mm512_cmpgt_epi64_mask(a, b)

static inline void store_bins(uint16_t *to, whole x)
{
    _mm_storeu_si128((__m128i *)(void *)to, _mm512_cvtepi64_epi16(x));
}
#elif defined(__AVX2__)
#define LANES 4u
typedef __m256i whole;

/* The bits of highest - logit. */
static inline whole load_gap(const float *logits, float highest)
{
    return _mm256_cvtepu32_epi64(
        _mm_castps_si128(_mm_sub_ps(_mm_set1_ps(highest), _mm_loadu_ps(logits))));
}

#define MULTIPLY(a, b)    _mm256_mul_epu32(a, b)
#define DOWN(a, n)        _mm256_srli_epi64(a, n)
#define UP_BY(a, n)       _mm256_sllv_epi64(a, n)
#define DOWN_BY(a, n)     _mm256_srlv_epi64(a, n)
#define WHERE(test, a, b) _mm256_blendv_epi8(b, a, test)
#define EQUAL(a, b)       _mm256_cmpeq_epi64(a, b)
#define MORE(a, b)        _mm256_cmpgt_epi64(a, b)

/* The low 16 bits of each lane. */
static inline void store_bins(uint16_t *to, whole x)
{
    const __m256i pairs = _mm256_shuffle_epi8(
        x, _mm256_setr_epi8(0, 1, 8, 9, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 8, 9,
                            -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m128i all =
        _mm_unpacklo_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storel_epi64((__m128i *)(void *)to, all);
}
#endif

#if defined(LANES)
static inline whole every(uint64_t x)
{
    return (whole){0} + (long long)x;
}

/* As kvf_draw_distance; far for logits that are not finite, too. Shifts by 64 and more, as numbers
 * without a sign, leave nothing. */
static inline whole distances(const kvf_draw_settings *s, float highest, const float *logits)
{
    const whole none = every(0), far = every(KVF_DRAW_FAR);
    const whole bits = load_gap(logits, highest);
    const whole field = DOWN(bits, 23) & every(255);
    const whole is_small = every(1), lead = every(0x800000u);
    const whole digits = (bits & every(0x7fffffu)) | WHERE(EQUAL(field, none), none, lead);
    const whole product = MULTIPLY(digits, every(s->scale));
    const whole exponent = WHERE(EQUAL(field, none), is_small, field);
    const whole shift = exponent + every((uint64_t)((int64_t)s->exponent - 118));
    const whole left = WHERE(MORE(DOWN_BY(far, shift), product), UP_BY(product, shift), far);
    const whole right = DOWN_BY(product, none - shift);
    whole distance = WHERE(MORE(shift, none), left, right);
    distance = WHERE(MORE(far, distance), distance, far);
    distance = WHERE(EQUAL(product, none), none, distance);
    return WHERE(EQUAL(field, every(255)), far, distance);
}

/* As kvf_draw_mass. */
static inline whole masses(whole distance)
{
    static const uint32_t terms[] = {437u,      5676u,      65510u,      661577u,    5726720u,
                                     41309550u, 238388332u, 1031764991u, 2977044472u};
    const whole f = distance & every(0xffffffffu);
    whole sum = every(30);
#pragma GCC unroll 9
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
        sum = every(terms[i]) - DOWN(MULTIPLY(f, sum), 32);
    const whole part = every(UINT64_C(1) << 32) - DOWN(MULTIPLY(f, sum), 32);
    return DOWN_BY(part << 8, DOWN(distance, 32));
}
#else
#define LANES 1u
#endif

static void weigh(const kvf_draw_settings *settings, float highest, const float *logits,
                  size_t count, uint64_t *mass, uint16_t *bin)
{
    size_t i = 0;
#if defined(__AVX512F__) || defined(__AVX2__)
    for (; i + LANES <= count; i += LANES) {
        const whole distance = distances(settings, highest, logits + i);
        const whole some = masses(distance);
        memcpy(mass + i, &some, sizeof some);
        store_bins(bin + i, DOWN(distance, KVF_DRAW_BIN_SHIFT));
    }
#endif
    for (; i < count; i++) {
        const uint64_t distance = kvf_draw_is_finite(logits[i])
                                      ? kvf_draw_distance(settings, highest, logits[i])
                                      : KVF_DRAW_FAR;
        mass[i] = kvf_draw_mass(distance);
        bin[i] = (uint16_t)(distance >> KVF_DRAW_BIN_SHIFT);
    }
}

/* So many logits are looked at before the best of them are compared. */
#define CHUNK 64u

/* Logits that are not finite become the least of all integers. */
static inline int32_t order(float x)
{
    return kvf_draw_is_finite(x) ? kvf_float_order(x) : INT32_MIN;
}

static size_t largest(const float *logits, size_t count)
{
    int32_t best = INT32_MIN;
    size_t found = count;
    for (size_t i = 0; i < count; i += CHUNK) {
        const size_t some = count - i < CHUNK ? count - i : CHUNK;
        int32_t most = INT32_MIN;
        if (some == CHUNK)
            for (size_t j = 0; j < CHUNK; j++)
                most = order(logits[i + j]) > most ? order(logits[i + j]) : most;
        else
            for (size_t j = 0; j < some; j++)
                most = order(logits[i + j]) > most ? order(logits[i + j]) : most;
        if (most > best)
            for (found = i, best = most; order(logits[found]) != most;)
                found++;
    }
    return found;
}

#define DRAW_PASTE(a, b)  a##b
#define DRAW_SYMBOL(a, b) DRAW_PASTE(a, b)
#define DRAW_TEXT(a)      #a
#define DRAW_QUOTE(a)     DRAW_TEXT(a)

extern const kvf_draw_kernels DRAW_SYMBOL(kvf_draw_kernels_, KVF_LINEAR_VARIANT);
const kvf_draw_kernels DRAW_SYMBOL(kvf_draw_kernels_, KVF_LINEAR_VARIANT) = {
    DRAW_QUOTE(KVF_LINEAR_VARIANT), largest, weigh};
