/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Page lists in compressed rows: out of a selection, and into spans. Knows nothing of how pages
 * were chosen. Every list ascends and has each page once: sink pages, chosen pages, window pages.
 */

#include "variants.h"

void kvf_csr_out_ref(const void *args, uint32_t task)
{
    const kvf_csr_args *a = args;
    const kvf_paging *p = &a->paging;
    int32_t n = 0;
    (void)task;
    for (uint32_t l = 0; l < a->rows * p->lists; l++) {
        const kvf_row *row = &a->row[l / p->lists];
        const int32_t *ids = a->ids + (size_t)l * a->ids_max;
        const uint32_t sealed = kvf_row_sealed_pages(p, row);
        const uint32_t sink_pages =
            kvf_min_u32(kvf_div_ceil_u32(p->sink, p->shape.page_size), sealed);
        const uint32_t pages = kvf_row_pages(p, row);
        a->indptr[l] = n;
        for (uint32_t i = 0; i < sink_pages; i++)
            a->indices[n++] = (int32_t)i;
        for (uint32_t i = 0; i < a->id_count[l]; i++)
            if ((uint32_t)ids[i] >= sink_pages)
                a->indices[n++] = ids[i];
        for (uint32_t i = sealed; i < pages; i++)
            a->indices[n++] = (int32_t)i;
        a->last_page_len[l] = pages ? (int32_t)kvf_row_tokens(p, row, pages - 1) : 0;
    }
    a->indptr[a->rows * p->lists] = n;
}

void kvf_csr_in_ref(const void *args, uint32_t task)
{
    const kvf_csr_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->kv_heads];
    const uint32_t head = task % p->kv_heads;
    const uint32_t first = (uint32_t)a->indptr[task], end = (uint32_t)a->indptr[task + 1];
    kvf_span *spans = a->spans + (size_t)task * a->spans_max;
    KVF_ASSERT(end - first <= a->spans_max);
    for (uint32_t i = first; i < end; i++) {
        const uint32_t page = (uint32_t)a->indices[i];
        const uint32_t tokens = kvf_row_tokens(p, row, page);
        const uint32_t last = (uint32_t)a->last_page_len[task];
        spans[i - first] = (kvf_span){.page = kvf_row_page(p, row, page, head),
                                      .count = i + 1 == end ? kvf_min_u32(last, tokens) : tokens};
    }
    a->span_count[task] = end - first;
}
