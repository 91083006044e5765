/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Who has a slot for pages that rows have in common, on the GPU; see lend_ref.c for the meaning.
 *
 * Knows nothing of bytes. A block per list number, chain by chain. Threads take ids, or slots, of
 * all rows of a chain at once, and a phase reads what the one before wrote of all rows: six
 * barriers per chain.
 *
 * Bound: latency. A list is behind its place in the order, an id behind its list, a slot behind its
 * id; per id that a row lacks come two to four dependent loads from the second-level cache, twice;
 * per slot and id of a row an atomic maximum, and a word that is cleared again. Sixteen rows with
 * 117 pages of 234 slots are two ids and four slots of each thread. Exact: bits and maxima are set
 * by atomics, and no result depends on their order.
 */

#include "cuda_kernels.h"

#include "cuda/select.cuh"
#include "paging.cuh"

#define THREADS 1024u

/* As in lend_ref.c. */
struct chain {
    uint32_t begin, end;
    uint32_t list;
    uint32_t words;
    uint32_t *holder, *chooser;
};

static __device__ __forceinline__ size_t list_at(const kvf_lend_args &a, const chain &c,
                                                 uint32_t at)
{
    return (size_t)a.order[at] * a.lists + c.list;
}

/* The rows begin .. *end - 1 of the chain have the page that row `at` has. */
static __device__ __forceinline__ uint32_t neighbours_of(const kvf_lend_args &a, const chain &c,
                                                         uint32_t at, uint32_t page, uint32_t *end)
{
    uint32_t begin = at, last = at + 1;
    while (begin > c.begin && a.common[begin] > page)
        begin--;
    while (last < c.end && a.common[last] > page)
        last++;
    *end = last;
    return begin;
}

static __device__ __forceinline__ uint32_t first_of(const chain &c, const uint32_t *seen,
                                                    int32_t page)
{
    return c.end - seen[page];
}

/* look(place of a row in the chain, index below `width`), by all threads. */
template <typename F>
static __device__ __forceinline__ void each(const chain &c, uint32_t width, const F &look)
{
    const uint32_t all = (c.end - c.begin) * width;
    for (uint32_t i = threadIdx.x; i < all; i += blockDim.x)
        look(c.begin + i / width, i % width);
}

/* look(place of a row, its list, place of an id among those of all lists). */
template <typename F>
static __device__ __forceinline__ void each_id(const kvf_lend_args &a, const chain &c,
                                               const F &look)
{
    each(c, a.ids_max, [&](uint32_t at, uint32_t i) {
        const size_t l = list_at(a, c, at);
        if (i < a.id_count[l])
            look(at, l, l * a.ids_max + i);
    });
}

/* look(place of a row, page in a slot). */
template <typename F>
static __device__ __forceinline__ void each_held(const kvf_lend_args &a, const chain &c,
                                                 const F &look)
{
    each(c, a.slots, [&](uint32_t at, uint32_t slot) {
        const int32_t page = a.page_of_slot[list_at(a, c, at)][slot];
        if (page >= 0)
            look(at, page);
    });
}

static __device__ __forceinline__ void clear_bits(const kvf_lend_args &a, const chain &c)
{
    each(c, c.words, [&](uint32_t at, uint32_t w) {
        a.kept[list_at(a, c, at) * c.words + w] = 0;
        a.asked[list_at(a, c, at) * c.words + w] = 0;
    });
}

static __device__ __forceinline__ void keep_own(const kvf_lend_args &a, const chain &c)
{
    each_id(a, c, [&](uint32_t at, size_t l, size_t id) {
        const int32_t page = a.ids[id], slot = a.slot_of_page[l][page];
        atomicMax(&c.chooser[page], c.end - at);
        if (slot >= 0)
            atomicOr(&a.kept[l * c.words + (uint32_t)slot / 32], 1u << slot % 32);
    });
    each_held(a, c, [&](uint32_t at, int32_t page) { atomicMax(&c.holder[page], c.end - at); });
}

/* Threads may meet in one page, and leave zero there. */
static __device__ __forceinline__ void forget(const kvf_lend_args &a, const chain &c)
{
    each_id(a, c, [&](uint32_t, size_t, size_t id) { atomicExch(&c.chooser[a.ids[id]], 0u); });
    each_held(a, c, [&](uint32_t, int32_t page) { atomicExch(&c.holder[page], 0u); });
}

/* The first of the neighbours begin .. end - 1 that has the page in a slot, and keeps it there if
 * KEPT; or `end`. */
template <bool KEPT>
static __device__ __forceinline__ uint32_t holder_of(const kvf_lend_args &a, const chain &c,
                                                     uint32_t begin, uint32_t end, int32_t page)
{
    const uint32_t first = first_of(c, c.holder, page);
    for (uint32_t k = begin > first ? begin : first; k < end; k++) {
        const size_t l = list_at(a, c, k);
        const int32_t slot = a.slot_of_page[l][page];
        if (slot >= 0 && (!KEPT || a.kept[l * c.words + (uint32_t)slot / 32] >> slot % 32 & 1))
            return k;
    }
    return end;
}

static __device__ __forceinline__ void ask(const kvf_lend_args &a, const chain &c)
{
    each_id(a, c, [&](uint32_t at, size_t l, size_t id) {
        const int32_t page = a.ids[id];
        if (a.slot_of_page[l][page] >= 0)
            return;
        uint32_t end;
        const uint32_t begin = neighbours_of(a, c, at, (uint32_t)page, &end);
        const uint32_t k = holder_of<false>(a, c, begin, end, page);
        if (k == end)
            return;
        const size_t other = list_at(a, c, k);
        const int32_t slot = a.slot_of_page[other][page];
        atomicOr(&a.asked[other * c.words + (uint32_t)slot / 32], 1u << slot % 32);
    });
}

/* The lowest `count` bits that are set, of at most 32. */
static __device__ __forceinline__ uint32_t lowest_bits(uint32_t x, uint32_t count)
{
    while ((uint32_t)__popc(x) > count)
        x &= ~(0x80000000u >> __clz((int)x));
    return x;
}

/* By one warp, a word per lane. */
static __device__ __forceinline__ void keep_asked(const kvf_lend_args &a, const chain &c,
                                                  uint32_t at)
{
    const size_t l = list_at(a, c, at);
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    uint32_t room = a.slots - a.id_count[l];
    for (uint32_t first = 0; first < c.words && room; first += KVF_WARP_LANES) {
        const size_t word = l * c.words + first + lane;
        const bool is_there = first + lane < c.words;
        const uint32_t own = is_there ? a.kept[word] : 0;
        const uint32_t asked = is_there ? a.asked[word] & ~own : 0;
        const uint32_t until = kvf_warp_scan((uint32_t)__popc(asked));
        const uint32_t before = until - (uint32_t)__popc(asked);
        if (asked)
            a.kept[word] = own | lowest_bits(asked, room > before ? room - before : 0);
        room -= kvf_min_u32(room, __shfl_sync(KVF_FULL_WARP, until, KVF_WARP_LANES - 1));
    }
}

/* A place in `order`, `at` itself if it brings the page. */
static __device__ __forceinline__ uint32_t lender_of(const kvf_lend_args &a, const chain &c,
                                                     uint32_t at, int32_t page, uint32_t *is_late)
{
    uint32_t end;
    const uint32_t begin = neighbours_of(a, c, at, (uint32_t)page, &end);
    const uint32_t holder = holder_of<true>(a, c, begin, end, page);
    *is_late = holder < end ? 0 : KVF_LENT_LATE;
    if (holder < end)
        return holder;
    const uint32_t first = first_of(c, c.chooser, page);
    uint32_t k = begin > first ? begin : first;
    while (k < at && !kvf_lend_chooses(&a, list_at(a, c, k), page))
        k++;
    return k;
}

static __device__ __forceinline__ void find_lenders(const kvf_lend_args &a, const chain &c)
{
    each_id(a, c, [&](uint32_t at, size_t l, size_t id) {
        const int32_t page = a.ids[id];
        int32_t lender = -1;
        if (a.slot_of_page[l][page] < 0) {
            uint32_t is_late;
            const uint32_t k = lender_of(a, c, at, page, &is_late);
            if (k != at) {
                lender = (int32_t)a.order[k];
                a.missed[id] = is_late;
            }
        }
        a.lender[id] = lender;
    });
}

static __device__ __forceinline__ void lend_chain(const kvf_lend_args &a, const chain &c)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, warps = blockDim.x / KVF_WARP_LANES;
    clear_bits(a, c);
    __syncthreads();
    keep_own(a, c);
    __syncthreads();
    ask(a, c);
    __syncthreads();
    for (uint32_t at = c.begin + warp; at < c.end; at += warps)
        keep_asked(a, c, at);
    __syncthreads();
    find_lenders(a, c);
    __syncthreads();
    forget(a, c);
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS)
    lend_kernel(const __grid_constant__ kvf_lend_args a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    chain c;
    c.list = blockIdx.x;
    c.words = kvf_div_ceil_u32(a.slots, 32);
    c.holder = a.seen + (size_t)c.list * 2 * a.pages_max;
    c.chooser = c.holder + a.pages_max;
    for (c.begin = 0; c.begin < a.rows; c.begin = c.end) {
        for (c.end = c.begin + 1; c.end < a.rows && a.common[c.end]; c.end++)
            ;
        lend_chain(a, c);
    }
}

extern "C" int kvf_lend_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_lend_args *a = (const kvf_lend_args *)args;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<lend_kernel>(dim3(a->lists), dim3(THREADS), 0,
                                              (cudaStream_t)stream, *a);
}
