/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The bytes of pages that have a slot without them, the specification and the only host form: as
 * addresses for the transfer engine, or by copies. And slots for pages that are sealed.
 *
 * Knows nothing of how slots were found for misses.
 */

#include <string.h>

#include "select/find_slot.h"
#include "variants.h"

/*
 * Misses as addresses, for the transfer engine: pages of the pool on one side, slots on the other.
 * Knows nothing of how they travel.
 */

void kvf_fetch_ref(const void *args, uint32_t task)
{
    const kvf_fetch_args *a = args;
    const kvf_choices *c = &a->choices;
    const kvf_paging *p = &c->paging;
    uint32_t n = 0;
    (void)task;
    for (uint32_t l = 0; l < c->rows * p->lists; l++) {
        const kvf_row *row = &c->row[l / p->lists];
        const uint32_t list = l % p->lists;
        for (uint32_t i = 0; i < c->miss_count[l]; i++, n++) {
            const kvf_miss miss = c->misses[(size_t)l * c->ids_max + i];
            a->from[n] = kvf_row_home(p, row, (uint32_t)miss.page, kvf_list_head(p, list));
            a->to[n] = kvf_row_slot(p, row, kvf_list_head(p, list), (uint32_t)miss.slot);
        }
    }
    *a->count = n;
}

/*
 * Pages that lists miss into their slots, the specification and the only host form. Knows nothing
 * of who else wants them.
 */

void kvf_collect_ref(const void *args, uint32_t task)
{
    const kvf_choices *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->lists];
    const uint32_t head = kvf_list_head(p, task % p->lists);
    for (uint32_t i = 0; row->slots && i < a->miss_count[task]; i++) {
        const kvf_miss miss = a->misses[(size_t)task * a->ids_max + i];
        memcpy(kvf_row_slot(p, row, head, (uint32_t)miss.slot),
               kvf_row_home(p, row, (uint32_t)miss.page, head), kvf_stored_page_bytes(&p->shape));
    }
}

/*
 * Pages of blocks that are sealed into slots, the specification and the only host form.
 *
 * Knows nothing of what else sealing does. Copies that slots have of these pages are of blocks that
 * were given back, so it goes in any case.
 */

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
