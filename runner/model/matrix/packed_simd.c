/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Matrix-vector kernels for weights that stay in the blocks of their file (gguf.h), built
 * once per instruction set.
 *
 * A block becomes small whole numbers q with a scale for 16 or 32 of them, and where the type has
 * it a shift; a weight is q x scale + shift. The product of q and scale is exact in fp32, so a
 * weight has the bits of gguf_types.c on every instruction set, fused or not. Bound: at 4 to 8 bits
 * a weight memory and arithmetic are near each other. It knows arrays only.
 * Invariant: the order of additions depends on `columns` and the variant, not on `rows`.
 */

#include "gguf.h"
#include "linear_vector.h"

#include <string.h>

#define SMALL 32u
#define LARGE GGUF_BLOCK_MAX

typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint64_t words2 __attribute__((vector_size(16)));

typedef struct unpacked {
    int8_t q[LARGE];
    float scale[LARGE / 16]; /* of a group of numbers */
    float shift[LARGE / SMALL];
    vf weight[SMALL / VF_LANES]; /* instead of the others, if READY */
} unpacked;

/* How numbers become weights: by a scale, by a scale and a shift, or they are ready. */
enum { SCALED, SHIFTED, READY };

static inline bytes16 load16(const char *from)
{
    bytes16 x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store16(int8_t *to, bytes16 x)
{
    memcpy(to, &x, sizeof x);
}

static inline float half(const char *bytes)
{
    uint16_t bits;
    memcpy(&bits, bytes, sizeof bits);
#if defined(__F16C__)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
#else
    return kvf_fp16_to_float(bits);
#endif
}

/* ---- 32 numbers: nibbles of 0 to 15 in the low halves, of 16 to 31 in the high ones ---- */

/* 16 where a bit of 16 is set, else 0. */
static inline bytes16 fifth_bits(const char *from)
{
    const bytes16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const words2 spread = {0x0101010101010101u * (uint8_t)from[0],
                           0x0101010101010101u * (uint8_t)from[1]};
    return (bytes16)(((bytes16)spread & bit) != 0) & 16;
}

static inline void unpack_fives(const char *fifths, const char *nibbles, uint8_t minus, int8_t *q)
{
    const bytes16 x = load16(nibbles);
    store16(q, ((x & 15) | fifth_bits(fifths)) - minus);
    store16(q + SMALL / 2, ((x >> 4) | fifth_bits(fifths + 2)) - minus);
}

#if defined(__AVX512F__)
/* A table of 16 weights per block, which both nibbles of a byte look up. */
#define NIBBLES(how) READY

static inline vf half_everywhere(const char *bytes)
{
    int16_t bits;
    memcpy(&bits, bytes, sizeof bits);
    return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
}

static inline void look_up(const char *from, vf table, unpacked *u)
{
    const __m512i x = _mm512_cvtepu8_epi32((__m128i)load16(from));
    u->weight[0] = _mm512_permutexvar_ps(x, table);
    u->weight[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), table);
}

static inline void unpack_q4_0(const char *block, unpacked *u)
{
    const vf q = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    look_up(block + 2, vf_mul(q, half_everywhere(block)), u);
}

static inline void unpack_q4_1(const char *block, unpacked *u)
{
    const vf q = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    look_up(block + 4, vf_fma(q, half_everywhere(block), half_everywhere(block + 2)), u);
}
#elif defined(__AVX2__)
/* Eight bytes become lanes of 32 bits, in which a nibble is one instruction away. */
#define NIBBLES(how) READY

/* 32 nibbles less @p minus. */
static inline void load_nibbles(const char *from, int minus, vf q[4])
{
    const __m256i low = _mm256_set1_epi32(15), less = _mm256_set1_epi32(minus);
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 2; i++) {
        const __m256i x = _mm256_cvtepu8_epi32(
            _mm_loadl_epi64((const __m128i *)(const void *)(from + (size_t)8 * i)));
        q[i] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(x, low), less));
        q[i + 2] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(x, 4), less));
    }
}

static inline void unpack_q4_0(const char *block, unpacked *u)
{
    const vf scale = vf_set(half(block));
    vf q[4];
    load_nibbles(block + 2, 8, q);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++)
        u->weight[i] = vf_mul(q[i], scale);
}

/* Scale and shift are converted together. */
static inline void unpack_q4_1(const char *block, unpacked *u)
{
    int32_t both;
    vf q[4];
    memcpy(&both, block, sizeof both);
    const vf pairs = _mm256_cvtph_ps(_mm_set1_epi32(both));
    const vf scale = _mm256_moveldup_ps(pairs), shift = _mm256_movehdup_ps(pairs);
    load_nibbles(block + 4, 0, q);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++)
        u->weight[i] = vf_fma(q[i], scale, shift);
}
#else
#define NIBBLES(how) how

static inline void unpack_nibbles(const char *from, uint8_t minus, int8_t *q)
{
    const bytes16 x = load16(from);
    store16(q, (x & 15) - minus);
    store16(q + SMALL / 2, (x >> 4) - minus);
}

static inline void unpack_q4_0(const char *block, unpacked *u)
{
    u->scale[0] = half(block);
    unpack_nibbles(block + 2, 8, u->q);
}

static inline void unpack_q4_1(const char *block, unpacked *u)
{
    u->scale[0] = half(block);
    u->shift[0] = half(block + 2);
    unpack_nibbles(block + 4, 0, u->q);
}
#endif

static inline void unpack_q5_0(const char *block, unpacked *u)
{
    u->scale[0] = half(block);
    unpack_fives(block + 2, block + 6, 16, u->q);
}

static inline void unpack_q5_1(const char *block, unpacked *u)
{
    u->scale[0] = half(block);
    u->shift[0] = half(block + 2);
    unpack_fives(block + 4, block + 8, 0, u->q);
}

static inline void unpack_q8_0(const char *block, unpacked *u)
{
    const vf scale = vf_set(half(block));
#pragma GCC unroll 32
    for (uint32_t i = 0; i < SMALL / VF_LANES; i++)
        u->weight[i] = vf_mul(vf_load_i8((const int8_t *)block + 2 + (size_t)i * VF_LANES), scale);
}

/* ---- 256 numbers ---- */

/* Eight scales and shifts of six bits each; gguf_types.c says where they are. */
static inline void unpack_scales(const char *block, unpacked *u)
{
    const float scale = half(block), least = half(block + 2);
    const uint8_t *p = (const uint8_t *)block + 4;
    for (uint32_t i = 0; i < 4; i++) {
        u->scale[i] = scale * (float)(p[i] & 63u);
        u->shift[i] = -(least * (float)(p[i + 4] & 63u));
        u->scale[i + 4] = scale * (float)((p[i + 8] & 15u) | (p[i] >> 6 & 3u) << 4);
        u->shift[i + 4] = -(least * (float)((uint32_t)p[i + 8] >> 4 | (p[i + 4] >> 6 & 3u) << 4));
    }
}

static inline void unpack_q4_k(const char *block, unpacked *u)
{
    unpack_scales(block, u);
    for (uint32_t i = 0; i < LARGE; i += 2 * SMALL)
        for (uint32_t side = 0; side < SMALL; side += 16) {
            const bytes16 x = load16(block + 16 + i / 2 + side);
            store16(u->q + i + side, x & 15);
            store16(u->q + i + SMALL + side, x >> 4);
        }
}

/* Bit g of a byte of the fifths belongs to group g. */
static inline void unpack_q5_k(const char *block, unpacked *u)
{
    unpack_scales(block, u);
    for (uint32_t side = 0; side < SMALL; side += 16) {
        bytes16 fifths = load16(block + 16 + side);
        for (uint32_t i = 0; i < LARGE; i += 2 * SMALL, fifths >>= 2) {
            const bytes16 x = load16(block + 48 + i / 2 + side);
            store16(u->q + i + side, (x & 15) | (fifths & 1) << 4);
            store16(u->q + i + SMALL + side, (x >> 4) | (fifths & 2) << 3);
        }
    }
}

/* Halves of 128 numbers; two more bits of number i of all four rows of a half are in one byte. */
static inline void unpack_q6_k(const char *block, unpacked *u)
{
    const float scale = half(block + 208);
    for (uint32_t i = 0; i < LARGE / 16; i++)
        u->scale[i] = scale * (float)(int8_t)block[192 + i];
    for (uint32_t first = 0; first < LARGE; first += LARGE / 2)
        for (uint32_t side = 0; side < SMALL; side += 16) {
            const char *nibbles = block + first / 2 + side;
            const bytes16 a = load16(nibbles), b = load16(nibbles + SMALL);
            const bytes16 pairs = load16(block + 128 + first / 4 + side);
            int8_t *q = u->q + first + side;
            store16(q, ((a & 15) | (pairs & 3) << 4) - 32);
            store16(q + SMALL, ((b & 15) | (pairs & 12) << 2) - 32);
            store16(q + 2 * SMALL, ((a >> 4) | (pairs & 48)) - 32);
            store16(q + 3 * SMALL, ((b >> 4) | (pairs & 192) >> 2) - 32);
        }
}

/* ---- products ---- */

/* Numbers i to i + VF_LANES - 1; a scale is for @p group of them. */
static inline vf weights_at(const unpacked *u, uint32_t i, uint32_t group, int how)
{
    if (how == READY)
        return u->weight[i / VF_LANES];
    const vf q = vf_load_i8(u->q + i), scale = vf_set(u->scale[i / group]);
    return how == SHIFTED ? vf_fma(q, scale, vf_set(u->shift[i / group])) : vf_mul(q, scale);
}

/* Sums of a row, and rows that go side by side so that four sums are under way. */
#define SUMS  KVF_SUMS
#define LINES (4u / SUMS)

/* All numbers of some blocks, as @p store writes them. */
#define DEFINE_CONVERSION(name, element, store, type, numbers, bytes, group, how)                  \
    static void name##_##type(const void *from, size_t count, element *to)                         \
    {                                                                                              \
        const char *block = from;                                                                  \
        unpacked u;                                                                                \
        for (size_t c = 0; c < count; c += (numbers), block += (bytes)) {                          \
            unpack_##type(block, &u);                                                              \
            for (uint32_t i = 0; i < (numbers); i += VF_LANES)                                     \
                store(to + c + i, weights_at(&u, i, group, how));                                  \
        }                                                                                          \
    }

/* A row that LINES lacks is the one before it again. */
#define DEFINE_KERNELS(type, numbers, bytes, group, how)                                           \
    static void dot_rows_##type(const void *weight, size_t rows, size_t columns, const float *x,   \
                                float *y)                                                          \
    {                                                                                              \
        const size_t row_bytes = columns / (numbers) * (bytes);                                    \
        unpacked u;                                                                                \
        for (size_t r = 0; r < rows; r += LINES) {                                                 \
            const char *block = (const char *)weight + r * row_bytes;                              \
            const size_t next = r + 1 < rows ? row_bytes : 0;                                      \
            vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};                              \
            for (size_t c = 0; c < columns; c += (numbers), block += (bytes))                      \
                _Pragma("GCC unroll 2") for (uint32_t l = 0; l < LINES; l++)                       \
                {                                                                                  \
                    vf *own = sum + l * SUMS;                                                      \
                    ask_ahead(block + l * next, bytes);                                            \
                    unpack_##type(block + l * next, &u);                                           \
                    for (uint32_t first = 0; first < (numbers); first += SMALL)                    \
                        _Pragma("GCC unroll 32") for (uint32_t i = 0; i < SMALL; i += VF_LANES)    \
                            own[i / VF_LANES % SUMS] =                                             \
                                vf_fma(weights_at(&u, first + i, group, how),                      \
                                       vf_load(x + c + first + i), own[i / VF_LANES % SUMS]);      \
                }                                                                                  \
            y[r] = finish_sums(sum, SUMS);                                                         \
            if (next && LINES > 1)                                                                 \
                y[r + 1] = finish_sums(sum + SUMS % 4, SUMS);                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    DEFINE_CONVERSION(widen, float, vf_store, type, numbers, bytes, group, how)                    \
    DEFINE_CONVERSION(round, uint16_t, vf_store_bf16, type, numbers, bytes, group, how)

DEFINE_KERNELS(q4_0, SMALL, 18, 32, NIBBLES(SCALED))
DEFINE_KERNELS(q4_1, SMALL, 20, 32, NIBBLES(SHIFTED))
DEFINE_KERNELS(q5_0, SMALL, 22, 32, SCALED)
DEFINE_KERNELS(q5_1, SMALL, 24, 32, SHIFTED)
DEFINE_KERNELS(q8_0, SMALL, 34, 32, READY)
DEFINE_KERNELS(q4_k, LARGE, 144, 32, SHIFTED)
DEFINE_KERNELS(q5_k, LARGE, 176, 32, SHIFTED)
DEFINE_KERNELS(q6_k, LARGE, 210, 16, SCALED)

#define OF_TYPES(operation)                                                                        \
    {                                                                                              \
        [GGUF_Q4_0] = operation##_q4_0, [GGUF_Q4_1] = operation##_q4_1,                            \
        [GGUF_Q5_0] = operation##_q5_0, [GGUF_Q5_1] = operation##_q5_1,                            \
        [GGUF_Q8_0] = operation##_q8_0, [GGUF_Q4_K] = operation##_q4_k,                            \
        [GGUF_Q5_K] = operation##_q5_k, [GGUF_Q6_K] = operation##_q6_k,                            \
    }

const kvf_packed_kernels KVF_LINEAR_SYMBOL(kvf_packed_kernels_) = {
    .dot_rows = OF_TYPES(dot_rows),
    .widen = OF_TYPES(widen),
    .round = OF_TYPES(round),
};
