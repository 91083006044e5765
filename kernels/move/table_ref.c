/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Page tables of rows: sealed pages point into the pool, the others into the ring. Knows nothing of
 * what the pages hold.
 */

#include "variants.h"

void kvf_table_ref(const void *args, uint32_t task)
{
    const kvf_table_args *a = args;
    const kvf_row *row = &a->row[task];
    const uint32_t pages = kvf_row_pages(&a->paging, row);
    for (uint32_t p = row->sealed_before; p < pages; p++)
        row->blocks[p] = p < row->sealed ? row->pool[p - row->sealed_before]
                                         : (void *)kvf_row_ring_block(&a->paging, row, p);
}
