/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SELECT_TOPK_CUH
#define KVF_KERNELS_SELECT_TOPK_CUH

/*
 * The k largest scores by the blocks of a list, for topk.cu and for what goes on from there.
 *
 * Knows nothing of what the ids mean. A list has one block, or several where it is long: 128 to
 * 1024 threads by the host-known length of lists. Keys of 32 bits are counted by how far they are
 * above the least one, 11 bits at a time from the highest that differ, until the last key that is
 * taken is found, and how many of its equals; it ends when a bin is taken whole, which with scores
 * that differ is after the second digit. Then each warp counts what it takes of its run of
 * consecutive scores, one barrier, and writes its ids in order at its place: ascending, ties to the
 * lower index. Scores are asked for before it is known how many there are, and read once where a
 * thread has eight of them at most, as with 16 blocks for 128K tokens in pages of 4; they wait in
 * registers. Each block takes the k largest of its part of a long list into `work`, keys and ids,
 * and as many more as save it the second digit; the block that arrives last takes the k largest of
 * these, which it has in registers. Their order is that of ids, so ties stay right. With b blocks
 * the longest way is n / b scores and then b * k candidates: b is near sqrt(n / k).
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
#define KVF_TOPK_ITEMS       8u /* scores that a thread has in flight */
#define KVF_TOPK_PAIRS       8u /* likewise, of what blocks took */
#define KVF_TOPK_PARTS_MAX   32u
#define KVF_TOPK_PART_MIN    1024u /* scores of a list that are worth a block */
#define KVF_TOPK_BLOCKS_MAX  128u  /* beyond that every multiprocessor has several lists anyway */
#define KVF_TOPK_SLACK       16u   /* what a part may take beyond what is wanted */

/* The largest score has the largest key; 0 is never taken. */
static __device__ __forceinline__ uint32_t kvf_topk_key(float x)
{
    return x > -INFINITY ? kvf_order_key(x) : 0;
}

/* Candidates: scores, their keys, or keys and indexes that blocks took. */
struct kvf_topk_scores {
    typedef float item;
    const float *__restrict__ scores;
    uint32_t room;  /* what can be read there */
    uint32_t begin; /* index of the first */
    /* Item i + k: an address for all k, which are constants. */
    __device__ __forceinline__ float load(uint32_t i, uint32_t k) const
    {
        return i + k < room ? (scores + i)[k] : -INFINITY;
    }
    __device__ __forceinline__ uint32_t index(uint32_t i, uint32_t k) const
    {
        return begin + i + k;
    }
    static __device__ __forceinline__ uint32_t key(float x)
    {
        return kvf_topk_key(x);
    }
};

/* Keys of the block's part of a list, in shared memory. */
struct kvf_topk_keys {
    typedef uint32_t item;
    const uint32_t *keys;
    uint32_t room;
    uint32_t begin;
    __device__ __forceinline__ uint32_t load(uint32_t i, uint32_t k) const
    {
        return i + k < room ? (keys + i)[k] : 0;
    }
    __device__ __forceinline__ uint32_t index(uint32_t i, uint32_t k) const
    {
        return begin + i + k;
    }
    static __device__ __forceinline__ uint32_t key(uint32_t x)
    {
        return x;
    }
};

struct kvf_topk_pairs {
    typedef uint32_t item;
    const uint32_t *keys, *indexes;
    uint32_t room;
    __device__ __forceinline__ uint32_t load(uint32_t i, uint32_t k) const
    {
        return i + k < room ? (keys + i)[k] : 0;
    }
    __device__ __forceinline__ uint32_t index(uint32_t i, uint32_t k) const
    {
        return i + k < room ? (indexes + i)[k] : 0;
    }
    static __device__ __forceinline__ uint32_t key(uint32_t x)
    {
        return x;
    }
};

/* The run of consecutive items that a warp looks at, again and again. The items that fit stay in
 * registers after the first time; HELD: all of it does, with its indexes. */
template <typename S, uint32_t N, bool HELD> struct kvf_topk_run {
    typedef typename S::item item;
    const S source;
    uint32_t begin, end;
    bool is_held;
    uint32_t key[N], index[N];

    __device__ __forceinline__ kvf_topk_run(const S &from, uint32_t length) : source(from)
    {
        const uint32_t warps = blockDim.x / KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
        const uint32_t run =
            (uint32_t)kvf_round_up(kvf_div_ceil_u32(length, warps), KVF_WARP_LANES);
        begin = warp * run;
        end = kvf_min_u32(length, begin + run);
        is_held = HELD || run <= N * KVF_WARP_LANES;
    }

    /* The lane's first item from `base` on; the others are a warp's lanes apart. */
    static __device__ __forceinline__ uint32_t place(uint32_t base)
    {
        return base + threadIdx.x % KVF_WARP_LANES;
    }

    /* All loads come before the first use. */
    __device__ __forceinline__ void ask(item x[N], uint32_t base)
    {
#pragma unroll
        for (uint32_t k = 0; k < N; k++)
            x[k] = source.load(place(base), k * KVF_WARP_LANES);
#pragma unroll
        for (uint32_t k = 0; k < N && HELD; k++)
            index[k] = source.index(place(base), k * KVF_WARP_LANES);
    }

    /* Items at and after `end` have a key of 0. */
    __device__ __forceinline__ void take(const item x[N], uint32_t base)
    {
#pragma unroll
        for (uint32_t k = 0; k < N; k++)
            key[k] = place(base) + k * KVF_WARP_LANES < end ? S::key(x[k]) : 0;
    }

    /* look(index, key) by all lanes of the warp together. */
    template <typename F> __device__ __forceinline__ void each(const F &look)
    {
        uint32_t base = begin;
#pragma unroll 1
        do {
            if (!HELD && !is_held) {
                item x[N];
                ask(x, base);
                take(x, base);
            }
#pragma unroll
            for (uint32_t k = 0; k < N; k++)
                look(HELD ? index[k] : source.index(place(base), k * KVF_WARP_LANES), key[k]);
            base += N * KVF_WARP_LANES;
        } while (!HELD && base < end);
    }
};

/* The taken items: keys above `floor`, and the first `ties` that equal it. */
struct kvf_topk_limit {
    uint32_t floor;
    uint32_t ties;
    uint32_t taken;
};

/* In shared memory. */
struct kvf_topk_state {
    kvf_select_state select;
    uint32_t above[KVF_WARP_LANES]; /* of every warp's run; first its least key but one */
    uint32_t equal[KVF_WARP_LANES]; /* likewise; first its greatest key */
    uint32_t is_last;
};

/* The least key of all, and the greatest; 0: there is none. One barrier. */
template <typename R>
static __device__ __forceinline__ uint2 kvf_topk_range(kvf_topk_state *s, R &run)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    const bool is_there = lane < blockDim.x / KVF_WARP_LANES;
    uint32_t low = UINT32_MAX, high = 0;
    run.each([&](uint32_t, uint32_t key) {
        low = kvf_min_u32(low, key - 1); /* none becomes the most */
        high = kvf_max_u32(high, key);
    });
    low = __reduce_min_sync(KVF_FULL_WARP, low);
    high = __reduce_max_sync(KVF_FULL_WARP, high);
    if (lane == 0) {
        s->above[warp] = low;
        s->equal[warp] = high;
    }
    __syncthreads();
    low = __reduce_min_sync(KVF_FULL_WARP, is_there ? s->above[lane] : UINT32_MAX);
    high = __reduce_max_sync(KVF_FULL_WARP, is_there ? s->equal[lane] : 0);
    return make_uint2(low + 1, high);
}

/* The `wanted` largest, or more if that many have room and it is found sooner. */
template <typename R>
static __device__ __forceinline__ kvf_topk_limit kvf_topk_find(kvf_topk_state *s, R &run,
                                                               uint32_t wanted, uint32_t room)
{
    const uint2 range = kvf_topk_range(s, run);
    if (range.y == 0 || wanted == 0)
        return {0, 0, 0};
    const uint32_t low = range.x;
    uint32_t prefix = 0, taken = 0, left = wanted;
    uint32_t top = kvf_max_u32(1, 32 - (uint32_t)__clz((int)(range.y - low)));
    for (bool is_first = true;; is_first = false) {
        const uint32_t bits = kvf_min_u32(top, KVF_SELECT_BITS), shift = top - bits;
        const uint32_t digits = (1u << bits) - 1, all_ones = prefix + (digits << shift);
        /* The digit counted down, and more than a digit where what is above it differs. */
        run.each([&](uint32_t, uint32_t key) {
            const uint32_t digit = ((key - low) ^ all_ones) >> shift;
            if (key && digit <= digits)
                kvf_select_count(&s->select, digit);
        });
        __syncthreads();
        const uint32_t total = kvf_select_digit(&s->select, left);
        if (is_first)
            taken = kvf_min_u32(wanted, total);
        prefix += (digits - s->select.digit) << shift;
        left = s->select.left;
        const uint32_t with_bin = taken - left + s->select.held;
        if (with_bin <= room) /* the whole bin, and what is above it */
            return {low + prefix - 1, 0, with_bin};
        if (shift == 0)
            return {low + prefix, left, taken};
        top = shift;
    }
}

/* put(place, index, key) for all that are taken, in order. */
template <typename R, typename P>
static __device__ __forceinline__ void kvf_topk_put(kvf_topk_state *s, R &run,
                                                    const kvf_topk_limit &l, const P &put)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES, warp = threadIdx.x / KVF_WARP_LANES;
    uint32_t above = 0, equal = 0;
    if (l.taken == 0)
        return;
    run.each([&](uint32_t, uint32_t key) { above += key > l.floor; });
    if (l.ties)
        run.each([&](uint32_t, uint32_t key) { equal += key == l.floor; });
    above = kvf_warp_sum(above);
    equal = kvf_warp_sum(equal);
    const bool has_any = above || equal;
    if (lane == 0) {
        s->above[warp] = above;
        s->equal[warp] = equal;
    }
    __syncthreads();
    if (!has_any) /* the whole warp */
        return;
    above = kvf_warp_sum(lane < warp ? s->above[lane] : 0);
    equal = kvf_warp_sum(lane < warp ? s->equal[lane] : 0);
    run.each([&](uint32_t index, uint32_t key) {
        bool is_taken = key > l.floor;
        const uint32_t more = __ballot_sync(KVF_FULL_WARP, is_taken);
        uint32_t at = above + (uint32_t)__popc(more & kvf_lanes_below());
        if (l.ties) {
            const uint32_t same = __ballot_sync(KVF_FULL_WARP, key == l.floor);
            const uint32_t rank = equal + (uint32_t)__popc(same & kvf_lanes_below());
            is_taken = is_taken || (key == l.floor && rank < l.ties);
            at += kvf_min_u32(rank, l.ties);
            equal += (uint32_t)__popc(same);
        }
        if (is_taken)
            put(at, index, key);
        above += (uint32_t)__popc(more);
    });
}

/* How a launch divides its lists. */
typedef struct kvf_topk_grid {
    uint32_t parts; /* blocks of a list, a power of two */
    uint32_t threads;
    uint32_t length; /* scores of a block */
    uint32_t room;   /* for what one takes, at least as many as are wanted */
} kvf_topk_grid;

/* A list by its blocks. */
struct kvf_topk_part {
    uint32_t count;  /* scores of the list */
    uint32_t wanted; /* of it */
    uint32_t parts;  /* that it has, of `length` scores each */
    uint32_t room;   /* for what one takes */
};

static __device__ __forceinline__ kvf_topk_part kvf_topk_part_of(const kvf_topk_args &a,
                                                                 uint32_t list,
                                                                 const kvf_topk_grid &g)
{
    const uint32_t count = a.count[list], wanted = kvf_min_u32(a.k[list], count);
    return {count, wanted, kvf_max_u32(1, kvf_div_ceil_u32(count, g.length)),
            kvf_min_u32(kvf_min_u32(wanted + KVF_TOPK_SLACK, g.room), g.length)};
}

/* Scores of the block's part of list blockIdx.x / parts. */
static __device__ __forceinline__ kvf_topk_scores kvf_topk_scores_of(const kvf_topk_args &a,
                                                                     const kvf_topk_grid &g)
{
    const uint32_t list = blockIdx.x / g.parts, begin = blockIdx.x % g.parts * g.length;
    const uint32_t first = a.first ? a.first[list] : 0;
    const uint32_t there = a.stride - kvf_min_u32(a.stride, first + begin);
    return {a.scores + (size_t)list * a.stride + first + begin, there, begin};
}

/* The ids of list blockIdx.x / parts, of which put(place, index) is told and that all threads
 * of the block get the number of. UINT32_MAX in the blocks that write none. `source` has the
 * block's part of the list. */
template <typename S, typename P>
static __device__ __forceinline__ uint32_t kvf_topk_list(const kvf_topk_args &a, kvf_topk_state *s,
                                                         const kvf_topk_grid &g, const S &source,
                                                         const P &put)
{
    const uint32_t list = blockIdx.x / g.parts, part = blockIdx.x % g.parts;
    const uint32_t first = a.first ? a.first[list] : 0, begin = part * g.length;
    kvf_topk_run<S, KVF_TOPK_ITEMS, false> run(source, g.length);
    typename S::item x[KVF_TOPK_ITEMS];
    run.ask(x, run.begin); /* before it is known how many count */
    const kvf_topk_part p = kvf_topk_part_of(a, list, g);
    run.end = kvf_min_u32(run.end, p.count - kvf_min_u32(p.count, begin));
    run.take(x, run.begin);
    if (part >= p.parts)
        return UINT32_MAX;
    kvf_select_clear(&s->select);
    const kvf_topk_limit mine = kvf_topk_find(s, run, p.wanted, p.parts > 1 ? p.room : p.wanted);
    /* Room for as many of every part; a key of zero is none. */
    uint32_t *keys = a.work + (size_t)list * a.work_stride, *indexes = keys + p.parts * p.room;
    uint32_t *part_keys = keys + part * p.room, *part_indexes = indexes + part * p.room;
    for (uint32_t i = mine.taken + threadIdx.x; i < p.room && p.parts > 1; i += blockDim.x)
        part_keys[i] = 0;
    kvf_topk_put(s, run, mine, [&](uint32_t at, uint32_t i, uint32_t key) {
        if (p.parts == 1) {
            put(at, first + i);
        } else {
            part_keys[at] = key;
            part_indexes[at] = i;
        }
    });
    if (p.parts == 1)
        return mine.taken;
    if (!kvf_arrives_last(&s->is_last, &a.arrived[list], p.parts))
        return UINT32_MAX;
    const kvf_topk_pairs pairs = {keys, indexes, p.parts * p.room};
    kvf_topk_run<kvf_topk_pairs, KVF_TOPK_PAIRS, true> all(pairs, pairs.room);
    uint32_t taken[KVF_TOPK_PAIRS];
    all.ask(taken, all.begin);
    all.take(taken, all.begin);
    const kvf_topk_limit last = kvf_topk_find(s, all, p.wanted, p.wanted);
    kvf_topk_put(s, all, last, [&](uint32_t at, uint32_t i, uint32_t) { put(at, first + i); });
    return last.taken;
}

/* Whether twice as many blocks of a list would make the longest way shorter. */
static inline bool kvf_topk_gains(const kvf_topk_args *a, uint32_t parts, uint32_t longest,
                                  uint32_t k)
{
    return 2 * parts * (uint64_t)a->lists <= KVF_TOPK_BLOCKS_MAX &&
           longest / (2 * parts) >= KVF_TOPK_PART_MIN && 2 * parts * (uint64_t)parts * k <= longest;
}

/* Blocks of a list: as long as twice as many gain, or one has more than `most` scores, and `work`
 * has room for what they take. */
static inline kvf_topk_grid kvf_topk_grid_of(const kvf_topk_args *a, uint32_t most = UINT32_MAX)
{
    const uint32_t longest = kvf_max_u32(1, kvf_min_u32(a->stride, a->work_stride));
    const uint32_t k = kvf_max_u32(1, a->ids_max);
    kvf_topk_grid g = {1, KVF_TOPK_THREADS_MIN, longest, k};
    while (a->arrived && g.parts < KVF_TOPK_PARTS_MAX &&
           (kvf_topk_gains(a, g.parts, longest, k) || longest / g.parts >= most) &&
           2 * g.parts * (uint64_t)k <= KVF_TOPK_PAIRS * KVF_TOPK_THREADS_MAX &&
           4 * g.parts * (uint64_t)k <= a->work_stride)
        g.parts *= 2;
    g.length = (uint32_t)kvf_round_up(kvf_div_ceil_u32(longest, g.parts), KVF_TOPK_ITEMS);
    while (g.threads < KVF_TOPK_THREADS_MAX &&
           (g.threads * KVF_TOPK_ITEMS < g.length ||
            (g.parts > 1 && g.threads * KVF_TOPK_PAIRS < g.parts * k)))
        g.threads *= 2;
    g.room = kvf_min_u32(g.threads * KVF_TOPK_PAIRS, a->work_stride / 2) / g.parts;
    return g;
}

#endif
