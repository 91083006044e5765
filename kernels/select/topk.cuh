/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SELECT_TOPK_CUH
#define KVF_KERNELS_SELECT_TOPK_CUH

/*
 * The k largest of a row by the blocks of a list, for topk.cu and for what goes on from there.
 *
 * Knows nothing of what the ids mean. A list has one block, or several where it is long: 128 to
 * 1024 threads by the host-known length of rows. A radix selection over keys of 32 bits, 11 + 11 +
 * 10, finds the last key that is taken and how many of its equals; it ends early when a bin is
 * taken whole, which with scores that differ is after the second digit. Then each warp counts what
 * it takes of its run of consecutive scores, one barrier, and writes its ids in order at its place:
 * ascending, ties to the lower index. Scores are read once where a thread has four of them at most,
 * as with 8 blocks for 128K tokens in pages of 4; they wait in registers.
 *
 * Of a long list each block takes the k largest of its part into `work`, keys and ids; the block
 * that arrives last does the same with these. Their order is that of ids, so ties stay right. With
 * b blocks the longest way is n / b scores and then b * k candidates: b is near sqrt(n / k).
 *
 * Exactness: integers only, hence the same ids whatever the order of threads and the number of
 * blocks. Invariant: `arrived` is zero before and after.
 */

#include <math.h>

#include "kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/select.cuh"
#include "cuda/words.cuh"

#define KVF_TOPK_THREADS_MAX 1024u
#define KVF_TOPK_THREADS_MIN 128u
#define KVF_TOPK_ITEMS       4u /* scores that a thread has in flight */
#define KVF_TOPK_PARTS_MAX   32u
#define KVF_TOPK_PART_MIN    4096u /* scores of a list that are worth a block */
#define KVF_TOPK_BLOCKS_MAX  1024u /* beyond that every multiprocessor has several lists anyway */

/* The largest score has the largest key; 0 is never taken. */
static __device__ __forceinline__ uint32_t kvf_topk_key(float x)
{
    return x > -INFINITY ? kvf_order_key(x) : 0;
}

/* What is selected from: scores, or keys that a block took. */
struct kvf_topk_scores {
    const float *__restrict__ scores;
    __device__ __forceinline__ float load(uint32_t i) const
    {
        return scores[i];
    }
    static __device__ __forceinline__ uint32_t key(float x)
    {
        return kvf_topk_key(x);
    }
    static __device__ __forceinline__ float none(void)
    {
        return -INFINITY;
    }
};

struct kvf_topk_keys {
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
static __device__ __forceinline__ void kvf_topk_load(uint32_t key[KVF_TOPK_ITEMS], const S &source,
                                                     uint32_t i, uint32_t step, uint32_t end)
{
    decltype(S::none()) x[KVF_TOPK_ITEMS];
#pragma unroll
    for (uint32_t k = 0; k < KVF_TOPK_ITEMS; k++)
        x[k] = i + k * step < end ? source.load(i + k * step) : S::none();
#pragma unroll
    for (uint32_t k = 0; k < KVF_TOPK_ITEMS; k++)
        key[k] = S::key(x[k]);
}

/* The run of consecutive scores that a warp looks at, again and again: keys that fit stay in
 * registers after the first time. */
template <typename S> struct kvf_topk_run {
    const S &source;
    uint32_t begin, end;
    bool is_held;
    uint32_t key[KVF_TOPK_ITEMS];

    __device__ __forceinline__ kvf_topk_run(const S &from, uint32_t count) : source(from)
    {
        const uint32_t warp = threadIdx.x / KVF_WARP_LANES, lane = threadIdx.x % KVF_WARP_LANES;
        const uint32_t length = (uint32_t)kvf_round_up(
            kvf_div_ceil_u32(count, blockDim.x / KVF_WARP_LANES), KVF_WARP_LANES);
        begin = kvf_min_u32(count, warp * length);
        end = kvf_min_u32(count, begin + length);
        is_held = length <= KVF_TOPK_ITEMS * KVF_WARP_LANES;
        kvf_topk_load(key, source, begin + lane, KVF_WARP_LANES, end);
    }

    /* look(index, key) by all lanes of the warp together; behind the end the key is 0. */
    template <typename F> __device__ __forceinline__ void each(const F &look)
    {
        const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
        for (uint32_t base = begin; base < end; base += KVF_TOPK_ITEMS * KVF_WARP_LANES) {
            if (!is_held)
                kvf_topk_load(key, source, base + lane, KVF_WARP_LANES, end);
#pragma unroll
            for (uint32_t k = 0; k < KVF_TOPK_ITEMS; k++)
                look(base + k * KVF_WARP_LANES + lane, key[k]);
        }
    }
};

/* What is taken: keys above `floor`, and the first `ties` that equal it. */
struct kvf_topk_limit {
    uint32_t floor;
    uint32_t ties;
    uint32_t taken;
};

/* In shared memory. */
struct kvf_topk_state {
    kvf_select_state select;
    uint32_t above[KVF_WARP_LANES]; /* of every warp's run */
    uint32_t equal[KVF_WARP_LANES];
    uint32_t is_last;
};

template <typename S>
static __device__ __forceinline__ kvf_topk_limit kvf_topk_find(kvf_topk_state *s,
                                                               kvf_topk_run<S> &run,
                                                               uint32_t wanted)
{
    uint32_t prefix = 0, mask = 0, taken = wanted;
    for (uint32_t top = 32; top > 0;) {
        const uint32_t bits = kvf_min_u32(top, KVF_SELECT_BITS), shift = top - bits;
        const uint32_t digits = (1u << bits) - 1;
        run.each([&](uint32_t, uint32_t key) {
            if (key && (key & mask) == prefix)
                atomicAdd(&s->select.bins[key >> shift & digits], 1u);
        });
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
static __device__ __forceinline__ void kvf_topk_put(kvf_topk_state *s, kvf_topk_run<S> &run,
                                                    const kvf_topk_limit &l, const P &put)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    uint32_t above = 0, equal = 0;
    run.each([&](uint32_t, uint32_t key) {
        above += key > l.floor;
        equal += l.ties && key == l.floor;
    });
    above = kvf_warp_sum(above);
    equal = kvf_warp_sum(equal);
    if (lane == 0) {
        s->above[warp] = above;
        s->equal[warp] = equal;
    }
    __syncthreads();
    above = kvf_warp_sum(lane < warp ? s->above[lane] : 0);
    equal = kvf_warp_sum(lane < warp ? s->equal[lane] : 0);
    run.each([&](uint32_t index, uint32_t key) {
        const bool is_above = key > l.floor, is_equal = l.ties && key == l.floor;
        const uint32_t more = __ballot_sync(KVF_FULL_WARP, is_above);
        const uint32_t same = l.ties ? __ballot_sync(KVF_FULL_WARP, is_equal) : 0;
        const uint32_t rank = equal + (uint32_t)__popc(same & kvf_lanes_below());
        const uint32_t at =
            above + (uint32_t)__popc(more & kvf_lanes_below()) + kvf_min_u32(rank, l.ties);
        if (is_above || (is_equal && rank < l.ties))
            put(at, index, key);
        above += (uint32_t)__popc(more);
        equal += (uint32_t)__popc(same);
    });
}

/* One block of a list, or its last one with what all took: the ids, and their number. */
template <typename S, typename P>
static __device__ void kvf_topk_take(kvf_topk_state *s, const S &source, uint32_t count,
                                     uint32_t wanted, uint32_t *taken, const P &put)
{
    kvf_topk_run<S> run(source, count);
    const kvf_topk_limit l =
        wanted ? kvf_topk_find(s, run, kvf_min_u32(wanted, count)) : kvf_topk_limit{0, 0, 0};
    if (l.taken)
        kvf_topk_put(s, run, l, put);
    if (threadIdx.x == 0)
        *taken = l.taken;
}

/* The ids of list blockIdx.x / parts_max. True in the block that writes them, which sees them. */
static __device__ __forceinline__ bool kvf_topk_list(const kvf_topk_args &a, kvf_topk_state *s,
                                                     uint32_t parts_max)
{
    const uint32_t list = blockIdx.x / parts_max, part = blockIdx.x % parts_max;
    const uint32_t count = a.count[list], wanted = kvf_min_u32(a.k[list], count);
    const uint32_t parts =
        kvf_max_u32(1, kvf_min_u32(parts_max, kvf_div_ceil_u32(count, KVF_TOPK_PART_MIN)));
    const uint32_t length = kvf_div_ceil_u32(count, parts), begin = part * length;
    const uint32_t first = a.first ? a.first[list] : 0;
    const float *scores = a.scores + (size_t)list * a.stride + first;
    int32_t *ids = a.ids + (size_t)list * a.ids_max;
    if (part >= parts)
        return false;
    kvf_select_clear(&s->select);
    __syncthreads();
    if (parts == 1) {
        kvf_topk_take(s, kvf_topk_scores{scores}, count, wanted, &a.id_count[list],
                      [&](uint32_t at, uint32_t i, uint32_t) { ids[at] = (int32_t)(first + i); });
        return true;
    }
    /* Room for as many of every part; a key of zero is none. */
    const uint32_t room = kvf_min_u32(wanted, length);
    uint32_t *keys = a.work + (size_t)list * a.work_stride, *part_keys = keys + part * room;
    uint32_t *indexes = keys + parts * room, *part_indexes = indexes + part * room;
    for (uint32_t i = threadIdx.x; i < room; i += blockDim.x)
        part_keys[i] = 0;
    __syncthreads();
    uint32_t taken;
    kvf_topk_take(s, kvf_topk_scores{scores + begin}, kvf_min_u32(length, count - begin), room,
                  &taken, [&](uint32_t at, uint32_t i, uint32_t key) {
                      part_keys[at] = key;
                      part_indexes[at] = begin + i;
                  });
    if (!kvf_arrives_last(&s->is_last, &a.arrived[list], parts))
        return false;
    kvf_topk_take(
        s, kvf_topk_keys{keys}, parts * room, wanted, &a.id_count[list],
        [&](uint32_t at, uint32_t i, uint32_t) { ids[at] = (int32_t)(first + indexes[i]); });
    return true;
}

/* Blocks of a list, a power of two: as long as twice as many would make the longest way shorter,
 * and `work` has room for what they take. */
static inline uint32_t kvf_topk_parts(const kvf_topk_args *a, uint32_t longest)
{
    const uint32_t k = a->ids_max ? a->ids_max : 1;
    uint32_t parts = 1;
    while (a->arrived && parts < KVF_TOPK_PARTS_MAX &&
           2 * parts * (uint64_t)a->lists <= KVF_TOPK_BLOCKS_MAX &&
           longest / (2 * parts) >= KVF_TOPK_PART_MIN &&
           4 * (uint64_t)parts * parts * k <= longest && 4 * (uint64_t)parts * k <= a->work_stride)
        parts *= 2;
    return parts;
}

/* Threads of a block, with so many blocks per list. */
static inline uint32_t kvf_topk_threads(const kvf_topk_args *a, uint32_t longest, uint32_t parts)
{
    const uint32_t most = kvf_max_u32(longest / parts, parts > 1 ? parts * a->ids_max : 0);
    uint32_t threads = KVF_TOPK_THREADS_MIN;
    while (threads < KVF_TOPK_THREADS_MAX && threads * KVF_TOPK_ITEMS < most)
        threads *= 2;
    return threads;
}

#endif
