/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of GGUF files to numbers; see the header. A block is read byte by byte, because types of
 * 18, 22 or 210 bytes leave it unaligned.
 *
 * The small types have 32 numbers and one scale; some add a least value. Their nibbles are numbers
 * 0 to 15 in the low halves of the bytes and 16 to 31 in the high ones. The K types have 256
 * numbers in groups with scales of their own, which are integers times a scale of the block.
 */

#include "gguf.h"

#include "common/convert.h"

#define SMALL 32u
#define LARGE GGUF_BLOCK_MAX

static uint16_t read_u16(const char *bytes)
{
    uint16_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static float half(const char *bytes)
{
    return kvf_fp16_to_float(read_u16(bytes));
}

static uint32_t low(const char *bytes, uint32_t i)
{
    return (uint8_t)bytes[i] & 15u;
}

static uint32_t high(const char *bytes, uint32_t i)
{
    return (uint8_t)bytes[i] >> 4;
}

/* ---- plain numbers ---- */

static void widen_f32(const char *blocks, size_t count, float *to)
{
    memcpy(to, blocks, count * sizeof *to);
}

static void widen_f16(const char *blocks, size_t count, float *to)
{
    for (size_t i = 0; i < count; i++)
        to[i] = half(blocks + 2 * i);
}

static void widen_bf16(const char *blocks, size_t count, float *to)
{
    for (size_t i = 0; i < count; i++)
        to[i] = kvf_bf16_to_float(read_u16(blocks + 2 * i));
}

/* ---- 32 numbers ---- */

static void widen_q4_0(const char *block, size_t count, float *to)
{
    for (; count > 0; count--, block += 18, to += SMALL) {
        const float scale = half(block);
        for (uint32_t i = 0; i < SMALL / 2; i++) {
            to[i] = scale * (float)((int32_t)low(block + 2, i) - 8);
            to[i + SMALL / 2] = scale * (float)((int32_t)high(block + 2, i) - 8);
        }
    }
}

static void widen_q4_1(const char *block, size_t count, float *to)
{
    for (; count > 0; count--, block += 20, to += SMALL) {
        const float scale = half(block), least = half(block + 2);
        for (uint32_t i = 0; i < SMALL / 2; i++) {
            to[i] = scale * (float)low(block + 4, i) + least;
            to[i + SMALL / 2] = scale * (float)high(block + 4, i) + least;
        }
    }
}

/* Five bits: a nibble, and bit i of a word for number i. */
static void unpack_fives(const char *fifths, const char *nibbles, uint32_t q[SMALL])
{
    uint32_t word;
    memcpy(&word, fifths, sizeof word);
    for (uint32_t i = 0; i < SMALL / 2; i++) {
        q[i] = low(nibbles, i) | (word >> i & 1u) << 4;
        q[i + SMALL / 2] = high(nibbles, i) | (word >> (i + SMALL / 2) & 1u) << 4;
    }
}

static void widen_q5_0(const char *block, size_t count, float *to)
{
    uint32_t q[SMALL];
    for (; count > 0; count--, block += 22, to += SMALL) {
        const float scale = half(block);
        unpack_fives(block + 2, block + 6, q);
        for (uint32_t i = 0; i < SMALL; i++)
            to[i] = scale * (float)((int32_t)q[i] - 16);
    }
}

static void widen_q5_1(const char *block, size_t count, float *to)
{
    uint32_t q[SMALL];
    for (; count > 0; count--, block += 24, to += SMALL) {
        const float scale = half(block), least = half(block + 2);
        unpack_fives(block + 4, block + 8, q);
        for (uint32_t i = 0; i < SMALL; i++)
            to[i] = scale * (float)q[i] + least;
    }
}

static void widen_q8_0(const char *block, size_t count, float *to)
{
    for (; count > 0; count--, block += 34, to += SMALL) {
        const float scale = half(block);
        for (uint32_t i = 0; i < SMALL; i++)
            to[i] = (float)(int8_t)block[2 + i] * scale;
    }
}

/* ---- 256 numbers ---- */

/* Scale and least value of group i of eight, six bits each: those of the first four groups are in
 * bytes 0 to 7, those of the last four have nibbles in bytes 8 to 11 and two bits above those. */
static void unpack_scales(const char *packed, uint32_t i, uint32_t *scale, uint32_t *least)
{
    const uint8_t *p = (const uint8_t *)packed;
    if (i < 4) {
        *scale = p[i] & 63u;
        *least = p[i + 4] & 63u;
    } else {
        *scale = (p[i + 4] & 15u) | (p[i - 4] >> 6 & 3u) << 4;
        *least = (uint32_t)p[i + 4] >> 4 | (p[i] >> 6 & 3u) << 4;
    }
}

/* Q4_K; Q5_K has a fifth bit: bit g of byte i belongs to number i of group g. @p fifths may be
 * NULL. */
static void widen_groups(const char *block, const char *fifths, const char *nibbles, float *to)
{
    const float scale = half(block), least = half(block + 2);
    for (uint32_t group = 0; group < LARGE / SMALL; group++) {
        uint32_t s, m;
        unpack_scales(block + 4, group, &s, &m);
        const float d = scale * (float)s, shift = least * (float)m;
        const char *from = nibbles + (size_t)group / 2 * SMALL;
        float *out = to + (size_t)group * SMALL;
        for (uint32_t i = 0; i < SMALL; i++) {
            uint32_t q = group % 2 == 0 ? low(from, i) : high(from, i);
            if (fifths)
                q |= ((uint8_t)fifths[i] >> group & 1u) << 4;
            out[i] = d * (float)q - shift;
        }
    }
}

static void widen_q4_k(const char *block, size_t count, float *to)
{
    for (; count > 0; count--, block += 144, to += LARGE)
        widen_groups(block, NULL, block + 16, to);
}

static void widen_q5_k(const char *block, size_t count, float *to)
{
    for (; count > 0; count--, block += 176, to += LARGE)
        widen_groups(block, block + 16, block + 48, to);
}

/* Halves of 128 numbers in four rows of 32: nibbles of 64 bytes, two more bits of 32 bytes, and a
 * signed scale for 16 numbers. */
static void widen_q6_k(const char *block, size_t count, float *to)
{
    for (; count > 0; count--, block += 210, to += LARGE) {
        const float scale = half(block + 208);
        for (uint32_t row = 0; row < LARGE / SMALL; row++) {
            const uint32_t side = row / 4, turn = row % 4;
            const char *nibbles = block + (size_t)side * 64 + (size_t)(turn % 2) * SMALL;
            const char *pairs = block + 128 + (size_t)side * SMALL;
            const char *scales = block + 192 + (size_t)row * 2;
            for (uint32_t i = 0; i < SMALL; i++) {
                uint32_t q = turn < 2 ? low(nibbles, i) : high(nibbles, i);
                q |= ((uint8_t)pairs[i] >> (2 * turn) & 3u) << 4;
                const float d = scale * (float)(int8_t)scales[i / 16];
                to[row * SMALL + i] = d * (float)((int32_t)q - 32);
            }
        }
    }
}

/* ---- by id ---- */

static const gguf_type types[] = {
    {"F32", 0, 1, 4, widen_f32, GGUF_PLAIN},
    {"F16", 1, 1, 2, widen_f16, GGUF_PLAIN},
    {"BF16", 30, 1, 2, widen_bf16, GGUF_PLAIN},
    {"Q4_0", 2, SMALL, 18, widen_q4_0, GGUF_Q4_0},
    {"Q4_1", 3, SMALL, 20, widen_q4_1, GGUF_Q4_1},
    {"Q5_0", 6, SMALL, 22, widen_q5_0, GGUF_Q5_0},
    {"Q5_1", 7, SMALL, 24, widen_q5_1, GGUF_Q5_1},
    {"Q8_0", 8, SMALL, 34, widen_q8_0, GGUF_Q8_0},
    {"Q4_K", 12, LARGE, 144, widen_q4_k, GGUF_Q4_K},
    {"Q5_K", 13, LARGE, 176, widen_q5_k, GGUF_Q5_K},
    {"Q6_K", 14, LARGE, 210, widen_q6_k, GGUF_Q6_K},
};

const gguf_type *gguf_type_find(uint32_t id)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].id == id)
            return &types[i];
    return NULL;
}

const char *gguf_type_name(uint32_t id)
{
    static const char *const others[] = {
        [9] = "Q8_1",    [10] = "Q2_K",    [11] = "Q3_K",  [15] = "Q8_K",   [16] = "IQ2_XXS",
        [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S",
        [22] = "IQ2_S",  [23] = "IQ4_XS",  [24] = "I8",    [25] = "I16",    [26] = "I32",
        [27] = "I64",    [28] = "F64",     [29] = "IQ1_M", [34] = "TQ1_0",  [35] = "TQ2_0",
        [39] = "MXFP4",
    };
    const gguf_type *type = gguf_type_find(id);
    if (type)
        return type->name;
    return id < sizeof others / sizeof *others && others[id] ? others[id] : "unknown";
}
