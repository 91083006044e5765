/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Queries against centroids, vectorised. Bound: reading the centroids once.
 *
 * Knows nothing of what the centroids are of. A query meets CENTROIDS of them at a time, so that
 * sums over lanes are formed for as many at once. With VNNI bytes are multiplied: centroids as
 * centroid + BIAS, and the bias times the sum of the query is subtracted once. Elsewhere they
 * become 16-bit numbers. Products are added in 32 bits, and all sums are below 2^24, so floats hold
 * them. Exactness: the bits of coarse_ref.c.
 */

#include "common/convert.h"
#include "common/simd.h"
#include "variants.h"

#define CENTROIDS 4u

/* STEP channels, and sums of products of a centroid and a query, lane by lane. Where a vector is
 * wider than what is left, the query's rest is zero. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define STEP 64u
#define BIAS 128
typedef __m512i part;
typedef vi sums;
KVF_ALWAYS_INLINE part take_part(const int8_t *x, uint32_t left)
{
    return _mm512_maskz_loadu_epi8(left >= STEP ? UINT64_MAX : UINT64_MAX >> (STEP - left), x);
}
KVF_ALWAYS_INLINE sums add_products(sums s, part centroid, part q)
{
    return (vi)_mm512_dpbusd_epi32((__m512i)s, centroid, q);
}
#define BIASED(x) _mm512_xor_si512(x, _mm512_set1_epi8(-BIAS))
#elif defined(__AVXVNNI__)
#define STEP      32u
#define BIAS      128
typedef __m256i part;
typedef vi sums;
KVF_ALWAYS_INLINE part take_part(const int8_t *x, uint32_t left)
{
    const __m128i *half = (const __m128i *)(const void *)x;
    return left >= STEP ? _mm256_loadu_si256((const __m256i *)(const void *)x)
                        : _mm256_zextsi128_si256(_mm_loadu_si128(half));
}
KVF_ALWAYS_INLINE sums add_products(sums s, part centroid, part q)
{
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)s, centroid, q);
}
#define BIASED(x) _mm256_xor_si256(x, _mm256_set1_epi8(-BIAS))
#elif defined(__AVX512BW__)
#define STEP 32u
typedef __m512i part;
typedef vi sums;
KVF_ALWAYS_INLINE part take_part(const int8_t *x, uint32_t left)
{
    return _mm512_cvtepi8_epi16(
        _mm256_maskz_loadu_epi8(left >= STEP ? UINT32_MAX : UINT32_MAX >> (STEP - left), x));
}
KVF_ALWAYS_INLINE sums add_products(sums s, part centroid, part q)
{
    return s + (vi)_mm512_madd_epi16(centroid, q);
}
#elif defined(__AVX2__)
#define STEP 16u
typedef __m256i part;
typedef vi sums;
KVF_ALWAYS_INLINE part take_part(const int8_t *x, uint32_t left)
{
    (void)left;
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)x));
}
KVF_ALWAYS_INLINE sums add_products(sums s, part centroid, part q)
{
    return s + (vi)_mm256_madd_epi16(centroid, q);
}
#else
/* Sixteen numbers, for whatever the compiler makes of them. */
#define STEP 16u
typedef struct part {
    int16_t at[STEP];
} part;
typedef struct sums {
    int32_t at[STEP];
} sums;
KVF_ALWAYS_INLINE part take_part(const int8_t *x, uint32_t left)
{
    part p;
    (void)left;
    for (uint32_t i = 0; i < STEP; i++)
        p.at[i] = (int16_t)(int32_t)x[i];
    return p;
}
KVF_ALWAYS_INLINE sums add_products(sums s, part centroid, part q)
{
    for (uint32_t i = 0; i < STEP; i++)
        s.at[i] += (int32_t)centroid.at[i] * q.at[i];
    return s;
}
#endif

/* The offset that is added to each number of a centroid. */
#if !defined(BIASED)
#define BIAS      0
#define BIASED(x) (x)
#endif

/* Sums of VF_LANES lanes, whose sum is that of all. */
KVF_ALWAYS_INLINE vf lanes_of(sums s)
{
    vi all = (vi)vu_set(0);
    for (uint32_t i = 0; i < sizeof s; i += sizeof all)
        all += (vi)vu_load((const char *)&s + i);
    return __builtin_convertvector(all, vf);
}

typedef struct query {
    part at[KVF_HEAD_DIM_MAX / STEP];
    float bias; /* what BIAS adds to each of its products */
    float scale;
} query;

static void take_query(query *to, const kvf_score_centroids_args *a, uint32_t at)
{
    const int8_t *q = a->q + (size_t)at * a->head_dim;
    int32_t sum = 0;
    for (uint32_t i = 0; i < a->head_dim; i++)
        sum += q[i];
    for (uint32_t i = 0; i < a->head_dim; i += STEP)
        to->at[i / STEP] = take_part(q + i, a->head_dim - i);
    to->bias = (float)(BIAS * sum);
    to->scale = a->q_scale[at];
}

/* Some centroids from the i-th on, at most CENTROIDS, for all queries of a list. */
KVF_ALWAYS_INLINE void score_task(const kvf_score_centroids_args *a, uint32_t list, const query *q,
                                  uint32_t i, uint32_t count, const uint32_t head_dim)
{
    const int8_t *centroid[CENTROIDS];
    float scale[CENTROIDS], dot[CENTROIDS],
        *to = a->scores + (size_t)list * a->group * a->stride + i;
    for (uint32_t m = 0; m < CENTROIDS; m++) {
        const kvf_centroid at = kvf_centroid_at(a, list, i + kvf_min_u32(m, count - 1));
        scale[m] = kvf_fp16_to_float(*at.scale);
        centroid[m] = at.centroid;
    }
    for (uint32_t g = 0; g < a->group; g++, q++, to += a->stride) {
        sums s[CENTROIDS] = {0};
        for (uint32_t d = 0; d < head_dim; d += STEP)
            for (uint32_t m = 0; m < CENTROIDS; m++)
                s[m] = add_products(s[m], BIASED(take_part(centroid[m] + d, head_dim - d)),
                                    q->at[d / STEP]);
        vf_sum4(dot, lanes_of(s[0]), lanes_of(s[1]), lanes_of(s[2]), lanes_of(s[3]));
        for (uint32_t m = 0; m < CENTROIDS; m++)
            dot[m] = (dot[m] - q->bias) * scale[m] * q->scale;
        if (count == CENTROIDS)
            memcpy(to, dot, sizeof dot);
        else
            memcpy(to, dot, count * sizeof *dot);
    }
}

void KVF_SIMD_NAME(score_centroids)(const void *args, uint32_t task)
{
    const kvf_score_centroids_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->stride, KVF_CENTROIDS_PER_TASK);
    const uint32_t list = task / parts, first = task % parts * KVF_CENTROIDS_PER_TASK;
    const uint32_t end = kvf_min_u32(a->count[list], first + KVF_CENTROIDS_PER_TASK);
    query q[KVF_GROUP_MAX_HEADS];
    if (first >= end)
        return;
    for (uint32_t g = 0; g < a->group; g++)
        take_query(&q[g], a, list * a->group + g);
    for (uint32_t i = first; i < end; i += CENTROIDS) {
        const uint32_t count = kvf_min_u32(CENTROIDS, end - i);
        if (STEP > 16 && a->head_dim == 128) /* so that the loop over channels is none */
            score_task(a, list, q, i, count, 128);
        else if (STEP > 16 && a->head_dim == 64)
            score_task(a, list, q, i, count, 64);
        else
            score_task(a, list, q, i, count, a->head_dim);
    }
}
