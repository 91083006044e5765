/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Topk, resolve and assemble of every list in one launch, on the GPU, and reduce_mass before them.
 *
 * Knows nothing that they do not know. The blocks of a list are those of topk.cuh, each with a part
 * of a long list of scores; the one that writes the ids goes on to slots and spans, so that two
 * launches and what waits between them are saved. Without topk a list has one block.
 *
 * If scores come from masses, every block makes the keys of its part, in shared memory, which serve
 * all passes: one block has all 32,768 of a list at 128K tokens if there are 128 lists. A launch of
 * reduce_mass comes before only for other ways to reduce a group, and if 32 blocks hold no list.
 *
 * The last block has the row and what was chosen in shared memory, and a page's place at home is
 * asked for together with its slot.
 *
 * Bound: latency, that of the three one after the other: at 128K tokens in pages of 4 a list has
 * 32,768 scores, which 16 blocks read once from the second-level cache; the last one then looks at
 * as many candidates as one had scores. Then 4 dependent round trips to that cache, those of a
 * page's block, its slot and the slot's word, read and changed, and some 20 barriers in all.
 *
 * Exactness: that of its parts.
 */

#include "attend/assemble.cuh"
#include "cuda_kernels.h"
#include "resolve.cuh"
#include "score/reduce_mass.cuh"
#include "topk.cuh"

#define THREADS  256u  /* without topk */
#define IDS_HELD 2048u /* chosen pages of a list that shared memory has room for */

/* In shared memory, before what is chosen: ids, slots and misses. */
struct alignas(sizeof(uint4)) select_state {
    kvf_topk_state top;
    kvf_row row;
    uint32_t scratch[KVF_BLOCK_SCRATCH];
};

static __device__ __forceinline__ int32_t *held_ids(void)
{
    return (int32_t *)(kvf_shared() + sizeof(select_state));
}

/* Chosen pages in shared memory; where a list can have more than it has room for, in place. */
static __device__ __forceinline__ kvf_chosen chosen_of(const kvf_select_args &a, uint32_t list,
                                                       uint32_t count)
{
    const kvf_choices &c = a.assemble.choices;
    const kvf_chosen in_place = kvf_chosen_of(c, list, count);
    int32_t *held = held_ids();
    if (c.ids_max > IDS_HELD)
        return in_place;
    return {a.k ? held : in_place.ids, held + c.ids_max, (uint32_t *)held + 2 * c.ids_max, count};
}

/* A word of the row for each thread: the block that comes last reads it again and again. It is
 * asked for before all else, and takes no register until then. */
#define ROW_WORDS ((uint32_t)(sizeof(kvf_row) / sizeof(uint64_t)))
static_assert(sizeof(kvf_row) % sizeof(uint64_t) == 0 && ROW_WORDS <= KVF_TOPK_THREADS_MIN,
              "a word per thread");

static __device__ __forceinline__ void ask_row(kvf_row *to, const kvf_row *row)
{
    if (threadIdx.x < ROW_WORDS)
        kvf_async_copy8((uint64_t *)to + threadIdx.x, (const uint64_t *)row + threadIdx.x);
    kvf_async_commit();
}

static_assert(KVF_MASS_PAGES == KVF_TOPK_ITEMS, "parts are aligned for a thread's pages");

/* Where keys are, if scores come from masses. */
static __device__ __forceinline__ uint32_t *held_keys(const kvf_select_args &a)
{
    const uint32_t ids_max = a.assemble.choices.ids_max;
    return (uint32_t *)(held_ids() + (ids_max <= IDS_HELD ? kvf_round_up(3 * ids_max, 4) : 0));
}

/* Keys of the block's part of a list, of N pages of a thread at a time. */
template <uint32_t N>
static __device__ __forceinline__ kvf_topk_keys keys_of(const kvf_select_args &a,
                                                        const kvf_topk_grid &g)
{
    const uint32_t list = blockIdx.x / g.parts, begin = blockIdx.x % g.parts * g.length;
    const uint32_t count = a.count[list], end = kvf_min_u32(count, begin + g.length);
    uint32_t *keys = held_keys(a);
    const auto put = [&](uint32_t page, const kvf_page_scores<KVF_GROUP_MEAN_SOFTMAX, N> &s,
                         uint32_t counting) {
        uint32_t key[N];
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            key[i] = kvf_topk_key(s.get(i, counting));
        if (N == 1)
            keys[page - begin] = key[0];
#pragma unroll
        for (uint32_t i = 0; i + 4 <= N; i += 4)
            *(uint4 *)(keys + page - begin + i) =
                make_uint4(key[i], key[(i + 1) % N], key[(i + 2) % N], key[(i + 3) % N]);
    };
    if (begin < count)
        kvf_reduce_masses<KVF_GROUP_MEAN_SOFTMAX, N>(a.masses, list, count, begin, end,
                                                     (char *)(keys + g.length), put);
    __syncthreads();
    return {keys, begin < count ? end - begin : 0, begin};
}

/* Topk of the list, from masses of N pages of a thread at a time, or from scores (0). */
template <uint32_t N>
static __device__ __forceinline__ uint32_t choose(const kvf_select_args &a, kvf_topk_state *s,
                                                  const kvf_topk_grid &g, int32_t *ids)
{
    const kvf_topk_args top = kvf_select_topk(&a);
    const auto put = [&](uint32_t at, uint32_t i) { ids[at] = (int32_t)i; };
    if constexpr (N > 0)
        return kvf_topk_list(top, s, g, keys_of<N>(a, g), put);
    else
        return kvf_topk_list(top, s, g, kvf_topk_scores_of(top, g), put);
}

template <uint32_t N>
static __global__ void __launch_bounds__(KVF_TOPK_THREADS_MAX)
    select_list(const __grid_constant__ kvf_select_args a, const __grid_constant__ kvf_topk_grid g)
{
    const kvf_choices &c = a.assemble.choices;
    const uint64_t *masks = a.assemble.masks;
    const uint32_t list = blockIdx.x / g.parts, of_row = list % c.paging.lists;
    const size_t first = (size_t)list * c.ids_max;
    select_state *s = (select_state *)kvf_shared();
    kvf_wait_for_earlier();
    kvf_let_next_start();
    ask_row(&s->row, &c.row[list / c.paging.lists]);
    uint32_t count;
    if (a.k) {
        count = choose<N>(a, &s->top, g, c.ids_max <= IDS_HELD ? held_ids() : c.ids + first);
        kvf_async_wait<0>();
        if (count == UINT32_MAX)
            return;
        if (threadIdx.x == 0)
            c.id_count[list] = count;
    } else {
        count = c.id_count[list];
        kvf_async_wait<0>();
    }
    const kvf_chosen chosen = chosen_of(a, list, count);
    kvf_span span = {};
    __syncthreads();
    kvf_resolve_list(c, &s->row, list, chosen, [&](uint32_t i, uint32_t page) {
        if (i == threadIdx.x) /* loads that wait for nothing */
            kvf_assemble_home(&c.paging, &s->row, of_row, page, masks ? masks[first + i] : 0,
                              &span);
    });
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count && c.ids_max <= IDS_HELD; i += blockDim.x) {
        c.ids[first + i] = chosen.ids[i];
        c.slot_of_id[first + i] = chosen.slot[i];
        c.missed[first + i] = chosen.missed[i];
    }
    kvf_assemble_list(a.assemble, &s->row, list, chosen, &span, s->scratch);
}

/* Shared memory in front of keys. */
static size_t front_bytes(const kvf_select_args *a)
{
    const uint32_t ids_max = a->assemble.choices.ids_max;
    const size_t held = ids_max <= IDS_HELD ? kvf_round_up(3 * ids_max, 4) : 0;
    return sizeof(select_state) + held * sizeof(uint32_t);
}

/* Behind it, for a part of `length` pages. */
static size_t keys_bytes(const kvf_select_args *a, uint32_t length)
{
    const size_t tiles = kvf_div_ceil_u32(length, kvf_tile_pages(a->masses.page_size)) + 1;
    return length * sizeof(uint32_t) + kvf_mass_bytes(a->masses.group, tiles);
}

/* About as many keys as `room` bytes hold. */
static uint32_t keys_in(const kvf_select_args *a, size_t room)
{
    const size_t fixed = keys_bytes(a, KVF_TOPK_ITEMS);
    const size_t of_tile =
        keys_bytes(a, kvf_tile_pages(a->masses.page_size)) - kvf_mass_bytes(a->masses.group, 1);
    return room < fixed
               ? 1
               : (uint32_t)((room - fixed) / of_tile * kvf_tile_pages(a->masses.page_size));
}

static int select(const kvf_select_args *a, cudaStream_t stream)
{
    const kvf_topk_args top = kvf_select_topk(a);
    const kvf_topk_grid one = {1, THREADS, 0, 0};
    const kvf_topk_grid g = a->k ? kvf_topk_grid_of(&top) : one;
    return kvf_cuda_launch_early<select_list<0>>(dim3(top.lists * g.parts), dim3(g.threads),
                                                 front_bytes(a), stream, *a, g);
}

extern "C" int kvf_select_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_select_args *a = (const kvf_select_args *)args;
    if (!a->masses.mass)
        return select(a, (cudaStream_t)stream);
    const size_t front = front_bytes(a), most = kvf_cuda_shared_max();
    const kvf_topk_args top = kvf_select_topk(a);
    const kvf_topk_grid g = kvf_topk_grid_of(&top, keys_in(a, most - front));
    const dim3 grid(top.lists * g.parts), block(g.threads);
    const size_t bytes = front + keys_bytes(a, g.length);
    if (a->masses.kind != KVF_GROUP_MEAN_SOFTMAX || bytes > most) {
        const int error =
            kvf_reduce_mass_cuda(&a->masses, kvf_reduce_mass_tasks(&a->masses), stream);
        return error == cudaSuccess ? select(a, (cudaStream_t)stream) : error;
    }
    if (kvf_masses_are_aligned(&a->masses))
        return kvf_cuda_launch_early<select_list<KVF_MASS_PAGES>>(grid, block, bytes,
                                                                  (cudaStream_t)stream, *a, g);
    return kvf_cuda_launch_early<select_list<1>>(grid, block, bytes, (cudaStream_t)stream, *a, g);
}
