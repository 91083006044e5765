/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Digests of pages on the GPU.
 *
 * Knows nothing of where digests live or which tokens are static. One warp per page, four warps per
 * block, ceil(jobs / 4) blocks. A lane reads 16 bytes of a key; the tokens of a box are divided
 * into 32 / (key bytes / 16) runs of consecutive tokens, one per group of lanes (bf16: 4 at
 * head_dim 64, 3 at 80, 2 at 96 and 128, 1 at 192 and 256), LOADS tokens of each in flight, and the
 * runs are put together in token order. Nothing is shared between warps and there is no barrier.
 *
 * Bound: one read of the keys and one write of the digest, 8 KiB + 512 bytes for a page of 32 x 128
 * in bf16; in that case 16 loads of 16 bytes per lane, 8 in flight, so that a decode step, which
 * seals few pages, takes two round trips to memory. cuboid_mean reads the keys a second time, out
 * of the cache.
 *
 * Exactness: minmax has the bits of digest_ref.c, because among equal values the first token's is
 * kept. The means are fp32 sums of terms that are scaled first, so that they cannot overflow, in a
 * fixed order, then one rounding to bf16.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/words.cuh"

#define WARPS 4u
#define LOADS 8u

/* A lane's part of one box: `elements` channels. */
template <typename T> struct channels {
    float lo[kvf_word<T>::elements];
    float hi[kvf_word<T>::elements];
};

/* The tokens of a lane: first .. end - 1, and of each the 16 bytes at `offset`. */
struct run {
    const char *keys;
    size_t token_bytes; /* from one to the next */
    uint64_t live;
    uint32_t first;
    uint32_t end;
};

/* use(x) for every live token in token order; LOADS tokens are on their way at a time. */
template <typename T, typename F>
static __device__ __forceinline__ void for_each_token(const run &r, F use)
{
    for (uint32_t t = r.first; t < r.end; t += LOADS) {
        uint4 word[LOADS];
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++)
            if (t + i < r.end && (r.live >> (t + i) & 1))
                word[i] = *(const uint4 *)(r.keys + (t + i) * r.token_bytes);
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
            float x[kvf_word<T>::elements];
            if (t + i < r.end && (r.live >> (t + i) & 1)) {
                kvf_widen_word<T>(word[i], x);
                use(x);
            }
        }
    }
}

/* Put the runs together: afterwards every lane has the box of its channels, the first token's value
 * where several are equal. `chunks` lanes make a run. */
template <typename T>
static __device__ __forceinline__ void merge_boxes(channels<T> *box, uint32_t chunks, uint32_t runs)
{
    const uint32_t at = threadIdx.x % KVF_WARP_LANES % chunks;
#pragma unroll
    for (uint32_t i = 0; i < kvf_word<T>::elements; i++) {
        float lo = INFINITY, hi = -INFINITY;
        for (uint32_t k = 0; k < runs; k++) {
            const float x = __shfl_sync(KVF_FULL_WARP, box->lo[i], (int)(k * chunks + at));
            const float y = __shfl_sync(KVF_FULL_WARP, box->hi[i], (int)(k * chunks + at));
            lo = x < lo ? x : lo;
            hi = y > hi ? y : hi;
        }
        box->lo[i] = lo;
        box->hi[i] = hi;
    }
}

template <typename T>
static __device__ __forceinline__ void merge_sums(float *sum, uint32_t chunks, uint32_t runs)
{
    const uint32_t at = threadIdx.x % KVF_WARP_LANES % chunks;
#pragma unroll
    for (uint32_t i = 0; i < kvf_word<T>::elements; i++) {
        float all = 0.0f;
        for (uint32_t k = 0; k < runs; k++)
            all += __shfl_sync(KVF_FULL_WARP, sum[i], (int)(k * chunks + at));
        sum[i] = all;
    }
}

template <typename T>
static __device__ __forceinline__ void store_channels(uint16_t *to, const uint16_t *bits)
{
    if (kvf_word<T>::elements == 8)
        *(uint4 *)to = make_uint4(
            kvf_pair_bits(bits[0], bits[1]), kvf_pair_bits(bits[2], bits[3]),
            kvf_pair_bits(bits[4 % kvf_word<T>::elements], bits[5 % kvf_word<T>::elements]),
            kvf_pair_bits(bits[6 % kvf_word<T>::elements], bits[7 % kvf_word<T>::elements]));
    else
        *(uint2 *)to = make_uint2(kvf_pair_bits(bits[0], bits[1]), kvf_pair_bits(bits[2], bits[3]));
}

/* Channels of one box; all lanes of the warp call it together. */
template <typename T>
static __device__ __forceinline__ void build_box(kvf_digest_kind kind, const run &r, uint64_t live,
                                                 uint32_t chunks, uint32_t runs, channels<T> *box)
{
    constexpr uint32_t n = kvf_word<T>::elements;
    const float share = live ? 1.0f / (float)__popcll(live) : 0.0f;
    float sum[n], centre[n];
#pragma unroll
    for (uint32_t i = 0; i < n; i++) {
        box->lo[i] = INFINITY;
        box->hi[i] = -INFINITY;
        sum[i] = 0.0f;
    }
    if (kind == KVF_DIGEST_MEAN && live) {
        for_each_token<T>(r, [&](const float *x) {
#pragma unroll
            for (uint32_t i = 0; i < n; i++)
                sum[i] = fmaf(x[i], share, sum[i]);
        });
        merge_sums<T>(sum, chunks, runs);
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            box->lo[i] = box->hi[i] = sum[i];
        return;
    }
    for_each_token<T>(r, [&](const float *x) {
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            box->lo[i] = x[i] < box->lo[i] ? x[i] : box->lo[i];
            box->hi[i] = x[i] > box->hi[i] ? x[i] : box->hi[i];
        }
    });
    merge_boxes<T>(box, chunks, runs);
    if (kind != KVF_DIGEST_CUBOID_MEAN || !live)
        return;
#pragma unroll
    for (uint32_t i = 0; i < n; i++)
        centre[i] = fmaf(0.5f, box->lo[i], 0.5f * box->hi[i]);
    for_each_token<T>(r, [&](const float *x) {
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            sum[i] = fmaf(fabsf(x[i] - centre[i]), share, sum[i]);
    });
    merge_sums<T>(sum, chunks, runs);
#pragma unroll
    for (uint32_t i = 0; i < n; i++) {
        box->lo[i] = centre[i] - sum[i];
        box->hi[i] = centre[i] + sum[i];
    }
}

/* LANES: at most as many have a token, so that those of a warp take equally many turns. */
template <typename T, uint32_t LANES>
static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES)
    digest_pages(const __grid_constant__ kvf_digest_args a)
{
    constexpr uint32_t n = kvf_word<T>::elements;
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t index = blockIdx.x * WARPS + warp;
    if (index >= a.job_count || !a.jobs[index].page)
        return;
    const kvf_digest_job job = a.jobs[index];
    const uint32_t tokens = a.shape.page_size / a.subs;
    const uint64_t all = kvf_live_bits(job.count, job.skip);
    /* Keys of more words (fp32, head_dim 192 and 256) take a second turn. */
    const uint32_t words = a.shape.head_dim / n;
    const uint32_t chunks = kvf_min_u32(words, LANES), runs = KVF_WARP_LANES / chunks;
    const uint32_t part = kvf_div_ceil_u32(tokens, runs), mine = lane / chunks;
    for (uint32_t sub = 0; sub < a.subs; sub++) {
        const uint64_t live = all & kvf_live_bits(tokens, 0) << (sub * tokens);
        const uint32_t begin = sub * tokens, end = begin + tokens;
        for (uint32_t word = lane % chunks; word < words; word += chunks) {
            const uint32_t first = kvf_min_u32(begin + mine * part, end);
            const run r = {(const char *)job.page + word * (size_t)16, kvf_token_bytes(&a.shape),
                           live, mine < runs ? first : end, kvf_min_u32(first + part, end)};
            channels<T> box;
            uint16_t lo[n], hi[n];
            build_box<T>(a.kind, r, live, chunks, runs, &box);
            const bool outwards = a.kind == KVF_DIGEST_MINMAX || live == 0;
#pragma unroll
            for (uint32_t i = 0; i < n; i++) {
                lo[i] = outwards ? kvf_bf16_down(box.lo[i]) : kvf_bf16_from_float(box.lo[i]);
                hi[i] = outwards ? kvf_bf16_up(box.hi[i]) : kvf_bf16_from_float(box.hi[i]);
            }
            uint16_t *to = (uint16_t *)job.digest + (size_t)sub * 2 * a.shape.head_dim + word * n;
            if (mine == 0)
                store_channels<T>(to, lo);
            if (mine == (runs > 1 ? 1 : 0))
                store_channels<T>(to + a.shape.head_dim, hi);
        }
    }
}

extern "C" int kvf_digest_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_digest_args *a = (const kvf_digest_args *)args;
    const dim3 grid(kvf_div_ceil_u32(a->job_count, WARPS)), block(WARPS * KVF_WARP_LANES);
    switch (a->shape.dtype) {
    case KVF_BF16:
        return kvf_cuda_launch<digest_pages<kvf_bf16, 32>>(grid, block, 0, (cudaStream_t)stream,
                                                           *a);
    case KVF_FP16:
        return kvf_cuda_launch<digest_pages<kvf_half, 32>>(grid, block, 0, (cudaStream_t)stream,
                                                           *a);
    default:
        return a->shape.head_dim == 192
                   ? kvf_cuda_launch<digest_pages<float, 24>>(grid, block, 0, (cudaStream_t)stream,
                                                              *a)
                   : kvf_cuda_launch<digest_pages<float, 32>>(grid, block, 0, (cudaStream_t)stream,
                                                              *a);
    }
}
