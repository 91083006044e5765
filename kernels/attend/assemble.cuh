/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ATTEND_ASSEMBLE_CUH
#define KVF_KERNELS_ATTEND_ASSEMBLE_CUH

/*
 * The spans that a list attends, by one block, for assemble.cu and for what ends with it.
 *
 * Knows nothing of policies. A thread per span: where a span goes follows from its number alone.
 * Exact.
 */

#include "kernels.h"

#include "cuda/paging.cuh"

/* Spans of a list from pages that are chosen. `held`: the span of this thread's first one as
 * kvf_assemble_home has it, or NULL. `scratch`: KVF_BLOCK_SCRATCH words of shared memory. */
static __device__ __forceinline__ void kvf_assemble_list(const kvf_assemble_args &a,
                                                         const kvf_row *row, uint32_t list,
                                                         const kvf_chosen &chosen,
                                                         const kvf_span *held, void *scratch)
{
    const kvf_paging *p = &a.choices.paging;
    kvf_layer_counters *counters = a.choices.counters;
    const uint32_t of_row = list % p->lists, head = kvf_list_head(p, of_row);
    const uint32_t page_size = p->shape.page_size;
    const uint32_t stored = row->static_count[head], sealed = kvf_row_sealed_pages(p, row);
    const uint32_t stores = kvf_div_ceil_u32(stored, page_size);
    const uint32_t fixed = stores + kvf_row_pages(p, row) - sealed;
    const uint64_t *masks = a.masks ? a.masks + (size_t)list * a.choices.ids_max : NULL;
    kvf_span *spans = a.spans + (size_t)list * a.spans_max, span;
    uint32_t tokens = 0, misses = 0;
    if (kvf_row_is_idle(row, of_row)) {
        if (threadIdx.x == 0)
            a.span_count[list] = 0;
        return;
    }
    KVF_ASSERT(fixed + chosen.count <= a.spans_max);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < chosen.count; i += blockDim.x) {
        const uint32_t page = (uint32_t)chosen.ids[i];
        if (held && i == threadIdx.x)
            span = *held;
        else
            kvf_assemble_home(p, row, of_row, page, masks ? masks[i] : 0, &span);
        misses +=
            kvf_assemble_slot(&a, row, of_row, (uint32_t)chosen.slot[i], chosen.missed[i], &span);
        tokens += (uint32_t)__popcll(kvf_live_bits(span.count, span.skip));
        spans[fixed + i] = span;
        if (row->chosen_at)
            atomicMax(&row->chosen_at[(size_t)head * p->pages_max + page], row->step + 1);
    }
    /* By the last threads, which have fewer of the others. */
#pragma unroll 1
    for (uint32_t i = blockDim.x - 1 - threadIdx.x; i < fixed; i += blockDim.x) {
        const uint32_t page = sealed + i - stores;
        if (i < stores)
            kvf_span_set(&span, kvf_static_page(p, row->static_kv, head, i), 0,
                         kvf_min_u32(page_size, stored - i * page_size));
        else
            kvf_span_set(&span, kvf_row_page(p, row, page, head), 0, kvf_row_tokens(p, row, page));
        tokens += span.count;
        spans[i] = span;
    }
    const uint64_t sums = kvf_block_sum((uint64_t)tokens << 32 | misses, scratch);
    if (threadIdx.x != 0)
        return;
    a.span_count[list] = fixed + chosen.count;
    kvf_counter_add(&counters->tokens_attended, sums >> 32);
    kvf_counter_add(&counters->pages_selected, chosen.count);
    kvf_counter_add(&counters->hits, chosen.count - (uint32_t)sums);
    kvf_counter_add(&counters->misses, (uint32_t)sums);
}

#endif
