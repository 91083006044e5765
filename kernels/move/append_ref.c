/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One token per row into the window, and what else a decode step needs to know before it selects.
 *
 * Knows nothing of policies. The token is moved even if it is not finite; the row's fault word
 * says so, and keeps the lowest (layer, token).
 */

#include <stdbool.h>
#include <string.h>

#include "variants.h"

/* Exponent all ones, for `bytes` of elements; a loop without branches, so that it is vectorised. */
static bool has_no_finite(const void *data, size_t bytes, kvf_dtype dtype)
{
    uint32_t bad = 0;
    if (dtype == KVF_FP32) {
        const uint32_t *x = data;
        for (size_t i = 0; i < bytes / 4; i++)
            bad |= (x[i] & 0x7f800000u) == 0x7f800000u;
        return bad != 0;
    }
    const uint16_t *x = data;
    const uint16_t exponent = dtype == KVF_BF16 ? 0x7f80 : 0x7c00;
    for (size_t i = 0; i < bytes / 2; i++)
        bad |= (x[i] & exponent) == exponent;
    return bad != 0;
}

void kvf_append_ref(const void *args, uint32_t task)
{
    const kvf_append_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task];
    const size_t bytes = kvf_row_bytes(&p->shape);
    for (uint32_t i = 0; i < a->choose_lists; i++)
        a->choose[task * a->choose_lists + i] = kvf_row_choose(p, row);
    if (!a->k)
        return;
    const size_t query_bytes = p->kv_heads * p->group * bytes;
    memcpy(row->queries + row->query_slot * query_bytes, kvf_offset(a->q, task * query_bytes),
           query_bytes);

    const uint32_t token = row->length - 1;
    const uint32_t block = token / p->block_size, t = token % p->block_size;
    if (t == 0)
        row->blocks[block] = kvf_row_ring_block(p, row, block);
    const void *k = kvf_offset(a->k, task * p->kv_heads * bytes);
    const void *v = kvf_offset(a->v, task * p->kv_heads * bytes);
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        char *to = kvf_row_run(p, row, block, h) + t * 2 * bytes;
        memcpy(to, kvf_offset(k, h * bytes), bytes);
        memcpy(to + bytes, kvf_offset(v, h * bytes), bytes);
    }
    if (has_no_finite(k, p->kv_heads * bytes, p->shape.dtype) ||
        has_no_finite(v, p->kv_heads * bytes, p->shape.dtype))
        kvf_row_fault(row, token);
}
