/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CUDA_SELECT_CUH
#define KVF_KERNELS_CUDA_SELECT_CUH

/*
 * The n-th largest of many keys, digit by digit, by one block: histograms of 11 bits in shared
 * memory.
 *
 * Knows nothing of what the keys stand for. Counts are integers, so the order of the atomic
 * additions changes nothing. Every function is called by all threads of the block, whose number is
 * a power of two from 32 to 1024.
 */

#include "cuda.cuh"
#include "words.cuh"

#define KVF_SELECT_BITS 11u
#define KVF_SELECT_BINS (1u << KVF_SELECT_BITS)

/* In shared memory. Between calls every bin is zero. */
typedef struct kvf_select_state {
    uint32_t bins[KVF_SELECT_BINS];
    uint32_t warp[KVF_WARP_LANES];
    uint32_t digit; /* bin of the n-th largest */
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
    for (uint32_t step = KVF_WARP_LANES / 2; step; step /= 2)
        value += __shfl_xor_sync(KVF_FULL_WARP, value, (int)step);
    return value;
}

/* Lanes of the warp below this one. */
static __device__ __forceinline__ uint32_t kvf_lanes_below(void)
{
    return (1u << (threadIdx.x % KVF_WARP_LANES)) - 1;
}

static __device__ __forceinline__ void kvf_select_clear(kvf_select_state *s)
{
    for (uint32_t i = threadIdx.x; i < KVF_SELECT_BINS; i += blockDim.x)
        s->bins[i] = 0;
}

/*
 * Sets digit, left and held for the wanted-th largest of what the bins count, 1 <= wanted, or
 * for the smallest if there are fewer; clears the bins. Returns how many they count; if that is 0
 * nothing is set. Two barriers; the caller has one before, behind its additions.
 */
static __device__ __forceinline__ uint32_t kvf_select_digit(kvf_select_state *s, uint32_t wanted)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t warps = blockDim.x / KVF_WARP_LANES, mine = KVF_SELECT_BINS / blockDim.x;
    uint32_t *bin = s->bins + KVF_SELECT_BINS - 1 - threadIdx.x * mine; /* and downwards */
    uint32_t sum = 0;
    for (uint32_t i = 0; i < mine; i++)
        sum += *(bin - i);
    uint32_t above = kvf_warp_scan(sum) - sum;
    if (lane == KVF_WARP_LANES - 1)
        s->warp[warp] = above + sum;
    __syncthreads();
    const uint32_t scan = kvf_warp_scan(lane < warps ? s->warp[lane] : 0);
    const uint32_t total = __shfl_sync(KVF_FULL_WARP, scan, KVF_WARP_LANES - 1);
    const uint32_t before = __shfl_sync(KVF_FULL_WARP, scan, (int)((warp - 1) % KVF_WARP_LANES));
    above += warp ? before : 0;
    wanted = kvf_min_u32(wanted, total);
    for (uint32_t i = 0; i < mine; i++) {
        const uint32_t n = *(bin - i);
        if (above < wanted && wanted <= above + n) {
            s->digit = KVF_SELECT_BINS - 1 - threadIdx.x * mine - i;
            s->left = wanted - above;
            s->held = n;
        }
        above += n;
        *(bin - i) = 0;
    }
    __syncthreads();
    return total;
}

#endif
