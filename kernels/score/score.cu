/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of pages on the GPU, by tensor cores.
 *
 * Knows nothing of candidates. With q+ = max(q, 0) and q- = min(q, 0), a box scores hi . q+ + lo .
 * q-, so the boxes of a list times the queries of its group is one matrix product in which the
 * digests are read once, whatever the group. A block is 4 warps and KVF_SCORE_PAGES pages of one
 * list, the grid is (ceil(pages_max / KVF_SCORE_PAGES), lists); blocks past the end of a list leave
 * at once. A warp takes 16 boxes at a time: the lines of A are boxes, loaded from memory straight
 * into fragments, 16 bytes per lane and load, up to 16 loads in flight per lane; the columns of B
 * are query heads, kept in shared memory. Which channel is which k of the product is free as long
 * as A and B agree, so lane c of a line takes channels 8c .. 8c + 7 of every 32. A query in fp16
 * (fp32) is the sum of two (three) bf16 numbers, exactly, unless it is subnormal.
 *
 * Bound: one read of the digests: subs * 4 * head_dim bytes per page, and 4 * group written. At
 * head_dim 128, 8 KiB per 16 boxes take 16 loads, 8 shared loads of 512 bytes and 16 products of
 * 16 x 8 x 16 per 8 heads (fp16: twice, fp32: three times as many). With 4 blocks on a
 * multiprocessor 16 warps have up to 128 KiB in flight.
 *
 * Exactness: products of bf16 are exact in fp32; they are added in fp32 by the tensor core, in an
 * order that depends on nothing but the shape. An empty box has lo = +inf; its sum may be anything
 * and is replaced.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/words.cuh"

#define THREADS 128u
#define WARPS   (THREADS / KVF_WARP_LANES)
#define BOXES   16u /* lines of a product */
#define HEADS   8u  /* columns of a product */
#define SPAN    32u /* channels that a warp loads at once: two products of 16 */
#define SPANS   4u  /* in flight */

/* bf16 numbers whose sum is an element. */
template <typename T> struct parts;
template <> struct parts<kvf_bf16> {
    static constexpr uint32_t count = 1;
};
template <> struct parts<kvf_half> {
    static constexpr uint32_t count = 2;
};
template <> struct parts<float> {
    static constexpr uint32_t count = 3;
};

/* A lane's part of B for one span, part and 8 heads: {b0, b1} of both products. */
KVF_INLINE uint32_t fragments(uint32_t head_dim, uint32_t parts_count, uint32_t head_blocks)
{
    return kvf_div_ceil_u32(head_dim, SPAN) * 2 * parts_count * head_blocks;
}

/* Fragments of q, in the order [span][hi, lo][part][head block][lane]. */
template <typename T>
static __device__ void prepare_queries(const kvf_score_args &a, uint4 *to, uint32_t list,
                                       uint32_t head_blocks)
{
    constexpr uint32_t n = parts<T>::count;
    const uint32_t all = fragments(a.shape.head_dim, n, head_blocks) / n * KVF_WARP_LANES;
    const T *q = (const T *)a.q + ((size_t)list * a.group + a.sub.first) * a.shape.head_dim;
    for (uint32_t i = threadIdx.x; i < all; i += THREADS) {
        const uint32_t lane = i % KVF_WARP_LANES, block = i / KVF_WARP_LANES % head_blocks;
        const uint32_t side = i / KVF_WARP_LANES / head_blocks % 2;
        const uint32_t span = i / KVF_WARP_LANES / head_blocks / 2;
        const uint32_t head = block * HEADS + lane / 4, d = span * SPAN + lane % 4 * 8;
        uint32_t bits[n][4] = {};
        if (head < a.sub.count && d < a.shape.head_dim)
            for (uint32_t k = 0; k < 8; k++) {
                float x = kvf_to_float(q[(size_t)head * a.shape.head_dim + d + k]);
                x = (side == 0) == (x < 0.0f) ? 0.0f : x;
#pragma unroll
                for (uint32_t part = 0; part < n; part++) {
                    const uint16_t h = kvf_bf16_from_float(x);
                    bits[part][k / 2] |= (uint32_t)h << (k % 2 * 16);
                    x = (h & 0x7f80u) == 0x7f80u ? 0.0f : x - kvf_bf16_to_float(h);
                }
            }
#pragma unroll
        for (uint32_t part = 0; part < n; part++)
            to[(((span * 2 + side) * n + part) * head_blocks + block) * KVF_WARP_LANES + lane] =
                make_uint4(bits[part][0], bits[part][1], bits[part][2], bits[part][3]);
    }
}

/* Two lines of A, those of the lane, for SPANS spans: hi and lo. */
struct loads {
    uint4 hi[SPANS][2];
    uint4 lo[SPANS][2];
};

static __device__ __forceinline__ void load_spans(loads *x, const char *first, const char *second,
                                                  uint32_t span, uint32_t head_dim)
{
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (uint32_t s = 0; s < SPANS; s++) {
        const uint32_t d = (span + s) * SPAN + threadIdx.x % 4 * 8;
        const bool is_there = d < head_dim;
        x->hi[s][0] = is_there ? kvf_load_once(first + (head_dim + d) * 2) : zero;
        x->hi[s][1] = is_there ? kvf_load_once(second + (head_dim + d) * 2) : zero;
        x->lo[s][0] = is_there ? kvf_load_once(first + d * 2) : zero;
        x->lo[s][1] = is_there ? kvf_load_once(second + d * 2) : zero;
    }
}

/* sum += boxes . queries of one span and side; `b` is this lane's first fragment of them. */
template <uint32_t N, uint32_t HEAD_BLOCKS>
static __device__ __forceinline__ void multiply(float sum[HEAD_BLOCKS][4], const uint4 boxes[2],
                                                const uint4 *b)
{
    const uint32_t near[4] = {boxes[0].x, boxes[1].x, boxes[0].y, boxes[1].y};
    const uint32_t far[4] = {boxes[0].z, boxes[1].z, boxes[0].w, boxes[1].w};
#pragma unroll
    for (uint32_t part = 0; part < N; part++)
#pragma unroll
        for (uint32_t h = 0; h < HEAD_BLOCKS; h++) {
            const uint4 q = b[(part * HEAD_BLOCKS + h) * KVF_WARP_LANES];
            const uint32_t first[2] = {q.x, q.y}, second[2] = {q.z, q.w};
            kvf_mma(sum[h], near, first, kvf_bf16());
            kvf_mma(sum[h], far, second, kvf_bf16());
        }
}

/* The lane's four sums per head block are (box, head 2c), (box, 2c + 1), (box + 8, 2c), ...: the
 * maximum over the boxes of a page, then one store per page and head. */
template <uint32_t HEAD_BLOCKS>
static __device__ __forceinline__ void
store_scores(const kvf_score_args &a, uint32_t list, uint32_t box, uint32_t boxes,
             float sum[HEAD_BLOCKS][4], const bool is_empty[2])
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    float *out = a.scores + ((size_t)list * a.group + a.sub.first) * a.pages_max;
#pragma unroll
    for (uint32_t h = 0; h < HEAD_BLOCKS; h++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t own = box + lane / 4 + i / 2 * 8;
            const uint32_t head = h * HEADS + lane % 4 * 2 + i % 2;
            /* fmaxf drops a NaN. */
            float best = own >= boxes || is_empty[i / 2] ? -INFINITY : fmaxf(sum[h][i], -INFINITY);
            for (uint32_t step = 1; step < a.subs; step *= 2)
                best = fmaxf(best, __shfl_xor_sync(KVF_FULL_WARP, best, (int)(step * 4)));
            if (own < boxes && own % a.subs == 0 && head < a.sub.count)
                out[(size_t)head * a.pages_max + own / a.subs] = best;
        }
}

static __device__ __forceinline__ const char *box_at(const kvf_score_args &a, uint32_t list,
                                                     uint32_t box)
{
    return (const char *)kvf_score_digest(&a, list, box / a.subs) +
           box % a.subs * 4 * (size_t)a.shape.head_dim;
}

template <typename T, uint32_t HEAD_BLOCKS>
static __global__ void __launch_bounds__(THREADS, HEAD_BLOCKS == 1 ? 4 : 3)
    score_pages(const __grid_constant__ kvf_score_args a)
{
    constexpr uint32_t n = parts<T>::count;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t list = blockIdx.y, head_dim = a.shape.head_dim;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const uint32_t pages = a.pages[list], first_page = blockIdx.x * KVF_SCORE_PAGES;
    if (first_page >= pages)
        return;
    const uint32_t boxes = pages * a.subs;
    const uint32_t end = kvf_min_u32(pages, first_page + KVF_SCORE_PAGES) * a.subs;
    const uint64_t *bits = a.bits ? a.bits[list] : NULL;
    uint4 *queries = (uint4 *)kvf_shared();
    loads x;
    for (uint32_t turn = warp;; turn += WARPS) {
        const uint32_t box = first_page * a.subs + turn * BOXES;
        if (turn != warp && box >= end)
            break;
        /* Boxes past the end repeat the last one, and are not stored. */
        const uint32_t own = box + lane / 4;
        const char *first = box_at(a, list, kvf_min_u32(own, boxes - 1));
        const char *second = box_at(a, list, kvf_min_u32(own + 8, boxes - 1));
        load_spans(&x, first, second, 0, head_dim);
        if (turn == warp) { /* while the first boxes are on their way */
            prepare_queries<T>(a, queries, list, HEAD_BLOCKS);
            __syncthreads();
            if (box >= end)
                break;
        }
        bool is_empty[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const bool mine = kvf_bf16_to_float((uint16_t)x.lo[0][i].x) >
                              kvf_bf16_to_float((uint16_t)x.hi[0][i].x);
            is_empty[i] = __shfl_sync(KVF_FULL_WARP, (int)mine, (int)(lane & ~3u)) != 0 ||
                          !kvf_score_counts(&a, bits, kvf_min_u32(own + 8 * i, boxes - 1) / a.subs);
        }
        float sum[HEAD_BLOCKS][4] = {};
        for (uint32_t span = 0; span * SPAN < head_dim; span += SPANS) {
            if (span)
                load_spans(&x, first, second, span, head_dim);
#pragma unroll
            for (uint32_t s = 0; s < SPANS; s++) {
                if ((span + s) * SPAN >= head_dim)
                    break;
                const uint4 *b =
                    queries + (size_t)(span + s) * 2 * n * HEAD_BLOCKS * KVF_WARP_LANES;
                multiply<n, HEAD_BLOCKS>(sum, x.hi[s], b + lane);
                multiply<n, HEAD_BLOCKS>(sum, x.lo[s], b + n * HEAD_BLOCKS * KVF_WARP_LANES + lane);
            }
        }
        store_scores<HEAD_BLOCKS>(a, list, box, boxes, sum, is_empty);
    }
}

template <typename T> static int launch(const kvf_score_args *a, cudaStream_t stream)
{
    const uint32_t head_blocks = a->sub.count > HEADS ? 2 : 1;
    const dim3 grid(kvf_div_ceil_u32(a->pages_max, KVF_SCORE_PAGES), a->lists);
    const size_t shared =
        fragments(a->shape.head_dim, parts<T>::count, head_blocks) * KVF_WARP_LANES * sizeof(uint4);
    if (head_blocks == 1)
        return kvf_cuda_launch_early<score_pages<T, 1>>(grid, dim3(THREADS), shared, stream, *a);
    return kvf_cuda_launch_early<score_pages<T, 2>>(grid, dim3(THREADS), shared, stream, *a);
}

static int launch_any(const kvf_score_args *a, cudaStream_t stream)
{
    switch (a->shape.dtype) {
    case KVF_BF16:
        return launch<kvf_bf16>(a, stream);
    case KVF_FP16:
        return launch<kvf_half>(a, stream);
    default:
        return launch<float>(a, stream);
    }
}

extern "C" int kvf_score_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_score_args *a = (const kvf_score_args *)args;
    const kvf_subgroup whole = kvf_subgroup_whole(a->sub, a->group);
    int error = cudaSuccess;
    for (uint32_t at = 0; at < whole.count && error == cudaSuccess; at += KVF_SUBGROUP_HEADS) {
        kvf_score_args one = *a;
        one.sub = kvf_subgroup_at(whole, at);
        error = launch_any(&one, (cudaStream_t)stream);
    }
    return error;
}
