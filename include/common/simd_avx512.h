/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_SIMD_AVX512_H
#define KVF_COMMON_SIMD_AVX512_H

/*
 * Sixteen lanes: AVX-512 F, BW, DQ and VL, with FMA and F16C. Included by simd.h only; see there
 * for what the names promise. With AVX512_BF16 there is also a dot product of bf16 pairs.
 */

#include <immintrin.h>

#define VF_LANES 16u

typedef __m512 vf;

KVF_ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

KVF_ALWAYS_INLINE vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

KVF_ALWAYS_INLINE vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}

KVF_ALWAYS_INLINE vf vf_sqrt(vf a)
{
    return _mm512_sqrt_ps(a);
}

KVF_ALWAYS_INLINE uint32_t vf_bits_ge(vf a, vf b)
{
    return (uint32_t)_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}

KVF_ALWAYS_INLINE vf vf_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* Sixteen elements, zeros after them. */
KVF_ALWAYS_INLINE __m512i vf_half_bf16(const uint16_t *p)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_inserti64x4(_mm512_setzero_si512(), x, 0);
}

KVF_ALWAYS_INLINE vf vf_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* Bytes, as integers. */
KVF_ALWAYS_INLINE __m512i vf_bytes(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}

KVF_ALWAYS_INLINE vf vf_load_fp16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

/* The low halves of the lanes. */
KVF_ALWAYS_INLINE void vf_store_low(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_castps_si512(x)));
}

KVF_ALWAYS_INLINE void vf_store_fp16(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

KVF_ALWAYS_INLINE void vf_store_zip(float *to, vf even, vf odd)
{
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(even, high, odd));
}

KVF_ALWAYS_INLINE __m256 vf_fold(vf x)
{
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}

/* Sums of each pair of lanes in the halves of a quarter: a's, b's, and those of the pairs after. */
KVF_ALWAYS_INLINE vf vf_interleave_add(vf a, vf b)
{
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

KVF_ALWAYS_INLINE void vf_sum4(float *to, vf x0, vf x1, vf x2, vf x3)
{
    const __m512d a = _mm512_castps_pd(vf_interleave_add(x0, x1));
    const __m512d b = _mm512_castps_pd(vf_interleave_add(x2, x3));
    const __m256 y = vf_fold(_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                           _mm512_castpd_ps(_mm512_unpackhi_pd(a, b))));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}

/* Sums of neighbours: those of a, then those of b. */
KVF_ALWAYS_INLINE vf vf_add_pairs(vf a, vf b)
{
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

#define VF_HAVE_SCALE 1

/* x - floor(x); 0 for -infinity. */
KVF_ALWAYS_INLINE vf vf_above_floor(vf x)
{
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
}

/* x * 2^floor(n) for n >= -126, else 0: a subnormal result would take the time of 150 others. */
KVF_ALWAYS_INLINE vf vf_scale(vf x, vf n)
{
    const __mmask16 is_normal = _mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    return _mm512_maskz_scalef_ps(is_normal, x, n);
}

#define VF_TRANSPOSE 4u

KVF_ALWAYS_INLINE __m128 vf_quarter(const void *key, kvf_dtype dtype, size_t i)
{
    if (dtype == KVF_FP32)
        return _mm_loadu_ps((const float *)key + i);
    __m128i x = _mm_loadl_epi64((const __m128i *)(const void *)((const uint16_t *)key + i));
    if (dtype == KVF_FP16)
        return _mm_cvtph_ps(x);
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), x));
}

/* By quarters: the transposition is a small part of a tile's work at any width. */
KVF_ALWAYS_INLINE void vf_transpose_keys(float *to, size_t stride, const void *const *keys,
                                         kvf_dtype dtype, size_t i)
{
    __m128 r0 = vf_quarter(keys[0], dtype, i), r1 = vf_quarter(keys[1], dtype, i);
    __m128 r2 = vf_quarter(keys[2], dtype, i), r3 = vf_quarter(keys[3], dtype, i);
    _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
    _mm_storeu_ps(to, r0);
    _mm_storeu_ps(to + stride, r1);
    _mm_storeu_ps(to + 2 * stride, r2);
    _mm_storeu_ps(to + 3 * stride, r3);
}

#if defined(__AVX512BF16__)
#define VF_HAVE_BF16_DOT 1

typedef __m512i vh; /* 32 bf16 */

KVF_ALWAYS_INLINE vh vh_load(const uint16_t *p, uint32_t left)
{
    __mmask32 mask = left >= 32 ? 0xffffffffu : 0xffffu; /* head_dim is a multiple of 16 */
    return _mm512_maskz_loadu_epi16(mask, p);
}

/* c + the sums of products of pairs. Subnormals count as zero; each step rounds to nearest. */
KVF_ALWAYS_INLINE vf vh_dot(vh a, vh b, vf c)
{
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
#endif

#define VF_STREAMS 1
KVF_ALWAYS_INLINE void vf_stream64(void *to, const void *from)
{
    _mm512_stream_si512(to, _mm512_loadu_si512(from));
}

#endif
