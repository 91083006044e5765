/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Conversions. Plain C is the specification; x86-64 with F16C and AVX2 has loops of its own, chosen
 * when they are called. Both give the same bits.
 */

#include "cell_numbers.h"

#include <math.h>
#include <string.h>

#include "common/base.h"
#include "common/convert.h"
#include "common/cpu_isa.h"
#include "ggml_abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define VECTOR __attribute__((target("avx2,f16c")))

/* Asked once: the answer is a constant of the machine. */
static int has_vectors(void)
{
    static _Atomic int known; /* 0 = not asked, else 1 + the answer */
    if (!known)
        known = 1 + ((kvf_cpu_has() & KVF_ISA_AVX2) != 0);
    return known - 1;
}
#endif

enum { Q8_0_BYTES = 34 };
#define F16_INFINITY 0x7c00u
#define F16_OPEN     0x0000u
#define F16_HIDDEN   0xfc00u

/* A finite number became an infinite one. */
static int overflows(float from, uint16_t to)
{
    return (to & 0x7fffu) == F16_INFINITY && (kvf_float_bits(from) & 0x7fffffffu) != 0x7f800000u;
}

#if defined(__x86_64__)
VECTOR static int to_f16_vector(const float *from, uint16_t *to, size_t count)
{
    const __m256 top = _mm256_set1_ps(kvf_rounds_below(KVF_FP16));
    const __m256 inf = _mm256_set1_ps(__builtin_inff());
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 bad = _mm256_setzero_ps();
    for (size_t i = 0; i < count; i += 8) {
        const __m256 x = _mm256_loadu_ps(from + i), a = _mm256_and_ps(x, magnitude);
        bad = _mm256_or_ps(bad, _mm256_and_ps(_mm256_cmp_ps(a, top, _CMP_GE_OQ),
                                              _mm256_cmp_ps(a, inf, _CMP_LT_OQ)));
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    return _mm256_movemask_ps(bad) == 0;
}

/* Bits of 16 comparisons. */
VECTOR static inline uint32_t bits_of(__m256i equal)
{
    const __m256i bytes = _mm256_packs_epi16(equal, _mm256_setzero_si256());
    const uint32_t bits = (uint32_t)_mm256_movemask_epi8(bytes);
    return (bits & 0xffu) | (bits >> 8 & 0xff00u);
}

VECTOR static int64_t open_cells_vector(const uint16_t *mask, size_t count, uint64_t *set,
                                        int *same)
{
    const __m256i hidden = _mm256_set1_epi16((short)F16_HIDDEN);
    __m256i other = _mm256_setzero_si256();
    uint64_t changed = 0;
    int64_t open = 0;
    for (size_t w = 0; w < count / 64; w++) {
        uint64_t bits = 0;
        for (int part = 0; part < 4; part++) {
            const uint16_t *at = mask + w * 64 + (size_t)part * 16;
            const __m256i m = _mm256_loadu_si256((const __m256i *)at);
            const __m256i zero = _mm256_cmpeq_epi16(m, _mm256_setzero_si256());
            const __m256i known = _mm256_or_si256(zero, _mm256_cmpeq_epi16(m, hidden));
            other = _mm256_or_si256(other, _mm256_xor_si256(known, _mm256_set1_epi16(-1)));
            bits |= (uint64_t)bits_of(zero) << part * 16;
        }
        changed |= bits ^ set[w];
        set[w] = bits;
        open += __builtin_popcountll(bits);
    }
    *same = changed == 0;
    return _mm256_testz_si256(other, other) ? open : -1;
}
#endif

int kvl_to_f16(const float *from, uint16_t *to, size_t count)
{
    size_t i = 0;
    int fits = 1;
#if defined(__x86_64__)
    if (has_vectors()) {
        i = count / 8 * 8;
        fits = to_f16_vector(from, to, i);
    }
#endif
    for (; i < count; i++) {
        to[i] = kvf_fp16_from_float(from[i]);
        fits &= !overflows(from[i], to[i]);
    }
    return fits;
}

int kvl_fits_f16(const float *x, size_t count)
{
    const uint32_t top = kvf_float_bits(kvf_rounds_below(KVF_FP16));
    const uint32_t infinity = kvf_float_bits(INFINITY);
    uint32_t bad = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t magnitude = kvf_float_bits(x[i]) & 0x7fffffffu;
        bad |= magnitude >= top && magnitude < infinity;
    }
    return !bad;
}

size_t kvl_row_bytes(int type, size_t count)
{
    if (type == GG_F16 || type == GG_BF16)
        return count * 2;
    if (type == GG_Q8_0 && count % GG_Q8_0_ELEMENTS == 0)
        return count / GG_Q8_0_ELEMENTS * Q8_0_BYTES;
    return 0;
}

void kvl_row_to_f32(int type, const void *from, float *to, size_t count)
{
    const uint16_t *half = from;
    if (type == GG_F16 || type == GG_BF16) {
        for (size_t i = 0; i < count; i++)
            to[i] = type == GG_F16 ? kvf_fp16_to_float(half[i]) : kvf_bf16_to_float(half[i]);
        return;
    }
    for (size_t block = 0; block < count / GG_Q8_0_ELEMENTS; block++) {
        const char *at = (const char *)from + block * Q8_0_BYTES;
        uint16_t scale;
        int8_t values[GG_Q8_0_ELEMENTS];
        memcpy(&scale, at, sizeof scale);
        memcpy(values, at + sizeof scale, sizeof values);
        for (size_t i = 0; i < GG_Q8_0_ELEMENTS; i++)
            to[block * GG_Q8_0_ELEMENTS + i] = kvf_fp16_to_float(scale) * (float)values[i];
    }
}

int kvl_row_to_f16(int type, const void *from, uint16_t *to, size_t count)
{
    float part[256];
    if (type == GG_F16) {
        memcpy(to, from, count * sizeof *to);
        return 1;
    }
    int fits = 1;
    for (size_t i = 0; i < count; i += 256) {
        const size_t n = count - i < 256 ? count - i : 256;
        kvl_row_to_f32(type, (const char *)from + kvl_row_bytes(type, i), part, n);
        fits &= kvl_to_f16(part, to + i, n);
    }
    return fits;
}

int64_t kvl_open_cells(const uint16_t *mask, size_t count, uint64_t *set, int *same)
{
#if defined(__x86_64__)
    if (has_vectors())
        return open_cells_vector(mask, count, set, same);
#endif
    int64_t open = 0;
    int other = 0;
    uint64_t changed = 0;
    for (size_t w = 0; w < count / 64; w++) {
        uint64_t bits = 0;
        for (size_t j = 0; j < 64; j++) {
            const uint16_t m = mask[w * 64 + j];
            bits |= (uint64_t)(m == F16_OPEN) << j;
            other |= m != F16_OPEN && m != F16_HIDDEN;
        }
        changed |= bits ^ set[w];
        set[w] = bits;
        open += __builtin_popcountll(bits);
    }
    *same = changed == 0;
    return other ? -1 : open;
}
