/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages that lists miss into their slots, the specification and the only host form. Knows nothing
 * of who else wants them.
 */

#include <string.h>

#include "variants.h"

void kvf_collect_ref(const void *args, uint32_t task)
{
    const kvf_collect_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->lists];
    const uint32_t head = kvf_list_head(p, task % p->lists);
    for (uint32_t i = 0; row->slots && i < a->miss_count[task]; i++) {
        const kvf_miss miss = a->misses[(size_t)task * a->ids_max + i];
        memcpy(kvf_row_slot(p, row, head, (uint32_t)miss.slot),
               kvf_row_home(p, row, (uint32_t)miss.page, head), kvf_stored_page_bytes(&p->shape));
    }
}
