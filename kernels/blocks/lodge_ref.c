/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages of new tokens into slots, the specification and the only host form.
 *
 * Knows nothing of rows, and nothing of what physical blocks hold: bytes come from where the caller
 * has them.
 */

#include "select/find_slot.h"
#include "variants.h"
#include "write_token.h"

static void lodge(const kvf_write_args *a, const kvf_row *row, uint32_t head, uint32_t page,
                  uint32_t first)
{
    const kvf_paging *p = &a->blocks->paging;
    const kvf_slot_tables t = kvf_slot_tables_of(p, row, head);
    const int32_t slot = kvf_admit_slot(p, &t, page, row->use - 1);
    if (slot < 0)
        return;
    t.tags[slot] = kvf_row_page_tag(p, row, page);
    for (uint32_t i = 0; row->slots && i < p->shape.page_size; i++) {
        const kvf_token_place place = {.is_nonfinite = (int)kvf_lodge_is_nonfinite(a, first + i)};
        kvf_write_exact(a, first + i, head, &place,
                        kvf_row_slot(p, row, head, (uint32_t)slot) +
                            i * kvf_token_bytes(&p->shape));
    }
}

void kvf_lodge_ref(const void *args, uint32_t task)
{
    const kvf_write_args *a = args;
    const kvf_physical_blocks *c = a->blocks;
    const kvf_row row = kvf_physical_slots(c);
    if (c->streaming.number && c->streaming.number[a->layer * c->paging.kv_heads + task])
        return;
    for (uint32_t i = 0; i < a->tokens; i++) {
        const uint32_t page = kvf_lodge_page(a, i);
        if (page != UINT32_MAX)
            lodge(a, &row, task, page, i);
    }
}
