/* SPDX-License-Identifier: Apache-2.0 */

/*
 * New tokens into their physical blocks, and pages of them into slots: the specification. Bytes
 * come from where the caller has them.
 *
 * Knows nothing of rows.
 */

#include "quantized.h"
#include "score/code_key.h"
#include "select/find_slot.h"
#include "variants.h"
#include "write_token.h"

/* The code of one key; NULL = zeros. */
static void put_code(const kvf_write_args *a, const void *key, const kvf_token_place *place,
                     uint32_t head)
{
    const kvf_paging *p = &a->blocks->paging;
    const uint32_t head_dim = p->shape.head_dim;
    float x[KVF_HEAD_DIM_MAX];
    for (uint32_t i = 0; i < head_dim; i++)
        x[i] = key ? kvf_element_get(key, p->shape.dtype, i) : 0.0f;
    *kvf_write_scale(a, place, head) = kvf_code_key(kvf_write_words(a, place, head), x, head_dim);
}

/* A token of a head, and the code of what comes back of it. */
static void put_quantized(const kvf_write_args *a, uint32_t index, const kvf_token_place *place,
                          uint32_t head)
{
    const kvf_shape *s = &a->blocks->paging.shape;
    char *page = kvf_write_page(a, place, head);
    const uint32_t t = place->token % s->page_size;
    _Alignas(float) char exact[2 * KVF_HEAD_DIM_MAX * sizeof(float)];
    float x[KVF_HEAD_DIM_MAX];
    kvf_write_exact(a, index, head, place, exact);
    kvf_quantize_token(s, page, t, exact, x);
    kvf_dequantize_token(s, page, t, exact, x);
    put_code(a, exact, place, head);
}

void kvf_write_ref(const void *args, uint32_t task)
{
    const kvf_write_args *a = args;
    const kvf_paging *p = &a->blocks->paging;
    kvf_write_count(a, task);
    for (uint32_t i = task * KVF_WRITE_TOKENS; i < kvf_write_end(a, task); i++) {
        kvf_token_place place;
        if (!kvf_write_token(a, i, &place))
            continue;
        for (uint32_t h = 0; h < p->kv_heads; h++)
            if (p->shape.pages == KVF_PAGES_NATIVE)
                put_code(a, place.is_nonfinite ? NULL : kvf_write_coded(a, i, h, &place), &place,
                         h);
            else
                put_quantized(a, i, &place, h);
    }
}

/* ---- admit_written, the only host form ---- */

static void admit_written_page(const kvf_write_args *a, const kvf_row *row, uint32_t head,
                               uint32_t page, uint32_t first)
{
    const kvf_paging *p = &a->blocks->paging;
    const kvf_slot_tables t = kvf_slot_tables_of(p, row, head);
    const int32_t slot = kvf_admit_slot(p, &t, page, row->use - 1);
    if (slot < 0)
        return;
    t.tags[slot] = kvf_row_page_tag(p, row, page);
    for (uint32_t i = 0; row->slots && i < p->shape.page_size; i++) {
        const kvf_token_place place = {.is_nonfinite =
                                           (int)kvf_admit_written_is_nonfinite(a, first + i)};
        kvf_write_exact(a, first + i, head, &place,
                        kvf_row_slot(p, row, head, (uint32_t)slot) +
                            i * kvf_token_bytes(&p->shape));
    }
}

void kvf_admit_written_ref(const void *args, uint32_t task)
{
    const kvf_write_args *a = args;
    const kvf_physical_blocks *c = a->blocks;
    const kvf_row row = kvf_physical_slots(c);
    if (c->streaming.number && c->streaming.number[a->layer * c->paging.kv_heads + task])
        return;
    for (uint32_t i = 0; i < a->tokens; i++) {
        const uint32_t page = kvf_admit_written_page(a, i);
        if (page != UINT32_MAX)
            admit_written_page(a, &row, task, page, i);
    }
}
