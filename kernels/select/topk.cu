/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The k largest of a row, on the GPU; the ids are those of topk_ref.c.
 *
 * Knows nothing of what the ids mean. A list has one block, or several where it is long: 128 to
 * 1024 threads by the host-known length of rows. A radix selection over keys of 32 bits, 11 + 11 +
 * 10, finds the last key that is taken and how many of its equals; it ends early when a bin is
 * taken whole, which with scores that differ is after the second digit. Then each warp counts what
 * it takes of its run of consecutive scores, one barrier, and writes its ids in order at its place:
 * ascending, ties to the lower index.
 *
 * Of a long list each block takes the k largest of its part into `work`, keys and ids; the block
 * that arrives last does the same with these. Their order is that of ids, so ties stay right. With
 * b blocks the longest way is n / b scores and then b * k candidates: b is near sqrt(n / k).
 *
 * Bound: a row is read once from memory, and 3 to 4 times more from the first-level cache (from the
 * second level above about 48,000 scores of a block), at most 64 bytes per clock: 4096 scores are
 * 16 KiB, or 256 clocks per turn, and 1M of 512 are 2048 and then 1024. At most 13 barriers, twice;
 * at 4096 scores the launch, one round trip to memory and these barriers are the time, not the
 * bytes. Additions to bins are of one constant, which the hardware combines within a warp, so that
 * equal scores cost nothing extra.
 *
 * Exactness: integers only, hence the same ids whatever the order of threads and the number of
 * blocks. Invariant: `arrived` is zero before and after.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/select.cuh"
#include "cuda/words.cuh"

#define THREADS_MAX 1024u
#define THREADS_MIN 128u
#define ITEMS       4u /* scores that a thread has in flight */
#define PARTS_MAX   32u
#define PART_MIN    4096u /* scores of a list that are worth a block */
#define BLOCKS_MAX  1024u /* beyond that every multiprocessor has several lists anyway */

/* The largest score has the largest key; 0 is never taken. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    return x > -INFINITY ? kvf_order_key(x) : 0;
}

/* What is selected from: scores, or keys that a block took. */
struct score_source {
    const float *__restrict__ scores;
    __device__ __forceinline__ float load(uint32_t i) const
    {
        return scores[i];
    }
    static __device__ __forceinline__ uint32_t key(float x)
    {
        return key_of(x);
    }
    static __device__ __forceinline__ float none(void)
    {
        return -INFINITY;
    }
};

struct key_source {
    const uint32_t *keys;
    __device__ __forceinline__ uint32_t load(uint32_t i) const
    {
        return keys[i];
    }
    static __device__ __forceinline__ uint32_t key(uint32_t x)
    {
        return x;
    }
    static __device__ __forceinline__ uint32_t none(void)
    {
        return 0;
    }
};

/* Keys of i, i + step, ...; 0 at `end` and behind it. All loads come before the first use. */
template <typename S>
static __device__ __forceinline__ void load_keys(uint32_t key[ITEMS], const S &source, uint32_t i,
                                                 uint32_t step, uint32_t end)
{
    decltype(S::none()) x[ITEMS];
#pragma unroll
    for (uint32_t k = 0; k < ITEMS; k++)
        x[k] = i + k * step < end ? source.load(i + k * step) : S::none();
#pragma unroll
    for (uint32_t k = 0; k < ITEMS; k++)
        key[k] = S::key(x[k]);
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
    uint32_t is_last;
};

template <typename S>
static __device__ limit find_limit(state *s, const S &source, uint32_t count, uint32_t wanted)
{
    uint32_t prefix = 0, mask = 0, taken = wanted;
    for (uint32_t top = 32; top > 0;) {
        const uint32_t bits = kvf_min_u32(top, KVF_SELECT_BITS), shift = top - bits;
        const uint32_t digits = (1u << bits) - 1;
        for (uint32_t i = threadIdx.x; i < count; i += ITEMS * blockDim.x) {
            uint32_t key[ITEMS];
            load_keys(key, source, i, blockDim.x, count);
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

/* put(place, index, key) for all that are taken, in order. */
template <typename S, typename P>
static __device__ void put_taken(state *s, const S &source, uint32_t count, const limit &l,
                                 const P &put)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const uint32_t run = (uint32_t)kvf_round_up(
        kvf_div_ceil_u32(count, blockDim.x / KVF_WARP_LANES), KVF_WARP_LANES);
    const uint32_t begin = kvf_min_u32(count, warp * run), end = kvf_min_u32(count, begin + run);
    uint32_t above = 0, equal = 0;
    for (uint32_t i = begin + lane; i < end; i += ITEMS * KVF_WARP_LANES) {
        uint32_t key[ITEMS];
        load_keys(key, source, i, KVF_WARP_LANES, end);
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
        load_keys(key, source, base + lane, KVF_WARP_LANES, end);
#pragma unroll
        for (uint32_t k = 0; k < ITEMS; k++) {
            const bool is_above = key[k] > l.floor, is_equal = l.ties && key[k] == l.floor;
            const uint32_t more = __ballot_sync(KVF_FULL_WARP, is_above);
            const uint32_t same = l.ties ? __ballot_sync(KVF_FULL_WARP, is_equal) : 0;
            const uint32_t rank = equal + (uint32_t)__popc(same & kvf_lanes_below());
            const uint32_t at =
                above + (uint32_t)__popc(more & kvf_lanes_below()) + kvf_min_u32(rank, l.ties);
            if (is_above || (is_equal && rank < l.ties))
                put(at, base + k * KVF_WARP_LANES + lane, key[k]);
            above += (uint32_t)__popc(more);
            equal += (uint32_t)__popc(same);
        }
    }
}

/* One block of a list, or its last one with what all took: the ids, and their number. */
template <typename S, typename P>
static __device__ void take(state *s, const S &source, uint32_t count, uint32_t wanted,
                            uint32_t *taken, const P &put)
{
    const limit l =
        wanted ? find_limit(s, source, count, kvf_min_u32(wanted, count)) : limit{0, 0, 0};
    if (l.taken)
        put_taken(s, source, count, l, put);
    if (threadIdx.x == 0)
        *taken = l.taken;
}

/* 1 in the block that comes last of `blocks`, which then sees what all of them wrote. */
static __device__ bool arrives_last(state *s, uint32_t *arrived, uint32_t blocks)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        s->is_last = atomicAdd(arrived, 1u) + 1 == blocks;
        if (s->is_last)
            *arrived = 0;
    }
    __syncthreads();
    __threadfence();
    return s->is_last;
}

static __global__ void __launch_bounds__(THREADS_MAX)
    top_of_list(const __grid_constant__ kvf_topk_args a, uint32_t parts_max)
{
    const uint32_t list = blockIdx.x / parts_max, part = blockIdx.x % parts_max;
    const uint32_t count = a.count[list], wanted = kvf_min_u32(a.k[list], count);
    const uint32_t parts =
        kvf_max_u32(1, kvf_min_u32(parts_max, kvf_div_ceil_u32(count, PART_MIN)));
    const uint32_t length = kvf_div_ceil_u32(count, parts), begin = part * length;
    const uint32_t first = a.first ? a.first[list] : 0;
    const float *scores = a.scores + (size_t)list * a.stride + first;
    int32_t *ids = a.ids + (size_t)list * a.ids_max;
    state *s = (state *)kvf_shared();
    if (part >= parts)
        return;
    kvf_select_clear(&s->select);
    __syncthreads();
    if (parts == 1) {
        take(s, score_source{scores}, count, wanted, &a.id_count[list],
             [&](uint32_t at, uint32_t i, uint32_t) { ids[at] = (int32_t)(first + i); });
        return;
    }
    /* Room for as many of every part; a key of zero is none. */
    const uint32_t room = kvf_min_u32(wanted, length);
    uint32_t *keys = a.work + (size_t)list * a.work_stride, *part_keys = keys + part * room;
    uint32_t *indexes = keys + parts * room, *part_indexes = indexes + part * room;
    for (uint32_t i = threadIdx.x; i < room; i += blockDim.x)
        part_keys[i] = 0;
    __syncthreads();
    uint32_t taken;
    take(s, score_source{scores + begin}, kvf_min_u32(length, count - begin), room, &taken,
         [&](uint32_t at, uint32_t i, uint32_t key) {
             part_keys[at] = key;
             part_indexes[at] = begin + i;
         });
    if (!arrives_last(s, &a.arrived[list], parts))
        return;
    take(s, key_source{keys}, parts * room, wanted, &a.id_count[list],
         [&](uint32_t at, uint32_t i, uint32_t) { ids[at] = (int32_t)(first + indexes[i]); });
}

/* Blocks of a list, a power of two: as long as twice as many would make the longest way shorter,
 * and `work` has room for what they take. */
static uint32_t parts_of(const kvf_topk_args *a, uint32_t longest)
{
    const uint32_t k = a->ids_max ? a->ids_max : 1;
    uint32_t parts = 1;
    while (a->arrived && parts < PARTS_MAX && 2 * parts * (uint64_t)a->lists <= BLOCKS_MAX &&
           longest / (2 * parts) >= PART_MIN && 4 * (uint64_t)parts * parts * k <= longest &&
           4 * (uint64_t)parts * k <= a->work_stride)
        parts *= 2;
    return parts;
}

extern "C" int kvf_topk_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_topk_args *a = (const kvf_topk_args *)args;
    const uint32_t longest = kvf_min_u32(a->stride, a->work_stride);
    const uint32_t parts = parts_of(a, longest);
    const uint32_t most = kvf_max_u32(longest / parts, parts > 1 ? parts * a->ids_max : 0);
    uint32_t threads = THREADS_MIN;
    (void)tasks;
    if (a->lists == 0)
        return cudaSuccess;
    while (threads < THREADS_MAX && threads * ITEMS < most)
        threads *= 2;
    return kvf_cuda_launch<top_of_list>(dim3(a->lists * parts), dim3(threads), sizeof(state),
                                        (cudaStream_t)stream, *a, parts);
}
