/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Misses as addresses, for the transfer engine: pages of the pool on one side, slots on the other.
 * Knows nothing of how they travel.
 */

#include "variants.h"

void kvf_fetch_ref(const void *args, uint32_t task)
{
    const kvf_fetch_args *a = args;
    const kvf_paging *p = &a->paging;
    uint32_t n = 0;
    (void)task;
    for (uint32_t l = 0; l < a->rows * p->lists; l++) {
        const kvf_row *row = &a->row[l / p->lists];
        const uint32_t list = l % p->lists;
        for (uint32_t i = 0; i < a->miss_count[l]; i++, n++) {
            const kvf_miss miss = a->misses[(size_t)l * a->ids_max + i];
            a->from[n] = kvf_row_home(p, row, (uint32_t)miss.page, kvf_list_head(p, list));
            a->to[n] = kvf_row_slot(p, row, kvf_list_head(p, list), (uint32_t)miss.slot);
        }
    }
    *a->count = n;
}
