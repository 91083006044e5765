/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The newest pages of each list; with as many as there are, all of them. Knows nothing of scores.
 */

#include "variants.h"

void kvf_newest_ref(const void *args, uint32_t task)
{
    const kvf_newest_args *a = args;
    const kvf_row *row = &a->row[task / a->paging.lists];
    const uint32_t sealed = kvf_row_sealed_pages(&a->paging, row);
    const uint32_t count = kvf_min_u32(a->choose[task], sealed);
    KVF_ASSERT(count <= a->ids_max);
    for (uint32_t i = 0; i < count; i++)
        a->ids[(size_t)task * a->ids_max + i] = (int32_t)(sealed - count + i);
    a->id_count[task] = count;
}
