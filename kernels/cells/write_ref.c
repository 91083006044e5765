/* SPDX-License-Identifier: Apache-2.0 */

/*
 * New tokens into their cells, the specification and the only host form.
 *
 * Knows nothing of rows.
 */

#include <string.h>

#include "element.h"
#include "score/code_key.h"
#include "variants.h"

/* The code of one key; NULL = zeros. */
static void put_code(const kvf_write_args *a, const void *key, uint32_t cell, uint32_t head,
                     uint32_t token)
{
    const kvf_paging *p = &a->cells->paging;
    const uint32_t head_dim = p->shape.head_dim;
    char *group = kvf_cell_words(&a->codes, head_dim, p->block_size, cell, head, token);
    uint32_t *words = (uint32_t *)(void *)group + kvf_code_word(head_dim, token % 32, 0);
    float x[KVF_HEAD_DIM_MAX];
    for (uint32_t i = 0; i < head_dim; i++)
        x[i] = key ? kvf_element_get(key, p->shape.dtype, i) : 0.0f;
    kvf_cell_scales(&a->codes, p->block_size, cell, head)[token] = kvf_code_key(words, x, head_dim);
}

static void note_odd(uint64_t *odd, uint32_t token, int is_odd)
{
    const uint64_t bit = UINT64_C(1) << token;
    if (is_odd)
        __atomic_fetch_or(odd, bit, __ATOMIC_RELAXED);
    else
        __atomic_fetch_and(odd, ~bit, __ATOMIC_RELAXED);
}

void kvf_write_ref(const void *args, uint32_t task)
{
    const kvf_write_args *a = args;
    const kvf_cells *c = a->cells;
    const kvf_paging *p = &c->paging;
    const size_t bytes = kvf_row_bytes(&p->shape), element = kvf_dtype_bytes(p->shape.dtype);
    const int64_t slot = a->slots[task];
    if (slot < 0)
        return;
    if ((uint64_t)slot >= kvf_cells_count(c) * p->block_size) {
        __atomic_fetch_add(&c->counters[a->layer].bad_slots, 1, __ATOMIC_RELAXED);
        return;
    }
    const uint32_t cell = (uint32_t)((uint64_t)slot / p->block_size);
    const uint32_t token = (uint32_t)((uint64_t)slot % p->block_size);
    const void *k = kvf_offset(a->k, task * a->k_stride * element);
    const void *v = kvf_offset(a->v, task * a->v_stride * element);
    const int is_odd = kvf_has_no_finite(k, p->kv_heads * bytes, p->shape.dtype) ||
                       kvf_has_no_finite(v, p->kv_heads * bytes, p->shape.dtype);
    char *to = kvf_cell_home(c, a->layer, cell) + token * 2 * bytes;
    for (uint32_t h = 0; h < p->kv_heads; h++, to += kvf_run_bytes(p)) {
        if (is_odd) {
            memset(to, 0, 2 * bytes);
        } else {
            memcpy(to, kvf_offset(k, h * bytes), bytes);
            memcpy(to + bytes, kvf_offset(v, h * bytes), bytes);
        }
        put_code(a, is_odd ? NULL : kvf_offset(k, h * bytes), cell, h, token);
    }
    note_odd(kvf_cell_odd(c, a->layer, cell), token, is_odd);
    kvf_cell_writes(c, a->layer, cell)[token] += !c->is_deaf;
    __atomic_fetch_add(&c->counters[a->layer].tokens_put, 1, __ATOMIC_RELAXED);
}
