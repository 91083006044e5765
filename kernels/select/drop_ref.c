/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stores without the sink tokens that a row has lost, the specification and the only host form.
 */

#include "variants.h"

void kvf_drop_ref(const void *args, uint32_t task)
{
    const kvf_drop_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->kv_heads];
    const uint32_t sealed = row->sealed * p->block_size;
    if (sealed < p->sink)
        row->store_count[task % p->kv_heads] = sealed;
}
