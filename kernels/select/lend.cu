/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Who has a slot for pages that rows have in common, on the GPU; see lend_ref.c for the meaning.
 *
 * Knows nothing of bytes. A block per list number, chain by chain. Threads take the ids of a row,
 * one row after the other without a barrier between them, because a phase reads what the one before
 * wrote of all rows: six barriers per chain.
 *
 * Bound: latency. Per id that a row lacks two to four dependent loads from the second-level cache,
 * twice; per slot and id of a row an atomic maximum, and a word that is cleared again. Exact: bits
 * and maxima are set by atomics, and no result depends on their order.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 512u

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

static __device__ __forceinline__ void keep_own(const kvf_lend_args &a, const chain &c, uint32_t at)
{
    const size_t l = list_at(a, c, at);
    const int32_t *slots = a.slot_of_page[l], *pages = a.page_of_slot[l];
    for (uint32_t i = threadIdx.x; i < a.id_count[l]; i += blockDim.x) {
        const int32_t page = a.ids[l * a.ids_max + i], slot = slots[page];
        atomicMax(&c.chooser[page], c.end - at);
        if (slot >= 0)
            atomicOr(&a.kept[l * c.words + (uint32_t)slot / 32], 1u << slot % 32);
    }
    for (uint32_t slot = threadIdx.x; slot < a.slots; slot += blockDim.x)
        if (pages[slot] >= 0)
            atomicMax(&c.holder[pages[slot]], c.end - at);
}

/* Threads may meet in one page, and leave zero there. */
static __device__ __forceinline__ void forget(const kvf_lend_args &a, const chain &c, uint32_t at)
{
    const size_t l = list_at(a, c, at);
    const int32_t *pages = a.page_of_slot[l];
    for (uint32_t i = threadIdx.x; i < a.id_count[l]; i += blockDim.x)
        atomicExch(&c.chooser[a.ids[l * a.ids_max + i]], 0u);
    for (uint32_t slot = threadIdx.x; slot < a.slots; slot += blockDim.x)
        if (pages[slot] >= 0)
            atomicExch(&c.holder[pages[slot]], 0u);
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

static __device__ __forceinline__ void ask(const kvf_lend_args &a, const chain &c, uint32_t at)
{
    const size_t l = list_at(a, c, at);
    for (uint32_t i = threadIdx.x; i < a.id_count[l]; i += blockDim.x) {
        const int32_t page = a.ids[l * a.ids_max + i];
        if (a.slot_of_page[l][page] >= 0)
            continue;
        uint32_t end;
        const uint32_t begin = neighbours_of(a, c, at, (uint32_t)page, &end);
        const uint32_t k = holder_of<false>(a, c, begin, end, page);
        if (k == end)
            continue;
        const size_t other = list_at(a, c, k);
        const int32_t slot = a.slot_of_page[other][page];
        atomicOr(&a.asked[other * c.words + (uint32_t)slot / 32], 1u << slot % 32);
    }
}

/* By one thread. */
static __device__ __forceinline__ void keep_asked(const kvf_lend_args &a, const chain &c,
                                                  uint32_t at)
{
    const size_t l = list_at(a, c, at);
    uint32_t *kept = a.kept + l * c.words;
    uint32_t room = a.slots - a.id_count[l];
    for (uint32_t w = 0; w < c.words; w++) {
        const uint32_t own = kept[w];
        uint32_t given = 0;
        for (uint32_t x = a.asked[l * c.words + w] & ~own; x && room; x &= x - 1, room--)
            given |= x & (0u - x);
        kept[w] = own | given;
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

static __device__ __forceinline__ void find_lenders(const kvf_lend_args &a, const chain &c,
                                                    uint32_t at)
{
    const size_t l = list_at(a, c, at);
    for (uint32_t i = threadIdx.x; i < a.id_count[l]; i += blockDim.x) {
        const size_t id = l * a.ids_max + i;
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
    }
}

static __device__ __forceinline__ void lend_chain(const kvf_lend_args &a, const chain &c)
{
    for (uint32_t at = c.begin; at < c.end; at++)
        for (uint32_t w = threadIdx.x; w < c.words; w += blockDim.x) {
            a.kept[list_at(a, c, at) * c.words + w] = 0;
            a.asked[list_at(a, c, at) * c.words + w] = 0;
        }
    __syncthreads();
    for (uint32_t at = c.begin; at < c.end; at++)
        keep_own(a, c, at);
    __syncthreads();
    for (uint32_t at = c.begin; at < c.end; at++)
        ask(a, c, at);
    __syncthreads();
    for (uint32_t at = c.begin + threadIdx.x; at < c.end; at += blockDim.x)
        keep_asked(a, c, at);
    __syncthreads();
    for (uint32_t at = c.begin; at < c.end; at++)
        find_lenders(a, c, at);
    __syncthreads();
    for (uint32_t at = c.begin; at < c.end; at++)
        forget(a, c, at);
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS)
    lend_kernel(const __grid_constant__ kvf_lend_args a)
{
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
    return kvf_cuda_launch<lend_kernel>(dim3(a->lists), dim3(THREADS), 0, (cudaStream_t)stream, *a);
}
