/* SPDX-License-Identifier: Apache-2.0 */

/* Page lists in CSR form: out of a selection, and into spans. Knows nothing of how pages
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

/* Pages of a list that are below `end`. */
static uint32_t count_below(const int32_t *pages, uint32_t count, uint32_t end)
{
    uint32_t n = 0;
    while (n < count && (uint32_t)pages[n] < end)
        n++;
    return n;
}

void kvf_csr_in_ref(const void *args, uint32_t task)
{
    const kvf_csr_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->kv_heads];
    const uint32_t head = task % p->kv_heads;
    const uint32_t count = (uint32_t)(a->indptr[task + 1] - a->indptr[task]);
    const int32_t *pages = a->indices + a->indptr[task];
    const kvf_list_ends ends = kvf_list_ends_of(p, row);
    const uint32_t quantized = count_below(pages, count, ends.quantized);
    const uint32_t sink = count_below(pages, count, ends.sink);
    const uint32_t whole = count_below(pages, count, ends.whole);
    kvf_span *spans = a->spans + (size_t)task * a->spans_max;
    a->span_count[task] = count + sink - whole;
    KVF_ASSERT(a->span_count[task] <= a->spans_max);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t page = (uint32_t)pages[i], last = (uint32_t)a->last_page_len[task];
        uint32_t tokens = kvf_row_tokens(p, row, page);
        tokens = i + 1 == count ? kvf_min_u32(last, tokens) : tokens;
        if (i < sink)
            spans[i] = (kvf_span){.page = kvf_static_page(p, row->static_kv, head, page),
                                  .count = kvf_page_sink(p, page, tokens)};
        if (i >= quantized)
            spans[sink + i - quantized] =
                (kvf_span){.page = kvf_row_page(p, row, page, head), .count = tokens};
        else if (i >= whole)
            spans[sink + count - quantized + i - whole] =
                (kvf_span){.page = kvf_row_home(p, row, page, head),
                           .skip = kvf_live_bits(kvf_page_sink(p, page, tokens), 0),
                           .count = tokens,
                           .quantized = 1};
    }
}
