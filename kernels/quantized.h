/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_QUANTIZED_H
#define KVF_KERNELS_QUANTIZED_H

/*
 * Tokens of quantized pages: what the numbers mean, and the way there and back, in plain C.
 *
 * Knows one token at a time, no blocks. A key is rotated as codes are (score/codes.h), so that none
 * of its channels is much larger than the others. All arithmetic is fp32, and a scale or a minimum
 * times or plus a code is exact or rounded once, so fused or not the bits are the same.
 *
 * int8 (keys, and values of k8v8), of x with the largest magnitude m:
 *     scale = m / 127 in bf16, upwards; code = x / scale to nearest, ties to even.
 * int4 (values of k8v4), per KVF_QUANTIZED_GROUP channels:
 *     minimum in fp16, to nearest, within +-65504; scale = (largest - minimum) / 15 in fp16, to
 *     nearest, at most 65504; code = (x - minimum) / scale to nearest, 0 .. 15.
 *     Byte j of a group of n channels has channel j in its low half, j + n / 2 in the high one. A
 *     vector that is not finite, or whose rotation is not, becomes zeros: the whole key, or the
 *     whole value. Back in the element type a number is within its finite ones.
 */

#include <float.h>
#include <math.h>
#include <string.h>

#include "paging.h"
#include "score/codes.h"

/* Sizes of heads X(d) that a GPU attends to quantized pages of, in bf16; the host device takes all.
 * */
#define KVF_GPU_QUANTIZED_DIMS(X) X(64) X(128) X(192)

/* ---- where parts of token t are ---- */

KVF_INLINE int8_t *kvf_quantized_key(const kvf_shape *s, const void *page, uint32_t t)
{
    return (int8_t *)(uintptr_t)kvf_offset(page, (size_t)t * s->head_dim);
}

KVF_INLINE uint8_t *kvf_quantized_value(const kvf_shape *s, const void *page, uint32_t t)
{
    return (uint8_t *)(uintptr_t)kvf_offset(page, (size_t)s->page_size * s->head_dim +
                                                      (size_t)t * kvf_quantized_value_bytes(s));
}

KVF_INLINE uint16_t *kvf_quantized_key_scale(const kvf_shape *s, const void *page, uint32_t t)
{
    const size_t codes = (size_t)s->page_size * (s->head_dim + kvf_quantized_value_bytes(s));
    return (uint16_t *)(uintptr_t)kvf_offset(page, codes + (size_t)t * 2);
}

/* One in bf16; of int4 pairs of a scale and a minimum in fp16, one per group. */
KVF_INLINE uint16_t *kvf_quantized_value_scale(const kvf_shape *s, const void *page, uint32_t t)
{
    const void *scales = kvf_quantized_key_scale(s, page, s->page_size);
    return (uint16_t *)(uintptr_t)kvf_offset(scales, (size_t)t * kvf_quantized_scale_bytes(s));
}

/* Token `t` of a page out of another's place `from_t`, which may be the same one. */
KVF_INLINE void kvf_quantized_move(const kvf_shape *s, void *page, uint32_t t, const kvf_shape *of,
                                   const void *from, uint32_t from_t)
{
    memmove(kvf_quantized_key(s, page, t), kvf_quantized_key(of, from, from_t), s->head_dim);
    memmove(kvf_quantized_value(s, page, t), kvf_quantized_value(of, from, from_t),
            kvf_quantized_value_bytes(s));
    memmove(kvf_quantized_key_scale(s, page, t), kvf_quantized_key_scale(of, from, from_t), 2);
    memmove(kvf_quantized_value_scale(s, page, t), kvf_quantized_value_scale(of, from, from_t),
            kvf_quantized_scale_bytes(s));
}

/* ---- the way there ---- */

/* The largest magnitude; above all numbers if one is none. */
KVF_INLINE float kvf_quantized_largest(const float *x, uint32_t count)
{
    uint32_t top = 0;
    for (uint32_t i = 0; i < count; i++)
        top = kvf_max_u32(top, kvf_float_bits(x[i]) & 0x7fffffffu);
    return kvf_bits_float(top);
}

KVF_INLINE uint16_t kvf_quantize_int8(int8_t *to, const float *x, uint32_t count)
{
    const float largest = kvf_quantized_largest(x, count);
    const int is_flat = !(largest > 0.0f && largest <= FLT_MAX);
    const uint16_t scale = is_flat ? 0 : kvf_bf16_up(largest / 127.0f);
    const float unit = kvf_bf16_to_float(scale);
    for (uint32_t i = 0; i < count; i++)
        to[i] = unit > 0.0f ? (int8_t)nearbyintf(x[i] / unit) : (int8_t)0;
    return scale;
}

KVF_INLINE uint8_t kvf_quantize_half(float x, float minimum, float scale)
{
    const float code = scale > 0.0f ? nearbyintf((x - minimum) / scale) : 0.0f;
    return code >= 15.0f ? 15 : code >= 0.0f ? (uint8_t)code : 0;
}

/* For numbers between low and high: the scale, and above it the minimum; zero is positive. */
KVF_INLINE uint32_t kvf_quantized_steps(float low, float high)
{
    low = low > -65504.0f ? low < 65504.0f ? low + 0.0f : 65504.0f : -65504.0f;
    const uint16_t least = kvf_fp16_from_float(low);
    const float step = (high - kvf_fp16_to_float(least)) / 15.0f;
    const float scale = step > 0.0f ? step < 65504.0f ? step : 65504.0f : 0.0f;
    return kvf_fp16_from_float(scale) | (uint32_t)least << 16;
}

/* The number of a code. */
KVF_INLINE float kvf_quantized_number(uint32_t code, float minimum, float scale)
{
    return minimum + scale * (float)code;
}

/* One group of an even number of channels, which are finite. */
KVF_INLINE void kvf_quantize_int4(uint8_t *to, uint16_t *scales, const float *x, uint32_t count)
{
    float low = x[0], high = x[0];
    for (uint32_t i = 1; i < count; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const uint32_t steps = kvf_quantized_steps(low, high);
    scales[0] = (uint16_t)steps;
    scales[1] = (uint16_t)(steps >> 16);
    const float scale = kvf_fp16_to_float(scales[0]), minimum = kvf_fp16_to_float(scales[1]);
    for (uint32_t i = 0; i < count / 2; i++)
        to[i] = (uint8_t)(kvf_quantize_half(x[i], minimum, scale) |
                          kvf_quantize_half(x[i + count / 2], minimum, scale) << 4);
}

KVF_INLINE void kvf_quantize_value(const kvf_shape *s, void *page, uint32_t t, float *x)
{
    const uint32_t value_dim = kvf_value_dim(s);
    uint8_t *to = kvf_quantized_value(s, page, t);
    uint16_t *scales = kvf_quantized_value_scale(s, page, t);
    if (s->pages == KVF_PAGES_K8V8) {
        *scales = kvf_quantize_int8((int8_t *)to, x, value_dim);
        return;
    }
    if (!(kvf_quantized_largest(x, value_dim) <= FLT_MAX))
        for (uint32_t i = 0; i < value_dim; i++)
            x[i] = 0.0f;
    for (uint32_t i = 0; i < value_dim; i += KVF_QUANTIZED_GROUP)
        kvf_quantize_int4(to + i / 2, scales + 2 * (i / KVF_QUANTIZED_GROUP), x + i,
                          kvf_min_u32(KVF_QUANTIZED_GROUP, value_dim - i));
}

/* Token t of a page from its exact key, after which its value lies. `x` [head_dim] is for work. */
KVF_INLINE void kvf_quantize_token(const kvf_shape *s, void *page, uint32_t t, const void *exact,
                                   float *x)
{
    for (uint32_t i = 0; i < s->head_dim; i++)
        x[i] = kvf_element_get(exact, s->dtype, i);
    kvf_code_rotate(x, s->head_dim);
    *kvf_quantized_key_scale(s, page, t) =
        kvf_quantize_int8(kvf_quantized_key(s, page, t), x, s->head_dim);
    for (uint32_t i = 0; i < kvf_value_dim(s); i++)
        x[i] = kvf_element_get(exact, s->dtype, s->head_dim + i);
    kvf_quantize_value(s, page, t, x);
}

/* ---- and back ---- */

/* The rotated key. */
KVF_INLINE void kvf_dequantize_key(const kvf_shape *s, const void *page, uint32_t t, float *x)
{
    const int8_t *code = kvf_quantized_key(s, page, t);
    const float scale = kvf_bf16_to_float(*kvf_quantized_key_scale(s, page, t));
    for (uint32_t i = 0; i < s->head_dim; i++)
        x[i] = scale * (float)code[i];
}

KVF_INLINE void kvf_dequantize_int4(const uint8_t *from, const uint16_t *scales, float *x,
                                    uint32_t count)
{
    const float scale = kvf_fp16_to_float(scales[0]), minimum = kvf_fp16_to_float(scales[1]);
    for (uint32_t i = 0; i < count / 2; i++) {
        x[i] = kvf_quantized_number(from[i] & 15, minimum, scale);
        x[i + count / 2] = kvf_quantized_number(from[i] >> 4, minimum, scale);
    }
}

KVF_INLINE void kvf_dequantize_value(const kvf_shape *s, const void *page, uint32_t t, float *x)
{
    const uint32_t value_dim = kvf_value_dim(s);
    const uint8_t *from = kvf_quantized_value(s, page, t);
    const uint16_t *scales = kvf_quantized_value_scale(s, page, t);
    if (s->pages == KVF_PAGES_K8V8) {
        const float scale = kvf_bf16_to_float(*scales);
        for (uint32_t i = 0; i < value_dim; i++)
            x[i] = scale * (float)(int8_t)from[i];
        return;
    }
    for (uint32_t i = 0; i < value_dim; i += KVF_QUANTIZED_GROUP)
        kvf_dequantize_int4(from + i / 2, scales + 2 * (i / KVF_QUANTIZED_GROUP), x + i,
                            kvf_min_u32(KVF_QUANTIZED_GROUP, value_dim - i));
}

/* The rotation backwards: it is its own inverse but for the order of signs. */
KVF_INLINE void kvf_quantized_rotate_back(float *x, uint32_t head_dim)
{
    for (uint32_t i = 0; i < head_dim; i++)
        x[i] = kvf_bits_float(kvf_float_bits(x[i]) ^ kvf_code_sign(i));
    kvf_code_rotate(x, head_dim);
    for (uint32_t i = 0; i < head_dim; i++)
        x[i] = kvf_bits_float(kvf_float_bits(x[i]) ^ kvf_code_sign(i));
}

/* Within the finite numbers of an element type. */
KVF_INLINE float kvf_quantized_within(kvf_dtype dtype, float x)
{
    const float most = dtype == KVF_FP16 ? 65504.0f : dtype == KVF_BF16 ? 0x1.fep127f : FLT_MAX;
    return x > most ? most : x < -most ? -most : x;
}

KVF_INLINE void kvf_quantized_store(const kvf_shape *s, void *to, size_t first, const float *x,
                                    uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        kvf_element_set(to, s->dtype, first + i, kvf_quantized_within(s->dtype, x[i]));
}

/* Token t of a page to an exact key with its value after it. */
KVF_INLINE void kvf_dequantize_token(const kvf_shape *s, const void *page, uint32_t t, void *exact,
                                     float *x)
{
    kvf_dequantize_key(s, page, t, x);
    kvf_quantized_rotate_back(x, s->head_dim);
    kvf_quantized_store(s, exact, 0, x, s->head_dim);
    kvf_dequantize_value(s, page, t, x);
    kvf_quantized_store(s, exact, s->head_dim, x, kvf_value_dim(s));
}

#endif
