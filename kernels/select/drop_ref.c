/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stores without the sink tokens that a row has lost, or without a static set, the specification
 * and the only host form.
 */

#include "variants.h"

void kvf_drop_ref(const void *args, uint32_t task)
{
    const kvf_drop_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->kv_heads];
    const uint32_t head = task % p->kv_heads, sealed = row->sealed * p->block_size;
    if (a->sets || sealed < p->sink)
        row->static_count[head] = kvf_min_u32(sealed, p->sink);
    for (uint32_t b = 0; a->sets && b < row->sealed; b++)
        kvf_row_bits(p, row, head)[b] = kvf_sink_bits(p, b);
    for (uint32_t i = 0; a->sets && row->chosen_at && i < kvf_row_sealed_pages(p, row); i++)
        row->chosen_at[(size_t)head * p->pages_max + i] = 0;
}
