/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_PACKED_BLOCKS_CUH
#define KVF_MODEL_PACKED_BLOCKS_CUH

/*
 * Numbers out of the blocks of a GGUF file (gguf_types.c says what they are), eight at a time, on a
 * GPU.
 *
 * It knows rows of blocks, which begin at even addresses, as all their parts do. Invariant:
 * products in here are exact in fp32 and each number is rounded once at most, so it has the bits of
 * the host.
 */

#include "cuda.cuh"
#include "gguf.h"

static __device__ __forceinline__ uint32_t kvf_packed_word(const char *bytes)
{
    const uint16_t *halves = (const uint16_t *)(const void *)bytes;
    return halves[0] | (uint32_t)halves[1] << 16;
}

static __device__ __forceinline__ uint64_t kvf_packed_eight(const char *bytes)
{
    return kvf_packed_word(bytes) | (uint64_t)kvf_packed_word(bytes + 4) << 32;
}

static __device__ __forceinline__ float kvf_packed_half(const char *bytes)
{
    return kvf_to_float<kvf_half>(*(const kvf_half *)(const void *)bytes);
}

/* Nibbles of eight bytes: the low ones, or the high ones. */
static __device__ __forceinline__ uint64_t kvf_packed_nibbles(const char *bytes, bool high)
{
    return kvf_packed_eight(bytes) >> (high ? 4 : 0) & UINT64_C(0x0f0f0f0f0f0f0f0f);
}

/* Eight bits as 16 or 0 in bytes of their own. */
static __device__ __forceinline__ uint64_t kvf_packed_fifths(uint32_t bits)
{
    uint64_t spread = 0;
    for (uint32_t i = 0; i < 8; i++)
        spread |= (uint64_t)(bits >> i & 1) << (8 * i + 4);
    return spread;
}

/* q x scale + shift, of signed bytes less `minus`. */
static __device__ __forceinline__ void kvf_packed_finish(uint64_t q, int32_t minus, float scale,
                                                         float shift, float to[8])
{
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        const int32_t byte = (int32_t)(int8_t)(q >> 8 * i & 0xff) - minus;
        to[i] = __fadd_rn(__fmul_rn((float)byte, scale), shift);
    }
}

/* Blocks of 32; i is a multiple of 8 in one. */
static __device__ __forceinline__ void kvf_packed_small(const char *block, uint32_t index,
                                                        uint32_t i, float to[8])
{
    const bool has_least = index == GGUF_Q4_1 || index == GGUF_Q5_1;
    const bool has_fifths = index == GGUF_Q5_0 || index == GGUF_Q5_1;
    const char *fifths = block + (has_least ? 4 : 2);
    const char *nibbles = fifths + (has_fifths ? 4 : 0);
    const float scale = kvf_packed_half(block);
    if (index == GGUF_Q8_0) {
        kvf_packed_finish(kvf_packed_eight(block + 2 + i), 0, scale, 0.0f, to);
        return;
    }
    uint64_t q = kvf_packed_nibbles(nibbles + i % 16, i >= 16);
    if (has_fifths)
        q |= kvf_packed_fifths(kvf_packed_word(fifths) >> i);
    kvf_packed_finish(q,
                      has_least    ? 0
                      : has_fifths ? 16
                                   : 8,
                      scale, has_least ? kvf_packed_half(block + 2) : 0.0f, to);
}

/* Q4_K and Q5_K: groups of 32 with scales and least values of six bits. */
static __device__ __forceinline__ void kvf_packed_groups(const char *block, bool has_fifths,
                                                         uint32_t n, float to[8])
{
    const uint32_t group = n / 32, i = n % 32, at = group % 4;
    const uint8_t *p = (const uint8_t *)block + 4;
    uint32_t s = p[at] & 63u, m = p[at + 4] & 63u;
    if (group >= 4) {
        s = (p[at + 8] & 15u) | (uint32_t)p[at] >> 6 << 4;
        m = (uint32_t)p[at + 8] >> 4 | (uint32_t)p[at + 4] >> 6 << 4;
    }
    const char *nibbles = block + (has_fifths ? 48 : 16) + group / 2 * 32 + i;
    uint64_t q = kvf_packed_nibbles(nibbles, group % 2 != 0);
    if (has_fifths)
        q |= (kvf_packed_eight(block + 16 + i) >> group & UINT64_C(0x0101010101010101)) << 4;
    kvf_packed_finish(q, 0, __fmul_rn(kvf_packed_half(block), (float)s),
                      -__fmul_rn(kvf_packed_half(block + 2), (float)m), to);
}

static __device__ __forceinline__ void kvf_packed_q6_k(const char *block, uint32_t n, float to[8])
{
    const uint32_t row = n / 32, i = n % 32, side = row / 4, turn = row % 4;
    uint64_t q = kvf_packed_nibbles(block + side * 64 + turn % 2 * 32 + i, turn >= 2);
    const uint64_t pairs = kvf_packed_eight(block + 128 + side * 32 + i) >> 2 * turn;
    q |= (pairs & UINT64_C(0x0303030303030303)) << 4;
    const float part = (float)(int8_t)block[192 + row * 2 + i / 16];
    kvf_packed_finish(q, 32, __fmul_rn(kvf_packed_half(block + 208), part), 0.0f, to);
}

/* Numbers `input` to input + 7 of a row of blocks; input is a multiple of 8. */
static __device__ __forceinline__ void kvf_packed_read(const char *row, uint32_t index,
                                                       uint32_t input, float to[8])
{
    const uint32_t small = input / 32, large = input / GGUF_BLOCK_MAX;
    const uint32_t i = input % 32, n = input % GGUF_BLOCK_MAX;
    switch (index) {
    case GGUF_Q4_0:
        kvf_packed_small(row + small * 18u, GGUF_Q4_0, i, to);
        return;
    case GGUF_Q4_1:
        kvf_packed_small(row + small * 20u, GGUF_Q4_1, i, to);
        return;
    case GGUF_Q5_0:
        kvf_packed_small(row + small * 22u, GGUF_Q5_0, i, to);
        return;
    case GGUF_Q5_1:
        kvf_packed_small(row + small * 24u, GGUF_Q5_1, i, to);
        return;
    case GGUF_Q8_0:
        kvf_packed_small(row + small * 34u, GGUF_Q8_0, i, to);
        return;
    case GGUF_Q4_K:
        kvf_packed_groups(row + large * 144u, false, n, to);
        return;
    case GGUF_Q5_K:
        kvf_packed_groups(row + large * 176u, true, n, to);
        return;
    default:
        kvf_packed_q6_k(row + large * 210u, n, to);
    }
}

#endif
