/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CUDA_WORDS_CUH
#define KVF_KERNELS_CUDA_WORDS_CUH

/*
 * 16 bytes of elements as floats, blocks of bytes moved by one warp, and scores as integers of the
 * same order.
 *
 * Knows nothing of pages. Widening and moving are exact.
 */

#include "common/convert.h"
#include "cuda.cuh"

/* Elements in 16 bytes. */
template <typename T> struct kvf_word {
    static constexpr uint32_t elements = 16 / sizeof(T);
};

static __device__ __forceinline__ void kvf_widen(const uint32_t u[4], float *x, float)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = kvf_bits_float(u[i]);
}

static __device__ __forceinline__ void kvf_widen(const uint32_t u[4], float *x, kvf_bf16)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = kvf_bits_float(u[i] << 16);
        x[2 * i + 1] = kvf_bits_float(u[i] & 0xffff0000u);
    }
}

static __device__ __forceinline__ void kvf_widen(const uint32_t u[4], float *x, kvf_half)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __half2 pair;
        memcpy(&pair, &u[i], sizeof pair);
        const float2 wide = __half22float2(pair);
        x[2 * i] = wide.x;
        x[2 * i + 1] = wide.y;
    }
}

/* The kvf_word<T>::elements elements of a word, in order. */
template <typename T> static __device__ __forceinline__ void kvf_widen_word(uint4 word, float *x)
{
    const uint32_t u[4] = {word.x, word.y, word.z, word.w};
    kvf_widen(u, x, T());
}

static __device__ __forceinline__ uint32_t kvf_pair_bits(uint16_t first, uint16_t second)
{
    return first | (uint32_t)second << 16;
}

/* A warp moves `bytes`, a multiple of 16 and at most N * 512, all loads before the first store. */
template <uint32_t N>
static __device__ __forceinline__ void kvf_warp_move(void *to, const void *from, uint32_t bytes)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    uint4 word[N];
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t at = (i * KVF_WARP_LANES + lane) * 16;
        if (at < bytes)
            word[i] = kvf_load_once((const char *)from + at);
    }
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t at = (i * KVF_WARP_LANES + lane) * 16;
        if (at < bytes)
            kvf_store_once((char *)to + at, word[i]);
    }
}

/* A warp moves `count` pieces of `bytes`, a multiple of 16, at most N * 512 in all: every piece
 * by neighbouring lanes, so as whole lines, and all loads before the first store. Addresses come
 * before them: those of sources at once, those of targets while the loads are on their way. */
template <uint32_t N>
static __device__ __forceinline__ void
kvf_warp_move_pieces(void *const *to, const void *const *from, uint32_t count, uint32_t bytes)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, words = bytes / 16;
    const char *source[N];
    char *target[N];
    uint4 word[N];
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t at = i * KVF_WARP_LANES + lane;
        if (at < count * words)
            source[i] = (const char *)from[at / words] + at % words * 16;
    }
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (i * KVF_WARP_LANES + lane < count * words)
            word[i] = kvf_load_once(source[i]);
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t at = i * KVF_WARP_LANES + lane;
        if (at < count * words)
            target[i] = (char *)to[at / words] + at % words * 16;
    }
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (i * KVF_WARP_LANES + lane < count * words)
            kvf_store_once(target[i], word[i]);
}

/* A larger key is a larger score; -0 equals +0. For numbers only. */
static __device__ __forceinline__ uint32_t kvf_order_key(float x)
{
    const uint32_t u = kvf_float_bits(x + 0.0f);
    return u >> 31 ? ~u : u | 0x80000000u;
}

#endif
