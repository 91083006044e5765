/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks of a row in exact form, the specification. Knows nothing of who reads them.
 */

#include <string.h>

#include "packed.h"
#include "variants.h"

static void make_view(const kvf_widen_args *a)
{
    const kvf_paging *p = &a->paging;
    for (uint32_t b = 0; a->table && b < p->blocks_max; b++)
        a->table[b] = b < a->row->sealed ? a->wide + b * kvf_block_bytes(p)
                                         : kvf_row_ring_block(p, a->row, b);
    if (!a->view)
        return;
    *a->view = *a->row;
    a->view->blocks = a->table;
    a->view->slots = NULL;
}

void kvf_widen_ref(const void *args, uint32_t task)
{
    const kvf_widen_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = a->row;
    if (task == 0) {
        make_view(a);
        return;
    }
    const uint32_t head = (task - 1) % p->kv_heads, block = a->first + (task - 1) / p->kv_heads;
    const size_t token = kvf_token_bytes(&p->shape);
    const uint64_t sink = kvf_sink_bits(p, block);
    const char *from =
        (const char *)(a->block ? a->block : row->blocks[block]) + head * kvf_home_run_bytes(p);
    char *to =
        (a->wide ? a->wide + block * kvf_block_bytes(p) : kvf_row_ring_block(p, row, block)) +
        head * kvf_run_bytes(p);
    float x[KVF_HEAD_DIM_MAX];
    for (uint32_t t = 0; t < p->block_size; t++) {
        if (sink >> t & 1)
            memcpy(to + t * token, kvf_store_token(p, row->store, head, block * p->block_size + t),
                   token);
        else
            kvf_unpack_token(&p->shape,
                             from + t / p->shape.page_size * kvf_home_page_bytes(&p->shape),
                             t % p->shape.page_size, to + t * token, x);
    }
}
