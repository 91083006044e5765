/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CUDA_PAGING_CUH
#define KVF_KERNELS_CUDA_PAGING_CUH

/*
 * Shared by the CUDA forms of the paging kernels: sums and running sums over a block, searches in
 * ascending lists, tokens of pages moved by many threads.
 *
 * Knows nothing of single kernels. Every function that says "block" is called by all threads of the
 * block, whose number is a multiple of 32; sums are of integers, so their order changes no bit.
 */

#include "attend/attend_args.h"
#include "cuda.cuh"
#include "paging.h"

/* Words of shared memory that kvf_block_sum and kvf_block_scan need. */
#define KVF_BLOCK_SCRATCH 64u

/* Sum of `value` over the block, in every thread. */
static __device__ __forceinline__ uint64_t kvf_block_sum(uint64_t value, void *scratch)
{
    unsigned long long *sums = (unsigned long long *)scratch;
    unsigned long long sum = value;
    for (uint32_t step = KVF_WARP_LANES / 2; step; step /= 2)
        sum += __shfl_xor_sync(KVF_FULL_WARP, sum, (int)step);
    if (threadIdx.x % KVF_WARP_LANES == 0)
        sums[threadIdx.x / KVF_WARP_LANES] = sum;
    __syncthreads();
    sum = 0;
    for (uint32_t w = 0; w < blockDim.x / KVF_WARP_LANES; w++)
        sum += sums[w];
    __syncthreads();
    return sum;
}

/* Sum of `value` over the threads before this one; *total is that over the block. */
static __device__ __forceinline__ uint32_t kvf_block_scan(uint32_t value, uint32_t *total,
                                                          void *scratch)
{
    uint32_t *sums = (uint32_t *)scratch;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    uint32_t sum = value, before = 0, all = 0;
    for (uint32_t step = 1; step < KVF_WARP_LANES; step *= 2) {
        const uint32_t other = __shfl_up_sync(KVF_FULL_WARP, sum, step);
        if (lane >= step)
            sum += other;
    }
    if (lane == KVF_WARP_LANES - 1)
        sums[warp] = sum;
    __syncthreads();
    for (uint32_t w = 0; w < blockDim.x / KVF_WARP_LANES; w++) {
        before += w < warp ? sums[w] : 0;
        all += sums[w];
    }
    __syncthreads();
    *total = all;
    return before + sum - value;
}

/* Number of ids[0 .. count) below `value`; ids ascend. */
static __device__ __forceinline__ uint32_t kvf_count_below(const int32_t *ids, uint32_t count,
                                                           uint32_t value)
{
    uint32_t low = 0, high = count;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if ((uint32_t)ids[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether a word holds an element with all exponent bits set. */
static __device__ __forceinline__ bool kvf_has_no_finite(uint32_t word, kvf_dtype dtype)
{
    if (dtype == KVF_FP32)
        return (word & 0x7f800000u) == 0x7f800000u;
    const uint32_t exponent = dtype == KVF_BF16 ? 0x7f80u : 0x7c00u;
    return (word & exponent) == exponent || (word >> 16 & exponent) == exponent;
}

/* The block copies `bytes`, a multiple of 4 in every type and head_dim. The caller's tensors are
 * aligned to an element at least; 16 bytes at a time where they are aligned to that. Returns
 * whether this thread met an element that is not finite. */
static __device__ inline bool kvf_copy_and_look(void *to, const void *from, size_t bytes,
                                                kvf_dtype dtype)
{
    bool bad = false;
    if ((size_t)from % 16 == 0) {
        for (size_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
            const uint4 x = ((const uint4 *)from)[i];
            ((uint4 *)to)[i] = x;
            bad = bad || kvf_has_no_finite(x.x, dtype) || kvf_has_no_finite(x.y, dtype) ||
                  kvf_has_no_finite(x.z, dtype) || kvf_has_no_finite(x.w, dtype);
        }
        return bad;
    }
    const uint16_t *halves = (const uint16_t *)from;
    for (size_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
        const uint32_t x = halves[2 * i] | (uint32_t)halves[2 * i + 1] << 16;
        ((uint32_t *)to)[i] = x;
        bad = bad || kvf_has_no_finite(x, dtype);
    }
    return bad;
}

/* Keep the lowest (key, token) that was not finite, whatever the order of threads. */
static __device__ __forceinline__ void kvf_row_fault(const kvf_row *row, uint32_t token)
{
    atomicMin((unsigned long long *)row->fault, (unsigned long long)row->fault_key << 32 | token);
}

static __device__ __forceinline__ void kvf_counter_add(uint64_t *counter, uint64_t value)
{
    atomicAdd((unsigned long long *)counter, (unsigned long long)value);
}

static __device__ __forceinline__ void kvf_job_set(kvf_digest_job *job, const void *page,
                                                   void *digest, uint64_t skip, uint32_t count)
{
    job->page = page;
    job->digest = digest;
    job->skip = skip;
    job->count = count;
    job->padding = 0;
}

static __device__ __forceinline__ void kvf_span_set(kvf_span *span, const void *page, uint64_t skip,
                                                    uint32_t count)
{
    span->page = page;
    span->home = NULL;
    span->skip = skip;
    span->count = count;
    span->quantized = 0;
}

/* Chosen pages of a list and what resolve says of them, where arguments have it or in shared
 * memory. */
typedef struct kvf_chosen {
    const int32_t *ids; /* ascending */
    int32_t *slot;
    uint32_t *missed;
    uint32_t count;
} kvf_chosen;

static __device__ __forceinline__ kvf_chosen kvf_chosen_of(const kvf_choices &c, uint32_t list,
                                                           uint32_t count)
{
    const size_t first = (size_t)list * c.ids_max;
    return {c.ids + first, c.slot_of_id + first, c.missed + first, count};
}

/* ---- tokens of pages ----
 * A move takes the token at `from`, key and value, to `to`, and to `also` unless that is NULL.
 * Tokens are a multiple of 16 bytes and aligned to 16. */

typedef struct kvf_token_move {
    const char *from;
    char *to;
    char *also;
} kvf_token_move;

#define KVF_MOVES_IN_FLIGHT 4u

/* Every thread of the block moves 16 bytes at a time, several loads before the first store, because
 * `from` may lie across a link. */
static __device__ __forceinline__ void kvf_block_move(const kvf_token_move *moves, uint32_t count,
                                                      const kvf_shape *shape)
{
    const uint32_t vectors = (uint32_t)kvf_token_bytes(shape) / 16, all = count * vectors;
    for (uint32_t first = threadIdx.x; first < all; first += KVF_MOVES_IN_FLIGHT * blockDim.x) {
        uint4 data[KVF_MOVES_IN_FLIGHT];
#pragma unroll
        for (uint32_t k = 0; k < KVF_MOVES_IN_FLIGHT; k++) {
            const uint32_t i = first + k * blockDim.x;
            if (i < all)
                data[k] = kvf_load_once(moves[i / vectors].from + i % vectors * (size_t)16);
        }
#pragma unroll
        for (uint32_t k = 0; k < KVF_MOVES_IN_FLIGHT; k++) {
            const uint32_t i = first + k * blockDim.x;
            if (i >= all)
                continue;
            const size_t at = i % vectors * (size_t)16;
            const kvf_token_move *move = &moves[i / vectors];
            *(uint4 *)(move->to + at) = data[k];
            if (move->also)
                *(uint4 *)(move->also + at) = data[k];
        }
    }
}

#endif
