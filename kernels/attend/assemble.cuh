/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ATTEND_ASSEMBLE_CUH
#define KVF_KERNELS_ATTEND_ASSEMBLE_CUH

/*
 * What a list attends, as spans, by one block, for assemble.cu and for what ends with it.
 *
 * Knows nothing of policies. A thread per span: where a span goes follows from its number alone.
 * Exact.
 */

#include "kernels.h"

#include "cuda/paging.cuh"

/* `scratch`: KVF_BLOCK_SCRATCH words of shared memory. */
static __device__ __forceinline__ void kvf_assemble_list(const kvf_assemble_args &a, uint32_t list,
                                                         void *scratch)
{
    const kvf_paging *p = &a.paging;
    const uint32_t head = kvf_list_head(p, list % p->lists);
    const kvf_row *row = &a.row[list / p->lists];
    const uint32_t page_size = p->shape.page_size, ids = a.id_count[list];
    const uint32_t stored = row->store_count[head], sealed = kvf_row_sealed_pages(p, row);
    const uint32_t stores = kvf_div_ceil_u32(stored, page_size);
    const uint32_t fixed = stores + kvf_row_pages(p, row) - sealed;
    kvf_span *spans = a.spans + (size_t)list * a.spans_max;
    uint64_t sums = 0; /* tokens << 32 | misses */
    if (kvf_row_is_idle(row, list % p->lists)) {
        if (threadIdx.x == 0)
            a.span_count[list] = 0;
        return;
    }
    KVF_ASSERT(fixed + ids <= a.spans_max);
    for (uint32_t i = threadIdx.x; i < fixed + ids; i += blockDim.x) {
        kvf_span span;
        span.skip = 0;
        span.home = NULL;
        span.packed = 0;
        if (i < stores) {
            span.page = kvf_store_page(p, row->store, head, i);
            span.count = kvf_min_u32(page_size, stored - i * page_size);
        } else if (i < fixed) {
            const uint32_t page = sealed + i - stores;
            span.page = kvf_row_page(p, row, page, head);
            span.count = kvf_row_tokens(p, row, page);
        } else {
            const size_t at = (size_t)list * a.ids_max + i - fixed;
            sums += kvf_assemble_chosen(&a, row, list % p->lists, at, &span);
            if (row->chosen_at)
                atomicMax(&row->chosen_at[(size_t)head * p->pages_max + (uint32_t)a.ids[at]],
                          row->step + 1);
        }
        spans[i] = span;
        sums += (uint64_t)__popcll(kvf_live_bits(span.count, span.skip)) << 32;
    }
    sums = kvf_block_sum(sums, scratch);
    if (threadIdx.x != 0)
        return;
    a.span_count[list] = fixed + ids;
    kvf_counter_add(&a.counters->tokens_attended, sums >> 32);
    kvf_counter_add(&a.counters->pages_selected, ids);
    kvf_counter_add(&a.counters->hits, ids - (uint32_t)sums);
    kvf_counter_add(&a.counters->misses, (uint32_t)sums);
}

#endif
