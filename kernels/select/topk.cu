/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The k largest of a row, on the GPU; the ids are those of topk_ref.c.
 *
 * Knows nothing of what the ids mean. One block per list, of 128 to 1024 threads by the host-known
 * length of rows. A radix selection over keys of 32 bits, 11 + 11 + 10, finds the last key that is
 * taken and how many of its equals; it ends early when a bin is taken whole, which with scores that
 * differ is after the second digit. Then each warp counts what it takes of its run of consecutive
 * scores, one barrier, and writes its ids in order at its place: ascending, ties to the lower
 * index.
 *
 * Bound: a row is read once from memory, and 3 to 4 times more from the first-level cache (from the
 * second level above about 48,000 scores), at most 64 bytes per clock: 4096 scores are 16 KiB, or
 * 256 clocks per turn. At most 13 barriers; at 4096 scores the launch, one round trip to memory and
 * these barriers are the time, not the bytes. Additions to bins are of one constant, which the
 * hardware combines within a warp, so that equal scores cost nothing extra. `work` is not used.
 *
 * Exactness: integers only, hence the same ids whatever the order of threads.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/select.cuh"
#include "cuda/words.cuh"

#define THREADS_MAX 1024u
#define THREADS_MIN 128u
#define ITEMS       4u /* scores that a thread has in flight */

/* The largest score has the largest key; 0 is never taken. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    return x > -INFINITY ? kvf_order_key(x) : 0;
}

/* Keys of i, i + step, ...; 0 at `end` and behind it. All loads come before the first use. */
static __device__ __forceinline__ void load_keys(uint32_t key[ITEMS],
                                                 const float *__restrict__ scores, uint32_t i,
                                                 uint32_t step, uint32_t end)
{
    float x[ITEMS];
#pragma unroll
    for (uint32_t k = 0; k < ITEMS; k++)
        x[k] = i + k * step < end ? scores[i + k * step] : -INFINITY;
#pragma unroll
    for (uint32_t k = 0; k < ITEMS; k++)
        key[k] = key_of(x[k]);
}

/* What is taken: keys above `floor`, and the first `ties` that equal it. */
struct limit {
    uint32_t floor;
    uint32_t ties;
    uint32_t taken;
};

/* In shared memory. */
struct state {
    kvf_select_state select;
    uint32_t above[KVF_WARP_LANES]; /* of every warp's run */
    uint32_t equal[KVF_WARP_LANES];
};

static __device__ limit find_limit(state *s, const float *__restrict__ scores, uint32_t count,
                                   uint32_t wanted)
{
    uint32_t prefix = 0, mask = 0, taken = wanted;
    for (uint32_t top = 32; top > 0;) {
        const uint32_t bits = kvf_min_u32(top, KVF_SELECT_BITS), shift = top - bits;
        const uint32_t digits = (1u << bits) - 1;
        for (uint32_t i = threadIdx.x; i < count; i += ITEMS * blockDim.x) {
            uint32_t key[ITEMS];
            load_keys(key, scores, i, blockDim.x, count);
#pragma unroll
            for (uint32_t k = 0; k < ITEMS; k++)
                if (key[k] && (key[k] & mask) == prefix)
                    atomicAdd(&s->select.bins[key[k] >> shift & digits], 1u);
        }
        __syncthreads();
        const uint32_t total = kvf_select_digit(&s->select, wanted);
        if (total == 0)
            return {0, 0, 0};
        if (mask == 0)
            taken = kvf_min_u32(wanted, total);
        prefix |= s->select.digit << shift;
        mask |= digits << shift;
        wanted = s->select.left;
        if (wanted == s->select.held) /* the whole bin, and what is above it */
            return {prefix ? prefix - 1 : 0, 0, taken};
        top = shift;
    }
    return {prefix, wanted, taken};
}

static __device__ void write_ids(state *s, const float *__restrict__ scores, uint32_t count,
                                 uint32_t first, const limit &l, int32_t *__restrict__ ids)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t run = (uint32_t)kvf_round_up(
        kvf_div_ceil_u32(count, blockDim.x / KVF_WARP_LANES), KVF_WARP_LANES);
    const uint32_t begin = kvf_min_u32(count, warp * run), end = kvf_min_u32(count, begin + run);
    uint32_t above = 0, equal = 0;
    for (uint32_t i = begin + lane; i < end; i += ITEMS * KVF_WARP_LANES) {
        uint32_t key[ITEMS];
        load_keys(key, scores, i, KVF_WARP_LANES, end);
#pragma unroll
        for (uint32_t k = 0; k < ITEMS; k++) {
            above += key[k] > l.floor;
            equal += l.ties && key[k] == l.floor;
        }
    }
    above = kvf_warp_sum(above);
    equal = kvf_warp_sum(equal);
    if (lane == 0) {
        s->above[warp] = above;
        s->equal[warp] = equal;
    }
    __syncthreads();
    above = kvf_warp_sum(lane < warp ? s->above[lane] : 0);
    equal = kvf_warp_sum(lane < warp ? s->equal[lane] : 0);
    for (uint32_t base = begin; base < end; base += ITEMS * KVF_WARP_LANES) {
        uint32_t key[ITEMS];
        load_keys(key, scores, base + lane, KVF_WARP_LANES, end);
#pragma unroll
        for (uint32_t k = 0; k < ITEMS; k++) {
            const bool is_above = key[k] > l.floor, is_equal = l.ties && key[k] == l.floor;
            const uint32_t more = __ballot_sync(KVF_FULL_WARP, is_above);
            const uint32_t same = l.ties ? __ballot_sync(KVF_FULL_WARP, is_equal) : 0;
            const uint32_t rank = equal + (uint32_t)__popc(same & kvf_lanes_below());
            const uint32_t at =
                above + (uint32_t)__popc(more & kvf_lanes_below()) + kvf_min_u32(rank, l.ties);
            if (is_above || (is_equal && rank < l.ties))
                ids[at] = (int32_t)(first + base + k * KVF_WARP_LANES + lane);
            above += (uint32_t)__popc(more);
            equal += (uint32_t)__popc(same);
        }
    }
}

static __global__ void __launch_bounds__(THREADS_MAX)
    top_of_list(const __grid_constant__ kvf_topk_args a)
{
    const uint32_t list = blockIdx.x, first = a.first ? a.first[list] : 0;
    const uint32_t count = a.count[list], wanted = kvf_min_u32(a.k[list], count);
    const float *scores = a.scores + (size_t)list * a.stride + first;
    state *s = (state *)kvf_shared();
    limit l = {0, 0, 0};
    if (wanted) {
        kvf_select_clear(&s->select);
        __syncthreads();
        l = find_limit(s, scores, count, wanted);
    }
    if (threadIdx.x == 0)
        a.id_count[list] = l.taken;
    if (l.taken)
        write_ids(s, scores, count, first, l, a.ids + (size_t)list * a.ids_max);
}

extern "C" int kvf_topk_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_topk_args *a = (const kvf_topk_args *)args;
    const uint32_t longest = kvf_min_u32(a->stride, a->work_stride);
    uint32_t threads = THREADS_MIN;
    (void)tasks;
    if (a->lists == 0)
        return cudaSuccess;
    while (threads < THREADS_MAX && threads * ITEMS < longest)
        threads *= 2;
    return kvf_cuda_launch(top_of_list, dim3(a->lists), dim3(threads), sizeof(state),
                           (cudaStream_t)stream, *a);
}
