/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_SIMD_AVX2_H
#define KVF_COMMON_SIMD_AVX2_H

/* Eight lanes: AVX2 with FMA and F16C. Included by simd.h only; see there for what the names
 * promise. */

#include <immintrin.h>

#define VF_LANES 8u

typedef __m256 vf;

KVF_ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

KVF_ALWAYS_INLINE vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

KVF_ALWAYS_INLINE vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}

KVF_ALWAYS_INLINE vf vf_sqrt(vf a)
{
    return _mm256_sqrt_ps(a);
}

/* Bit i is set iff a_i >= b_i; never for NaN. */
KVF_ALWAYS_INLINE uint32_t vf_bits_ge(vf a, vf b)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ));
}

KVF_ALWAYS_INLINE vf vf_load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

KVF_ALWAYS_INLINE vf vf_load_i8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

/* Bytes, as integers. */
KVF_ALWAYS_INLINE __m256i vf_bytes(const uint8_t *p)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}

KVF_ALWAYS_INLINE vf vf_load_fp16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

/* The low halves of the lanes. */
KVF_ALWAYS_INLINE void vf_store_low(uint16_t *p, vf x)
{
    const __m256i low = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_packus_epi32(low, low);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 8)));
}

KVF_ALWAYS_INLINE void vf_store_fp16(uint16_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

KVF_ALWAYS_INLINE void vf_store_zip(float *to, vf even, vf odd)
{
    vf low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

/* to[i] = sum of the lanes of x[i]. */
KVF_ALWAYS_INLINE void vf_sum4(float *to, vf x0, vf x1, vf x2, vf x3)
{
    __m256 y = _mm256_hadd_ps(_mm256_hadd_ps(x0, x1), _mm256_hadd_ps(x2, x3));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}

/* Sums of neighbours: those of a, then those of b. */
KVF_ALWAYS_INLINE vf vf_add_pairs(vf a, vf b)
{
    __m256 x = _mm256_hadd_ps(a, b);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
}

#define VF_TRANSPOSE 8u

KVF_ALWAYS_INLINE void vf_transpose(float *to, size_t stride, vf line[8])
{
    vf a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_ps(line[2 * i], line[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(line[2 * i], line[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 2; k++) {
            vf low = a[4 * i + k], high = a[4 * i + 2 + k];
            b[4 * i + 2 * k] = _mm256_shuffle_ps(low, high, 0x44);
            b[4 * i + 2 * k + 1] = _mm256_shuffle_ps(low, high, 0xee);
        }
    for (size_t i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(b[i], b[4 + i], 0x20));
        _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[4 + i], 0x31));
    }
}

/* 64 bytes past the cache; both ends are 64-byte aligned at least on the storing side. */
#define VF_STREAMS 1
KVF_ALWAYS_INLINE void vf_stream64(void *to, const void *from)
{
    const __m256i *f = from;
    __m256i *t = to;
    __m256i x = _mm256_loadu_si256(f), y = _mm256_loadu_si256(f + 1);
    _mm256_stream_si256(t, x);
    _mm256_stream_si256(t + 1, y);
}

#endif
