/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One token per row into the window, and what else a decode step needs to know before it selects.
 *
 * Knows nothing of policies. The token is moved even if it is not finite; the row's fault word
 * says so, and keeps the lowest (layer, token).
 */

#include <string.h>

#include "element.h"
#include "variants.h"

void kvf_append_ref(const void *args, uint32_t task)
{
    const kvf_append_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task];
    const size_t bytes = kvf_row_bytes(&p->shape), value_bytes = kvf_value_bytes(&p->shape);
    for (uint32_t i = 0; i < a->choose_lists; i++)
        a->choose[task * a->choose_lists + i] = kvf_row_choose(p, row);
    if (!a->k)
        return;
    const size_t query_bytes = p->kv_heads * p->group * bytes;
    if (row->queries)
        memcpy(row->queries + row->query_slot * query_bytes, kvf_offset(a->q, task * query_bytes),
               query_bytes);

    const uint32_t token = row->length - 1;
    const uint32_t index = token / p->block_size, t = token % p->block_size;
    /* Not by the table: the row that begins the block may be another one of this launch. */
    char *block = kvf_row_ring_block(p, row, index);
    if (t == 0)
        row->blocks[index] = block;
    const void *k = kvf_offset(a->k, task * p->kv_heads * bytes);
    const void *v = kvf_offset(a->v, task * p->kv_heads * value_bytes);
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        char *to = block + h * kvf_run_bytes(p) + t * kvf_token_bytes(&p->shape);
        memcpy(to, kvf_offset(k, h * bytes), bytes);
        memcpy(to + bytes, kvf_offset(v, h * value_bytes), value_bytes);
    }
    if (kvf_has_no_finite(k, p->kv_heads * bytes, p->shape.dtype) ||
        kvf_has_no_finite(v, p->kv_heads * value_bytes, p->shape.dtype))
        kvf_row_fault(row, token);
}
