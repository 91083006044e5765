/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sparse paged attention over spans, on the GPU; see attend_ref.c for the meaning and attend.cuh
 * for a split in 16-bit types.
 *
 * Knows nothing of pages beyond their address, their live tokens and whether they arrive late.
 * Grid: one block per (list, split). The result of a split depends on its spans and on the shape of
 * the launch alone, never on the pass or on other splits; a split of another pass exits before it
 * writes.
 *
 * Bound: bytes. A chunk of 16 tokens at head_dim 128 is 8 KiB from device memory, 48 matrix
 * products of 16x8x16, 16 matrix loads and 8 exponentials per lane: at 4096 operations per product
 * a fifth of what the tensor cores of an A100 or H100 do while the memory delivers 8 KiB. With the
 * ring full an SM has 48 to 70 KiB on their way per block, so one block alone streams at what one
 * SM can take.
 *
 * attend_step is the same with two things more, in one launch. It brings what is not here: a split
 * has so few tokens that everything it reads is on its way at once, over the link or from device
 * memory, and splits that miss nothing do not wait for those that do. And the block that comes last
 * of a list merges its splits. Bytes: those of attend; what is missed is written once more.
 *
 * Quantized pages have a kernel of their own, attend_quantized.cuh, so exact ones lose nothing to
 * them. Bytes: 4.25 KiB per chunk (k8v8) or 3.4 (k8v4) instead of 8, for 64 or 67 products and,
 * with groups of 8 at most, some 800 or 980 instructions per warp, a third of them to make codes
 * numbers. As a multiprocessor of an H100 issues four instructions a cycle and gets 15 bytes, that
 * is 70% of the time of the bytes (k8v8), or a little more than that (k8v4). A miss costs a round
 * trip to L2 more than through the ring.
 *
 * fp32: plain sums by channel and by query, for tests and for comparison; no bound claimed.
 */

#include "attend.cuh"
#include "attend_quantized.cuh"
#include "cuda_kernels.h"
#include "merge.cuh"
#include "plain.cuh"

/* The split of this block; as kvf_split_get, by all lanes of a warp together. */
static __device__ __forceinline__ bool split_of(const kvf_attend_args *a, kvf_split *out)
{
    const uint32_t splits_max = kvf_div_ceil_u32(a->spans_max, a->split);
    const uint32_t first = blockIdx.x % splits_max * a->split;
    out->list = blockIdx.x / splits_max;
    const uint32_t spans = a->span_count[out->list];
    if (first >= spans)
        return false;
    out->count = kvf_min_u32(a->split, spans - first);
    out->spans = a->spans + (size_t)out->list * a->spans_max + first;
    if (a->pass == KVF_PASS_ALL)
        return true;
    bool fetched = false;
    for (uint32_t i = threadIdx.x % KVF_WARP_LANES; i < out->count; i += KVF_WARP_LANES)
        fetched |= out->spans[i].home != NULL;
    return (__any_sync(KVF_FULL_WARP, fetched) != 0) == (a->pass == KVF_PASS_FETCHED);
}

/* The end of a block that has left its split: the last one of its list merges. */
static __device__ __forceinline__ void finish(const kvf_attend_step_args &s, uint32_t list,
                                              uint32_t value_dim)
{
    const kvf_merge_args merge = kvf_attend_step_merge(&s);
    const uint32_t quads = value_dim / 4;
    const uint32_t splits = kvf_div_ceil_u32(merge.span_count[list], merge.split);
    if (splits && !kvf_arrives_last((uint32_t *)kvf_shared(), &s.arrived[list], splits))
        return;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < s.attend.sub.count * quads; i += blockDim.x)
        kvf_merge_quad(merge, splits, list * merge.group + i / quads, i % quads * 4, value_dim);
}

/* Nobody has a split of a list without spans; its first block says so. */
static __device__ __forceinline__ void finish_empty(const kvf_attend_step_args &s,
                                                    uint32_t value_dim)
{
    const uint32_t splits_max = kvf_div_ceil_u32(s.attend.spans_max, s.attend.split);
    const uint32_t list = blockIdx.x / splits_max;
    if (blockIdx.x % splits_max == 0 && s.attend.span_count[list] == 0)
        finish(s, list, value_dim);
}

/* ---- 16-bit types ---- */

/* Blocks of four warps that registers of a multiprocessor must be enough for: short splits have two
 * warps and twice as many blocks. Later devices have no room for more, or would spill. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define BLOCKS 3
#else
#define BLOCKS 4
#endif

template <typename T, uint32_t D>
static __global__ void __launch_bounds__(ring<D>::warps *KVF_WARP_LANES, D <= 128 ? BLOCKS : 1)
    attend_chunks(const __grid_constant__ kvf_attend_args a)
{
    kvf_split split;
    if (split_of(&a, &split))
        do_chunks<T, D, false>(a, split);
}

template <typename T, uint32_t D>
static __global__ void __launch_bounds__(ring<D>::warps *KVF_WARP_LANES, D <= 128 ? BLOCKS : 1)
    step_chunks(const __grid_constant__ kvf_attend_step_args s)
{
    kvf_split split;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (!split_of(&s.attend, &split)) {
        finish_empty(s, kvf_tile<D>::value_dim);
        return;
    }
    do_chunks<T, D, true>(s.attend, split);
    finish(s, split.list, kvf_tile<D>::value_dim);
}

/* Threads and shared memory of a block. */
template <uint32_t D>
static void chunks_size(const kvf_attend_args *a, uint32_t *threads, size_t *shared)
{
    const uint32_t tokens = kvf_min_u32(a->split, a->spans_max) * a->shape.page_size;
    const uint32_t warps = kvf_min_u32(ring<D>::warps, kvf_div_ceil_u32(tokens, CHUNK));
    const size_t rings =
        query_bytes<D>() + (size_t)warps * ring_slots<D>(a, warps) * ring<D>::slot_bytes;
    const size_t parts = (size_t)warps * part_floats<D>(a->sub.count) * sizeof(float);
    *threads = warps * KVF_WARP_LANES;
    *shared = rings > parts ? rings : parts;
}

template <typename T, uint32_t D>
static cudaError_t launch_chunks(const kvf_attend_args *a, uint32_t blocks, cudaStream_t stream)
{
    uint32_t threads;
    size_t shared;
    chunks_size<D>(a, &threads, &shared);
    return kvf_cuda_launch<attend_chunks<T, D>>(dim3(blocks), dim3(threads), shared, stream, *a);
}

template <typename T, uint32_t D>
static cudaError_t launch_chunks(const kvf_attend_step_args *s, uint32_t blocks,
                                 cudaStream_t stream)
{
    uint32_t threads;
    size_t shared;
    chunks_size<D>(&s->attend, &threads, &shared);
    return kvf_cuda_launch_early<step_chunks<T, D>>(dim3(blocks), dim3(threads), shared, stream,
                                                    *s);
}

/* ---- quantized pages ---- */

/* One kernel for both operations: of attend_step it has `arrived`, and is told to start early. */
template <uint32_t D, bool NIBBLES>
static __global__ void __launch_bounds__(ring<D>::warps *KVF_WARP_LANES)
    quantized_chunks(const __grid_constant__ kvf_attend_step_args s)
{
    const bool is_step = s.arrived != NULL;
    kvf_split split;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (!split_of(&s.attend, &split)) {
        if (is_step)
            finish_empty(s, kvf_tile<D>::value_dim);
        return;
    }
    do_codes<D, NIBBLES>(s.attend, split, is_step);
    if (is_step)
        finish(s, split.list, kvf_tile<D>::value_dim);
}

template <uint32_t D, bool NIBBLES>
static cudaError_t launch_codes(const kvf_attend_step_args *s, uint32_t blocks, cudaStream_t stream)
{
    const kvf_attend_args *a = &s->attend;
    const uint32_t tokens = kvf_min_u32(a->split, a->spans_max) * a->shape.page_size;
    const uint32_t warps = kvf_min_u32(ring<D>::warps, kvf_div_ceil_u32(tokens, CHUNK));
    const uint32_t shared =
        kvf_max_u32(query_bytes<D>() + warps * exact_bytes<D>(a, warps),
                    rotated_bytes<D>(a) + warps * code_bytes<D, NIBBLES>(a, warps));
    const dim3 grid(blocks), block(warps * KVF_WARP_LANES);
    if (s->arrived)
        return kvf_cuda_launch_early<quantized_chunks<D, NIBBLES>>(grid, block, shared, stream, *s);
    return kvf_cuda_launch<quantized_chunks<D, NIBBLES>>(grid, block, shared, stream, *s);
}

static cudaError_t launch_quantized(const kvf_attend_step_args *s, uint32_t blocks,
                                    cudaStream_t stream)
{
    const kvf_shape *shape = &s->attend.shape;
    if (shape->dtype != KVF_BF16)
        return cudaErrorInvalidValue;
#define CASE(d)                                                                                    \
    case d:                                                                                        \
        return shape->pages == KVF_PAGES_K8V4 ? launch_codes<d, true>(s, blocks, stream)           \
                                              : launch_codes<d, false>(s, blocks, stream);
    switch (shape->head_dim) {
        KVF_GPU_QUANTIZED_DIMS(CASE)
    default:
        return cudaErrorInvalidValue;
    }
#undef CASE
}

/* `A`: the arguments of attend, or of attend_step. */
template <typename T, typename A>
static cudaError_t launch_type(const A *a, uint32_t head_dim, uint32_t blocks, cudaStream_t stream)
{
#define CASE(d)                                                                                    \
    case d:                                                                                        \
        return launch_chunks<T, d>(a, blocks, stream);
    switch (head_dim) {
        KVF_GPU_HEAD_DIMS(CASE)
    default:
        return cudaErrorInvalidValue;
    }
#undef CASE
}

/* ---- fp32 ---- */

/* Key of token `token` of the split, or NULL if it does not count. */
static __device__ __forceinline__ const float *plain_key(const kvf_attend_args *a,
                                                         const kvf_split *split, uint32_t token)
{
    const uint32_t page_size = a->shape.page_size;
    const kvf_span *span = &split->spans[token / page_size];
    if (token / page_size >= split->count || !(span_live(span, page_size) >> token % page_size & 1))
        return NULL;
    return (const float *)token_key(a, split, token, (uint32_t)kvf_token_bytes(&a->shape));
}

/* Logits of tokens first .. first + KVF_PLAIN_TOKENS - 1, a token per thread. */
static __device__ __forceinline__ void plain_logits(kvf_plain_shared *state,
                                                    const kvf_attend_args *a,
                                                    const kvf_split *split, uint32_t first)
{
    static_assert(KVF_PLAIN_TOKENS == KVF_PLAIN_THREADS, "a token per thread");
    const uint32_t d = a->shape.head_dim;
    const float unit = a->scale * KVF_CUDA_LOG2E;
    const float *q = (const float *)a->q + (size_t)split->list * a->group * d;
    const float *k = plain_key(a, split, first + threadIdx.x);
    for (uint32_t g = 0; g < a->sub.count; g++) {
        const float s = k ? kvf_times(kvf_dot(q + g * d, k, d), unit) : -INFINITY;
        state->s[g][threadIdx.x] = a->cap > 0.0f ? kvf_cap_logit(s, a->cap * KVF_CUDA_LOG2E) : s;
    }
}

/* Adds weights x values to the channels of this thread. */
static __device__ __forceinline__ void plain_values(const kvf_plain_shared *state,
                                                    const kvf_attend_args *a,
                                                    const kvf_split *split, uint32_t first,
                                                    kvf_plain_sums *r)
{
    const uint32_t quads = kvf_value_dim(&a->shape) / 4, page_size = a->shape.page_size;
    const uint32_t token = a->shape.head_dim + 4 * quads;
    const uint32_t count = kvf_min_u32(KVF_PLAIN_TOKENS, split->count * page_size - first);
#pragma unroll
    for (uint32_t i = 0; i < KVF_PLAIN_ITEMS; i++) {
        const uint32_t at = i * KVF_PLAIN_THREADS + threadIdx.x, query = at / quads;
        if (query >= a->sub.count)
            continue;
        kvf_scale(&r->o[i], state->factor[query]);
        for (uint32_t t = 0; t < count; t++) {
            const float weight = state->s[query][t];
            if (weight == 0.0f)
                continue; /* perhaps there is no such token */
            const float *page = (const float *)split->spans[(first + t) / page_size].page;
            kvf_add_scaled(&r->o[i], weight,
                           page + (first + t) % page_size * token + a->shape.head_dim +
                               at % quads * 4);
        }
    }
}

/* Pages that are not here yet are brought to their place. */
static __device__ __forceinline__ void plain_bring(const kvf_attend_args &a, const kvf_split &split)
{
    const uint32_t words = (uint32_t)kvf_page_bytes(&a.shape) / 16;
    for (uint32_t i = threadIdx.x; i < split.count * words; i += blockDim.x) {
        const kvf_span *span = &split.spans[i / words];
        if (span->home)
            ((uint4 *)(uintptr_t)span->page)[i % words] =
                kvf_load_once((const uint4 *)span->home + i % words);
    }
    __syncthreads();
}

static __device__ __forceinline__ void do_plain(const kvf_attend_args &a, const kvf_split &split)
{
    kvf_plain_shared *state = (kvf_plain_shared *)kvf_shared();
    const uint32_t quads = kvf_value_dim(&a.shape) / 4;
    kvf_plain_sums r;
    kvf_plain_begin(&r);
    for (uint32_t first = 0; first < split.count * a.shape.page_size; first += KVF_PLAIN_TOKENS) {
        __syncthreads();
        plain_logits(state, &a, &split, first);
        __syncthreads();
        kvf_plain_soften(state, &r, a.sub.count);
        __syncthreads();
        plain_values(state, &a, &split, first, &r);
    }
    __syncthreads();
    const float lse = kvf_plain_end(state, &r);
    const size_t out = (size_t)blockIdx.x * a.group;
    if (threadIdx.x % KVF_PLAIN_PARTS == 0 && threadIdx.x / KVF_PLAIN_PARTS < a.sub.count)
        a.partial_lse[out + threadIdx.x / KVF_PLAIN_PARTS] = lse;
#pragma unroll
    for (uint32_t i = 0; i < KVF_PLAIN_ITEMS; i++) {
        const uint32_t at = i * KVF_PLAIN_THREADS + threadIdx.x;
        if (at / quads >= a.sub.count)
            continue;
        kvf_scale(&r.o[i], state->factor[at / quads]);
        *(float4 *)(a.partial_o + (out * quads + at) * 4) = r.o[i];
    }
}

/* Five blocks of a multiprocessor: else the compiler spills to have seven. */
static __global__ void __launch_bounds__(KVF_PLAIN_THREADS, 5)
    attend_plain(const __grid_constant__ kvf_attend_args a)
{
    kvf_split split;
    if (split_of(&a, &split))
        do_plain(a, split);
}

static __global__ void __launch_bounds__(KVF_PLAIN_THREADS)
    step_plain(const __grid_constant__ kvf_attend_step_args s)
{
    kvf_split split;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (!split_of(&s.attend, &split)) {
        finish_empty(s, kvf_value_dim(&s.attend.shape));
        return;
    }
    plain_bring(s.attend, split);
    do_plain(s.attend, split);
    finish(s, split.list, kvf_value_dim(&s.attend.shape));
}

static bool is_valid(const kvf_attend_args *a)
{
    return a->group > 0 && a->group <= KVF_GROUP_MAX_HEADS && a->split > 0;
}

static uint32_t blocks_of(const kvf_attend_args *a)
{
    return a->lists * kvf_div_ceil_u32(a->spans_max, a->split);
}

/* A sub-group, whose head 0 its pointers name: kernels know its number of heads, and what lies from
 * list to list. */
static kvf_attend_args take_subgroup(const kvf_attend_args *a, kvf_subgroup sub)
{
    kvf_attend_args one = *a;
    one.q = kvf_offset(a->q, sub.first * kvf_key_bytes(&a->shape));
    one.partial_o = a->partial_o + (size_t)sub.first * kvf_value_dim(&a->shape);
    one.partial_lse = a->partial_lse + sub.first;
    one.sub.first = 0;
    one.sub.count = sub.count;
    return one;
}

static cudaError_t launch_attend(const kvf_attend_args *a, cudaStream_t stream)
{
    const uint32_t head_dim = a->shape.head_dim;
    if (a->shape.pages != KVF_PAGES_NATIVE) {
        kvf_attend_step_args s = {};
        s.attend = *a;
        return launch_quantized(&s, blocks_of(a), stream);
    }
    switch (a->shape.dtype) {
    case KVF_BF16:
        return launch_type<kvf_bf16>(a, head_dim, blocks_of(a), stream);
    case KVF_FP16:
        return launch_type<kvf_half>(a, head_dim, blocks_of(a), stream);
    default:
        return kvf_cuda_launch<attend_plain>(dim3(blocks_of(a)), dim3(KVF_PLAIN_THREADS),
                                             sizeof(kvf_plain_shared), stream, *a);
    }
}

static cudaError_t launch_step(const kvf_attend_step_args *s, cudaStream_t stream)
{
    const kvf_attend_args *a = &s->attend;
    const uint32_t head_dim = a->shape.head_dim;
    if (a->shape.pages != KVF_PAGES_NATIVE)
        return launch_quantized(s, blocks_of(a), stream);
    switch (a->shape.dtype) {
    case KVF_BF16:
        return launch_type<kvf_bf16>(s, head_dim, blocks_of(a), stream);
    case KVF_FP16:
        return launch_type<kvf_half>(s, head_dim, blocks_of(a), stream);
    default:
        return kvf_cuda_launch_early<step_plain>(dim3(blocks_of(a)), dim3(KVF_PLAIN_THREADS),
                                                 sizeof(kvf_plain_shared), stream, *s);
    }
}

extern "C" int kvf_attend_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_attend_args a = *(const kvf_attend_args *)args;
    const kvf_subgroup whole = kvf_subgroup_whole(a.sub, a.group);
    cudaError_t error = cudaSuccess;
    if (!is_valid(&a))
        return cudaErrorInvalidValue;
    for (uint32_t at = 0; at < whole.count && error == cudaSuccess; at += KVF_SUBGROUP_HEADS) {
        const kvf_attend_args one = take_subgroup(&a, kvf_subgroup_at(whole, at));
        error = launch_attend(&one, (cudaStream_t)stream);
    }
    return error;
}

extern "C" int kvf_attend_step_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_attend_step_args s = *(const kvf_attend_step_args *)args;
    const kvf_subgroup whole = kvf_subgroup_whole({}, s.attend.group);
    cudaError_t error = cudaSuccess;
    if (!is_valid(&s.attend) || s.attend.spans_max == 0 || s.attend.pass != KVF_PASS_ALL)
        return cudaErrorInvalidValue;
    for (uint32_t at = 0; at < whole.count && error == cudaSuccess; at += KVF_SUBGROUP_HEADS) {
        kvf_attend_step_args one = s;
        one.attend = take_subgroup(&s.attend, kvf_subgroup_at(whole, at));
        one.out = kvf_offset_mut(s.out, at * kvf_value_dim(&s.attend.shape) *
                                            kvf_dtype_bytes(s.out_dtype));
        one.lse = s.lse ? s.lse + at : NULL;
        one.sinks = s.sinks ? s.sinks + at : NULL;
        error = launch_step(&one, (cudaStream_t)stream);
    }
    return error;
}
