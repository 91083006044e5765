/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One token per row into the window, and what else a decode step needs to know before it selects.
 *
 * Knows nothing of policies. The token is moved even if it is not finite; the row's fault word
 * says so, and keeps the lowest (layer, token).
 */

#include <stdbool.h>
#include <string.h>

#include "element.h"
#include "variants.h"

/* `count` numbers of the caller, from number `first` on, in the element type. */
static void put(void *to, kvf_dtype dtype, bool is_wide, const void *from, size_t first,
                size_t count)
{
    const size_t bytes = kvf_dtype_bytes(dtype);
    if (!is_wide) {
        memcpy(to, kvf_offset(from, first * bytes), count * bytes);
        return;
    }
    for (size_t i = 0; i < count; i++)
        kvf_element_set(to, dtype, i, ((const float *)from)[first + i]);
}

static void put_queries(const kvf_append_args *a, uint32_t task)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task];
    const kvf_dtype dtype = p->shape.dtype;
    const size_t count = (size_t)p->kv_heads * p->group * p->shape.head_dim;
    const size_t bytes = count * kvf_dtype_bytes(dtype);
    if (a->wide_queries)
        put((char *)a->rounded + task * bytes, dtype, true, a->q, task * count, count);
    if (a->k && row->queries)
        put(row->queries + row->query_slot * bytes, dtype, a->wide_queries, a->q, task * count,
            count);
}

static void put_token(const kvf_append_args *a, uint32_t task)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task];
    const uint32_t keys = p->shape.head_dim, values = kvf_value_dim(&p->shape);
    const size_t bytes = kvf_key_bytes(&p->shape), value_bytes = kvf_value_bytes(&p->shape);
    const uint32_t token = row->length - 1;
    const uint32_t index = token / p->block_size, t = token % p->block_size;
    /* Not by the table: the row that begins the block may be another one of this launch. */
    char *block = kvf_row_ring_block(p, row, index);
    if (t == 0)
        row->blocks[index] = block;
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        const size_t head = (size_t)task * p->kv_heads + h;
        char *to = block + h * kvf_run_bytes(p) + t * kvf_token_bytes(&p->shape);
        put(to, p->shape.dtype, a->wide_keys, a->k, head * keys, keys);
        put(to + bytes, p->shape.dtype, a->wide_keys, a->v, head * values, values);
        if (kvf_has_no_finite(to, bytes + value_bytes, p->shape.dtype))
            kvf_row_fault(row, token);
    }
}

void kvf_append_ref(const void *args, uint32_t task)
{
    const kvf_append_args *a = args;
    for (uint32_t i = 0; i < a->choose_lists; i++)
        a->choose[task * a->choose_lists + i] = kvf_row_choose(&a->paging, &a->row[task]);
    put_queries(a, task);
    if (a->k)
        put_token(a, task);
    if (!a->rotated)
        return;
    const kvf_rotate_args rotate = kvf_append_rotate(a, task);
    for (uint32_t i = 0; i < kvf_rotate_tasks(&rotate); i++)
        kvf_rotate_ref(&rotate, i);
}
