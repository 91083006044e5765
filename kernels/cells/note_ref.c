/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tags of the slots that misses got, the specification and the only host form. Knows nothing of how
 * pages come there.
 */

#include "variants.h"

void kvf_note_ref(const void *args, uint32_t task)
{
    const kvf_note_args *a = args;
    const kvf_cells *c = a->cells;
    const uint32_t *cell = c->cell + (size_t)(task / c->paging.lists) * c->paging.blocks_max;
    kvf_cell_tag *tags = c->slot_tags + (c->list_page_of_slot[task] - c->page_of_slot);
    for (uint32_t i = 0; i < a->miss_count[task]; i++) {
        const kvf_miss miss = a->misses[(size_t)task * a->ids_max + i];
        tags[miss.slot] = kvf_page_tag(c, a->layer, cell, (uint32_t)miss.page);
    }
}
