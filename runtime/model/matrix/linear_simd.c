/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The matrix-vector kernels, built once per instruction set (KVF_LINEAR_VARIANT names the build).
 *
 * Bound: memory. As long as x stays in the first-level cache, rows are read one after the other,
 * strictly in order, which prefetchers like best; a longer x would be fetched from the second level
 * for each row, so four rows share it then. Measured on Zen 4 with AVX2 (GB/s, a plain read has
 * 16): 2048 inputs 20 in order, 14 by fours; 4096: 16 and 15; 8192: 10 and 16. It knows arrays
 * only. Invariant: the order of additions depends on `columns` and the variant, not on `rows`, so a
 * row's result does not depend on the panel it is in.
 */

#include "common/convert.h"
#include "linear.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if !defined(KVF_LINEAR_VECTOR)
#define LANES 1u
typedef float vec;

static inline vec vec_zero(void)
{
    return 0.0f;
}
static inline vec vec_fma(vec a, vec b, vec c)
{
    return a * b + c;
}
static inline vec load_fp32(const float *p)
{
    return *p;
}
static inline vec load_bf16(const uint16_t *p)
{
    return kvf_bf16_to_float(*p);
}
static inline vec load_fp16(const uint16_t *p)
{
    return kvf_fp16_to_float(*p);
}
static inline void vec_store(float *p, vec v)
{
    *p = v;
}
#elif defined(__AVX512F__)
#define LANES 16u
typedef __m512 vec;

static inline vec vec_zero(void)
{
    return _mm512_setzero_ps();
}
static inline vec vec_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vec load_fp32(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline vec load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline vec load_fp16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
static inline void vec_store(float *p, vec v)
{
    _mm512_storeu_ps(p, v);
}

#elif defined(__AVX2__)
#define LANES 8u
typedef __m256 vec;

static inline vec vec_zero(void)
{
    return _mm256_setzero_ps();
}
static inline vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}
static inline vec load_fp32(const float *p)
{
    return _mm256_loadu_ps(p);
}
static inline vec load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vec load_fp16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
static inline void vec_store(float *p, vec v)
{
    _mm256_storeu_ps(p, v);
}

#elif defined(__SSE2__)
#define LANES 4u
typedef __m128 vec;

static inline vec vec_zero(void)
{
    return _mm_setzero_ps();
}
static inline vec vec_fma(vec a, vec b, vec c)
{
    return _mm_add_ps(_mm_mul_ps(a, b), c);
}
static inline vec load_fp32(const float *p)
{
    return _mm_loadu_ps(p);
}
static inline vec load_bf16(const uint16_t *p)
{
    __m128i half = _mm_loadl_epi64((const __m128i *)(const void *)p);
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), half));
}
static inline vec load_fp16(const uint16_t *p)
{
    return _mm_setr_ps(kvf_fp16_to_float(p[0]), kvf_fp16_to_float(p[1]), kvf_fp16_to_float(p[2]),
                       kvf_fp16_to_float(p[3]));
}
static inline void vec_store(float *p, vec v)
{
    _mm_storeu_ps(p, v);
}

#elif defined(__ARM_NEON)
#define LANES 4u
typedef float32x4_t vec;

static inline vec vec_zero(void)
{
    return vdupq_n_f32(0.0f);
}
static inline vec vec_fma(vec a, vec b, vec c)
{
    return vfmaq_f32(c, a, b);
}
static inline vec load_fp32(const float *p)
{
    return vld1q_f32(p);
}
static inline vec load_bf16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline vec load_fp16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline void vec_store(float *p, vec v)
{
    vst1q_f32(p, v);
}

#else
#error "no vector code for this architecture: build the plain variant only"
#endif

static inline float vec_sum(vec v)
{
    float lane[LANES];
    vec_store(lane, v);
    for (size_t width = LANES / 2; width > 0; width /= 2)
        for (size_t i = 0; i < width; i++)
            lane[i] += lane[i + width];
    return lane[0];
}

static inline float widen_fp32(float x)
{
    return x;
}

/* fp32 numbers of x that leave room in 32 KiB for the row that streams by. */
#define IN_ORDER_COLUMNS_MAX 4096u

/* Two accumulators a row where four rows run side by side, four where one does. */
#define DEFINE_KERNELS(format, type, widen_one)                                                    \
    static inline float finish_##format(vec a, vec b, const type *w, const float *x, size_t c,     \
                                        size_t columns)                                            \
    {                                                                                              \
        float sum = vec_sum(a) + vec_sum(b);                                                       \
        for (; c < columns; c++)                                                                   \
            sum += widen_one(w[c]) * x[c];                                                         \
        return sum;                                                                                \
    }                                                                                              \
                                                                                                   \
    static void dot_one_##format(const type *w, size_t columns, const float *x, float *y)          \
    {                                                                                              \
        vec a = vec_zero(), b = vec_zero();                                                        \
        size_t c = 0;                                                                              \
        for (; c + 2u * LANES <= columns; c += 2u * LANES) {                                       \
            a = vec_fma(load_##format(w + c), load_fp32(x + c), a);                                \
            b = vec_fma(load_##format(w + c + LANES), load_fp32(x + c + LANES), b);                \
        }                                                                                          \
        *y = finish_##format(a, b, w, x, c, columns);                                              \
    }                                                                                              \
                                                                                                   \
    static void dot_in_order_##format(const type *w, size_t columns, const float *x, float *y)     \
    {                                                                                              \
        vec a = vec_zero(), b = a, d = a, e = a;                                                   \
        size_t c = 0;                                                                              \
        for (; c + 4u * LANES <= columns; c += 4u * LANES) {                                       \
            a = vec_fma(load_##format(w + c), load_fp32(x + c), a);                                \
            b = vec_fma(load_##format(w + c + LANES), load_fp32(x + c + LANES), b);                \
            d = vec_fma(load_##format(w + c + 2u * LANES), load_fp32(x + c + 2u * LANES), d);      \
            e = vec_fma(load_##format(w + c + 3u * LANES), load_fp32(x + c + 3u * LANES), e);      \
        }                                                                                          \
        float sum = vec_sum(d) + vec_sum(e);                                                       \
        *y = sum + finish_##format(a, b, w, x, c, columns);                                        \
    }                                                                                              \
                                                                                                   \
    static void dot_rows_##format(const void *weight, size_t rows, size_t columns, const float *x, \
                                  float *y)                                                        \
    {                                                                                              \
        const type *w = weight;                                                                    \
        if (columns <= IN_ORDER_COLUMNS_MAX) {                                                     \
            for (size_t i = 0; i < rows; i++)                                                      \
                dot_in_order_##format(w + i * columns, columns, x, y + i);                         \
            return;                                                                                \
        }                                                                                          \
        size_t r = 0;                                                                              \
        for (; r + 4 <= rows; r += 4, w += 4 * columns) {                                          \
            const type *w1 = w + columns, *w2 = w1 + columns, *w3 = w2 + columns;                  \
            vec a0 = vec_zero(), a1 = a0, a2 = a0, a3 = a0;                                        \
            vec b0 = a0, b1 = a0, b2 = a0, b3 = a0;                                                \
            size_t c = 0;                                                                          \
            for (; c + 2u * LANES <= columns; c += 2u * LANES) {                                   \
                vec p = load_fp32(x + c), q = load_fp32(x + c + LANES);                            \
                a0 = vec_fma(load_##format(w + c), p, a0);                                         \
                b0 = vec_fma(load_##format(w + c + LANES), q, b0);                                 \
                a1 = vec_fma(load_##format(w1 + c), p, a1);                                        \
                b1 = vec_fma(load_##format(w1 + c + LANES), q, b1);                                \
                a2 = vec_fma(load_##format(w2 + c), p, a2);                                        \
                b2 = vec_fma(load_##format(w2 + c + LANES), q, b2);                                \
                a3 = vec_fma(load_##format(w3 + c), p, a3);                                        \
                b3 = vec_fma(load_##format(w3 + c + LANES), q, b3);                                \
            }                                                                                      \
            y[r] = finish_##format(a0, b0, w, x, c, columns);                                      \
            y[r + 1] = finish_##format(a1, b1, w1, x, c, columns);                                 \
            y[r + 2] = finish_##format(a2, b2, w2, x, c, columns);                                 \
            y[r + 3] = finish_##format(a3, b3, w3, x, c, columns);                                 \
        }                                                                                          \
        for (; r < rows; r++, w += columns)                                                        \
            dot_one_##format(w, columns, x, y + r);                                                \
    }                                                                                              \
                                                                                                   \
    static void widen_all_##format(const void *from, size_t count, float *to)                      \
    {                                                                                              \
        const type *w = from;                                                                      \
        size_t i = 0;                                                                              \
        for (; i + LANES <= count; i += LANES)                                                     \
            vec_store(to + i, load_##format(w + i));                                               \
        for (; i < count; i++)                                                                     \
            to[i] = widen_one(w[i]);                                                               \
    }

DEFINE_KERNELS(bf16, uint16_t, kvf_bf16_to_float)
DEFINE_KERNELS(fp16, uint16_t, kvf_fp16_to_float)
DEFINE_KERNELS(fp32, float, widen_fp32)

#define PASTE(a, b)  a##b
#define SYMBOL(a, b) PASTE(a, b)
#define TEXT(a)      #a
#define QUOTE(a)     TEXT(a)

extern const kvf_linear_kernels SYMBOL(kvf_linear_kernels_, KVF_LINEAR_VARIANT);

const kvf_linear_kernels SYMBOL(kvf_linear_kernels_, KVF_LINEAR_VARIANT) = {
    .name = QUOTE(KVF_LINEAR_VARIANT),
    .dot_rows =
        {[KVF_BF16] = dot_rows_bf16, [KVF_FP16] = dot_rows_fp16, [KVF_FP32] = dot_rows_fp32},
    .widen =
        {[KVF_BF16] = widen_all_bf16, [KVF_FP16] = widen_all_fp16, [KVF_FP32] = widen_all_fp32},
};
