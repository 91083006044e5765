/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Queries against means, vectorised. Bound: reading the means once.
 *
 * Knows nothing of what the means are of. A mean becomes 16-bit numbers once, for up to HEADS
 * queries; products of two numbers of at most 127 are added in 32 bits. Exactness: the bits of
 * skim_ref.c.
 */

#include "common/convert.h"
#include "common/simd.h"
#include "variants.h"

#define HEADS 4u

/* STEP channels as 16-bit numbers, and sums of their products, in as many lanes as there are. */
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define STEP 32u
typedef __m512i wide;
typedef __m512i sums;
KVF_ALWAYS_INLINE wide widen(const int8_t *x, uint32_t left)
{
    return _mm512_cvtepi8_epi16(left >= STEP ? _mm256_loadu_si256((const __m256i *)(const void *)x)
                                             : _mm256_maskz_loadu_epi8(0xffffu, x));
}
KVF_ALWAYS_INLINE sums no_sums(void)
{
    return _mm512_setzero_si512();
}
KVF_ALWAYS_INLINE sums add_products(sums s, wide x, wide y)
{
    return _mm512_add_epi32(s, _mm512_madd_epi16(x, y));
}
KVF_ALWAYS_INLINE int32_t sum_of(sums s)
{
    return _mm512_reduce_add_epi32(s);
}
#elif defined(__AVX2__)
#define STEP 16u
typedef __m256i wide;
typedef __m256i sums;
KVF_ALWAYS_INLINE wide widen(const int8_t *x, uint32_t left)
{
    (void)left;
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)x));
}
KVF_ALWAYS_INLINE sums no_sums(void)
{
    return _mm256_setzero_si256();
}
KVF_ALWAYS_INLINE sums add_products(sums s, wide x, wide y)
{
    return _mm256_add_epi32(s, _mm256_madd_epi16(x, y));
}
KVF_ALWAYS_INLINE int32_t sum_of(sums s)
{
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    return _mm_cvtsi128_si32(x);
}
#else
/* Sixteen numbers, for whatever the compiler makes of them. */
#define STEP 16u
typedef struct wide {
    int16_t at[STEP];
} wide;
typedef struct sums {
    int32_t at[STEP];
} sums;
KVF_ALWAYS_INLINE wide widen(const int8_t *x, uint32_t left)
{
    wide w;
    (void)left;
    for (uint32_t i = 0; i < STEP; i++)
        w.at[i] = (int16_t)(int32_t)x[i];
    return w;
}
KVF_ALWAYS_INLINE sums no_sums(void)
{
    return (sums){{0}};
}
KVF_ALWAYS_INLINE sums add_products(sums s, wide x, wide y)
{
    for (uint32_t i = 0; i < STEP; i++)
        s.at[i] += (int32_t)x.at[i] * y.at[i];
    return s;
}
KVF_ALWAYS_INLINE int32_t sum_of(sums s)
{
    int32_t all = 0;
    for (uint32_t i = 0; i < STEP; i++)
        all += s.at[i];
    return all;
}
#endif

/* Means first .. end - 1 of a list for `heads` queries from `row` on. */
KVF_ALWAYS_INLINE void skim_heads(const kvf_skim_args *a, uint32_t list, uint32_t row,
                                  const uint32_t heads, uint32_t first, uint32_t end)
{
    wide q[HEADS][KVF_HEAD_DIM_MAX / STEP];
    const uint32_t steps = kvf_div_ceil_u32(a->head_dim, STEP);
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t k = 0; k < steps; k++)
            q[h][k] =
                widen(a->q + (size_t)(row + h) * a->head_dim + k * STEP, a->head_dim - k * STEP);
    for (uint32_t i = first; i < end; i++) {
        const kvf_mean_place at = kvf_skim_mean(a, list, i);
        const float scale = kvf_fp16_to_float(*at.scale);
        sums s[HEADS];
        for (uint32_t h = 0; h < heads; h++)
            s[h] = no_sums();
        for (uint32_t k = 0; k < steps; k++) {
            const wide x = widen(at.mean + k * STEP, a->head_dim - k * STEP);
            for (uint32_t h = 0; h < heads; h++)
                s[h] = add_products(s[h], x, q[h][k]);
        }
        for (uint32_t h = 0; h < heads; h++)
            a->scores[(size_t)(row + h) * a->stride + i] =
                (float)sum_of(s[h]) * scale * a->q_scale[row + h];
    }
}

void KVF_SIMD_NAME(skim)(const void *args, uint32_t task)
{
    const kvf_skim_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->stride, KVF_SKIM_MEANS);
    const uint32_t list = task / parts, first = task % parts * KVF_SKIM_MEANS;
    const uint32_t end = kvf_min_u32(a->count[list], first + KVF_SKIM_MEANS);
    for (uint32_t g = 0; g < a->group; g += HEADS) {
        const uint32_t row = list * a->group + g;
        switch (kvf_min_u32(HEADS, a->group - g)) {
        case 1:
            skim_heads(a, list, row, 1, first, end);
            break;
        case 2:
            skim_heads(a, list, row, 2, first, end);
            break;
        case 3:
            skim_heads(a, list, row, 3, first, end);
            break;
        default:
            skim_heads(a, list, row, 4, first, end);
        }
    }
}
