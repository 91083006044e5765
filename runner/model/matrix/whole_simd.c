/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Products of rows with weights in blocks, in whole numbers, for CPUs with AVX-512 VNNI.
 *
 * Bound: memory at one row, arithmetic from about four on. A block's numbers are bytes and x is 16
 * bits, in two planes of bytes, so a sum over 32 columns is exact in 32 bits. Sixteen outputs are
 * the lanes: their blocks are transposed into eight vectors, each with four columns of all of them,
 * which stay in registers for all rows; nothing is added across lanes. For 512 weights that is 35
 * to 60 operations, and for each row 16 products and 5 to 7 more; numbers in fp32 have 32 products,
 * and lanes to add. It knows arrays only. Invariant: a result is one chain of sums over blocks in
 * order, so its bits depend neither on other rows nor on the outputs beside.
 */

#include "common/base.h"
#include "common/convert.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#define OUTPUTS 16u /* lanes */
#define VECTORS 8u  /* of four columns each: a block of x */

#include "whole_products.h"

/* 32 columns of OUTPUTS outputs: weight = (byte - minus) x scale + shift. */
typedef struct columns {
    __m512i bytes[VECTORS]; /* of output i columns 4v ... 4v + 3 in lane i of vector v */
    __m512 scale, shift;
    int32_t minus;
    bool has_shift;
} columns;

/* ---- rows of x ---- */

/* A block with a number that is not finite makes every result NaN; one that is too small is 0. */
static void narrow_block(const float *x, kvf_whole_block *to)
{
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const int32_t bits = _mm512_reduce_max_epi32(
        _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), no_sign),
                         _mm512_and_si512(_mm512_castps_si512(b), no_sign)));
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    if (!isfinite(largest) || largest < KVF_WHOLE_LEAST_LARGEST) {
        memset(to, 0, sizeof *to);
        to->scale = to->sum = isfinite(largest) ? 0.0f : NAN;
        return;
    }
    const __m512 times = _mm512_set1_ps(KVF_WHOLE_LARGEST / largest);
    const __m512i half = _mm512_set1_epi32(128);
    const __m512i c = _mm512_cvtps_epi32(_mm512_mul_ps(a, times));
    const __m512i d = _mm512_cvtps_epi32(_mm512_mul_ps(b, times));
    _mm_storeu_si128((__m128i *)(void *)to->low, _mm512_cvtepi32_epi8(c));
    _mm_storeu_si128((__m128i *)(void *)(to->low + 16), _mm512_cvtepi32_epi8(d));
    _mm_storeu_si128((__m128i *)(void *)to->high,
                     _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(c, half), 8)));
    _mm_storeu_si128((__m128i *)(void *)(to->high + 16),
                     _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(d, half), 8)));
    to->scale = largest / KVF_WHOLE_LARGEST;
    to->whole_sum = _mm512_reduce_add_epi32(_mm512_add_epi32(c, d));
    to->sum = (float)to->whole_sum * to->scale;
}

static void narrow(const float *x, size_t count, kvf_whole_block *to)
{
    for (size_t i = 0; i < count; i++)
        narrow_block(x + i * KVF_WHOLE_COLUMNS, to + i);
}

/* ---- blocks of weights ---- */

/* 16 bytes of each output, and of output 4i + k lane k of quarter i: vector v has bytes 4v ... 4v +
 * 3 of all. */
WHOLE_INLINE void load_transposed(const char *from, const size_t *offset, __m512i to[4])
{
    __m512i line[4];
#pragma GCC unroll 4
    for (uint32_t k = 0; k < 4; k++) {
        __m512i x = _mm512_castsi128_si512(
            _mm_loadu_si128((const __m128i *)(const void *)(from + offset[k])));
        x = _mm512_inserti32x4(
            x, _mm_loadu_si128((const __m128i *)(const void *)(from + offset[k + 4])), 1);
        x = _mm512_inserti32x4(
            x, _mm_loadu_si128((const __m128i *)(const void *)(from + offset[k + 8])), 2);
        line[k] = _mm512_inserti32x4(
            x, _mm_loadu_si128((const __m128i *)(const void *)(from + offset[k + 12])), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(line[0], line[1]);
    const __m512i b = _mm512_unpacklo_epi32(line[2], line[3]);
    const __m512i c = _mm512_unpackhi_epi32(line[0], line[1]);
    const __m512i d = _mm512_unpackhi_epi32(line[2], line[3]);
    to[0] = _mm512_unpacklo_epi64(a, b);
    to[1] = _mm512_unpackhi_epi64(a, b);
    to[2] = _mm512_unpacklo_epi64(c, d);
    to[3] = _mm512_unpackhi_epi64(c, d);
}

WHOLE_INLINE __m512 low_halves(__m512i x)
{
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
}

WHOLE_INLINE __m512 high_halves(__m512i x)
{
    return low_halves(_mm512_srli_epi32(x, 16));
}

WHOLE_INLINE __m512i low_nibbles(__m512i x)
{
    return _mm512_and_si512(x, _mm512_set1_epi8(15));
}

WHOLE_INLINE __m512i high_nibbles(__m512i x)
{
    return low_nibbles(_mm512_srli_epi32(x, 4));
}

/* The first numbers are low nibbles, as many after them high ones. */
WHOLE_INLINE void load_nibbles(const char *from, const size_t *offset, columns *c)
{
    __m512i x[4];
    load_transposed(from, offset, x);
#pragma GCC unroll 4
    for (uint32_t v = 0; v < 4; v++) {
        c->bytes[v] = low_nibbles(x[v]);
        c->bytes[v + 4] = high_nibbles(x[v]);
    }
}

WHOLE_INLINE void unpack_q4_0(const char *block, const size_t *offset, columns *c)
{
    __m512i head[4];
    load_transposed(block, offset, head);
    load_nibbles(block + 2, offset, c);
    c->scale = low_halves(head[0]);
    c->minus = 8;
    c->has_shift = false;
}

WHOLE_INLINE void unpack_q4_1(const char *block, const size_t *offset, columns *c)
{
    __m512i head[4];
    load_transposed(block, offset, head);
    load_nibbles(block + 4, offset, c);
    c->scale = low_halves(head[0]);
    c->shift = high_halves(head[0]);
    c->minus = 0;
    c->has_shift = true;
}

/* Signed bytes, made unsigned. */
WHOLE_INLINE void unpack_q8_0(const char *block, const size_t *offset, columns *c)
{
    __m512i head[4];
    load_transposed(block, offset, head);
    load_transposed(block + 2, offset, c->bytes);
    load_transposed(block + 18, offset, c->bytes + 4);
#pragma GCC unroll 8
    for (uint32_t v = 0; v < VECTORS; v++)
        c->bytes[v] = _mm512_xor_si512(c->bytes[v], _mm512_set1_epi8((char)0x80));
    c->scale = low_halves(head[0]);
    c->minus = 128;
    c->has_shift = false;
}

/* ---- products ---- */

WHOLE_INLINE __m512i four_everywhere(const int8_t *x)
{
    return _mm512_set1_epi32(word_at(x));
}

/* 255 x 128 x 32 is in reach of 32 bits, 256 times as much too. */
WHOLE_INLINE void add_rows(const columns *c, const strip *s, uint32_t row, const uint32_t rows)
{
    const kvf_whole_block *x = s->x + row * s->x_stride;
    __m512i high[ROWS], low[ROWS];
#pragma GCC unroll 4
    for (uint32_t r = 0; r < rows; r++) {
        high[r] = _mm512_setzero_si512();
        low[r] = c->minus ? _mm512_set1_epi32(-c->minus * x[r * s->x_stride].whole_sum)
                          : _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (uint32_t v = 0; v < VECTORS; v++)
#pragma GCC unroll 4
        for (uint32_t r = 0; r < rows; r++) {
            const kvf_whole_block *own = x + r * s->x_stride;
            high[r] = _mm512_dpbusd_epi32(high[r], c->bytes[v],
                                          four_everywhere(own->high + (size_t)4 * v));
            low[r] =
                _mm512_dpbusd_epi32(low[r], c->bytes[v], four_everywhere(own->low + (size_t)4 * v));
        }
#pragma GCC unroll 4
    for (uint32_t r = 0; r < rows; r++) {
        const kvf_whole_block *own = x + r * s->x_stride;
        const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
        const __m512 scale = _mm512_mul_ps(c->scale, _mm512_set1_ps(own->scale));
        __m512 sum = _mm512_load_ps(s->sum[row + r]);
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, sum);
        if (c->has_shift)
            sum = _mm512_fmadd_ps(c->shift, _mm512_set1_ps(own->sum), sum);
        _mm512_store_ps(s->sum[row + r], sum);
    }
}

DEFINE_ADD_BLOCK

static void store_sums(const kvf_whole_product *p, uint32_t output, uint32_t row, uint32_t rows,
                       const float (*sum)[OUTPUTS])
{
    const uint32_t outputs = kvf_min_u32(OUTPUTS, p->outputs - output);
    const __mmask16 mask = (__mmask16)((1u << outputs) - 1);
    float *y = p->y + row * p->y_stride + output;
    for (uint32_t r = 0; r < rows; r++, y += p->y_stride) {
        __m512 x = _mm512_load_ps(sum[r]);
        if (p->accumulate)
            x = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), x);
        _mm512_mask_storeu_ps(y, mask, x);
    }
}

DEFINE_PRODUCT(q4_0, 18)
DEFINE_PRODUCT(q4_1, 20)
DEFINE_PRODUCT(q8_0, 34)

const kvf_whole_kernel kvf_whole_kernel_avx512_vnni = {
    .narrow = narrow,
    .multiply =
        {[GGUF_Q4_0] = multiply_q4_0, [GGUF_Q4_1] = multiply_q4_1, [GGUF_Q8_0] = multiply_q8_0},
};
