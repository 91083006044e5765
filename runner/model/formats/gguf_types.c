/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of GGUF files to numbers; see the header. A block is read byte by byte, because types of
 * 18 or 34 bytes leave it unaligned.
 *
 * A block has 32 numbers and one scale; some add a least value. Nibbles are numbers 0 to 15 in the
 * low halves of the bytes and 16 to 31 in the high ones.
 */

#include "gguf.h"

#include "common/convert.h"

#define NUMBERS GGUF_BLOCK_MAX

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

/* ---- blocks ---- */

static void widen_q4_0(const char *block, size_t count, float *to)
{
    for (; count > 0; count--, block += 18, to += NUMBERS) {
        const float scale = half(block);
        for (uint32_t i = 0; i < NUMBERS / 2; i++) {
            to[i] = scale * (float)((int32_t)low(block + 2, i) - 8);
            to[i + NUMBERS / 2] = scale * (float)((int32_t)high(block + 2, i) - 8);
        }
    }
}

static void widen_q4_1(const char *block, size_t count, float *to)
{
    for (; count > 0; count--, block += 20, to += NUMBERS) {
        const float scale = half(block), least = half(block + 2);
        for (uint32_t i = 0; i < NUMBERS / 2; i++) {
            to[i] = scale * (float)low(block + 4, i) + least;
            to[i + NUMBERS / 2] = scale * (float)high(block + 4, i) + least;
        }
    }
}

static void widen_q8_0(const char *block, size_t count, float *to)
{
    for (; count > 0; count--, block += 34, to += NUMBERS) {
        const float scale = half(block);
        for (uint32_t i = 0; i < NUMBERS; i++)
            to[i] = (float)(int8_t)block[2 + i] * scale;
    }
}

/* ---- by id ---- */

static const gguf_type types[] = {
    {"F32", 0, 1, 4, widen_f32},          {"F16", 1, 1, 2, widen_f16},
    {"BF16", 30, 1, 2, widen_bf16},       {"Q4_0", 2, NUMBERS, 18, widen_q4_0},
    {"Q4_1", 3, NUMBERS, 20, widen_q4_1}, {"Q8_0", 8, NUMBERS, 34, widen_q8_0},
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
        [6] = "Q5_0",    [7] = "Q5_1",     [9] = "Q8_1",   [10] = "Q2_K",   [11] = "Q3_K",
        [12] = "Q4_K",   [13] = "Q5_K",    [14] = "Q6_K",  [15] = "Q8_K",   [16] = "IQ2_XXS",
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
