/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The shape of attention over tokens, on the GPU: entropy, mass of the largest, variance.
 *
 * Knows nothing of heads or layers. One block per vector, of 128 to 1024 threads by the length of
 * vectors. One turn for the sum; a radix selection over the bits of positive numbers, 11 + 11 + 9,
 * for the last value among the largest, which ends early when a bin is taken whole; and a last turn
 * for the three figures.
 *
 * Bound: a vector is read once from memory and 3 to 4 times more from the caches; one logarithm and
 * one division per score. 32 vectors of 16384 are 2 MiB: launch and barriers, about 12, are the
 * time.
 *
 * Exactness: what belongs to the largest is decided on integers. Sums are in fp32, of a thread's
 * scores in order and then over threads as a tree, which depends on the length of vectors only.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/select.cuh"
#include "cuda/words.cuh"

#define THREADS_MAX 1024u
#define THREADS_MIN 128u
#define ITEMS       4u /* scores that a thread has in flight */
#define KEY_BITS    31u

/* In shared memory. */
struct state {
    kvf_select_state select;
    float part[4][KVF_WARP_LANES]; /* of every warp: sum; entropy, mass, squares */
};

/* The largest: scores above `floor`, and `ties` that equal it. */
struct edge {
    float floor;
    uint32_t ties;
};

static __device__ __forceinline__ float positive(float x)
{
    return x > 0.0f ? x : 0.0f;
}

/* Scores of i, i + step, ...; 0 after the vector. All loads come before the first use. */
static __device__ __forceinline__ void load(float x[ITEMS], const float *__restrict__ vector,
                                            uint32_t i, uint32_t count)
{
#pragma unroll
    for (uint32_t k = 0; k < ITEMS; k++)
        x[k] = i + k * blockDim.x < count ? positive(vector[i + k * blockDim.x]) : 0.0f;
}

static __device__ __forceinline__ float warp_add(float x)
{
    for (uint32_t step = KVF_WARP_LANES / 2; step; step /= 2)
        x += __shfl_xor_sync(KVF_FULL_WARP, x, (int)step);
    return x;
}

/* The sum of this thread's values, into the place of its warp. */
static __device__ __forceinline__ void leave(float *part, float x)
{
    x = warp_add(x);
    if (threadIdx.x % KVF_WARP_LANES == 0)
        part[threadIdx.x / KVF_WARP_LANES] = x;
}

/* The block's sum, to every thread; after a barrier. */
static __device__ __forceinline__ float collect(const float *part)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    return warp_add(lane < blockDim.x / KVF_WARP_LANES ? part[lane] : 0.0f);
}

/* Bins are zero before and after. */
static __device__ edge find_edge(state *s, const float *__restrict__ vector, uint32_t count,
                                 uint32_t wanted)
{
    uint32_t prefix = 0, mask = 0;
    for (uint32_t top = KEY_BITS; top > 0;) {
        const uint32_t bits = kvf_min_u32(top, KVF_SELECT_BITS), shift = top - bits;
        const uint32_t digits = (1u << bits) - 1;
        for (uint32_t i = threadIdx.x; i < count; i += ITEMS * blockDim.x) {
            float x[ITEMS];
            load(x, vector, i, count);
#pragma unroll
            for (uint32_t k = 0; k < ITEMS; k++) {
                const uint32_t key = kvf_float_bits(x[k]);
                if (key && (key & mask) == prefix)
                    kvf_select_count(&s->select, ~key >> shift & digits);
            }
        }
        __syncthreads();
        kvf_select_digit(&s->select, wanted);
        prefix |= (digits - s->select.digit) << shift;
        mask |= digits << shift;
        wanted = s->select.left;
        if (wanted == s->select.held) /* the whole bin, and what is above it */
            return {kvf_bits_float(prefix ? prefix - 1 : 0), 0};
        top = shift;
    }
    return {kvf_bits_float(prefix), wanted};
}

static __global__ void __launch_bounds__(THREADS_MAX, 1)
    profile_vector(const __grid_constant__ kvf_profile_args a)
{
    const float *vector = a.scores + (size_t)blockIdx.x * a.stride;
    float *out = a.out + (size_t)blockIdx.x * KVF_PROFILE_VALUES;
    state *s = (state *)kvf_shared();
    float sum = 0.0f, entropy = 0.0f, mass = 0.0f, squares = 0.0f;
    for (uint32_t i = threadIdx.x; i < a.count; i += ITEMS * blockDim.x) {
        float x[ITEMS];
        load(x, vector, i, a.count);
#pragma unroll
        for (uint32_t k = 0; k < ITEMS; k++)
            sum += x[k];
    }
    leave(s->part[0], sum);
    kvf_select_clear(&s->select);
    __syncthreads();
    const float total = collect(s->part[0]), mean = 1.0f / (float)a.count;
    if (!(total > 0.0f)) {
        if (threadIdx.x < KVF_PROFILE_VALUES)
            out[threadIdx.x] = 0.0f;
        return;
    }
    edge e = {INFINITY, 0};
    if (a.top && a.count)
        e = find_edge(s, vector, a.count, kvf_min_u32(a.top, a.count));
    for (uint32_t i = threadIdx.x; i < a.count; i += ITEMS * blockDim.x) {
        float x[ITEMS];
        load(x, vector, i, a.count);
#pragma unroll
        for (uint32_t k = 0; k < ITEMS; k++) {
            const float share = x[k] / total, distance = share - mean;
            entropy -= share > 0.0f ? share * logf(share) : 0.0f;
            mass += x[k] > e.floor ? share : 0.0f;
            squares += i + k * blockDim.x < a.count ? distance * distance : 0.0f;
        }
    }
    leave(s->part[1], entropy);
    leave(s->part[2], mass);
    leave(s->part[3], squares);
    __syncthreads();
    entropy = collect(s->part[1]);
    mass = collect(s->part[2]) + (float)e.ties * (e.ties ? e.floor / total : 0.0f);
    squares = collect(s->part[3]);
    if (threadIdx.x == 0) {
        out[0] = entropy;
        out[1] = mass;
        out[2] = squares * mean;
    }
}

extern "C" int kvf_profile_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_profile_args *a = (const kvf_profile_args *)args;
    uint32_t threads = THREADS_MIN;
    while (threads < THREADS_MAX && threads * ITEMS < a->count)
        threads *= 2;
    return kvf_cuda_launch<profile_vector>(dim3(a->vectors), dim3(threads), sizeof(state),
                                           (cudaStream_t)stream, *a);
}
