/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_MOVE_QUANTIZED_CUH
#define KVF_KERNELS_MOVE_QUANTIZED_CUH

/*
 * A token of a quantized page by half a warp, there and back, with the bits of quantized.h.
 *
 * Knows one vector at a time, as score/codes.cuh has them: lane r of 16 has the channels
 * r, r + 16, .., so a group of an int4 value is two words of every lane, whose codes share a byte.
 * Called by whole warps; what `count` says is the same for a warp.
 */

#include "cuda/paging.cuh"
#include "quantized.h"
#include "score/codes.cuh"

/* Channels of this lane, of a vector of `words` x 16. */
static __device__ __forceinline__ void quantized_load(float x[KVF_CODE_WORDS], const void *vector,
                                                      kvf_dtype dtype, uint32_t words)
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        x[k] = k < words ? kvf_element_get(vector, dtype, k * KVF_CODE_LANES + lane) : 0.0f;
}

static __device__ __forceinline__ void
quantized_store(void *vector, kvf_dtype dtype, uint32_t words, const float x[KVF_CODE_WORDS])
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        if (k < words)
            kvf_element_set(vector, dtype, k * KVF_CODE_LANES + lane,
                            kvf_quantized_within(dtype, x[k]));
}

/* `count` numbers, which lie apart. */
template <typename T>
static __device__ __forceinline__ void quantized_move(void *to, const void *from, uint32_t count)
{
    for (uint32_t i = threadIdx.x % KVF_CODE_LANES; i < count; i += KVF_CODE_LANES)
        ((T *)to)[i] = ((const T *)from)[i];
}

/* Token t of a page out of another's place `from_t`. */
static __device__ __forceinline__ void quantized_move(const kvf_shape *s, void *page, uint32_t t,
                                                      const kvf_shape *of, const void *from,
                                                      uint32_t from_t)
{
    quantized_move<uint4>(kvf_quantized_key(s, page, t), kvf_quantized_key(of, from, from_t),
                          s->head_dim / 16);
    quantized_move<uint2>(kvf_quantized_value(s, page, t), kvf_quantized_value(of, from, from_t),
                          kvf_quantized_value_bytes(s) / 8);
    quantized_move<uint16_t>(kvf_quantized_key_scale(s, page, t),
                             kvf_quantized_key_scale(of, from, from_t), 1);
    quantized_move<uint16_t>(kvf_quantized_value_scale(s, page, t),
                             kvf_quantized_value_scale(of, from, from_t),
                             kvf_quantized_scale_bytes(s) / 2);
}

/* Bits of the largest magnitude of a vector; above those of all numbers if one is none. */
static __device__ __forceinline__ uint32_t quantized_largest(const float x[KVF_CODE_WORDS])
{
    uint32_t top = 0;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        top = kvf_max_u32(top, kvf_float_bits(x[k]) & 0x7fffffffu);
#pragma unroll
    for (int step = 1; step < (int)KVF_CODE_LANES; step *= 2)
        top = kvf_max_u32(top, __shfl_xor_sync(KVF_FULL_WARP, top, step));
    return top;
}

/* A vector in int8, and what comes back of it in x. */
static __device__ __forceinline__ void quantized_int8(int8_t *to, uint16_t *scale,
                                                      float x[KVF_CODE_WORDS], uint32_t words)
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
    const float largest = kvf_bits_float(quantized_largest(x));
    const bool is_flat = !(largest > 0.0f && largest <= FLT_MAX);
    const uint16_t bits = is_flat ? 0 : kvf_bf16_up(__fdiv_rn(largest, 127.0f));
    const float unit = kvf_bf16_to_float(bits);
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++) {
        if (k >= words)
            break;
        const int8_t code = unit > 0.0f ? (int8_t)nearbyintf(__fdiv_rn(x[k], unit)) : (int8_t)0;
        to[k * KVF_CODE_LANES + lane] = code;
        x[k] = __fmul_rn(unit, (float)code);
    }
    if (lane == 0)
        *scale = bits;
}

/* Least and greatest over the lanes of a vector. */
static __device__ __forceinline__ void quantized_range(float *low, float *high)
{
#pragma unroll
    for (int step = 1; step < (int)KVF_CODE_LANES; step *= 2) {
        *low = fminf(*low, __shfl_xor_sync(KVF_FULL_WARP, *low, step));
        *high = fmaxf(*high, __shfl_xor_sync(KVF_FULL_WARP, *high, step));
    }
}

/* A group in int4, of which this lane has a, and b unless the group is short; what comes back. */
static __device__ __forceinline__ void quantized_int4(uint8_t *to, uint16_t *scales, float *a,
                                                      float *b, bool is_short)
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
    float low = is_short ? *a : fminf(*a, *b), high = is_short ? *a : fmaxf(*a, *b);
    quantized_range(&low, &high);
    const uint32_t bits = kvf_quantized_steps(low, high);
    const float scale = kvf_fp16_to_float((uint16_t)bits);
    const float minimum = kvf_fp16_to_float((uint16_t)(bits >> 16));
    const uint32_t code = kvf_quantize_half(*a, minimum, scale);
    const uint32_t other = kvf_quantize_half(*b, minimum, scale);
    const uint32_t far = __shfl_xor_sync(KVF_FULL_WARP, code, (int)KVF_CODE_LANES / 2);
    *a = kvf_quantized_number(code, minimum, scale);
    *b = kvf_quantized_number(other, minimum, scale);
    if (!is_short)
        to[lane] = (uint8_t)(code | other << 4);
    else if (lane < KVF_CODE_LANES / 2)
        to[lane] = (uint8_t)(code | far << 4);
    if (lane == 0) {
        scales[0] = (uint16_t)bits;
        scales[1] = (uint16_t)(bits >> 16);
    }
}

/* A value, and what comes back of it. */
static __device__ __forceinline__ void quantized_value(const kvf_shape *s, void *page, uint32_t t,
                                                       float x[KVF_CODE_WORDS], uint32_t words)
{
    uint8_t *to = kvf_quantized_value(s, page, t);
    uint16_t *scales = kvf_quantized_value_scale(s, page, t);
    if (s->pages == KVF_PAGES_K8V8) {
        quantized_int8((int8_t *)to, scales, x, words);
        return;
    }
    const bool is_sound = kvf_bits_float(quantized_largest(x)) <= FLT_MAX;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        x[k] = is_sound ? x[k] : 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k += 2)
        if (k < words)
            quantized_int4(to + k * KVF_CODE_LANES / 2, scales + k, &x[k], &x[k + 1],
                           k + 1 >= words);
}

/* A rotated key back to one as it came. */
static __device__ __forceinline__ void quantized_rotate_back(float x[KVF_CODE_WORDS],
                                                             uint32_t words)
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
    for (uint32_t turn = 0; turn < 2; turn++) {
#pragma unroll
        for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
            if (k < words)
                x[k] =
                    kvf_bits_float(kvf_float_bits(x[k]) ^ kvf_code_sign(k * KVF_CODE_LANES + lane));
        if (turn == 0)
            kvf_code_rotate_lanes(x, words);
    }
}

/* Token t of a page from its exact key, after which its value lies; unless `stays`, what comes
 * back goes there. */
static __device__ __forceinline__ void quantized_token(const kvf_shape *s, void *page, uint32_t t,
                                                       char *exact, bool stays)
{
    const uint32_t words = s->head_dim / KVF_CODE_LANES;
    const uint32_t value_words = kvf_value_dim(s) / KVF_CODE_LANES;
    float x[KVF_CODE_WORDS];
    quantized_load(x, exact, s->dtype, words);
    kvf_code_rotate_lanes(x, words);
    quantized_int8(kvf_quantized_key(s, page, t), kvf_quantized_key_scale(s, page, t), x, words);
    quantized_rotate_back(x, words);
    if (!stays)
        quantized_store(exact, s->dtype, words, x);
    quantized_load(x, exact + kvf_key_bytes(s), s->dtype, value_words);
    quantized_value(s, page, t, x, value_words);
    if (!stays)
        quantized_store(exact + kvf_key_bytes(s), s->dtype, value_words, x);
}

/* A run or a page in storage format to shared memory, 16 bytes per thread, because pages are across
 * a link. By the whole block. */
static __device__ __forceinline__ void quantized_fetch(const char *run, size_t bytes)
{
    for (uint32_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
        ((uint4 *)kvf_shared())[i] = kvf_load_once((const uint4 *)run + i);
    __syncthreads();
}

/* Token t of a page to an exact key with its value after it; `stays`: it is not written. */
static __device__ __forceinline__ void quantized_token_back(const kvf_shape *s, const void *page,
                                                            uint32_t t, char *exact, bool stays)
{
    const uint32_t words = s->head_dim / KVF_CODE_LANES, lane = threadIdx.x % KVF_CODE_LANES;
    const uint32_t value_words = kvf_value_dim(s) / KVF_CODE_LANES;
    const int8_t *key = kvf_quantized_key(s, page, t);
    const uint8_t *value = kvf_quantized_value(s, page, t);
    const uint16_t *scales = kvf_quantized_value_scale(s, page, t);
    const bool by_group = s->pages == KVF_PAGES_K8V4;
    const float unit = kvf_bf16_to_float(*kvf_quantized_key_scale(s, page, t));
    float x[KVF_CODE_WORDS];
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        x[k] = k < words ? __fmul_rn(unit, (float)key[k * KVF_CODE_LANES + lane]) : 0.0f;
    quantized_rotate_back(x, words);
    if (!stays)
        quantized_store(exact, s->dtype, words, x);
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++) {
        if (k >= value_words)
            break;
        if (!by_group) {
            x[k] = __fmul_rn(kvf_bf16_to_float(*scales),
                             (float)(int8_t)value[k * KVF_CODE_LANES + lane]);
            continue;
        }
        const uint32_t first = k / 2 * 2;
        const bool is_short = first + 1 >= value_words;
        const uint32_t middle = is_short ? KVF_CODE_LANES / 2 : KVF_CODE_LANES;
        const bool is_high = is_short ? lane >= middle : k % 2 != 0;
        const uint32_t byte = value[first * KVF_CODE_LANES / 2 + lane % middle];
        x[k] = kvf_quantized_number(is_high ? byte >> 4 : byte & 15,
                                    kvf_fp16_to_float(scales[first + 1]),
                                    kvf_fp16_to_float(scales[first]));
    }
    if (!stays)
        quantized_store(exact + kvf_key_bytes(s), s->dtype, value_words, x);
}

#endif
