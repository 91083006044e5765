/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_ROW_OPS_CUH
#define KVF_MODEL_ROW_OPS_CUH

/*
 * Norms of rows and of heads inside a kernel: for the launches of row_ops.cu, and for products that
 * end with them.
 *
 * A row's bits are the same whoever computes it: the order of its sums depends on its width alone.
 */

#include "row_ops.h"

#include "cuda/cuda.cuh"

#define KVF_ROW_THREADS 256u
#define KVF_ROW_WARPS   (KVF_ROW_THREADS / KVF_WARP_LANES)

static __device__ __forceinline__ float kvf_warp_sum(float x)
{
    for (uint32_t step = 16; step > 0; step >>= 1)
        x += __shfl_xor_sync(KVF_FULL_WARP, x, (int)step);
    return x;
}

/* Rows first to first + count - 1, at most R, by a block of KVF_ROW_THREADS; what is read of all
 * rows is on its way together. partial: shared memory, [R, KVF_ROW_WARPS]. */
template <typename T, uint32_t R>
static __device__ __forceinline__ void kvf_norm_rows(const kvf_row_norm_args &a, size_t first,
                                                     uint32_t count, float *partial)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const float *x = a.x + first * a.width;
    T *y = (T *)a.y + first * a.width;
    float sum[R] = {};
    for (uint32_t i = threadIdx.x; i < a.width; i += KVF_ROW_THREADS) {
#pragma unroll
        for (uint32_t r = 0; r < R; r++) {
            const float value = r < count ? x[(size_t)r * a.width + i] : 0.0f;
            sum[r] += value * value;
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < R; r++) {
        sum[r] = kvf_warp_sum(sum[r]);
        if (lane == 0)
            partial[r * KVF_ROW_WARPS + warp] = sum[r];
    }
    __syncthreads();
#pragma unroll
    for (uint32_t r = 0; r < R; r++) {
        float all = 0.0f;
        for (uint32_t w = 0; w < KVF_ROW_WARPS; w++)
            all += partial[r * KVF_ROW_WARPS + w];
        sum[r] = 1.0f / sqrtf(all / (float)a.width + a.eps);
    }
    for (uint32_t i = threadIdx.x; i < a.width; i += KVF_ROW_THREADS) {
        const float weight = a.weight[i];
#pragma unroll
        for (uint32_t r = 0; r < R; r++)
            if (r < count)
                y[(size_t)r * a.width + i] =
                    kvf_from_float<T>(x[(size_t)r * a.width + i] * sum[r] * weight);
    }
}

/* Where a head of a row comes from and goes to. */
template <typename T> struct kvf_head_place {
    const float *from;
    const float *bias;
    const float *norm;
    T *to;
    uint32_t is_value;
};

template <typename T>
static __device__ __forceinline__ kvf_head_place<T> kvf_find_head(const kvf_row_rotate_args &a,
                                                                  size_t row, uint32_t head)
{
    const uint32_t all = a.query_heads + 2 * a.kv_heads;
    kvf_head_place<T> p = {};
    p.from = a.qkv + (row * all + head) * a.head_dim;
    p.bias = a.bias ? a.bias + (size_t)head * a.head_dim : nullptr;
    if (head < a.query_heads) {
        p.norm = a.query_norm;
        p.to = (T *)a.q + (row * a.query_heads + head) * a.head_dim;
        return p;
    }
    head -= a.query_heads;
    p.is_value = head >= a.kv_heads;
    p.norm = p.is_value ? nullptr : a.key_norm;
    p.to = (T *)(p.is_value ? a.v : a.k) + (row * a.kv_heads + head % a.kv_heads) * a.head_dim;
    return p;
}

/* One head of a row by a warp; a lane holds the pairs lane, lane + 32, ... */
template <typename T>
static __device__ __forceinline__ void kvf_rotate_head(const kvf_row_rotate_args &a, size_t row,
                                                       uint32_t head)
{
    const uint32_t pairs = a.head_dim / 2, lane = threadIdx.x % KVF_WARP_LANES;
    const kvf_head_place<T> p = kvf_find_head<T>(a, row, head);
    float scale = 1.0f;
    if (p.norm) {
        float sum = 0.0f;
        for (uint32_t i = lane; i < a.head_dim; i += KVF_WARP_LANES) {
            const float x = p.from[i] + (p.bias ? p.bias[i] : 0.0f);
            sum += x * x;
        }
        scale = 1.0f / sqrtf(kvf_warp_sum(sum) / (float)a.head_dim + a.eps);
    }
    for (uint32_t i = lane; i < pairs; i += KVF_WARP_LANES) {
        float x = p.from[i] + (p.bias ? p.bias[i] : 0.0f);
        float y = p.from[i + pairs] + (p.bias ? p.bias[i + pairs] : 0.0f);
        if (p.norm) {
            x = x * scale * p.norm[i];
            y = y * scale * p.norm[i + pairs];
        }
        const float c = p.is_value ? 1.0f : a.cosine[row * pairs + i];
        const float s = p.is_value ? 0.0f : a.sine[row * pairs + i];
        p.to[i] = kvf_from_float<T>(x * c - y * s);
        p.to[i + pairs] = kvf_from_float<T>(y * c + x * s);
    }
}

#endif
