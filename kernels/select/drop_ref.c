/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Slots without the pages that a row has lost, the specification and the only host form.
 *
 * Knows nothing of bytes. Before and after: slot_of_page and page_of_slot are inverse to each
 * other.
 */

#include "variants.h"

void kvf_drop_ref(const void *args, uint32_t task)
{
    const kvf_drop_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->lists];
    const uint32_t list = task % p->lists, head = kvf_list_head(p, list);
    const uint32_t sealed = row->sealed * p->block_size;
    const int32_t pages = (int32_t)kvf_row_sealed_pages(p, row);
    int32_t *slot_of_page = a->slot_of_page + (size_t)task * p->pages_max;
    int32_t *page_of_slot = a->page_of_slot + (size_t)task * a->slots;
    for (uint32_t s = 0; s < a->slots; s++) {
        if (page_of_slot[s] < pages)
            continue;
        slot_of_page[page_of_slot[s]] = -1;
        page_of_slot[s] = -1;
    }
    if (list % (p->lists / p->kv_heads) == 0 && sealed < p->sink)
        row->store_count[head] = sealed;
}
