/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_SIMD_SSE2_H
#define KVF_COMMON_SIMD_SSE2_H

/* Four lanes: SSE2, the least that x86-64 has. Included by simd.h only; see there for what the
 * names promise. */

#include <emmintrin.h>

#define VF_LANES 4u

typedef __m128 vf;

/* Rounded twice: SSE2 has no fused form. */
KVF_ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm_add_ps(_mm_mul_ps(a, b), c);
}

KVF_ALWAYS_INLINE vf vf_max(vf a, vf b)
{
    return _mm_max_ps(a, b);
}

KVF_ALWAYS_INLINE vf vf_min(vf a, vf b)
{
    return _mm_min_ps(a, b);
}

KVF_ALWAYS_INLINE vf vf_sqrt(vf a)
{
    return _mm_sqrt_ps(a);
}

KVF_ALWAYS_INLINE uint32_t vf_bits_ge(vf a, vf b)
{
    return (uint32_t)_mm_movemask_ps(_mm_cmpge_ps(a, b));
}

KVF_ALWAYS_INLINE vf vf_load_bf16(const uint16_t *p)
{
    __m128i x = _mm_loadl_epi64((const __m128i *)(const void *)p);
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), x));
}

KVF_ALWAYS_INLINE vf vf_load_i8(const int8_t *p)
{
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    __m128i x = _mm_cvtsi32_si128(bits);
    x = _mm_unpacklo_epi8(x, x);
    return _mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(x, x), 24));
}

/* Bytes, as integers. */
KVF_ALWAYS_INLINE __m128i vf_bytes(const uint8_t *p)
{
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    const __m128i none = _mm_setzero_si128();
    return _mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(bits), none), none);
}

/* By bits: shifting the exponent up by 112 is a product with 2^112, which also rescales subnormals.
 */
KVF_ALWAYS_INLINE vf vf_load_fp16(const uint16_t *p)
{
    __m128i x =
        _mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)(const void *)p), _mm_setzero_si128());
    __m128i magnitude = _mm_and_si128(x, _mm_set1_epi32(0x7fff));
    __m128i sign = _mm_slli_epi32(_mm_and_si128(x, _mm_set1_epi32(0x8000)), 16);
    __m128i huge = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff));
    __m128 value =
        _mm_mul_ps(_mm_castsi128_ps(_mm_slli_epi32(magnitude, 13)), _mm_set1_ps(0x1p112f));
    __m128i exponent = _mm_and_si128(huge, _mm_set1_epi32(0x7f800000));
    return _mm_or_ps(value, _mm_castsi128_ps(_mm_or_si128(sign, exponent)));
}

/* The low halves of the lanes. */
KVF_ALWAYS_INLINE void vf_store_low(uint16_t *p, vf x)
{
    const __m128i low = _mm_srai_epi32(_mm_slli_epi32(_mm_castps_si128(x), 16), 16);
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi32(low, low));
}

KVF_ALWAYS_INLINE void vf_store_fp16(uint16_t *p, vf x)
{
    float y[4];
    _mm_storeu_ps(y, x);
    for (int i = 0; i < 4; i++)
        p[i] = kvf_fp16_from_float(y[i]);
}

KVF_ALWAYS_INLINE void vf_store_zip(float *to, vf even, vf odd)
{
    _mm_storeu_ps(to, _mm_unpacklo_ps(even, odd));
    _mm_storeu_ps(to + 4, _mm_unpackhi_ps(even, odd));
}

KVF_ALWAYS_INLINE void vf_sum4(float *to, vf x0, vf x1, vf x2, vf x3)
{
    __m128 a = _mm_add_ps(_mm_unpacklo_ps(x0, x1), _mm_unpackhi_ps(x0, x1));
    __m128 b = _mm_add_ps(_mm_unpacklo_ps(x2, x3), _mm_unpackhi_ps(x2, x3));
    _mm_storeu_ps(to, _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)));
}

/* Sums of neighbours: those of a, then those of b. */
KVF_ALWAYS_INLINE vf vf_add_pairs(vf a, vf b)
{
    return _mm_add_ps(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd));
}

#define VF_TRANSPOSE 4u

KVF_ALWAYS_INLINE void vf_transpose(float *to, size_t stride, vf row[4])
{
    _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
    for (size_t r = 0; r < 4; r++)
        _mm_storeu_ps(to + r * stride, row[r]);
}

#define VF_STREAMS 1
KVF_ALWAYS_INLINE void vf_stream64(void *to, const void *from)
{
    const __m128i *f = from;
    __m128i *t = to;
    __m128i a = _mm_loadu_si128(f), b = _mm_loadu_si128(f + 1);
    __m128i c = _mm_loadu_si128(f + 2), d = _mm_loadu_si128(f + 3);
    _mm_stream_si128(t, a);
    _mm_stream_si128(t + 1, b);
    _mm_stream_si128(t + 2, c);
    _mm_stream_si128(t + 3, d);
}

#endif
