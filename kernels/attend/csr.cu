/* SPDX-License-Identifier: Apache-2.0 */

/* Page lists in CSR form, on the GPU; see csr_ref.c for the meaning.
 *
 * Knows nothing of how pages were chosen. Out of a selection: a warp per list, LISTS of them per
 * block; where a list begins is the sum of the lengths before it, which each block adds up itself.
 * Into spans: a block per list, a thread per page. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define LISTS   8u
#define THREADS 128u

typedef struct list_parts {
    uint32_t sink;    /* pages 0 .. sink-1 */
    uint32_t skipped; /* leading ids that are among them */
    uint32_t chosen;
    uint32_t window; /* pages sealed .. sealed+window-1 */
} list_parts;

static __device__ __forceinline__ list_parts parts_of(const kvf_csr_args *a, uint32_t list)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[list / p->lists];
    list_parts n;
    const uint32_t sealed = kvf_row_sealed_pages(p, row);
    n.sink = kvf_min_u32(kvf_div_ceil_u32(p->sink, p->shape.page_size), sealed);
    n.skipped = kvf_count_below(a->ids + (size_t)list * a->ids_max, a->id_count[list], n.sink);
    n.chosen = a->id_count[list] - n.skipped;
    n.window = kvf_row_pages(p, row) - sealed;
    return n;
}

static __device__ __forceinline__ uint32_t length_of(const list_parts *n)
{
    return n->sink + n->chosen + n->window;
}

static __global__ void csr_out_kernel(const __grid_constant__ kvf_csr_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t lists = a.rows * p->lists, first = blockIdx.x * LISTS;
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t list = first + threadIdx.x / KVF_WARP_LANES;
    uint64_t before = 0;
    for (uint32_t l = threadIdx.x; l < first; l += blockDim.x) {
        const list_parts n = parts_of(&a, l);
        before += length_of(&n);
    }
    before = kvf_block_sum(before, kvf_shared());
    if (list >= lists)
        return;
    uint32_t begin = (uint32_t)before;
    for (uint32_t l = first; l < list; l++) {
        const list_parts n = parts_of(&a, l);
        begin += length_of(&n);
    }
    const kvf_row *row = &a.row[list / p->lists];
    const list_parts n = parts_of(&a, list);
    const int32_t *ids = a.ids + (size_t)list * a.ids_max + n.skipped;
    const uint32_t length = length_of(&n), pages = kvf_row_sealed_pages(p, row) + n.window;
    for (uint32_t i = lane; i < length; i += KVF_WARP_LANES)
        a.indices[begin + i] = i < n.sink              ? (int32_t)i
                               : i < n.sink + n.chosen ? ids[i - n.sink]
                                                       : (int32_t)(pages - length + i);
    if (lane != 0)
        return;
    a.indptr[list] = (int32_t)begin;
    a.last_page_len[list] = pages ? (int32_t)kvf_row_tokens(p, row, pages - 1) : 0;
    if (list == lists - 1)
        a.indptr[lists] = (int32_t)(begin + length);
}

extern "C" int kvf_csr_out_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_csr_args *a = (const kvf_csr_args *)args;
    const uint32_t blocks = kvf_div_ceil_u32(a->rows * a->paging.lists, LISTS);
    if (blocks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<csr_out_kernel>(dim3(blocks), dim3(LISTS * KVF_WARP_LANES),
                                           KVF_BLOCK_SCRATCH * 4, (cudaStream_t)stream, *a);
}

static __global__ void csr_in_kernel(const __grid_constant__ kvf_csr_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t list = blockIdx.x, head = list % p->kv_heads;
    const kvf_row *row = &a.row[list / p->kv_heads];
    const uint32_t first = (uint32_t)a.indptr[list], count = (uint32_t)a.indptr[list + 1] - first;
    const int32_t *pages = a.indices + first;
    const kvf_list_ends ends = kvf_list_ends_of(p, row);
    const uint32_t quantized = kvf_count_below(pages, count, ends.quantized);
    const uint32_t sink = kvf_count_below(pages, count, ends.sink);
    const uint32_t whole = kvf_count_below(pages, count, ends.whole);
    kvf_span *spans = a.spans + (size_t)list * a.spans_max;
    KVF_ASSERT(count + sink - whole <= a.spans_max);
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
        const uint32_t page = (uint32_t)pages[i];
        uint32_t tokens = kvf_row_tokens(p, row, page);
        if (i + 1 == count)
            tokens = kvf_min_u32((uint32_t)a.last_page_len[list], tokens);
        const uint32_t of_sink = i < sink ? kvf_page_sink(p, page, tokens) : 0;
        if (i < sink)
            kvf_span_set(&spans[i], kvf_static_page(p, row->static_kv, head, page), 0, of_sink);
        if (i >= quantized) {
            kvf_span_set(&spans[sink + i - quantized], kvf_row_page(p, row, page, head), 0, tokens);
        } else if (i >= whole) {
            kvf_span *span = &spans[sink + count - quantized + i - whole];
            kvf_span_set(span, kvf_row_home(p, row, page, head), kvf_live_bits(of_sink, 0), tokens);
            span->quantized = 1;
        }
    }
    if (threadIdx.x == 0)
        a.span_count[list] = count + sink - whole;
}

KVF_LAUNCHER(csr_in, csr_in_kernel, tasks, THREADS, 0)
