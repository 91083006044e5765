/* SPDX-License-Identifier: Apache-2.0 */

/*
 * New tokens into their cells, the specification.
 *
 * Knows nothing of rows.
 */

#include "score/code_key.h"
#include "variants.h"
#include "write_token.h"

/* The code of one key; NULL = zeros. */
static void put_code(const kvf_write_args *a, const void *key, const kvf_token_place *place,
                     uint32_t head)
{
    const kvf_paging *p = &a->cells->paging;
    const uint32_t head_dim = p->shape.head_dim;
    float x[KVF_HEAD_DIM_MAX];
    for (uint32_t i = 0; i < head_dim; i++)
        x[i] = key ? kvf_element_get(key, p->shape.dtype, i) : 0.0f;
    *kvf_write_scale(a, place, head) = kvf_code_key(kvf_write_words(a, place, head), x, head_dim);
}

void kvf_write_ref(const void *args, uint32_t task)
{
    const kvf_write_args *a = args;
    for (uint32_t i = task * KVF_WRITE_TOKENS; i < kvf_write_end(a, task); i++) {
        kvf_token_place place;
        if (!kvf_write_token(a, i, &place))
            continue;
        for (uint32_t h = 0; h < a->cells->paging.kv_heads; h++)
            put_code(a, place.is_odd ? NULL : kvf_write_key(a, i, h), &place, h);
    }
}
