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
    const uint32_t blocks = kvf_row_blocks(&a->paging, row);
    for (uint32_t b = row->sealed_before; b < blocks; b++)
        row->blocks[b] = b < row->sealed ? row->pool[b - row->sealed_before]
                                         : (void *)kvf_row_ring_block(&a->paging, row, b);
}
