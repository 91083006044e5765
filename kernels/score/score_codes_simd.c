/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The weights that queries give the tokens of a tile. Bound: arithmetic; per 16 channels of a
 * vector of tokens 7 operations to unpack, 5 with VBMI, and per query 4 with VNNI and 9 without.
 *
 * Knows nothing of keys, nor of other tiles. A lane is a token, so no product is added across
 * lanes. Levels are taken as bytes level + KVF_CODE_BIAS, and the bias times the sum of the query
 * is subtracted once; up to HEADS queries meet a vector of codes while it is unpacked, those of
 * rows that share it among them, and the logits of a tile stay in the cache until its largest is
 * known. Codes of a tile come from memory once, for however many queries. Exactness: the logits
 * have the bits of score_codes_ref.c; exponentials are to 3e-6, and sums are fp32, the same for a
 * query whatever is beside it.
 */

#include <math.h>

#include "cap_simd.h"
#include "codes_simd.h"
#include "variants.h"

#define HEADS 4u
#if defined(__AVX2__) && !defined(__AVX512F__)
#define WIDE 1u /* vectors of tokens at a time; two would not fit 16 registers */
#else
#define WIDE 2u /* 2 * HEADS sums hide the latency of a product */
#endif
#define GROUPS (KVF_SCORE_CODES_TOKENS / KVF_CODE_TOKENS)

/* ---- vectors of codes: a lane is one token's word ---- */

#if defined(__AVX512F__)
#define VU_M(op)             _mm512_##op
#define VU_TABLE(a, b, c, d) (vu) _mm512_set4_epi32((int)(d), (int)(c), (int)(b), (int)(a))
#define VU_OF(x)             ((__m512i)(x))
#elif defined(__AVX2__)
#define VU_M(op) _mm256_##op
#define VU_TABLE(a, b, c, d)                                                                       \
    (vu) _mm256_set_epi32((int)(d), (int)(c), (int)(b), (int)(a), (int)(d), (int)(c), (int)(b),    \
                          (int)(a))
#define VU_OF(x) ((__m256i)(x))
#endif

#if defined(__AVX512VBMI__)
/* A level as a byte at every index whose two bits from `at` on say so, of 64. */
#define LEVEL(i, at) ((0x140d0700u >> (8 * ((i) >> (at)&3)) & 255u))
#define LEVELS(i, at)                                                                              \
    (LEVEL(i, at) | LEVEL((i) + 1, at) << 8 | LEVEL((i) + 2, at) << 16 | LEVEL((i) + 3, at) << 24)
#define LEVELS16(i, at) LEVELS(i, at), LEVELS(i + 4, at), LEVELS(i + 8, at), LEVELS(i + 12, at)
#define LEVELS64(at)                                                                               \
    {                                                                                              \
        LEVELS16(0, at), LEVELS16(16, at), LEVELS16(32, at), LEVELS16(48, at)                      \
    }

/* Bytes of level + bias of channels 4j .. 4j + 3: the tables look at two of the low six bits. */
KVF_ALWAYS_INLINE void unpack(vu code, vu level[4])
{
    static const vu table[3] = {LEVELS64(0), LEVELS64(2), LEVELS64(4)};
    for (uint32_t j = 0; j < 3; j++)
        level[j] = (vu)_mm512_permutexvar_epi8((__m512i)code, (__m512i)table[j]);
    level[3] = (vu)_mm512_permutexvar_epi8((__m512i)(code >> 6), (__m512i)table[0]);
}
#elif defined(VU_M)
/* Bytes of level + bias of channels 4j .. 4j + 3: a nibble holds two codes, and the tables look at
 * its low or high two bits. */
KVF_ALWAYS_INLINE void unpack(vu code, vu level[4])
{
    const vu by_low = VU_TABLE(0x140d0700u, 0x140d0700u, 0x140d0700u, 0x140d0700u);
    const vu by_high = VU_TABLE(0x00000000u, 0x07070707u, 0x0d0d0d0du, 0x14141414u);
    const vu low = code & 0x0f0f0f0fu, high = code >> 4 & 0x0f0f0f0fu;
    level[0] = (vu)VU_M(shuffle_epi8)(VU_OF(by_low), VU_OF(low));
    level[1] = (vu)VU_M(shuffle_epi8)(VU_OF(by_high), VU_OF(low));
    level[2] = (vu)VU_M(shuffle_epi8)(VU_OF(by_low), VU_OF(high));
    level[3] = (vu)VU_M(shuffle_epi8)(VU_OF(by_high), VU_OF(high));
}
#else
/* 7 * low bit + 13 * high bit, which is level + bias, in each byte. */
KVF_ALWAYS_INLINE void unpack(vu code, vu level[4])
{
    for (uint32_t j = 0; j < 4; j++) {
        const vu low = code >> (2 * j) & 0x01010101u, high = code >> (2 * j + 1) & 0x01010101u;
        level[j] = (low << 3) - low + (high << 4) - (high << 2) + high;
    }
}
#endif

/* 16 channels of a query, four of them in every lane of a part. Products take a part from memory:
 * AVX-512 spreads it on the way, elsewhere that would be one more operation for each of them. */
#if defined(__AVX512F__)
typedef uint32_t query_part;
#else
typedef vu query_part;
#endif

typedef struct query_word {
    query_part part[4];
} query_word;

KVF_ALWAYS_INLINE vu query_lanes(const query_word *q, uint32_t j)
{
    return (vu){0} + q->part[j];
}

static inline void take_word(query_word *to, const int8_t *q)
{
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t x;
        memcpy(&x, q + 4 * j, sizeof x);
        to->part[j] = (query_part){0} + x;
    }
}

/* sum + products of 16 channels with q. */
#if defined(__AVX512VNNI__)
KVF_ALWAYS_INLINE vi add_products(vi sum, const vu level[4], const query_word *q)
{
    for (uint32_t j = 0; j < 4; j++)
        sum = (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)level[j], (__m512i)query_lanes(q, j));
    return sum;
}
#elif defined(__AVXVNNI__)
/* Two chains: four products one by one would take longer than those of four queries side by side.
 */
KVF_ALWAYS_INLINE vi add_products(vi sum, const vu level[4], const query_word *q)
{
    vi part[2] = {sum, (vi)vu_set(0)};
    for (uint32_t j = 0; j < 4; j++)
        part[j / 2] = (vi)_mm256_dpbusd_avx_epi32((__m256i)part[j / 2], (__m256i)level[j],
                                                  (__m256i)query_lanes(q, j));
    return part[0] + part[1];
}
#elif defined(VU_M)
/* Sums of two products are at most 2 * 20 * 127 in magnitude: four of them fit 16 bits. */
KVF_ALWAYS_INLINE vi add_products(vi sum, const vu level[4], const query_word *q)
{
    const vu ones = vu_set(0x00010001u);
    vu part[4];
    for (uint32_t j = 0; j < 4; j++)
        part[j] = (vu)VU_M(maddubs_epi16)(VU_OF(level[j]), VU_OF(query_lanes(q, j)));
    part[0] = (vu)VU_M(add_epi16)(VU_OF(part[0]), VU_OF(part[1]));
    part[2] = (vu)VU_M(add_epi16)(VU_OF(part[2]), VU_OF(part[3]));
    part[0] = (vu)VU_M(add_epi16)(VU_OF(part[0]), VU_OF(part[2]));
    return sum + (vi)VU_M(madd_epi16)(VU_OF(part[0]), VU_OF(ones));
}
#elif defined(__SSE2__)
/* By 16-bit halves: bytes 0 and 2 of a word, then 1 and 3. */
KVF_ALWAYS_INLINE vi add_products(vi sum, const vu level[4], const query_word *q)
{
    for (uint32_t j = 0; j < 4; j++) {
        const __m128i x = (__m128i)level[j], y = (__m128i)query_lanes(q, j);
        const __m128i even = _mm_and_si128(x, _mm_set1_epi16(0xff)), odd = _mm_srli_epi16(x, 8);
        sum += (vi)_mm_madd_epi16(even, _mm_srai_epi16(_mm_slli_epi16(y, 8), 8));
        sum += (vi)_mm_madd_epi16(odd, _mm_srai_epi16(y, 8));
    }
    return sum;
}
#elif defined(__ARM_FEATURE_DOTPROD)
KVF_ALWAYS_INLINE vi add_products(vi sum, const vu level[4], const query_word *q)
{
    for (uint32_t j = 0; j < 4; j++)
        sum = (vi)vdotq_s32((int32x4_t)sum, vreinterpretq_s8_u32((uint32x4_t)level[j]),
                            vreinterpretq_s8_u32((uint32x4_t)query_lanes(q, j)));
    return sum;
}
#else
/* Products are at most 20 * 127 in magnitude: sums of four fit 16 bits. */
KVF_ALWAYS_INLINE vi add_products(vi sum, const vu level[4], const query_word *q)
{
    int16x8_t low = vdupq_n_s16(0), high = low; /* four channels of two tokens each */
    for (uint32_t j = 0; j < 4; j++) {
        const int8x16_t x = vreinterpretq_s8_u32((uint32x4_t)level[j]);
        const int8x16_t y = vreinterpretq_s8_u32((uint32x4_t)query_lanes(q, j));
        low = vmlal_s8(low, vget_low_s8(x), vget_low_s8(y));
        high = vmlal_high_s8(high, x, y);
    }
    return sum + (vi)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
#endif

/* ---- what is read next ---- */

/*
 * Codes are fetched ahead at an even pace, in the loop over codes and in the one over exponentials:
 * requests that come faster than memory answers hold up what is after them, and a memory that is
 * not asked has nothing to answer. Groups may lie anywhere, and those of neighbouring blocks of the
 * pool are neighbours, so they are asked for one after the other. For every four that the first
 * loop reads it asks for three, FETCHED bytes at a time, and the second one for the rest, in as
 * many turns as a group has for each query. The rest of a thin tile is asked for while the tile
 * before it is weighed, by the first loop as far as that one reads as many.
 */
#define AHEAD   4608u /* bytes between what is read and what is asked for, at least */
#define FETCHED (4 * WIDE * VF_LANES)
#define REST    (GROUPS / 4) /* groups that the second loop asks for */

KVF_ALWAYS_INLINE const char *fetch(const char *at, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(at + i, 0, 3);
    return at + bytes;
}

/* Groups that are asked for next, up to `until`. In the second loop: one for every `all` turns. */
typedef struct turns {
    const kvf_code_group *next, *until;
    const char *at;
    uint32_t left, all;
    uint32_t bytes; /* in one */
} turns;

/* The words of the next group, which are the caller's to ask for; NULL without one. */
KVF_ALWAYS_INLINE const char *fetch_next(turns *t)
{
    if (t->next >= t->until)
        return NULL;
    __builtin_prefetch(t->next->scales, 0, 3);
    return t->next++->words;
}

KVF_ALWAYS_INLINE void fetch_turn(turns *t)
{
    if (t->left == 0) {
        t->left = t->all;
        t->at = fetch_next(t);
    }
    t->left--;
    if (t->at)
        t->at = fetch(t->at, t->bytes);
}

/* ---- a tile ---- */

typedef struct tile {
    const kvf_score_codes_args *a;
    uint32_t first;        /* token */
    uint32_t tokens;       /* a multiple of page_size */
    uint32_t any_skipped;  /* in whole blocks */
    uint32_t skip[GROUPS]; /* bit t: token t of the group does not count */
    uint32_t is_thin;
    uint32_t blocks; /* that are looked at, side by side, and where they were */
    uint8_t block[GROUPS];
    const kvf_code_group *at; /* their codes */
    uint32_t groups;
} tile;

/* Queries that are weighed together: words of all heads side by side, so that every address in the
 * loop over them is one register and a constant. */
typedef struct queries {
    query_word at[KVF_HEAD_DIM_MAX / KVF_CODE_LANES][HEADS];
    int32_t bias[HEADS]; /* what KVF_CODE_BIAS adds to each of their products */
    float scale[HEADS];
} queries;

/* Heads that are weighed together, of one row or several. */
typedef struct columns {
    const tile *of[HEADS]; /* they have the codes of the first one, and skip tokens of their own */
    uint32_t query[HEADS]; /* of q, tile_max, tile_sum and mass */
    uint32_t count;
} columns;

typedef struct logits {
    _Alignas(64) float at[HEADS][KVF_SCORE_CODES_TOKENS + 2 * VF_LANES];
} logits;

static void take_queries(queries *q, const kvf_score_codes_args *a, const columns *c)
{
    for (uint32_t h = 0; h < c->count; h++) {
        const int8_t *from = a->q + (size_t)c->query[h] * a->head_dim;
        int32_t sum = 0;
        for (uint32_t i = 0; i < a->head_dim; i++)
            sum += from[i];
        for (uint32_t w = 0; w < a->head_dim / KVF_CODE_LANES; w++)
            take_word(&q->at[w][h], from + w * KVF_CODE_LANES);
        q->bias[h] = KVF_CODE_BIAS * sum;
        q->scale[h] = a->q_scale[c->query[h]];
    }
}

/* A tile is thin if not even half of its blocks have a token that counts: then it becomes a tile of
 * these alone. Only its last block may be short, and stays last. */
static void find_blocks(tile *t, const uint64_t *bits)
{
    const uint32_t size = t->a->block_size, all = kvf_div_ceil_u32(t->tokens, size);
    uint32_t left = kvf_left_blocks(bits, all, size);
    t->is_thin = 2 * (uint32_t)__builtin_popcount(left) < all;
    t->blocks = 0;
    if (!t->is_thin) {
        for (; t->blocks < all; t->blocks++)
            t->block[t->blocks] = (uint8_t)t->blocks;
        return;
    }
    for (; left; left &= left - 1)
        t->block[t->blocks++] = (uint8_t)__builtin_ctz(left);
    const uint32_t end = t->blocks ? t->block[t->blocks - 1] + 1u : 0;
    t->tokens = kvf_min_u32(t->tokens, end * size) - (end - t->blocks) * size;
}

/* Tokens beyond the last one do not count either. */
static void find_skipped(tile *t, const uint64_t *bits)
{
    const uint32_t past = t->tokens % KVF_CODE_TOKENS;
    t->any_skipped = 0;
    if (t->a->block_size == KVF_CODE_TOKENS)
        for (uint32_t i = 0; i < t->groups; i++)
            t->skip[i] = (uint32_t)bits[t->block[i]];
    else
        for (uint32_t i = 0; i < t->groups; i++)
            t->skip[i] = (uint32_t)(bits[t->block[i / 2]] >> i % 2 * KVF_CODE_TOKENS);
    if (past)
        t->skip[t->groups - 1] |= UINT32_MAX << past;
    for (uint32_t i = 0; i < t->groups; i++)
        t->any_skipped |= t->skip[i];
}

static void look_at_tile(tile *t, const kvf_score_codes_args *a, uint32_t list, uint32_t index)
{
    const uint32_t first = index * KVF_SCORE_CODES_TOKENS, tokens = a->pages[list] * a->page_size;
    const uint64_t *bits = a->bits[list] + first / a->block_size;
    t->a = a;
    t->first = first;
    t->tokens = kvf_min_u32(KVF_SCORE_CODES_TOKENS, tokens - first);
    find_blocks(t, bits);
    t->groups = kvf_div_ceil_u32(t->tokens, KVF_CODE_TOKENS);
    find_skipped(t, bits);
}

/* The groups of a tile, by the codes of a list, to `at`; returns where those after them go. */
static kvf_code_group *find_codes(tile *t, uint32_t list, kvf_code_group *at)
{
    const kvf_score_codes_args *a = t->a;
    const size_t bytes = kvf_code_bytes(a->head_dim), words = kvf_code_scales(a->head_dim);
    const uint32_t size = a->block_size;
    t->at = at;
    if (!a->physical && size == KVF_CODE_TOKENS) { /* mostly: without a branch for each */
        const uint32_t *block_of = a->block_of[list] + t->first / size;
        const char *codes = a->codes[list];
        for (uint32_t i = 0; i < t->groups; i++, at++) {
            at->words = codes + block_of[t->block[i]] * bytes;
            at->scales = at->words + words;
        }
        return at;
    }
    for (uint32_t i = 0; i < t->groups; i++) {
        const uint32_t token = i * KVF_CODE_TOKENS;
        *at++ =
            kvf_score_codes_group(a, list, t->first + t->block[token / size] * size + token % size);
    }
    return at;
}

/* -infinity in the lanes whose bit is set. */
KVF_ALWAYS_INLINE vf drop_skipped(vf s, uint32_t skip)
{
    vu lane;
    for (uint32_t i = 0; i < VF_LANES; i++)
        lane[i] = i;
    const vu is_skipped = -(vu_set(skip) >> lane & 1u);
    return (vf)vu_pick(is_skipped, (vu)vf_set(-INFINITY), (vu)s);
}

/* Logits of WIDE vectors of tokens for `heads` queries; `from` are the words of the first. */
KVF_ALWAYS_INLINE void score_codes_vectors(const uint32_t *from, const uint32_t words,
                                           const uint16_t *scales, const size_t next,
                                           const queries *q, const uint32_t heads,
                                           vf s[HEADS][WIDE], const char **ahead)
{
    vi sum[HEADS][WIDE];
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t v = 0; v < WIDE; v++)
            sum[h][v] = (vi)vu_set((uint32_t)-q->bias[h]);
    for (uint32_t w = 0; w < words; w++, from += KVF_CODE_LANES) {
        vu level[WIDE][4];
        if (*ahead)
            *ahead = fetch(*ahead, FETCHED);
        for (uint32_t v = 0; v < WIDE; v++)
            unpack(vu_load(from + v * next), level[v]);
        for (uint32_t h = 0; h < heads; h++)
            for (uint32_t v = 0; v < WIDE; v++)
                sum[h][v] = add_products(sum[h][v], level[v], &q->at[w][h]);
    }
    for (uint32_t v = 0; v < WIDE; v++) {
        const vf scale = vf_load_fp16(scales + v * VF_LANES);
        for (uint32_t h = 0; h < heads; h++)
            s[h][v] =
                vf_mul(vf_mul(__builtin_convertvector(sum[h][v], vf), scale), vf_set(q->scale[h]));
    }
}

/* Groups between the one that is read and those that are asked for: 24 at most. */
KVF_ALWAYS_INLINE uint32_t groups_ahead(uint32_t head_dim)
{
    return kvf_div_ceil_u32(AHEAD, (uint32_t)kvf_code_bytes(head_dim));
}

/* Logits of the tile for `heads` queries, and the largest of each. */
KVF_ALWAYS_INLINE void score_codes_tile(const columns *c, const queries *q, const uint32_t heads,
                                        turns *soon, logits *out, float top[HEADS])
{
    const tile *t = c->of[0];
    const uint32_t head_dim = t->a->head_dim;
    /* The second vector: the other half of the group, or the next lanes of this one. */
    const size_t next = VF_LANES == KVF_CODE_LANES ? head_dim : VF_LANES;
    vf best[HEADS];
    for (uint32_t h = 0; h < heads; h++)
        best[h] = vf_set(-INFINITY);
    for (uint32_t i = 0; i < t->groups; i++) {
        const uint32_t first = i * KVF_CODE_TOKENS;
        const uint32_t *words = (const uint32_t *)(const void *)t->at[i].words;
        const uint16_t *scales = (const uint16_t *)(const void *)t->at[i].scales;
        const char *ahead = t->is_thin || i % 4 != 3 ? fetch_next(soon) : NULL;
        uint32_t skip[HEADS];
        for (uint32_t h = 0; h < heads; h++)
            skip[h] = c->of[h]->skip[i];
        for (uint32_t k = 0; k < KVF_CODE_TOKENS; k += WIDE * VF_LANES) {
            vf s[HEADS][WIDE];
            score_codes_vectors(words + kvf_code_word(head_dim, k, 0), head_dim / KVF_CODE_LANES,
                                scales + k, next, q, heads, s, &ahead);
            for (uint32_t v = 0; v < WIDE; v++)
                for (uint32_t h = 0; h < heads; h++) {
                    if (skip[h])
                        s[h][v] = drop_skipped(s[h][v], skip[h] >> (k + v * VF_LANES));
                    best[h] = vf_max(s[h][v], best[h]);
                    vf_store(&out->at[h][first + k + v * VF_LANES], s[h][v]);
                }
        }
    }
    for (uint32_t h = 0; h < heads; h++)
        top[h] = vf_largest(best[h]);
}

/* ---- from logits to masses ---- */

#define PARTS  (KVF_CODE_TOKENS / VF_LANES) /* vectors of a group's tokens */
#define STAGES (PARTS >= 4 ? 2u : 1u)       /* of sums that are formed in registers */

/* exp(s - top) of whole groups, in place, or sums of 2^stages neighbours; returns the sum of all.
 * Skipped tokens are 0. */
KVF_ALWAYS_INLINE float soften(float *s, float top, uint32_t tokens, const uint32_t stages,
                               turns *ahead)
{
    const vf base = vf_set(top);
    vf sum = vf_zero(), part[PARTS];
    float all = 0.0f;
    for (uint32_t i = 0; i < tokens; i += KVF_CODE_TOKENS) {
        fetch_turn(ahead);
        for (uint32_t k = 0; k < PARTS; k++) {
            part[k] = vf_exp_coarse(vf_sub(vf_load(s + i + k * VF_LANES), base));
            sum = vf_add(sum, part[k]);
        }
        for (uint32_t l = 1; l <= stages; l++)
            for (uint32_t k = 0; k < PARTS >> l; k++)
                part[k] = vf_add_pairs(part[2 * k], part[2 * k + 1]);
        for (uint32_t k = 0; k < PARTS >> stages; k++)
            vf_store(s + (i >> stages) + k * VF_LANES, part[k]);
    }
    for (uint32_t i = 0; i < VF_LANES; i++)
        all += sum[i];
    return all;
}

/* s becomes the sums of pages, of `tokens` tokens in whole groups; returns the sum of all. Reads
 * and writes whole vectors, up to one beyond the sums. */
static float score_codes_pages(float *s, float top, uint32_t tokens, uint32_t page_size,
                               turns *ahead)
{
    const uint32_t stages = page_size >= 1u << STAGES ? STAGES : page_size / 2;
    const float all = stages == STAGES ? soften(s, top, tokens, STAGES, ahead)
                      : stages         ? soften(s, top, tokens, 1, ahead)
                                       : soften(s, top, tokens, 0, ahead);
    tokens >>= stages;
    page_size >>= stages;
    for (; page_size > 1; page_size /= 2, tokens = kvf_div_ceil_u32(tokens, 2))
        for (uint32_t i = 0; 2 * i < tokens; i += VF_LANES)
            vf_store(s + i, vf_add_pairs(vf_load(s + 2 * i), vf_load(s + 2 * i + VF_LANES)));
    return all;
}

/* To bf16, to nearest; numbers only. */
static void round_masses(uint16_t *mass, const float *s, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t u = kvf_float_bits(s[i]);
        mass[i] = (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
    }
}

/* Pages whose tokens are all skipped. */
static void mark_empty(uint16_t *mass, const tile *t)
{
    const uint32_t page_size = t->a->page_size, part = kvf_min_u32(page_size, KVF_CODE_TOKENS);
    const uint32_t all = part == 32 ? UINT32_MAX : (1u << part) - 1;
    const uint16_t none = kvf_bf16_from_float(-1.0f);
    for (uint32_t i = 0; i < t->tokens; i += page_size) {
        const uint32_t *skip = &t->skip[i / KVF_CODE_TOKENS];
        const uint32_t rest = page_size > KVF_CODE_TOKENS ? skip[1] : UINT32_MAX;
        if ((skip[0] >> i % KVF_CODE_TOKENS & all) == all && rest == UINT32_MAX)
            mass[i / page_size] = none;
    }
}

/* Masses of a thin tile to the pages that they are of; `mass` has those of the whole one. */
static void spread_masses(uint16_t *mass, const uint16_t *thin, const tile *t)
{
    const uint32_t all = t->tokens / t->a->page_size, per = t->a->block_size / t->a->page_size;
    for (uint32_t i = 0; i < t->blocks; i++)
        memcpy(mass + t->block[i] * per, thin + i * per,
               kvf_min_u32(per, all - i * per) * sizeof *mass);
}

/* Logits under the cap; returns the largest. */
static float cap_query(float *s, uint32_t tokens, float cap)
{
    vf best = vf_set(-INFINITY);
    cap_logits(s, tokens, cap);
    for (uint32_t i = 0; i < tokens; i += VF_LANES)
        best = vf_max(vf_load(s + i), best);
    return vf_largest(best);
}

/* `soon` are the groups that are asked for meanwhile. */
static void score_codes_columns(columns *c, const queries *q, uint32_t tile_index, turns *soon)
{
    const kvf_score_codes_args *a = c->of[0]->a;
    const uint32_t heads = c->count, pages = c->of[0]->tokens / a->page_size;
    const uint32_t whole = c->of[0]->groups * KVF_CODE_TOKENS;
    logits s;
    float top[HEADS];
    switch (heads) {
    case 1:
        score_codes_tile(c, q, 1, soon, &s, top);
        break;
    case 2:
        score_codes_tile(c, q, 2, soon, &s, top);
        break;
    case 3:
        score_codes_tile(c, q, 3, soon, &s, top);
        break;
    default:
        score_codes_tile(c, q, 4, soon, &s, top);
    }
    for (uint32_t h = 0; a->cap > 0.0f && h < heads; h++)
        top[h] = cap_query(s.at[h], whole, a->cap);
    soon->left = 0;
    soon->all = GROUPS / REST * heads;
    soon->bytes = kvf_div_ceil_u32((uint32_t)kvf_code_scales(a->head_dim), soon->all);
    for (uint32_t h = 0; h < heads; h++) {
        const tile *t = c->of[h];
        const size_t at = (size_t)c->query[h] * a->tiles_max + tile_index;
        uint16_t *const place = a->mass + (size_t)c->query[h] * a->pages_max +
                                tile_index * kvf_tile_pages(a->page_size);
        uint16_t thin[KVF_SCORE_CODES_TOKENS], *mass = t->is_thin ? thin : place;
        a->tile_max[at] = top[h];
        a->tile_sum[at] = score_codes_pages(s.at[h], top[h] == -INFINITY ? 0.0f : top[h], whole,
                                            a->page_size, soon);
        round_masses(mass, s.at[h], pages);
        if (t->any_skipped)
            mark_empty(mass, t);
        if (t->is_thin)
            spread_masses(place, thin, t);
    }
}

/* ---- tiles of lists ---- */

static void fetch_groups(turns *soon, const kvf_code_group *until, uint32_t head_dim)
{
    for (; soon->next < until; soon->next++) {
        (void)fetch(soon->next->words, (uint32_t)kvf_code_scales(head_dim));
        __builtin_prefetch(soon->next->scales, 0, 3);
    }
}

/* Groups up to `end` that are prefetched while a tile is weighed: those of the next tile if this
 * one is thin, else those that are as far ahead as it takes them to come. More than this tile has
 * are asked for at once. */
static void look_ahead(turns *soon, const tile *t, const kvf_code_group *end)
{
    const uint32_t head_dim = t->a->head_dim;
    const ptrdiff_t most = GROUPS + REST + groups_ahead(head_dim);
    soon->until = t->is_thin || end - t->at < most ? end : t->at + most;
    if (soon->until - soon->next > (ptrdiff_t)t->groups)
        fetch_groups(soon, soon->until - t->groups, head_dim);
}

/* Some tiles of a list that has nothing in common with others, for one sub-group. Groups of the one
 * after them are asked for too, because the same thread mostly goes on with it. */
static void score_codes_list(const kvf_score_codes_args *a, uint32_t list, kvf_subgroup sub,
                             uint32_t first, uint32_t end)
{
    const uint32_t tiles = kvf_tiles(a->pages[list], a->page_size);
    const uint32_t batches = kvf_div_ceil_u32(sub.count, HEADS);
    queries q[KVF_SUBGROUP_HEADS / HEADS];
    columns c[KVF_SUBGROUP_HEADS / HEADS];
    kvf_code_group places[(KVF_SCORE_CODES_MOST + 1) * GROUPS], *at = places;
    tile two[2];
    turns soon;
    for (uint32_t g = 0; g < sub.count; g++) {
        c[g / HEADS].query[g % HEADS] = list * a->group + sub.first + g;
        c[g / HEADS].count = g % HEADS + 1;
    }
    for (uint32_t b = 0; b < batches; b++)
        take_queries(&q[b], a, &c[b]);
    look_at_tile(&two[first % 2], a, list, first);
    at = find_codes(&two[first % 2], list, at);
    soon.next = two[first % 2].is_thin ? places : places + REST + groups_ahead(a->head_dim);
    for (uint32_t i = first; i < end; i++) {
        const tile *t = &two[i % 2];
        if (i + 1 < tiles) {
            look_at_tile(&two[(i + 1) % 2], a, list, i + 1);
            at = find_codes(&two[(i + 1) % 2], list, at);
        }
        look_ahead(&soon, t, at);
        for (uint32_t b = 0; b < batches; b++) {
            for (uint32_t h = 0; h < c[b].count; h++)
                c[b].of[h] = t;
            score_codes_columns(&c[b], &q[b], i, &soon);
        }
    }
}

/* Heads of one row or several that are together so far. */
static void score_codes_waiting(columns *c, uint32_t index, turns *soon)
{
    queries q;
    if (!c->count)
        return;
    take_queries(&q, c->of[0]->a, c);
    score_codes_columns(c, &q, index, soon);
    c->count = 0;
}

/* The heads of one more row, which has `t`; HEADS of them at a time are weighed. */
static void add_columns(columns *c, const tile *t, uint32_t list, uint32_t index, turns *soon)
{
    const kvf_subgroup sub = kvf_subgroup_whole(t->a->sub, t->a->group);
    for (uint32_t g = sub.first; g < sub.first + sub.count; g++) {
        c->of[c->count] = t;
        c->query[c->count++] = list * t->a->group + g;
        if (c->count == HEADS)
            score_codes_waiting(c, index, soon);
    }
}

/* A thin tile of a row that has it in common with others: it is weighed alone. */
static void score_codes_thin(tile *t, uint32_t list, uint32_t from, uint32_t index)
{
    kvf_code_group places[GROUPS];
    columns c = {.count = 0};
    turns none = {.next = places};
    none.until = find_codes(t, from, places);
    fetch_groups(&none, none.until, t->a->head_dim);
    add_columns(&c, t, list, index, &none);
    score_codes_waiting(&c, index, &none);
}

/* Tile `index` of the list of task l, and of those that have it in common. */
static void score_codes_lists(const kvf_score_codes_args *a, uint32_t l, uint32_t index)
{
    const uint32_t from = kvf_score_codes_list(a, l), count = kvf_score_codes_sharers(a, l, index);
    kvf_code_group places[2 * GROUPS], *end = NULL;
    tile tiles[HEADS], next; /* rows of columns that wait are fewer than columns */
    columns c = {.count = 0};
    turns soon;
    for (uint32_t i = 0, n = 0; i < count; i++) {
        const uint32_t list = kvf_score_codes_list(a, l + i * a->row_lists);
        tile *t = &tiles[n % HEADS];
        look_at_tile(t, a, list, index);
        if (t->is_thin) {
            score_codes_thin(t, list, from, index);
            continue;
        }
        if (n++ == 0) {
            end = find_codes(t, from, places);
            if (index + 1 < kvf_tiles(a->pages[from], a->page_size)) {
                look_at_tile(&next, a, from, index + 1);
                end = find_codes(&next, from, end);
            }
            soon.next = places + REST + groups_ahead(a->head_dim);
            look_ahead(&soon, t, end);
        }
        t->at = places;
        add_columns(&c, t, list, index, &soon);
    }
    score_codes_waiting(&c, index, &soon);
}

void KVF_SIMD_NAME(score_codes)(const void *args, uint32_t task)
{
    const kvf_score_codes_args *a = args;
    const uint32_t tiles = kvf_score_codes_tiles(a), parts = kvf_div_ceil_u32(a->tiles_max, tiles);
    const uint32_t l = task / parts, first = task % parts * tiles;
    const uint32_t list = kvf_score_codes_list(a, l);
    const uint32_t end = kvf_min_u32(first + tiles, kvf_tiles(a->pages[list], a->page_size));
    const kvf_subgroup whole = kvf_subgroup_whole(a->sub, a->group);
    if (first < end && kvf_score_codes_sharers(a, l, first) == 1) /* then so it is of later tiles */
        for (uint32_t at = 0; at < whole.count; at += KVF_SUBGROUP_HEADS)
            score_codes_list(a, list, kvf_subgroup_at(whole, at), first, end);
    else
        for (uint32_t i = first; i < end; i++)
            score_codes_lists(a, l, i);
}
