/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of rows to one place, the specification and the only host form. Knows nothing of who
 * attends to them.
 */

#include <string.h>

#include "slots.h"
#include "variants.h"

/* Returns the bytes that came from where the table names the page. */
static size_t stage_page(const kvf_stage_args *a, const kvf_row *row, uint32_t head, uint32_t page,
                         char *to)
{
    const kvf_paging *p = &a->paging;
    const size_t bytes = kvf_page_bytes(&p->shape);
    if (page * p->shape.page_size >= row->length)
        return 0;
    const int32_t slot = kvf_row_slot_of(p, row, head, page);
    memcpy(to, kvf_row_page_in(p, row, head, page, slot), bytes);
    return slot < 0 ? bytes : 0;
}

void kvf_stage_ref(const void *args, uint32_t task)
{
    const kvf_stage_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / a->count];
    const uint32_t block = task % a->count;
    char *to = a->to + task * kvf_block_bytes(p);
    size_t bytes = 0;
    if (block >= kvf_row_blocks(p, row))
        return;
    for (uint32_t i = 0; i < p->kv_heads * p->block_pages; i++)
        bytes += stage_page(a, row, i / p->block_pages, block * p->block_pages + i % p->block_pages,
                            to + i * kvf_page_bytes(&p->shape));
    __atomic_fetch_add(&a->counters->bytes_prompt, bytes, __ATOMIC_RELAXED);
    if (!a->home)
        return;
    a->home[block] = row->blocks[block];
    row->blocks[block] = to;
}
