/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The tokens of one row as spans, on the GPU; see cover_ref.c for the meaning.
 *
 * Knows nothing of scores. Grid: (parts of PAGES pages or runs, KV heads). Where a part's spans
 * begin is the number of pages before it that are there; each block counts those itself, 4 bytes
 * per page from the cache, which is cheaper than a second launch. The block in whose part the
 * sealed pages end adds the window and the totals. Bound: 28 bytes written per page. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 256u
#define PAGES   1024u

/* Spans and their first tokens, of one KV head. */
typedef struct covering {
    kvf_span *spans;
    uint32_t *index;
} covering;

static __device__ __forceinline__ void put(const covering *c, uint32_t at, const void *page,
                                           uint64_t skip, uint32_t count, uint32_t index)
{
    kvf_span_set(&c->spans[at], page, skip, count);
    c->index[at] = index;
}

/* The window, candidates and the limits of the kept queries; n spans are there already. */
static __device__ void put_end(const kvf_cover_args *a, const covering *c, uint32_t head,
                               uint32_t n)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = a->row;
    const uint32_t tokens = kvf_cover_tokens(p, a->resident), sealed = row->sealed * p->block_size;
    const uint32_t window = kvf_div_ceil_u32(row->length - sealed, tokens);
    KVF_ASSERT(n + window <= a->spans_max);
    for (uint32_t i = threadIdx.x; i < window; i += blockDim.x) {
        const uint32_t token = sealed + i * tokens;
        put(c, n + i, kvf_row_page(p, row, token / p->shape.page_size, head), 0,
            kvf_min_u32(tokens, row->length - token), token);
    }
    if (a->first && a->limit && head == 0) {
        const uint32_t ring = p->query_window;
        for (uint32_t s = threadIdx.x; s < ring; s += blockDim.x)
            a->limit[s] = row->length - 1 - (row->query_slot + ring - s) % ring;
    }
    if (threadIdx.x != 0)
        return;
    a->span_count[head] = n + window;
    if (a->first) {
        const uint32_t sink = kvf_min_u32(p->sink, sealed);
        a->first[head] = sink;
        a->count[head] = n * tokens - sink;
        a->take[head] = a->take_tokens ? a->take_tokens : kvf_row_static(row);
    }
}

static __global__ void cover_kernel(const __grid_constant__ kvf_cover_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = a.row;
    const bool resident = a.resident != 0;
    const uint32_t head = blockIdx.y, page_size = p->shape.page_size;
    const uint32_t sealed = resident ? kvf_row_sealed_pages(p, row) : row->sealed;
    const uint32_t first = blockIdx.x * PAGES;
    covering c;
    c.spans = a.spans + (size_t)head * a.spans_max;
    c.index = a.span_index + (size_t)head * a.spans_max;
    if (first > sealed)
        return;
    uint32_t n = first;
    if (resident) {
        const uint32_t stored = row->static_count[head];
        const uint32_t stores = kvf_div_ceil_u32(stored, page_size);
        uint64_t before = 0;
        for (uint32_t i = threadIdx.x; first == 0 && i < stores; i += blockDim.x)
            put(&c, i, kvf_static_page(p, row->static_kv, head, i), 0,
                kvf_min_u32(page_size, stored - i * page_size), 0);
        for (uint32_t i = threadIdx.x; i < first; i += blockDim.x)
            before += kvf_row_is_recent(p, row, head, i);
        n = stores + (uint32_t)kvf_block_sum(before, kvf_shared());
    }
    const uint32_t end = kvf_min_u32(first + PAGES, sealed);
    for (uint32_t base = first; base < end; base += blockDim.x) {
        const uint32_t i = base + threadIdx.x;
        const bool is_there = i < end && (!resident || kvf_row_is_recent(p, row, head, i));
        uint32_t more;
        const uint32_t at = n + kvf_block_scan(is_there, &more, kvf_shared());
        if (is_there && !resident)
            put(&c, at, kvf_row_run(p, row, i, head), 0, p->block_size, i * p->block_size);
        else if (is_there)
            put(&c, at, kvf_row_nearest(p, row, head, i), kvf_row_skip(p, row, head, i), page_size,
                i * page_size);
        n += more;
    }
    if (sealed - first < PAGES)
        put_end(&a, &c, head, n);
}

KVF_LAUNCHER(cover, cover_kernel,
             dim3((a->resident ? a->paging.pages_max : a->paging.blocks_max) / PAGES + 1, tasks),
             THREADS, KVF_BLOCK_SCRATCH * 4)
