/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages that the caller wants as scores of pages, the specification.
 *
 * Knows nothing of where scores come from. No entry, whatever it is, is used as an index before it
 * is known to name a page.
 */

#include <math.h>

#include "variants.h"

void kvf_given_ref(const void *args, uint32_t task)
{
    const kvf_given_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->lists];
    const uint32_t head = task % p->lists, pages = kvf_row_sealed_pages(p, row);
    const size_t first = kvf_given_first(a, task);
    float *out = a->out + (size_t)task * a->stride;
    KVF_ASSERT(pages <= a->stride);
    for (uint32_t i = 0; i < pages; i++) {
        const int is_given = a->scores && i < a->given_stride;
        out[i] = is_given && kvf_given_counts(p, row, head, i) ? a->scores[first + i] : -INFINITY;
    }
    for (uint32_t i = a->scores ? 0 : a->given_stride; i-- > 0;) {
        const uint32_t page = (uint32_t)a->ids[first + i]; /* -1 is none */
        if (kvf_given_counts(p, row, head, page))
            out[page] = (float)(a->given_stride - i);
    }
}
