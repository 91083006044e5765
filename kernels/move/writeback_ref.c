/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks from the ring to the pool. Knows nothing of block tables: they point to the ring
 * until the kernel `table` runs.
 */

#include <string.h>

#include "variants.h"

void kvf_writeback_ref(const void *args, uint32_t task)
{
    const kvf_writeback_args *a = args;
    const kvf_row *row = &a->row[task];
    for (uint32_t block = row->sealed_before; block < row->sealed; block++)
        memcpy(row->pool[block - row->sealed_before], kvf_row_ring_block(&a->paging, row, block),
               kvf_block_bytes(&a->paging));
}
