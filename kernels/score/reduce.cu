/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of query heads into scores of lists, on the GPU.
 *
 * Knows nothing of groups or layers. MAX and SUM: a thread per page, grid (pages_max / 256,
 * outputs), heads in order. MEAN_SOFTMAX: one block per output, of 1 to 32 warps by the host-known
 * size heads * pages_max. The heads are cut into 32 / heads parts each; a warp finds the maximum,
 * then the sum of the exponentials of its part (reads two and three come from the first-level
 * cache), one barrier, the parts are put together in order, one barrier, and every thread writes
 * the mean of its pages.
 *
 * Bound: 4 * (heads + 1) bytes and, for MEAN_SOFTMAX, 2 * heads exponentials per page; 16
 * exponentials per clock of one multiprocessor: 4096 pages of 4 heads take 2048 clocks of them. One
 * block per output is enough from a few sequences on; for a single one of a million tokens it is
 * not, and costs about ten times that.
 *
 * Exactness: fp32 sums in an order that depends on heads, pages and pages_max only; exponentials to
 * 2 units in the last place. NaN counts as -infinity and +infinity as the largest float.
 */

#include <float.h>
#include <math.h>

#include "cuda_kernels.h"

#include "cuda/tile.cuh"
#include "cuda/words.cuh"

#define FOLD_THREADS 256u
#define WARPS_MAX    32u
#define WARP_SCORES  512u /* at least, before another warp pays */
#define LOG2E        1.4426950408889634f

static __device__ __forceinline__ float tame(float x)
{
    return x > FLT_MAX ? FLT_MAX : x == x ? x : -INFINITY;
}

/* A score, scaled and capped. */
static __device__ __forceinline__ float logit(const kvf_reduce_args &a, float score)
{
    return kvf_cap_logit(score * a.scale, a.cap);
}

/* e^(logit of x - logit of top). */
template <bool CAPPED>
static __device__ __forceinline__ float weight_of(const kvf_reduce_args &a, float x, float top)
{
    return CAPPED ? exp2f((logit(a, x) - logit(a, top)) * LOG2E)
                  : exp2f((x - top) * (a.scale * LOG2E));
}

static __global__ void __launch_bounds__(FOLD_THREADS)
    reduce_heads(const __grid_constant__ kvf_reduce_args a)
{
    const uint32_t page = blockIdx.x * FOLD_THREADS + threadIdx.x, output = blockIdx.y;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (page >= a.pages[output])
        return;
    const float *scores = a.scores + (size_t)output * a.heads * a.pages_max + page;
    float x = 0.0f;
    for (uint32_t r = 0; r < a.heads; r++) {
        float y = tame(scores[(size_t)r * a.pages_max]);
        if (a.cap > 0.0f && a.kind == KVF_GROUP_SUM)
            y = logit(a, y);
        x = r == 0 ? y : a.kind == KVF_GROUP_SUM ? x + y : fmaxf(x, y);
    }
    a.out[(size_t)output * a.pages_max + page] = x;
}

/* Maximum, and sum of weights beside it, of part of a head; {-inf, 0} if nothing counts. */
struct weight {
    float top;
    float sum;
};

template <bool CAPPED>
static __device__ weight weigh(const kvf_reduce_args &a, const float *scores, uint32_t begin,
                               uint32_t end)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    weight w = {-INFINITY, 0.0f};
#pragma unroll 4
    for (uint32_t p = begin + lane; p < end; p += KVF_WARP_LANES)
        w.top = fmaxf(w.top, tame(scores[p]));
    for (uint32_t step = KVF_WARP_LANES / 2; step; step /= 2)
        w.top = fmaxf(w.top, __shfl_xor_sync(KVF_FULL_WARP, w.top, (int)step));
    if (w.top == -INFINITY)
        return w;
#pragma unroll 4
    for (uint32_t p = begin + lane; p < end; p += KVF_WARP_LANES)
        w.sum += weight_of<CAPPED>(a, tame(scores[p]), w.top);
    for (uint32_t step = KVF_WARP_LANES / 2; step; step /= 2)
        w.sum += __shfl_xor_sync(KVF_FULL_WARP, w.sum, (int)step);
    return w;
}

/* The parts of a head, in order, as {maximum, 1 / (sum * heads)}; {0, 0} for a head without scores.
 */
template <bool CAPPED>
static __device__ weight share_of_head(const kvf_reduce_args &a, const weight *parts,
                                       uint32_t count)
{
    weight all = {-INFINITY, 0.0f};
    for (uint32_t i = 0; i < count; i++)
        all.top = fmaxf(all.top, parts[i].top);
    if (all.top == -INFINITY)
        return {0.0f, 0.0f};
    for (uint32_t i = 0; i < count; i++)
        if (parts[i].top != -INFINITY)
            all.sum = fmaf(parts[i].sum, weight_of<CAPPED>(a, parts[i].top, all.top), all.sum);
    return {all.top, 1.0f / (all.sum * (float)a.heads)};
}

/* Parts that each head is cut into. */
KVF_INLINE uint32_t parts_of(uint32_t heads)
{
    return kvf_max_u32(1, WARPS_MAX / heads);
}

template <bool CAPPED>
static __global__ void __launch_bounds__(WARPS_MAX *KVF_WARP_LANES)
    mean_softmax(const __grid_constant__ kvf_reduce_args a)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, warps = blockDim.x / KVF_WARP_LANES;
    const uint32_t output = blockIdx.x, count = parts_of(a.heads);
    const float *scores = a.scores + (size_t)output * a.heads * a.pages_max;
    float *out = a.out + (size_t)output * a.pages_max;
    weight *parts = (weight *)kvf_shared(), *shares = parts + (size_t)a.heads * count;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const uint32_t pages = a.pages[output];
    const uint32_t part = (uint32_t)kvf_round_up(kvf_div_ceil_u32(pages, count), KVF_WARP_LANES);
    for (uint32_t i = warp; i < a.heads * count; i += warps) {
        const uint32_t begin = kvf_min_u32(pages, i % count * part);
        const weight w = weigh<CAPPED>(a, scores + (size_t)(i / count) * a.pages_max, begin,
                                       kvf_min_u32(pages, begin + part));
        if (threadIdx.x % KVF_WARP_LANES == 0)
            parts[i] = w;
    }
    __syncthreads();
    for (uint32_t r = threadIdx.x; r < a.heads; r += blockDim.x)
        shares[r] = share_of_head<CAPPED>(a, parts + (size_t)r * count, count);
    __syncthreads();
    for (uint32_t p = threadIdx.x; p < pages; p += blockDim.x) {
        float mean = 0.0f, top = -INFINITY;
#pragma unroll 4
        for (uint32_t r = 0; r < a.heads; r++) {
            const float x = tame(scores[(size_t)r * a.pages_max + p]);
            top = fmaxf(top, x);
            mean = fmaf(weight_of<CAPPED>(a, x, shares[r].top), shares[r].sum, mean);
        }
        out[p] = top == -INFINITY ? -INFINITY : mean;
    }
}

extern "C" int kvf_reduce_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_reduce_args *a = (const kvf_reduce_args *)args;
    if (a->outputs == 0 || a->pages_max == 0)
        return cudaSuccess;
    if (a->kind != KVF_GROUP_MEAN_SOFTMAX)
        return kvf_cuda_launch_early<reduce_heads>(
            dim3(kvf_div_ceil_u32(a->pages_max, FOLD_THREADS), a->outputs), dim3(FOLD_THREADS), 0,
            (cudaStream_t)stream, *a);
    const uint64_t scores = (uint64_t)a->heads * a->pages_max;
    const uint32_t warps = scores >= (uint64_t)WARPS_MAX * WARP_SCORES
                               ? WARPS_MAX
                               : 1 + (uint32_t)(scores / WARP_SCORES);
    const dim3 grid(a->outputs), block(kvf_min_u32(warps, WARPS_MAX) * KVF_WARP_LANES);
    const size_t shared = (size_t)a->heads * (parts_of(a->heads) + 1) * sizeof(weight);
    if (a->cap > 0.0f)
        return kvf_cuda_launch_early<mean_softmax<true>>(grid, block, shared, (cudaStream_t)stream,
                                                         *a);
    return kvf_cuda_launch_early<mean_softmax<false>>(grid, block, shared, (cudaStream_t)stream,
                                                      *a);
}
