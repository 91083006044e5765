/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Physical restructuring on the GPU; see permute_ref.c for the meaning.
 *
 * Knows nothing of scores. Grid: (parts, KV heads); a thread finds the place of a token, then the
 * block moves the rows. Positions sink .. stored-1 hold the old static set and the others the rest,
 * both ascending by token, so a token is found by bisection in the static set alone, and how many
 * chosen tokens come before it by bisection in the ids: no token waits for another. Bound: every
 * sealed row read and written once, over the link. Exact.
 *
 * Dead ids (rows of the last store page that do not exist, static tokens of resident pages) lie
 * behind the live ones of the store and before the live ones of the pages.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS   256u
#define PARTS_MAX 64u

/* One KV head of one launch. Chosen positions are ids[0 .. stored_ids) as they are, and those of
 * ids[first_paged .. count) through their spans. */
typedef struct permuting {
    const kvf_permute_args *a;
    uint32_t head;
    uint32_t sink;
    uint32_t stored;       /* old ones, the sink included */
    const uint32_t *order; /* [tokens] token at each position */
    const int32_t *ids;
    uint32_t stored_ids;
    uint32_t first_paged;
    uint32_t count;
} permuting;

/* Position of id i, which lies in a page and not in the store. */
static __device__ __forceinline__ uint32_t paged_position(const permuting *k, uint32_t i)
{
    const uint32_t id = (uint32_t)k->ids[i], page_size = k->a->paging.shape.page_size;
    return k->a->span_index[(size_t)k->head * k->a->spans_max + id / page_size] + id % page_size;
}

/* First of ids[first .. count) whose position is not below `position`. */
static __device__ __forceinline__ uint32_t paged_bound(const permuting *k, uint32_t first,
                                                       uint32_t position)
{
    uint32_t low = first, high = k->count;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (paged_position(k, middle) < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Chosen positions in [first, end), which lie on one side of `stored`. */
static __device__ __forceinline__ uint32_t chosen_between(const permuting *k, uint32_t first,
                                                          uint32_t end)
{
    if (k->a->resident && first < k->stored)
        return kvf_count_below(k->ids, k->stored_ids, end) -
               kvf_count_below(k->ids, k->stored_ids, first);
    return paged_bound(k, k->first_paged, end) - paged_bound(k, k->first_paged, first);
}

static __device__ permuting permuting_of(const kvf_permute_args *a, uint32_t head)
{
    const kvf_paging *p = &a->paging;
    const uint32_t page_size = p->shape.page_size;
    permuting k;
    k.a = a;
    k.head = head;
    k.sink = kvf_min_u32(p->sink, a->row->sealed * page_size);
    k.stored = a->row->store_count[head];
    k.order = a->row->order + (size_t)head * p->pages_max * page_size;
    k.ids = a->ids + (size_t)head * a->ids_max;
    k.count = a->id_count[head];
    k.stored_ids = 0;
    k.first_paged = 0;
    if (a->resident) {
        k.stored_ids = kvf_count_below(k.ids, k.count, k.stored);
        k.first_paged =
            kvf_count_below(k.ids, k.count, (uint32_t)kvf_round_up(k.stored, page_size));
        k.first_paged = paged_bound(&k, k.first_paged, k.stored);
    }
    return k;
}

/* Bits and digest jobs of every page: the first `front` tokens are in the store. */
static __device__ void renew_pages(const permuting *k, uint32_t front)
{
    const kvf_permute_args *a = k->a;
    const kvf_paging *p = &a->paging;
    const uint32_t page_size = p->shape.page_size, pages = a->row->sealed;
    for (uint32_t page = blockIdx.x * blockDim.x + threadIdx.x; page < pages;
         page += gridDim.x * blockDim.x) {
        const uint32_t first = page * page_size;
        const uint64_t bits =
            kvf_live_bits(front > first ? kvf_min_u32(page_size, front - first) : 0, 0);
        kvf_row_bits(p, a->row, k->head)[page] = bits;
        kvf_job_set(&a->jobs[(size_t)k->head * pages + page],
                    (const char *)a->after->pool[page] + k->head * kvf_page_bytes(&p->shape),
                    kvf_row_digest(p, a->row, page, k->head), bits, page_size);
    }
}

/* Where a token lies, where it goes, and whether it is in the store. */
static __device__ __forceinline__ void place(const permuting *k, uint32_t chosen, uint32_t token,
                                             kvf_row_move *move)
{
    const kvf_permute_args *a = k->a;
    const kvf_paging *p = &a->paging;
    const uint32_t page_size = p->shape.page_size, statics = k->stored - k->sink;
    const size_t bytes = kvf_row_bytes(&p->shape);
    uint32_t from = token, to = token;
    bool is_stored = true;
    if (token >= k->sink) {
        const uint32_t i = kvf_count_below((const int32_t *)k->order + k->sink, statics, token);
        const uint32_t j = token - k->sink - i; /* tokens of the rest before this one */
        const bool was_static = i < statics && k->order[k->sink + i] == token;
        from = was_static ? k->sink + i : k->stored + j;
        const uint32_t before =
            chosen_between(k, k->sink, k->sink + i) + chosen_between(k, k->stored, k->stored + j);
        is_stored = chosen_between(k, from, from + 1) != 0;
        to = is_stored ? k->sink + before : token + chosen - before;
    }
    move->from = kvf_row_page(p, a->row, from / page_size, k->head) + from % page_size * bytes;
    move->to = (char *)a->after->pool[to / page_size] + k->head * kvf_page_bytes(&p->shape) +
               to % page_size * bytes;
    move->also = NULL;
    a->after->order[(size_t)k->head * p->pages_max * page_size + to] = token;
    if (!is_stored)
        return;
    KVF_ASSERT(to < kvf_store_tokens(p));
    move->also =
        kvf_store_page(p, a->after->store, k->head, to / page_size) + to % page_size * bytes;
    a->after->store_index[k->head * kvf_store_tokens(p) + to] = to;
}

static __global__ void __launch_bounds__(THREADS)
    permute_kernel(const __grid_constant__ kvf_permute_args a)
{
    kvf_row_move *moves = (kvf_row_move *)(void *)kvf_shared(); /* [THREADS] */
    const kvf_paging *p = &a.paging;
    const uint32_t tokens = a.row->sealed * p->shape.page_size, head = blockIdx.y;
    const permuting k = permuting_of(&a, head);
    const uint32_t chosen = k.stored_ids + k.count - k.first_paged;
    for (uint32_t first = blockIdx.x * THREADS; first < tokens; first += gridDim.x * THREADS) {
        const uint32_t more = kvf_min_u32(THREADS, tokens - first);
        if (threadIdx.x < more)
            place(&k, chosen, first + threadIdx.x, &moves[threadIdx.x]);
        __syncthreads();
        kvf_block_move(moves, more, &p->shape);
        __syncthreads();
    }
    renew_pages(&k, k.sink + chosen);
    if (blockIdx.x != 0 || threadIdx.x != 0)
        return;
    a.after->store_count[head] = k.sink + chosen;
    kvf_counter_add(&a.counters->bytes_refresh,
                    tokens * (a.resident ? 2 : 3) * (uint64_t)kvf_row_bytes(&p->shape));
}

int kvf_permute_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_permute_args *a = (const kvf_permute_args *)args;
    const uint32_t tokens_max = a->paging.pages_max * a->paging.shape.page_size;
    const uint32_t parts = kvf_min_u32(PARTS_MAX, kvf_div_ceil_u32(tokens_max, THREADS));
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch(permute_kernel, dim3(parts, tasks), dim3(THREADS),
                           THREADS * sizeof(kvf_row_move), (cudaStream_t)stream, *a);
}
