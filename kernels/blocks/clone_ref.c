/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A physical block onto another, the specification and the only host form. Knows nothing of rows;
 * the words of codes are the caller's.
 */

#include <string.h>

#include "variants.h"

void kvf_clone_ref(const void *args, uint32_t task)
{
    const kvf_clone_args *a = args;
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t layer = task / c->id_blocks, part = task % c->id_blocks;
    const uint32_t from = a->from * c->id_blocks + part, to = a->to * c->id_blocks + part;
    const size_t scales = (size_t)p->kv_heads * p->block_size;
    uint16_t *all = c->scales + layer * kvf_physical_count(c) * scales;
    uint32_t *writes = kvf_physical_writes(c, layer, to);
    memcpy(kvf_physical_home(c, layer, to), kvf_physical_home(c, layer, from),
           kvf_stored_block_bytes(p));
    memcpy(all + to * scales, all + from * scales, scales * sizeof *all);
    *kvf_physical_nonfinite(c, layer, to) = *kvf_physical_nonfinite(c, layer, from);
    for (uint32_t t = 0; t < p->block_size; t++)
        writes[t] += c->ignores_writes != 1;
    if (p->segments_max && !c->ignores_writes)
        __atomic_store_n(kvf_physical_is_centroid(c, layer, to), 0, __ATOMIC_RELAXED);
}
