/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A new static store out of the old one and of pages, on the GPU; see pack_ref.c for the meaning.
 *
 * Knows nothing of scores. Grid: (PARTS, KV heads). The reference merges entry by entry, a
 * block THREADS at a time: the thread of step d of a merge finds by bisection how many of
 * the d entries before it come from either run, and a running sum over the block gives the places
 * of live entries. Every block of a head follows the whole merge and moves the tokens of every
 * PARTS-th round; the first one writes indices and bits as well, so no two write the same. Bound:
 * the tokens taken, read and written once, over the link where pages are not resident. Exact.
 */

#include "common/convert.h"
#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 256u
#define PARTS   8u

typedef struct shared_state {
    uint32_t scratch[KVF_BLOCK_SCRATCH];
    uint32_t pages[THREADS + 1]; /* of this round's steps, after the last page of the one before */
    kvf_token_move moves[THREADS];
} shared_state;

/* One KV head of one launch. */
typedef struct packing {
    const kvf_pack_args *a;
    uint32_t head;
    uint32_t sink; /* entries that stay in front */
    uint32_t old_count;
    const uint32_t *old_index; /* [old_count] */
    const int32_t *ids;        /* [count]; the first `split` are positions in the old store */
    uint32_t split;
    uint32_t count;
    uint32_t *new_index; /* [new_count] */
    uint32_t new_count;
    uint32_t from_pages; /* entries */
} packing;

/* How many of the first d steps of a merge take from the first run, of n; the other has m.
 * before(i, j): entry i of the first run comes before entry j of the other. */
template <typename Before>
static __device__ __forceinline__ uint32_t merge_split(uint32_t d, uint32_t n, uint32_t m,
                                                       Before before)
{
    uint32_t low = d > m ? d - m : 0, high = kvf_min_u32(d, n);
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (before(middle, d - 1 - middle))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static __device__ __forceinline__ const char *old_entry(const packing *k, uint32_t entry)
{
    const kvf_paging *p = &k->a->paging;
    return kvf_static_token(p, k->a->row->static_kv, k->head, entry);
}

static __device__ __forceinline__ char *new_entry(const packing *k, uint32_t entry)
{
    const kvf_paging *p = &k->a->paging;
    KVF_ASSERT(entry < kvf_static_room(p));
    return kvf_static_token(p, k->a->static_kv, k->head, entry);
}

/* Token of id i of the old store; those after its end are dead and come last. */
static __device__ __forceinline__ uint32_t old_token(const packing *k, uint32_t i)
{
    const uint32_t entry = (uint32_t)k->ids[i];
    return entry < k->old_count ? k->old_index[entry] : UINT32_MAX;
}

static __device__ __forceinline__ uint32_t page_token(const packing *k, uint32_t j)
{
    const uint32_t tokens = kvf_cover_tokens(&k->a->paging, k->a->resident);
    const uint32_t position = (uint32_t)k->ids[k->split + j];
    return k->a->span_index[(size_t)k->head * k->a->spans_max + position / tokens] +
           position % tokens;
}

/* The entry of step d of the merge of old and new tokens: its token and key, NULL if dead. */
static __device__ const char *merged_entry(const packing *k, uint32_t d, uint32_t *token,
                                           bool *is_of_page)
{
    const kvf_pack_args *a = k->a;
    const uint32_t tokens = kvf_cover_tokens(&a->paging, a->resident);
    const uint32_t others = k->count - k->split;
    const uint32_t i = merge_split(d, k->split, others, [k](uint32_t x, uint32_t y) {
        return old_token(k, x) < page_token(k, y);
    });
    const uint32_t j = d - i;
    *is_of_page = i == k->split || (j < others && old_token(k, i) >= page_token(k, j));
    if (!*is_of_page) {
        *token = old_token(k, i);
        return *token == UINT32_MAX ? NULL : old_entry(k, (uint32_t)k->ids[i]);
    }
    const uint32_t position = (uint32_t)k->ids[k->split + j], t = position % tokens;
    const kvf_span *span = &a->spans[(size_t)k->head * a->spans_max + position / tokens];
    *token = page_token(k, j);
    if (!(kvf_live_bits(span->count, span->skip) >> t & 1))
        return NULL;
    return (const char *)span->page + t * kvf_token_bytes(&a->paging.shape);
}

/* New entries: the old ones of the sink, or those of the merge. */
static __device__ void add_entries(packing *k, shared_state *s, uint32_t steps, bool is_sink)
{
    for (uint32_t round = 0; round * THREADS < steps; round++) {
        const uint32_t d = round * THREADS + threadIdx.x;
        uint32_t token = 0, more;
        bool is_of_page = false;
        const char *from = NULL;
        if (d < steps && is_sink) {
            token = k->old_index[d];
            from = old_entry(k, d);
        } else if (d < steps) {
            from = merged_entry(k, d, &token, &is_of_page);
        }
        const uint32_t place = kvf_block_scan(from != NULL, &more, s->scratch);
        if (from) {
            const uint32_t entry = k->new_count + place;
            s->moves[place].from = from;
            s->moves[place].to = new_entry(k, entry);
            s->moves[place].also = NULL;
            if (blockIdx.x == 0)
                k->new_index[entry] = token;
            k->from_pages += is_of_page;
        }
        __syncthreads();
        if (round % PARTS == blockIdx.x)
            kvf_block_move(s->moves, more, &k->a->paging.shape);
        k->new_count += more;
        __syncthreads();
    }
}

/* Bits of a page whose first new entry is j, counted after the sink. */
static __device__ uint64_t bits_of(const packing *k, uint32_t page, uint32_t j)
{
    const kvf_paging *p = &k->a->paging;
    const uint32_t page_size = p->shape.page_size;
    uint64_t bits = kvf_sink_bits(p, page / p->block_pages) >> page % p->block_pages * page_size &
                    kvf_live_bits(page_size, 0);
    for (j += k->sink; j < k->new_count && k->new_index[j] / page_size == page; j++)
        bits |= UINT64_C(1) << k->new_index[j] % page_size;
    return bits;
}

/* Old and new entries merged by page. The thread of a page's first step looks after the page. */
static __device__ void refresh_bits(const packing *k, shared_state *s)
{
    const kvf_pack_args *a = k->a;
    const kvf_paging *p = &a->paging;
    const uint32_t page_size = p->shape.page_size;
    const uint32_t n = k->old_count - k->sink, m = k->new_count - k->sink;
    const uint32_t *old_index = k->old_index + k->sink, *new_index = k->new_index + k->sink;
    uint64_t *all = kvf_row_bits(p, a->row, k->head);
    for (uint32_t first = 0; first < n + m; first += THREADS) {
        const uint32_t d = first + threadIdx.x;
        uint32_t j = 0, page = UINT32_MAX;
        if (d < n + m) {
            const uint32_t i = merge_split(d, n, m, [=](uint32_t x, uint32_t y) {
                return old_index[x] / page_size <= new_index[y] / page_size;
            });
            j = d - i;
            page = i < n ? old_index[i] / page_size : UINT32_MAX;
            page = j < m ? kvf_min_u32(page, new_index[j] / page_size) : page;
        }
        if (threadIdx.x == 0)
            s->pages[0] = first ? s->pages[THREADS] : UINT32_MAX;
        __syncthreads();
        s->pages[threadIdx.x + 1] = page;
        __syncthreads();
        if (d < n + m && s->pages[threadIdx.x] != page) {
            /* Other threads change other pages of the same block meanwhile. */
            uint64_t *block = &all[page / p->block_pages];
            const uint64_t old = kvf_page_skip(p, kvf_load_relaxed(block), page);
            const uint64_t bits = bits_of(k, page, j);
            if (old != bits)
                atomicXor((unsigned long long *)block, (unsigned long long)(old ^ bits)
                                                           << page % p->block_pages * page_size);
        }
        __syncthreads();
    }
}

static __global__ void __launch_bounds__(THREADS, 2)
    pack_kernel(const __grid_constant__ kvf_pack_args a)
{
    shared_state *s = (shared_state *)(void *)kvf_shared();
    const kvf_paging *p = &a.paging;
    const uint32_t head = blockIdx.y, page_size = p->shape.page_size;
    packing k;
    k.a = &a;
    k.head = head;
    k.sink = kvf_min_u32(p->sink, a.row->sealed * p->block_size);
    k.old_count = a.row->static_count[head];
    k.old_index = a.row->static_ids + head * kvf_static_room(p);
    k.ids = a.ids + (size_t)head * a.ids_max;
    k.count = a.id_count[head];
    k.split = a.resident ? kvf_count_below(k.ids, k.count,
                                           kvf_div_ceil_u32(k.old_count, page_size) * page_size)
                         : 0;
    k.new_index = a.static_ids + head * kvf_static_room(p);
    k.new_count = 0;
    k.from_pages = 0;
    KVF_ASSERT(k.sink <= k.old_count);
    add_entries(&k, s, k.sink, true);
    add_entries(&k, s, k.count, false);
    if (blockIdx.x != 0)
        return;
    refresh_bits(&k, s);
    const uint64_t from_pages = kvf_block_sum(k.from_pages, s->scratch);
    if (threadIdx.x != 0)
        return;
    a.static_count[head] = k.new_count;
    if (!a.resident)
        kvf_counter_add(&a.counters->bytes_refresh,
                        from_pages * kvf_token_bytes(&p->shape) +
                            a.row->sealed * p->block_size * kvf_key_bytes(&p->shape));
}

KVF_LAUNCHER(pack, pack_kernel, dim3(PARTS, tasks), THREADS, sizeof(shared_state))
