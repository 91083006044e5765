/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CUDA_SELECT_CUH
#define KVF_KERNELS_CUDA_SELECT_CUH

/*
 * The n-th smallest of many keys, digit by digit, by one block: histograms of 11 bits in shared
 * memory.
 *
 * Knows nothing of what the keys stand for. Counts are integers, so the order of the atomic
 * additions changes nothing. Every function is called by all threads of the block, whose number is
 * a power of two from 64 to 1024.
 */

#include "cuda.cuh"
#include "words.cuh"

#define KVF_SELECT_BITS 11u
#define KVF_SELECT_BINS (1u << KVF_SELECT_BITS)

/* In shared memory. Between calls every bin is zero. */
typedef struct kvf_select_state {
    uint32_t bins[KVF_SELECT_BINS + KVF_SELECT_BINS / KVF_WARP_LANES]; /* see kvf_select_place */
    uint32_t warp[KVF_WARP_LANES];
    uint32_t digit; /* of the n-th smallest */
    uint32_t left;  /* of the n, how many are in it */
    uint32_t held;  /* entries that it has */
} kvf_select_state;

static __device__ __forceinline__ uint32_t kvf_warp_scan(uint32_t value)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    for (uint32_t step = 1; step < KVF_WARP_LANES; step *= 2) {
        const uint32_t other = __shfl_up_sync(KVF_FULL_WARP, value, step);
        value += lane >= step ? other : 0;
    }
    return value;
}

static __device__ __forceinline__ uint32_t kvf_warp_sum(uint32_t value)
{
    return __reduce_add_sync(KVF_FULL_WARP, value);
}

/* Lanes of the warp below this one. */
static __device__ __forceinline__ uint32_t kvf_lanes_below(void)
{
    return (1u << (threadIdx.x % KVF_WARP_LANES)) - 1;
}

static __device__ __forceinline__ void kvf_select_clear(kvf_select_state *s)
{
    for (uint32_t i = threadIdx.x; i < sizeof s->bins / sizeof *s->bins; i += blockDim.x)
        s->bins[i] = 0;
}

/* Bins of a thread that are looked at together. */
#define KVF_SELECT_AHEAD 8u

/* Where the bin of a digit is: threads that read every 2nd, 4th ... 32nd one meet no other bank. */
static __device__ __forceinline__ uint32_t kvf_select_place(uint32_t digit)
{
    return digit + digit / KVF_WARP_LANES;
}

static __device__ __forceinline__ void kvf_select_count(kvf_select_state *s, uint32_t digit)
{
    atomicAdd(&s->bins[kvf_select_place(digit)], 1u);
}

/*
 * Sets digit, left and held for the wanted-th smallest of what the bins count, 1 <= wanted, or
 * for the largest if there are fewer; clears the bins. Returns how many they count; if that is 0
 * nothing is set. Two barriers; the caller has one before, after its additions.
 */
static __device__ __forceinline__ uint32_t kvf_select_digit(kvf_select_state *s, uint32_t wanted)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t warps = blockDim.x / KVF_WARP_LANES, mine = KVF_SELECT_BINS / blockDim.x;
    uint32_t *bin = s->bins + kvf_select_place(threadIdx.x * mine); /* and the next ones */
    uint32_t sum = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < mine; i += KVF_SELECT_AHEAD)
#pragma unroll
        for (uint32_t k = 0; k < KVF_SELECT_AHEAD; k++)
            sum += i + k < mine ? bin[i + k] : 0;
    uint32_t before = kvf_warp_scan(sum) - sum;
    if (lane == KVF_WARP_LANES - 1)
        s->warp[warp] = before + sum;
    __syncthreads();
    const uint32_t others = lane < warps ? s->warp[lane] : 0;
    const uint32_t total = kvf_warp_sum(others);
    before += kvf_warp_sum(lane < warp ? others : 0);
    wanted = kvf_min_u32(wanted, total);
    if (before < wanted && wanted <= before + sum) {
        uint32_t i = 0;
#pragma unroll 1
        for (; before + bin[i] < wanted; i++)
            before += bin[i];
        s->digit = threadIdx.x * mine + i;
        s->left = wanted - before;
        s->held = bin[i];
    }
#pragma unroll 1
    for (uint32_t i = 0; i < mine; i += KVF_SELECT_AHEAD)
#pragma unroll
        for (uint32_t k = 0; k < KVF_SELECT_AHEAD; k++)
            if (i + k < mine)
                bin[i + k] = 0;
    __syncthreads();
    return total;
}

#endif
