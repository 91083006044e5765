/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Products of rows with weights in blocks, in whole numbers, for CPUs with AVX2; built a second
 * time for those with AVX-VNNI, which multiply and add up in one operation.
 *
 * Bound: memory at one row, arithmetic from about four on. A block's numbers and x are 16 bits, so
 * that a product of two pairs is exact in 32 bits, and a sum over 32 columns too. Eight outputs are
 * the lanes: their blocks are transposed into vectors with a pair of columns of all of them, which
 * stay in the first-level cache for all rows; nothing is added across lanes. 256 weights and a row
 * have 16 products and as many sums, or 16 operations with VNNI; in fp32 they have 32. For types
 * with whole bytes fp32 is faster at one row, which is as fast as memory there. It knows arrays
 * only. Invariant: a result is one chain of sums over blocks in order, so its bits depend
 * neither on other rows nor on the outputs beside; they are those of whole_simd.c.
 */

#include "common/base.h"

#include <immintrin.h>
#include <math.h>

#define LANES   8u
#define HALVES  2u /* of a strip */
#define OUTPUTS (HALVES * LANES)
#define PAIRS   16u /* of columns of a block */

/* Products that are added up by an operation of their own leave registers for few of them. */
#if defined(__AVXVNNI__)
#define PAIR_LOOP _Pragma("GCC unroll 4")
#else
#define PAIR_LOOP _Pragma("GCC unroll 1")
#endif

#include "whole_products.h"

/* 32 columns of LANES outputs: weight = (number - minus) x scale + shift. Pairs are columns 0 and
 * 2, 1 and 3, 4 and 6, ...: what falls out of bytes by shifts. */
typedef struct half_columns {
    __m256i pairs[PAIRS]; /* of output i in lane i */
    __m256 scale, shift;
} half_columns;

typedef struct columns {
    half_columns half[HALVES];
    int32_t minus;
    bool has_shift;
} columns;

/* ---- rows of x ---- */

/* Eight numbers of 32 bits in the order of the pairs. */
WHOLE_INLINE __m256i in_pairs(__m256i x)
{
    return _mm256_shuffle_epi32(x, _MM_SHUFFLE(3, 1, 2, 0));
}

WHOLE_INLINE __m256i abs_bits(__m256 x)
{
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

WHOLE_INLINE __m128i halves_of(__m256i x, __m128i (*combine)(__m128i, __m128i))
{
    return combine(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

WHOLE_INLINE __m128i max_of(__m128i a, __m128i b)
{
    return _mm_max_epi32(a, b);
}

WHOLE_INLINE __m128i sum_of(__m128i a, __m128i b)
{
    return _mm_add_epi32(a, b);
}

/* Over all lanes. */
WHOLE_INLINE int32_t reduce(__m256i x, __m128i (*combine)(__m128i, __m128i))
{
    __m128i four = halves_of(x, combine);
    four = combine(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(combine(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1))));
}

/* As narrow_block of whole_simd.c. */
static void narrow_block(const float *x, kvf_whole_block *to)
{
    __m256i bits = _mm256_setzero_si256(), all = bits, whole[4];
    for (uint32_t i = 0; i < 4; i++)
        bits = _mm256_max_epi32(bits, abs_bits(_mm256_loadu_ps(x + 8 * i)));
    const int32_t most = reduce(bits, max_of);
    float largest;
    memcpy(&largest, &most, sizeof largest);
    if (!isfinite(largest) || largest < KVF_WHOLE_LEAST_LARGEST) {
        memset(to, 0, sizeof *to);
        to->scale = to->sum = isfinite(largest) ? 0.0f : NAN;
        return;
    }
    const __m256 times = _mm256_set1_ps(KVF_WHOLE_LARGEST / largest);
    for (uint32_t i = 0; i < 4; i++) {
        whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), times));
        all = _mm256_add_epi32(all, whole[i]);
        whole[i] = in_pairs(whole[i]);
    }
    for (uint32_t i = 0; i < 2; i++)
        _mm256_storeu_si256(
            (__m256i *)(void *)(to->pairs + 16 * i),
            _mm256_permute4x64_epi64(_mm256_packs_epi32(whole[2 * i], whole[2 * i + 1]), 0xd8));
    to->scale = largest / KVF_WHOLE_LARGEST;
    to->whole_sum = reduce(all, sum_of);
    to->sum = (float)to->whole_sum * to->scale;
}

static void narrow(const float *x, size_t count, kvf_whole_block *to)
{
    for (size_t i = 0; i < count; i++)
        narrow_block(x + i * KVF_WHOLE_COLUMNS, to + i);
}

/* ---- blocks of weights ---- */

/* 16 bytes of each output: vector v has bytes 4v ... 4v + 3 of all. */
WHOLE_INLINE void load_transposed(const char *from, const size_t *offset, __m256i to[4])
{
    __m256i line[4];
#pragma GCC unroll 4
    for (uint32_t k = 0; k < 4; k++)
        line[k] = _mm256_inserti128_si256(
            _mm256_castsi128_si256(
                _mm_loadu_si128((const __m128i *)(const void *)(from + offset[k]))),
            _mm_loadu_si128((const __m128i *)(const void *)(from + offset[k + 4])), 1);
    const __m256i a = _mm256_unpacklo_epi32(line[0], line[1]);
    const __m256i b = _mm256_unpacklo_epi32(line[2], line[3]);
    const __m256i c = _mm256_unpackhi_epi32(line[0], line[1]);
    const __m256i d = _mm256_unpackhi_epi32(line[2], line[3]);
    to[0] = _mm256_unpacklo_epi64(a, b);
    to[1] = _mm256_unpackhi_epi64(a, b);
    to[2] = _mm256_unpacklo_epi64(c, d);
    to[3] = _mm256_unpackhi_epi64(c, d);
}

WHOLE_INLINE __m256 low_halves(__m256i x)
{
    const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0xd8);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

WHOLE_INLINE __m256 high_halves(__m256i x)
{
    return low_halves(_mm256_srli_epi32(x, 16));
}

/* The first numbers are low nibbles, as many after them high ones. */
WHOLE_INLINE void load_nibbles(const char *from, const size_t *offset, __m256i pairs[PAIRS])
{
    const __m256i nibbles = _mm256_set1_epi32(0x000f000f);
    __m256i x[4];
    load_transposed(from, offset, x);
#pragma GCC unroll 4
    for (uint32_t v = 0; v < 4; v++) {
        pairs[2 * v] = _mm256_and_si256(x[v], nibbles);
        pairs[2 * v + 1] = _mm256_and_si256(_mm256_srli_epi32(x[v], 8), nibbles);
        pairs[2 * v + 8] = _mm256_and_si256(_mm256_srli_epi32(x[v], 4), nibbles);
        pairs[2 * v + 9] = _mm256_and_si256(_mm256_srli_epi32(x[v], 12), nibbles);
    }
}

WHOLE_INLINE void unpack_q4_0(const char *block, const size_t *offset, columns *c)
{
    for (uint32_t h = 0; h < HALVES; h++, offset += LANES) {
        __m256i head[4];
        load_transposed(block, offset, head);
        load_nibbles(block + 2, offset, c->half[h].pairs);
        c->half[h].scale = low_halves(head[0]);
    }
    c->minus = 8;
    c->has_shift = false;
}

WHOLE_INLINE void unpack_q4_1(const char *block, const size_t *offset, columns *c)
{
    for (uint32_t h = 0; h < HALVES; h++, offset += LANES) {
        __m256i head[4];
        load_transposed(block, offset, head);
        load_nibbles(block + 4, offset, c->half[h].pairs);
        c->half[h].scale = low_halves(head[0]);
        c->half[h].shift = high_halves(head[0]);
    }
    c->minus = 0;
    c->has_shift = true;
}

/* ---- products ---- */

WHOLE_INLINE __m256i add_pairs(__m256i sum, __m256i a, __m256i b)
{
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

/* A block's part of the results of a row. */
WHOLE_INLINE void add_whole(const half_columns *c, bool has_shift, const kvf_whole_block *x,
                            __m256i whole, float *to)
{
    const __m256 scale = _mm256_mul_ps(c->scale, _mm256_set1_ps(x->scale));
    __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), scale, _mm256_load_ps(to));
    if (has_shift)
        sum = _mm256_fmadd_ps(c->shift, _mm256_set1_ps(x->sum), sum);
    _mm256_store_ps(to, sum);
}

/* 15 x 32512 x 32 is in reach of 32 bits. */
WHOLE_INLINE void add_rows(const columns *c, const strip *s, uint32_t row, const uint32_t rows)
{
    const kvf_whole_block *x = s->x + row * s->x_stride;
    __m256i sum[ROWS][HALVES];
#pragma GCC unroll 4
    for (uint32_t r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = c->minus
                                    ? _mm256_set1_epi32(-c->minus * x[r * s->x_stride].whole_sum)
                                    : _mm256_setzero_si256();
    PAIR_LOOP
    for (uint32_t v = 0; v < PAIRS; v++) {
        const __m256i a = c->half[0].pairs[v], b = c->half[1].pairs[v];
#pragma GCC unroll 4
        for (uint32_t r = 0; r < rows; r++) {
            const __m256i pair =
                _mm256_set1_epi32(word_at(x[r * s->x_stride].pairs + (size_t)2 * v));
            sum[r][0] = add_pairs(sum[r][0], a, pair);
            sum[r][1] = add_pairs(sum[r][1], b, pair);
        }
    }
#pragma GCC unroll 4
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t h = 0; h < HALVES; h++)
            add_whole(&c->half[h], c->has_shift, &x[r * s->x_stride], sum[r][h],
                      s->sum[row + r] + (size_t)h * LANES);
}

DEFINE_ADD_BLOCK

static void store_sums(const kvf_whole_product *p, uint32_t output, uint32_t row, uint32_t rows,
                       const float (*sum)[OUTPUTS])
{
    const uint32_t outputs = kvf_min_u32(OUTPUTS, p->outputs - output);
    float *y = p->y + row * p->y_stride + output;
    for (uint32_t r = 0; r < rows; r++, y += p->y_stride)
        for (uint32_t o = 0; o < outputs; o++)
            y[o] = p->accumulate ? y[o] + sum[r][o] : sum[r][o];
}

DEFINE_PRODUCT(q4_0, 18)
DEFINE_PRODUCT(q4_1, 20)

#if defined(__AVXVNNI__)
const kvf_whole_kernel kvf_whole_kernel_avx_vnni = {
#else
const kvf_whole_kernel kvf_whole_kernel_avx2 = {
#endif
    .in_pairs = true,
    .narrow = narrow,
    .multiply = {[GGUF_Q4_0] = multiply_q4_0, [GGUF_Q4_1] = multiply_q4_1},
};
