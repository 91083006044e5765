/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_CODES_H
#define KVF_KERNELS_SCORE_CODES_H

/*
 * Codes of keys: two bits per channel of a rotated key, and one scale per token.
 *
 * Knows numbers and where they lie, no pages and no queries. Everything here is fp32 arithmetic in
 * one fixed order, rounded after every operation and never fused, with subnormals: whoever follows
 * it gets the same bits.
 *
 * Rotation, of a key or a query z of head_dim channels (a multiple of 16, at most 512):
 *     the sign of z_i flips where kvf_code_sign(i) has its top bit set;
 *     blocks of kvf_code_block channels, the largest power of two that is left, from the front
 *     (128 whole, 96 = 64 + 32, 80 = 64 + 16), each by stages of stride 1, 2, 4, ..:
 *     (a, b) -> (a + b, a - b); then every channel times kvf_code_unit(block).
 * Sums over channels: 16 partial sums, term i goes to sum i % 16 in ascending i; then sum i + sum
 * i + 8 for i < 8, and so on with 4, 2, 1.
 *
 * Code of a rotated key x, with n2 the sum of x_i^2:
 *     level c_i = 3 if |x_i| < 0.9815 * sqrt(n2 / head_dim), else 10; negative where x_i < 0;
 *     scale = n2 / sum of c_i x_i in fp16, to nearest, at most 65504. So scale * c is as long as x
 *     in the direction of x.
 * If n2 is 0 or not finite, every level is +3 and the scale is 0. A stored code 0, 1, 2, 3 is the
 * level -10, -3, 3, 10.
 */

#include "paging.h"

#define KVF_CODE_TOKENS 32u         /* tokens of a code group */
#define KVF_CODE_LANES  16u         /* tokens whose words lie side by side; channels of a word */
#define KVF_CODE_FLAT   0xaaaaaaaau /* a word of +3 */
#define KVF_CODE_EDGE   0.9815f
#define KVF_CODE_BIAS   10 /* level + bias is 0, 7, 13 or 20 */

/*
 * A code group: [2 halves][head_dim / 16][16 tokens] words, then [32] scales. Channel i of a token
 * is in word i / 16, at bit kvf_code_shift(i % 16): four consecutive channels are the same two bits
 * of four bytes. A multiple of 64 bytes.
 */
KVF_INLINE size_t kvf_code_bytes(uint32_t head_dim)
{
    return KVF_CODE_TOKENS * ((size_t)head_dim / 4 + 2);
}

KVF_INLINE size_t kvf_code_word(uint32_t head_dim, uint32_t token, uint32_t word)
{
    return ((size_t)(token / KVF_CODE_LANES) * (head_dim / KVF_CODE_LANES) + word) *
               KVF_CODE_LANES +
           token % KVF_CODE_LANES;
}

KVF_INLINE uint32_t kvf_code_shift(uint32_t channel)
{
    return 8 * (channel % 4) + 2 * (channel / 4);
}

/* Where the scales of a code group are. */
KVF_INLINE size_t kvf_code_scales(uint32_t head_dim)
{
    return (size_t)KVF_CODE_TOKENS * head_dim / 4;
}

/* 0 or the sign bit: the top bit of channel + 1, mixed. */
KVF_INLINE uint32_t kvf_code_sign(uint32_t channel)
{
    uint32_t u = (channel + 1) * 0x9e3779b9u;
    u = (u ^ u >> 16) * 0x85ebca6bu;
    u = (u ^ u >> 13) * 0xc2b2ae35u;
    return u & 0x80000000u;
}

/* Channels of the longest vector: a GPU's loops over its blocks unroll, and hold registers. */
#ifdef __CUDACC__
#define KVF_CODE_CHANNELS KVF_GPU_HEAD_DIM_MAX
#else
#define KVF_CODE_CHANNELS KVF_HEAD_DIM_MAX
#endif

/* Channels of the next block when `left` are left. */
KVF_INLINE uint32_t kvf_code_block(uint32_t left)
{
    uint32_t block = KVF_CODE_CHANNELS;
    while (block > left)
        block /= 2;
    return block;
}

/* 1 / sqrt(block), to nearest. */
KVF_INLINE float kvf_code_unit(uint32_t block)
{
    return KVF_CODE_CHANNELS >= 512 && block == 512 ? 0x1.6a09e6p-5f
           : block == 256                           ? 0x1p-4f
           : block == 128                           ? 0x1.6a09e6p-4f
           : block == 64                            ? 0x1p-3f
           : block == 32                            ? 0x1.6a09e6p-3f
                                                    : 0x1p-2f;
}

/*
 * A rotated query y in int8: y_i * (127 / largest |y|), to nearest, ties to even; its scale is
 * (largest |y| / 127) * the scale of softmax, at most 2^92, so that no logit overflows. All zero
 * if the largest is 0, not finite, or so small that 127 / largest is not finite.
 */
#define KVF_QUERY_SCALE_MAX 0x1p92f

/* The rotation, in place and in plain C: the specification. */
KVF_INLINE void kvf_code_rotate(float *x, uint32_t head_dim)
{
    for (uint32_t i = 0; i < head_dim; i++)
        x[i] = kvf_bits_float(kvf_float_bits(x[i]) ^ kvf_code_sign(i));
    for (uint32_t first = 0, block; first < head_dim; first += block) {
        block = kvf_code_block(head_dim - first);
        float *at = x + first;
        for (uint32_t stride = 1; stride < block; stride *= 2)
            for (uint32_t i = 0; i < block; i++) {
                if (i & stride)
                    continue;
                const float a = at[i], b = at[i + stride];
                at[i] = a + b;
                at[i + stride] = a - b;
            }
        for (uint32_t i = 0; i < block; i++)
            at[i] = at[i] * kvf_code_unit(block);
    }
}

#endif
