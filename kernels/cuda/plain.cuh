/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CUDA_PLAIN_CUH
#define KVF_KERNELS_CUDA_PLAIN_CUH

/*
 * Attention in fp32 without matrix products: the parts that decode and prefill share.
 *
 * Knows logits in shared memory, not where they come from. A block of KVF_PLAIN_THREADS
 * threads serves KVF_PLAIN_QUERIES queries and takes KVF_PLAIN_TOKENS tokens at a time;
 * KVF_PLAIN_PARTS threads keep the maximum of a query, each with a part of its sum, and item i of a
 * thread is four channels of a query. Plain, with few barriers: for tests and for comparison, no
 * bound claimed. The order of all sums is fixed.
 */

#include "tile.cuh"

#define KVF_PLAIN_THREADS 128u
#define KVF_PLAIN_QUERIES 16u
#define KVF_PLAIN_TOKENS  128u
#define KVF_PLAIN_PARTS   (KVF_PLAIN_THREADS / KVF_PLAIN_QUERIES)
#define KVF_PLAIN_ITEMS   (KVF_PLAIN_QUERIES * KVF_GPU_HEAD_DIM_MAX / 4 / KVF_PLAIN_THREADS)

typedef struct kvf_plain_shared {
    float s[KVF_PLAIN_QUERIES][KVF_PLAIN_TOKENS]; /* logits in units of ln 2, then weights */
    float part[KVF_PLAIN_QUERIES][KVF_PLAIN_PARTS];
    float factor[KVF_PLAIN_QUERIES];
} kvf_plain_shared;

/* Held by a thread: of query threadIdx.x / KVF_PLAIN_PARTS, and the channels of its items. */
typedef struct kvf_plain_sums {
    float top;
    float sum; /* of tokens threadIdx.x % KVF_PLAIN_PARTS + n * KVF_PLAIN_PARTS */
    float4 o[KVF_PLAIN_ITEMS];
} kvf_plain_sums;

/* q.k in four running sums, added in order. 16-byte aligned. */
static __device__ __forceinline__ float kvf_dot(const float *q, const float *k, uint32_t head_dim)
{
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint32_t d = 0; d < head_dim; d += 4) {
        const float4 x = *(const float4 *)(q + d), y = *(const float4 *)(k + d);
        sum.x += x.x * y.x;
        sum.y += x.y * y.y;
        sum.z += x.z * y.z;
        sum.w += x.w * y.w;
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

static __device__ __forceinline__ void kvf_plain_begin(kvf_plain_sums *r)
{
    r->top = -INFINITY;
    r->sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < KVF_PLAIN_ITEMS; i++)
        r->o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

/* Logits of `queries` queries become weights; factor is what older sums are worth. Barriers: all
 * logits are there before, weights are read after another one. */
static __device__ __forceinline__ void kvf_plain_soften(kvf_plain_shared *state, kvf_plain_sums *r,
                                                        uint32_t queries)
{
    const uint32_t query = threadIdx.x / KVF_PLAIN_PARTS, part = threadIdx.x % KVF_PLAIN_PARTS;
    float top = -INFINITY;
    for (uint32_t t = part; t < KVF_PLAIN_TOKENS && query < queries; t += KVF_PLAIN_PARTS)
        top = fmaxf(top, state->s[query][t]);
    state->part[query][part] = top;
    __syncthreads();
    if (query >= queries)
        return;
    top = r->top;
    for (uint32_t i = 0; i < KVF_PLAIN_PARTS; i++)
        top = fmaxf(top, state->part[query][i]);
    const float base = kvf_finite_top(top), factor = kvf_exp2(r->top - base);
    r->sum *= factor;
    r->top = top;
    for (uint32_t t = part; t < KVF_PLAIN_TOKENS; t += KVF_PLAIN_PARTS) {
        state->s[query][t] = kvf_exp2(state->s[query][t] - base);
        r->sum += state->s[query][t];
    }
    if (part == 0)
        state->factor[query] = factor;
}

/* Behind the last use of factor and a barrier: factor becomes 1 / sum, in every query. Returns the
 * logarithm of the sum; of use to the first thread of a query. */
static __device__ __forceinline__ float kvf_plain_end(kvf_plain_shared *state, kvf_plain_sums *r)
{
    const uint32_t query = threadIdx.x / KVF_PLAIN_PARTS, part = threadIdx.x % KVF_PLAIN_PARTS;
    float sum = 0.0f;
    state->part[query][part] = r->sum;
    __syncthreads();
    for (uint32_t i = 0; i < KVF_PLAIN_PARTS; i++)
        sum += state->part[query][i];
    const bool any = !(sum <= 0.0f);
    if (part == 0)
        state->factor[query] = any ? 1.0f / sum : 0.0f;
    __syncthreads();
    return any ? r->top * KVF_CUDA_LN2 + logf(sum) : -INFINITY;
}

#endif
