/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks into home form, the specification. Knows nothing of what else sealing does.
 */

#include <string.h>

#include "packed.h"
#include "variants.h"

void kvf_narrow_ref(const void *args, uint32_t task)
{
    const kvf_narrow_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / (a->count * p->kv_heads)];
    const uint32_t head = task % p->kv_heads;
    const uint32_t block =
        (a->wide ? a->first : row->sealed_before) + task / p->kv_heads % a->count;
    if (block >= row->sealed)
        return;
    const size_t token = kvf_token_bytes(&p->shape), run = head * kvf_run_bytes(p);
    char *from =
        (a->wide ? a->wide + block * kvf_block_bytes(p) : kvf_row_ring_block(p, row, block)) + run;
    char *to = (char *)row->pool[block - row->sealed_before] + head * kvf_home_run_bytes(p);
    const uint64_t sink = kvf_sink_bits(p, block);
    float x[KVF_HEAD_DIM_MAX];
    if (p->spare_blocks && block + 1 == row->sealed)
        memcpy(kvf_row_spare(p, row) + run, from, kvf_run_bytes(p));
    memset(to, 0, kvf_home_run_bytes(p));
    for (uint32_t t = 0; t < p->block_size; t++) {
        char *page = to + t / p->shape.page_size * kvf_home_page_bytes(&p->shape);
        kvf_pack_token(&p->shape, page, t % p->shape.page_size, from + t * token, x);
        if (!(sink >> t & 1))
            kvf_unpack_token(&p->shape, page, t % p->shape.page_size, from + t * token, x);
    }
}
