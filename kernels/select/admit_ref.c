/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages of blocks that are sealed into slots, the specification and the only host form.
 *
 * Knows nothing of what else sealing does. Copies that slots have of these pages are of blocks that
 * were given back, so it goes in any case.
 */

#include <string.h>

#include "select/find_slot.h"
#include "variants.h"

static void admit_page(const kvf_admit_args *a, const kvf_row *row, uint32_t head, uint32_t block,
                       uint32_t number)
{
    const kvf_paging *p = &a->paging;
    const kvf_slot_tables t = kvf_slot_tables_of(p, row, head);
    const uint32_t page = kvf_row_sealing(row, block) * p->block_pages + number;
    const int32_t slot = kvf_admit_slot(p, &t, page, row->use);
    if (slot >= 0 && row->slots)
        memcpy(kvf_row_slot(p, row, head, (uint32_t)slot),
               kvf_admit_from(p, row, head, block, number), kvf_stored_page_bytes(&p->shape));
}

void kvf_admit_ref(const void *args, uint32_t task)
{
    const kvf_admit_args *a = args;
    for (uint32_t r = 0; r < a->rows; r++) {
        const kvf_row *row = &a->row[r];
        for (uint32_t b = row->sealed_before; b < row->sealed; b++)
            for (uint32_t i = 0; i < a->paging.block_pages; i++)
                admit_page(a, row, task, b, i);
    }
}
