/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sparse paged attention over spans, vectorised. Bound it aims at: reading K and V once from
 * memory.
 *
 * Knows nothing of pages beyond attend_ref.c. Queries go in batches of 4, 2 or 1, and as many
 * keys at a time as fill eight accumulators, so a key is widened once per batch and a query vector
 * is loaded once for several keys. Softmax is online, a tile at a time: the live tokens of a page
 * of 32 or 64, or of as many smaller pages as make 32. While the keys of a tile are read, those of
 * the next one are prefetched, and likewise its values. Only live tokens are touched, so skipping a
 * token gives the bits of a page without it.
 *
 * Exactness: products and sums in fp32 (fused where the hardware fuses), exponentials to 3e-7. With
 * AVX512_BF16 and bf16 data, q.k comes from pairwise bf16 dot products: exact products, sums
 * rounded to nearest at each step, subnormal inputs taken as zero. |q.k| must stay below FLT_MAX.
 *
 * Quantized pages come after the exact ones of a split, in tiles of their own. Codes become fp32 in
 * registers; a scale goes to the logit of its key and to the weight of its value, once per token
 * and query. Scales and minima of int4 differ by channel and go to the value. Whole pages of the
 * next tile are prefetched, so that their scales are there when it is listed.
 */

#include <math.h>

#include "cap_simd.h"
#include "quantized.h"
#include "split.h"
#include "variants.h"

#define ACCUMULATORS 8u
#define BATCHES_MAX  5u                                           /* 15 heads: 4 + 4 + 4 + 2 + 1 */
#define STEPS_MAX    (2 * KVF_HEAD_DIM_MAX / KVF_QUANTIZED_GROUP) /* scales and minima of a value */

/* The state of one batch of queries over one split. */
typedef struct batch {
    _Alignas(64) float q[4][KVF_HEAD_DIM_MAX]; /* paired order, padded with zeros */
    _Alignas(64) float o[4][KVF_HEAD_DIM_MAX]; /* paired order, sum of weight x value */
    _Alignas(
        64) float s[(KVF_PAGE_SIZE_MAX + ACCUMULATORS) * 4]; /* [key][query] logits, then weights */
    float top[4];
    float sum[4];
    const void *raw[4]; /* queries as given */
    /* of quantized pages, in order */
    _Alignas(64) float rotated[4][KVF_HEAD_DIM_MAX];
    _Alignas(64) float sums[4][KVF_HEAD_DIM_MAX]; /* of weight x value */
} batch;

/* Live tokens of a tile, in order; padded with the last one to a multiple of ACCUMULATORS. A value
 * lies after its key. */
typedef struct live_tokens {
    uint32_t count;
    const char *key[KVF_PAGE_SIZE_MAX + ACCUMULATORS];
    /* of quantized pages, of live tokens only */
    const uint8_t *value[KVF_PAGE_SIZE_MAX];
    float key_scale[KVF_PAGE_SIZE_MAX];
    float value_scale[KVF_PAGE_SIZE_MAX];      /* of int8 */
    float steps[KVF_PAGE_SIZE_MAX][STEPS_MAX]; /* of int4: scale and minimum by group */
} live_tokens;

/* Spans of a tile. */
#define TILE_TOKENS 32u

static uint32_t tile_spans(const kvf_shape *s)
{
    return s->page_size < TILE_TOKENS ? TILE_TOKENS / s->page_size : 1;
}

/* Exact spans of a split, which come first. */
static uint32_t exact_spans(const kvf_shape *s, const kvf_split *split)
{
    uint32_t n = 0;
    if (s->pages == KVF_PAGES_NATIVE)
        return split->count;
    while (n < split->count && !split->spans[n].quantized)
        n++;
    return n;
}

/* Tokens of a span that count. */
KVF_ALWAYS_INLINE uint64_t live_bits(const kvf_shape *s, const kvf_span *span)
{
    return kvf_live_bits(kvf_min_u32(span->count, s->page_size), span->skip);
}

/* The tile that begins at span `first` of exact ones. */
KVF_ALWAYS_INLINE void list_live(live_tokens *tile, const kvf_shape *s, const kvf_split *split,
                                 uint32_t first)
{
    const uint32_t end = kvf_min_u32(split->count, first + tile_spans(s));
    uint32_t n = 0;
    for (uint32_t i = first; i < end; i++) {
        const kvf_span *span = &split->spans[i];
        for (uint64_t live = live_bits(s, span); live; live &= live - 1)
            tile->key[n++] = kvf_page_key(s, span->page, (uint32_t)__builtin_ctzll(live));
    }
    tile->count = n;
    for (uint32_t i = 0; i < ACCUMULATORS && n; i++)
        tile->key[n + i] = tile->key[n - 1];
}

/* `lines` cache lines from `at` on, into the second level; beyond it nothing is gained. */
KVF_ALWAYS_INLINE void prefetch_lines(const char *at, const uint32_t lines)
{
    for (uint32_t i = 0; i < lines; i++)
        __builtin_prefetch(at + (size_t)i * 64, 0, 2);
}

/*
 * s[key][query] for 8 / queries keys. Meanwhile as many keys of `ahead`, unless that is NULL, are
 * prefetched, some lines a step: the core drops prefetches that come in bursts.
 */
KVF_ALWAYS_INLINE void dot_keys(batch *b, const uint32_t queries, const kvf_dtype dtype,
                                const kvf_shape *s, const char *const *key, float *to,
                                const char *const *ahead)
{
    const uint32_t keys = ACCUMULATORS / queries, element = dtype == KVF_FP32 ? 4 : 2;
    const uint32_t lines = (VF_PAIR * element + 63) / 64;
    vf acc[ACCUMULATORS];
    for (uint32_t i = 0; i < ACCUMULATORS; i++)
        acc[i] = vf_zero();
#ifdef VF_HAVE_BF16_DOT
    if (dtype == KVF_BF16) {
        for (uint32_t d = 0; d < s->head_dim; d += VF_PAIR) {
            vh q[4];
            for (uint32_t g = 0; g < queries; g++)
                q[g] = vh_load((const uint16_t *)b->raw[g] + d, s->head_dim - d);
            for (uint32_t k = 0; ahead && k < keys; k++)
                prefetch_lines(ahead[k] + d * element, lines);
            for (uint32_t k = 0; k < keys; k++) {
                vh x = vh_load((const uint16_t *)key[k] + d, s->head_dim - d);
                for (uint32_t g = 0; g < queries; g++)
                    acc[k * queries + g] = vh_dot(x, q[g], acc[k * queries + g]);
            }
        }
        for (uint32_t i = 0; i < ACCUMULATORS; i += 4)
            vf_sum4(to + i, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
        return;
    }
#endif
    for (uint32_t d = 0; d < s->head_dim; d += VF_PAIR) {
        const uint32_t left = s->head_dim - d;
        for (uint32_t k = 0; ahead && k < keys; k++)
            prefetch_lines(ahead[k] + d * element, lines);
        if (queries == 4) {
            vf2 x[2] = {vf_load2(key[0], dtype, d, left), vf_load2(key[1], dtype, d, left)};
            for (uint32_t g = 0; g < queries; g++) {
                vf qa = vf_load(b->q[g] + d), qb = vf_load(b->q[g] + d + VF_LANES);
                VF_KEEP(qa);
                VF_KEEP(qb);
                acc[g] = vf_fma(x[0].a, qa, acc[g]);
                acc[4 + g] = vf_fma(x[1].a, qa, acc[4 + g]);
                acc[g] = vf_fma(x[0].b, qb, acc[g]);
                acc[4 + g] = vf_fma(x[1].b, qb, acc[4 + g]);
            }
            continue;
        }
        vf2 q[2];
        for (uint32_t g = 0; g < queries; g++) {
            q[g].a = vf_load(b->q[g] + d);
            q[g].b = vf_load(b->q[g] + d + VF_LANES);
        }
        for (uint32_t k = 0; k < keys; k++) {
            vf2 x = vf_load2(key[k], dtype, d, left);
            for (uint32_t g = 0; g < queries; g++) {
                acc[k * queries + g] = vf_fma(x.a, q[g].a, acc[k * queries + g]);
                acc[k * queries + g] = vf_fma(x.b, q[g].b, acc[k * queries + g]);
            }
        }
    }
    for (uint32_t i = 0; i < ACCUMULATORS; i += 4)
        vf_sum4(to + i, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
}

/* Largest of the entries of each query; s has `count` entries, query = index % queries. */
KVF_ALWAYS_INLINE void query_tops(const float *s, uint32_t count, const uint32_t queries,
                                  float *top)
{
    vf best = vf_set(-INFINITY);
    for (uint32_t i = 0; i < count; i += VF_LANES)
        best = vf_max(vf_load(s + i), best);
    float lane[VF_LANES];
    vf_store(lane, best);
    for (uint32_t g = 0; g < queries; g++)
        for (uint32_t i = g; i < VF_LANES; i += queries)
            top[g] = lane[i] > top[g] ? lane[i] : top[g];
}

KVF_ALWAYS_INLINE vf repeat(const float *x, const uint32_t queries)
{
    float lane[VF_LANES];
    for (uint32_t i = 0; i < VF_LANES; i++)
        lane[i] = x[i % queries];
    return vf_load(lane);
}

/* From a product to a logit in units of ln 2. */
typedef struct scaling {
    float unit;
    float cap; /* 0 = none */
} scaling;

/* Products become logits, and weights under the running maximum; o and sum are rescaled if it grew,
 * and with `by_code` the sums of quantized pages. */
KVF_ALWAYS_INLINE void soften(batch *b, const uint32_t queries, uint32_t keys, scaling by,
                              uint32_t value_dim, const int by_code)
{
    const uint32_t count = keys * queries;
    const uint32_t padded = (count + VF_LANES - 1) / VF_LANES * VF_LANES;
    float top[4], base[4];
    for (uint32_t i = count; i < padded; i++)
        b->s[i] = 0.0f;
    for (uint32_t i = 0; i < padded; i += VF_LANES)
        vf_store(b->s + i, vf_mul(vf_load(b->s + i), vf_set(by.unit)));
    if (by.cap > 0.0f)
        cap_logits(b->s, count, by.cap);
    for (uint32_t i = count; i < padded; i++)
        b->s[i] = -INFINITY;
    memcpy(top, b->top, sizeof top);
    query_tops(b->s, padded, queries, top);
    for (uint32_t g = 0; g < queries; g++) {
        base[g] = top[g] == -INFINITY ? 0.0f : top[g];
        if (top[g] == b->top[g])
            continue;
        float factor[VF_LANES];
        vf_store(factor, vf_exp2(vf_set(b->top[g] - base[g])));
        for (uint32_t d = 0; d < value_dim; d += VF_LANES)
            vf_store(b->o[g] + d, vf_mul(vf_load(b->o[g] + d), vf_set(factor[0])));
        for (uint32_t d = 0; by_code && d < value_dim; d += VF_LANES)
            vf_store(b->sums[g] + d, vf_mul(vf_load(b->sums[g] + d), vf_set(factor[0])));
        b->sum[g] *= factor[0];
        b->top[g] = top[g];
    }
    const vf shift = repeat(base, queries);
    vf sum = vf_zero();
    for (uint32_t i = 0; i < padded; i += VF_LANES) {
        vf weight = vf_exp2(vf_sub(vf_load(b->s + i), shift));
        vf_store(b->s + i, weight);
        sum = vf_add(sum, weight);
    }
    float lane[VF_LANES];
    vf_store(lane, sum);
    for (uint32_t g = 0; g < queries; g++)
        for (uint32_t i = g; i < VF_LANES; i += queries)
            b->sum[g] += lane[i];
}

/*
 * o += weights x values, for `pairs` x queries pairs of vectors from column d. Prefetches the same
 * columns of the values of `next`, unless that is NULL.
 */
KVF_ALWAYS_INLINE void add_values(batch *b, const uint32_t queries, const uint32_t pairs,
                                  const kvf_dtype dtype, const kvf_shape *s,
                                  const live_tokens *tile, uint32_t d, const live_tokens *next)
{
    const uint32_t value_dim = kvf_value_dim(s);
    const size_t key_bytes = kvf_key_bytes(s), column = d * (dtype == KVF_FP32 ? 4u : 2u);
    vf2 acc[4];
    for (uint32_t g = 0; g < queries; g++)
        for (uint32_t p = 0; p < pairs; p++) {
            acc[g * pairs + p].a = vf_load(b->o[g] + d + p * VF_PAIR);
            acc[g * pairs + p].b = vf_load(b->o[g] + d + p * VF_PAIR + VF_LANES);
        }
    for (uint32_t j = 0; j < tile->count; j++) {
        const void *v = tile->key[j] + key_bytes;
        if (next && j < next->count)
            prefetch_lines(next->key[j] + key_bytes + column, pairs);
        for (uint32_t p = 0; p < pairs; p++) {
            vf2 x = vf_load2(v, dtype, d + p * VF_PAIR, value_dim - d - p * VF_PAIR);
            for (uint32_t g = 0; g < queries; g++) {
                vf weight = vf_set(b->s[j * queries + g]);
                acc[g * pairs + p].a = vf_fma(weight, x.a, acc[g * pairs + p].a);
                acc[g * pairs + p].b = vf_fma(weight, x.b, acc[g * pairs + p].b);
            }
        }
    }
    for (uint32_t g = 0; g < queries; g++)
        for (uint32_t p = 0; p < pairs; p++) {
            vf_store(b->o[g] + d + p * VF_PAIR, acc[g * pairs + p].a);
            vf_store(b->o[g] + d + p * VF_PAIR + VF_LANES, acc[g * pairs + p].b);
        }
}

/* One tile for one batch of queries. `next` is the tile to fetch into the cache meanwhile, or NULL.
 */
KVF_ALWAYS_INLINE void attend_tile(batch *b, const uint32_t queries, const kvf_dtype dtype,
                                   const kvf_shape *s, const live_tokens *tile, scaling by,
                                   const live_tokens *next)
{
    const uint32_t keys = ACCUMULATORS / queries, value_dim = kvf_value_dim(s);
    for (uint32_t j = 0; j < tile->count; j += keys)
        dot_keys(b, queries, dtype, s, tile->key + j, b->s + j * queries,
                 next && j < next->count ? next->key + j : NULL);
    soften(b, queries, tile->count, by, (value_dim + VF_PAIR - 1) / VF_PAIR * VF_PAIR, 0);
    const uint32_t pairs = 4 / queries, step = pairs * VF_PAIR;
    uint32_t d = 0;
    for (; d + step <= value_dim; d += step)
        add_values(b, queries, pairs, dtype, s, tile, d, next);
    for (; d < value_dim; d += VF_PAIR)
        add_values(b, queries, 1, dtype, s, tile, d, next);
}

/* ---- quantized pages ---- */

/* VF_LANES codes in the low (0) or high (4) halves of bytes, in fp32. */
KVF_ALWAYS_INLINE vf codes_int4(vu bytes, const uint32_t shift)
{
    return (vf) __builtin_convertvector((vi)(bytes >> shift & 15u), vf);
}

/* Prefetched lines: whole pages of a tile, line by line. */
typedef struct ahead {
    const kvf_span *spans;
    uint32_t count;
    uint32_t lines; /* of a page */
    uint32_t line;
} ahead;

static ahead ahead_of(const kvf_shape *s, const kvf_span *spans, uint32_t count)
{
    const bool is_quantized = count && spans[0].quantized;
    const size_t bytes = is_quantized ? kvf_stored_page_bytes(s) : kvf_page_bytes(s);
    return (ahead){.spans = spans,
                   .count = kvf_min_u32(count, tile_spans(s)),
                   .lines = (uint32_t)(bytes + 63) / 64};
}

KVF_ALWAYS_INLINE void prefetch_ahead(ahead *a, uint32_t lines)
{
    for (; a->count && lines; lines--) {
        __builtin_prefetch((const char *)a->spans->page + (size_t)a->line * 64, 0, 2);
        if (++a->line == a->lines) {
            a->line = 0;
            a->spans++;
            a->count--;
        }
    }
}

/* `count` numbers in fp16; whole vectors are written. */
KVF_ALWAYS_INLINE void widen_steps(float *to, const uint16_t *from, uint32_t count)
{
    uint16_t half[STEPS_MAX] = {0};
    memcpy(half, from, count * sizeof *half);
    for (uint32_t i = 0; i < count; i += VF_LANES)
        vf_store(to + i, vf_load_fp16(half + i));
}

/* The tile that begins at span `first` of quantized ones. */
KVF_ALWAYS_INLINE void list_quantized(live_tokens *tile, const kvf_shape *s, const kvf_split *split,
                                      uint32_t first)
{
    const uint32_t end = kvf_min_u32(split->count, first + tile_spans(s));
    uint32_t n = 0;
    for (uint32_t i = first; i < end; i++) {
        const void *page = split->spans[i].page;
        for (uint64_t live = live_bits(s, &split->spans[i]); live; live &= live - 1, n++) {
            const uint32_t t = (uint32_t)__builtin_ctzll(live);
            const uint16_t *scales = kvf_quantized_value_scale(s, page, t);
            tile->key[n] = (const char *)kvf_quantized_key(s, page, t);
            tile->value[n] = kvf_quantized_value(s, page, t);
            tile->key_scale[n] = kvf_bf16_to_float(*kvf_quantized_key_scale(s, page, t));
            tile->value_scale[n] = kvf_bf16_to_float(*scales);
            if (s->pages == KVF_PAGES_K8V4)
                widen_steps(tile->steps[n], scales, 2 * kvf_quantized_groups(kvf_value_dim(s)));
        }
    }
    tile->count = n;
    for (uint32_t i = 0; i < ACCUMULATORS && n; i++)
        tile->key[n + i] = tile->key[n - 1];
}

/* As dot_keys, without scales; prefetches `lines` of what is ahead. */
KVF_ALWAYS_INLINE void dot_codes(batch *b, const uint32_t queries, uint32_t head_dim,
                                 const char *const *key, float *to, ahead *a, uint32_t lines)
{
    const uint32_t keys = ACCUMULATORS / queries;
    vf acc[ACCUMULATORS];
    for (uint32_t i = 0; i < ACCUMULATORS; i++)
        acc[i] = vf_zero();
    prefetch_ahead(a, lines);
    for (uint32_t d = 0; d < head_dim; d += VF_LANES) {
        vf q[4];
        for (uint32_t g = 0; g < queries; g++) {
            q[g] = vf_load(b->rotated[g] + d);
            VF_KEEP(q[g]);
        }
        for (uint32_t k = 0; k < keys; k++) {
            const vf x = vf_load_i8((const int8_t *)key[k] + d);
            for (uint32_t g = 0; g < queries; g++)
                acc[k * queries + g] = vf_fma(x, q[g], acc[k * queries + g]);
        }
    }
    for (uint32_t i = 0; i < ACCUMULATORS; i += 4)
        vf_sum4(to + i, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
}

/* s[token][query] *= scale[token]. */
KVF_ALWAYS_INLINE void scale_queries(float *s, const uint32_t queries, const float *scale,
                                     uint32_t count)
{
    for (uint32_t j = 0; j < count; j++)
        for (uint32_t g = 0; g < queries; g++)
            s[j * queries + g] *= scale[j];
}

/* sums += weights x codes, for `vectors` of channels from d on. */
KVF_ALWAYS_INLINE void add_int8(batch *b, const uint32_t queries, const uint32_t vectors,
                                const live_tokens *tile, uint32_t d)
{
    vf acc[ACCUMULATORS];
    for (uint32_t g = 0; g < queries; g++)
        for (uint32_t i = 0; i < vectors; i++)
            acc[g * vectors + i] = vf_load(b->sums[g] + d + i * VF_LANES);
    for (uint32_t j = 0; j < tile->count; j++) {
        vf x[ACCUMULATORS];
        for (uint32_t i = 0; i < vectors; i++)
            x[i] = vf_load_i8((const int8_t *)tile->value[j] + d + (size_t)i * VF_LANES);
        for (uint32_t g = 0; g < queries; g++) {
            const vf weight = vf_set(b->s[j * queries + g]);
            for (uint32_t i = 0; i < vectors; i++)
                acc[g * vectors + i] = vf_fma(weight, x[i], acc[g * vectors + i]);
        }
    }
    for (uint32_t g = 0; g < queries; g++)
        for (uint32_t i = 0; i < vectors; i++)
            vf_store(b->sums[g] + d + i * VF_LANES, acc[g * vectors + i]);
}

/* The same of values in int4, for VF_LANES bytes from `at` on of a group that begins at channel
 * `first`; its other half is `half` channels after. */
KVF_ALWAYS_INLINE void add_int4(batch *b, const uint32_t queries, const live_tokens *tile,
                                uint32_t first, uint32_t at, const uint32_t half)
{
    const uint32_t d = first + at, group = first / KVF_QUANTIZED_GROUP;
    vf low[4], high[4];
    for (uint32_t g = 0; g < queries; g++) {
        low[g] = vf_load(b->sums[g] + d);
        high[g] = vf_load(b->sums[g] + d + half);
    }
    for (uint32_t j = 0; j < tile->count; j++) {
        const float *step = tile->steps[j] + (size_t)2 * group;
        const vf scale = vf_set(step[0]), minimum = vf_set(step[1]);
        const vu bytes = vu_load_u8(tile->value[j] + first / 2 + at);
        const vf x = vf_fma(codes_int4(bytes, 0), scale, minimum);
        const vf y = vf_fma(codes_int4(bytes, 4), scale, minimum);
        for (uint32_t g = 0; g < queries; g++) {
            const vf weight = vf_set(b->s[j * queries + g]);
            low[g] = vf_fma(weight, x, low[g]);
            high[g] = vf_fma(weight, y, high[g]);
        }
    }
    for (uint32_t g = 0; g < queries; g++) {
        vf_store(b->sums[g] + d, low[g]);
        vf_store(b->sums[g] + d + half, high[g]);
    }
}

/* And of a last group of 16 channels, by plain C: no model in use has one. */
static void add_short(batch *b, uint32_t queries, const live_tokens *tile, uint32_t first)
{
    const uint32_t half = KVF_QUANTIZED_GROUP / 4, group = first / KVF_QUANTIZED_GROUP;
    for (uint32_t j = 0; j < tile->count; j++)
        for (uint32_t i = 0; i < 2 * half; i++) {
            const float *step = tile->steps[j] + (size_t)2 * group;
            const uint32_t byte = tile->value[j][first / 2 + i % half];
            const float x = step[1] + step[0] * (float)(i < half ? byte & 15 : byte >> 4);
            for (uint32_t g = 0; g < queries; g++)
                b->sums[g][first + i] += b->s[j * queries + g] * x;
        }
}

/* One tile of quantized pages for one batch of queries. Prefetches what is ahead. */
KVF_ALWAYS_INLINE void attend_quantized(batch *b, const uint32_t queries, const kvf_shape *s,
                                        const live_tokens *tile, scaling by, ahead *a)
{
    const uint32_t keys = ACCUMULATORS / queries, value_dim = kvf_value_dim(s);
    const uint32_t lines = kvf_div_ceil_u32(a->count * a->lines, (tile->count + keys - 1) / keys);
    for (uint32_t j = 0; j < tile->count; j += keys)
        dot_codes(b, queries, s->head_dim, tile->key + j, b->s + j * queries, a, lines);
    scale_queries(b->s, queries, tile->key_scale, tile->count);
    soften(b, queries, tile->count, by, (value_dim + VF_PAIR - 1) / VF_PAIR * VF_PAIR, 1);
    uint32_t d = 0;
    if (s->pages == KVF_PAGES_K8V8) {
        const uint32_t vectors = ACCUMULATORS / queries, step = vectors * VF_LANES;
        scale_queries(b->s, queries, tile->value_scale, tile->count);
        for (; d + step <= value_dim; d += step)
            add_int8(b, queries, vectors, tile, d);
        for (; d < value_dim; d += VF_LANES)
            add_int8(b, queries, 1, tile, d);
        return;
    }
    for (; d + KVF_QUANTIZED_GROUP <= value_dim; d += KVF_QUANTIZED_GROUP)
        for (uint32_t at = 0; at < KVF_QUANTIZED_GROUP / 2; at += VF_LANES)
            add_int4(b, queries, tile, d, at, KVF_QUANTIZED_GROUP / 2);
    if (d < value_dim)
        add_short(b, queries, tile, d);
}

/* Queries side by side, four floats a channel, so that every stage adds whole vectors. */
static void rotate_queries(float *x, uint32_t head_dim)
{
    for (uint32_t first = 0, size; first < head_dim; first += size) {
        size = kvf_code_block(head_dim - first);
        float *at = x + (size_t)4 * first;
        for (uint32_t stride = 1; stride < size; stride *= 2)
            for (uint32_t low = 0; low < size; low += 2 * stride)
                for (uint32_t i = 4 * low; i < 4 * (low + stride); i++) {
                    const float a = at[i], b = at[i + 4 * stride];
                    at[i] = a + b;
                    at[i + 4 * stride] = a - b;
                }
        const float unit = kvf_code_unit(size);
        for (uint32_t i = 0; i < 4 * size; i++)
            at[i] *= unit;
    }
}

/* Rotated queries of a batch, and sums of nothing. */
static void begin_quantized(batch *b, const kvf_attend_args *a, uint32_t queries)
{
    const uint32_t head_dim = a->shape.head_dim;
    _Alignas(64) float x[4 * KVF_HEAD_DIM_MAX];
    for (uint32_t g = 0; g < 4; g++)
        for (uint32_t d = 0; g >= queries && d < head_dim; d++)
            x[4 * d + g] = 0.0f;
    for (uint32_t g = 0; g < queries; g++) {
        memset(b->sums[g], 0, sizeof b->sums[g]);
        vf_widen_array(b->rotated[g], b->raw[g], a->shape.dtype, head_dim);
        for (uint32_t d = 0; d < head_dim; d++)
            x[4 * d + g] = kvf_bits_float(kvf_float_bits(b->rotated[g][d]) ^ kvf_code_sign(d));
    }
    rotate_queries(x, head_dim);
    for (uint32_t g = 0; g < queries; g++)
        for (uint32_t d = 0; d < head_dim; d++)
            b->rotated[g][d] = x[4 * d + g];
}

/* The quantized pages of a split, for its batches of queries. `behind`: what follows it. */
static void attend_codes(batch *b, const kvf_attend_args *a, const kvf_split *split,
                         const kvf_split *behind, scaling by)
{
    const uint32_t heads = a->sub.count, fours = heads / 4, two = heads / 2 % 2, one = heads % 2;
    const uint32_t step = tile_spans(&a->shape);
    for (uint32_t i = 0; i < fours; i++)
        begin_quantized(&b[i], a, 4);
    if (two)
        begin_quantized(&b[fours], a, 2);
    if (one)
        begin_quantized(&b[fours + two], a, 1);
    live_tokens tile;
    for (uint32_t first = 0; first < split->count; first += step) {
        ahead next =
            first + step < split->count
                ? ahead_of(&a->shape, split->spans + first + step, split->count - first - step)
                : ahead_of(&a->shape, behind->spans, behind->count);
        list_quantized(&tile, &a->shape, split, first);
        if (tile.count == 0)
            continue;
        for (uint32_t i = 0; i < fours; i++)
            attend_quantized(&b[i], 4, &a->shape, &tile, by, &next);
        if (two)
            attend_quantized(&b[fours], 2, &a->shape, &tile, by, &next);
        if (one)
            attend_quantized(&b[fours + two], 1, &a->shape, &tile, by, &next);
    }
}

/* ---- a split ---- */

KVF_ALWAYS_INLINE void begin_batch(batch *b, const kvf_attend_args *a, uint32_t list,
                                   uint32_t first, const uint32_t queries, const kvf_dtype dtype)
{
    const uint32_t head_dim = a->shape.head_dim;
    for (uint32_t g = 0; g < queries; g++) {
        const size_t query = (size_t)list * a->group + a->sub.first + first + g;
        b->raw[g] = kvf_offset(a->q, query * kvf_key_bytes(&a->shape));
        b->top[g] = -INFINITY;
        b->sum[g] = 0.0f;
        for (uint32_t d = 0; d < head_dim; d += VF_PAIR) {
            vf2 x = vf_load2(b->raw[g], dtype, d, head_dim - d);
            vf_store(b->q[g] + d, x.a);
            vf_store(b->q[g] + d + VF_LANES, x.b);
            vf_store(b->o[g] + d, vf_zero());
            vf_store(b->o[g] + d + VF_LANES, vf_zero());
        }
    }
}

KVF_ALWAYS_INLINE void end_batch(const batch *b, const kvf_attend_args *a, uint32_t task,
                                 uint32_t first, const uint32_t queries, const kvf_dtype dtype,
                                 const bool by_code)
{
    const uint32_t value_dim = kvf_value_dim(&a->shape);
    for (uint32_t g = 0; g < queries; g++) {
        const size_t query = (size_t)task * a->group + a->sub.first + first + g;
        const bool any = !(b->sum[g] <= 0.0f);
        const float inverse = any ? 1.0f / b->sum[g] : 0.0f;
        float o[KVF_HEAD_DIM_MAX];
        for (uint32_t d = 0; d < value_dim; d += VF_PAIR) {
            vf2 x = {vf_load(b->o[g] + d), vf_load(b->o[g] + d + VF_LANES)};
            x.a = vf_mul(x.a, vf_set(inverse));
            x.b = vf_mul(x.b, vf_set(inverse));
            vf_store2(o + d, dtype, x);
        }
        for (uint32_t d = 0; by_code && d < value_dim; d++)
            o[d] += b->sums[g][d] * inverse;
        memcpy(a->partial_o + query * value_dim, o, value_dim * sizeof *o);
        a->partial_lse[query] = any ? b->top[g] * KVF_LN2 + logf(b->sum[g]) : -INFINITY;
    }
}

/* The split after this one, of its list or of the next: the next task's. Splits may be as short as
 * a tile, so each fetches the first tile of the next one too. */
static kvf_split split_behind(const kvf_attend_args *a, const kvf_split *split)
{
    kvf_split behind = {.spans = split->spans + split->count, .list = split->list};
    const kvf_span *first = a->spans + (size_t)split->list * a->spans_max;
    behind.count = a->span_count[split->list] - (uint32_t)(behind.spans - first);
    if (behind.count == 0 && split->list + 1 < a->lists) {
        behind.spans = first + a->spans_max;
        behind.count = a->span_count[++behind.list];
    }
    return behind;
}

/* The exact pages of a split. All batches share each tile while it is in the cache. */
KVF_ALWAYS_INLINE void attend_exact(batch *b, const kvf_attend_args *a, const kvf_split *split,
                                    const kvf_split *behind, scaling by, const kvf_dtype dtype)
{
    const uint32_t heads = a->sub.count, fours = heads / 4, two = heads / 2 % 2, one = heads % 2;
    const uint32_t step = tile_spans(&a->shape);
    live_tokens tiles[2];
    list_live(&tiles[0], &a->shape, split, 0);
    for (uint32_t first = 0, turn = 0; first < split->count; first += step, turn ^= 1) {
        const live_tokens *tile = &tiles[turn], *next = &tiles[turn ^ 1];
        if (first + step < split->count)
            list_live(&tiles[turn ^ 1], &a->shape, split, first + step);
        else
            list_live(&tiles[turn ^ 1], &a->shape, behind, 0);
        if (tile->count == 0)
            continue;
        for (uint32_t i = 0; i < fours; i++, next = NULL)
            attend_tile(&b[i], 4, dtype, &a->shape, tile, by, next);
        if (two) {
            attend_tile(&b[fours], 2, dtype, &a->shape, tile, by, next);
            next = NULL;
        }
        if (one)
            attend_tile(&b[fours + two], 1, dtype, &a->shape, tile, by, next);
    }
}

/* For the heads of a->sub, at most KVF_SUBGROUP_HEADS. */
KVF_ALWAYS_INLINE void attend_split(const kvf_attend_args *a, const kvf_split *split, uint32_t task,
                                    const kvf_dtype dtype)
{
    const uint32_t heads = a->sub.count, fours = heads / 4, two = heads / 2 % 2, one = heads % 2;
    const scaling by = {a->scale * KVF_LOG2E, a->cap * KVF_LOG2E};
    const kvf_split behind = split_behind(a, split);
    kvf_split exact = *split, quantized = *split, exact_behind = behind;
    batch b[BATCHES_MAX];
    exact.count = exact_spans(&a->shape, split);
    quantized.spans += exact.count;
    quantized.count -= exact.count;
    exact_behind.count = quantized.count ? 0 : exact_spans(&a->shape, &behind);
    for (uint32_t i = 0; i < fours; i++)
        begin_batch(&b[i], a, split->list, 4 * i, 4, dtype);
    if (two)
        begin_batch(&b[fours], a, split->list, 4 * fours, 2, dtype);
    if (one)
        begin_batch(&b[fours + two], a, split->list, heads - 1, 1, dtype);
    if (exact.count)
        attend_exact(b, a, &exact, &exact_behind, by, dtype);
    if (quantized.count)
        attend_codes(b, a, &quantized, &behind, by);
    for (uint32_t i = 0; i < fours; i++)
        end_batch(&b[i], a, task, 4 * i, 4, dtype, quantized.count);
    if (two)
        end_batch(&b[fours], a, task, 4 * fours, 2, dtype, quantized.count);
    if (one)
        end_batch(&b[fours + two], a, task, heads - 1, 1, dtype, quantized.count);
}

void KVF_SIMD_NAME(attend)(const void *args, uint32_t task)
{
    kvf_attend_args a = *(const kvf_attend_args *)args;
    const kvf_subgroup whole = kvf_subgroup_whole(a.sub, a.group);
    kvf_split split;
    if (!kvf_split_get(&a, task, &split))
        return;
    for (uint32_t at = 0; at < whole.count; at += KVF_SUBGROUP_HEADS) {
        a.sub = kvf_subgroup_at(whole, at);
        if (a.shape.dtype == KVF_BF16)
            attend_split(&a, &split, task, KVF_BF16);
        else if (a.shape.dtype == KVF_FP16)
            attend_split(&a, &split, task, KVF_FP16);
        else
            attend_split(&a, &split, task, KVF_FP32);
    }
}
