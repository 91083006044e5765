/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A chunk in token order into pages, the specification. Moves bits and reports the first token that
 * has a NaN or an infinity; what is reported is moved all the same. Places outside the chunk are
 * not touched. Task = block * kv_heads + KV head.
 */

#include <math.h>

#include "common/convert.h"
#include "fault.h"
#include "variants.h"

static int vector_is_finite(const kvf_shape *s, const void *vector, uint32_t count)
{
    for (uint32_t d = 0; d < count; d++)
        if (!isfinite(kvf_element_get(vector, s->dtype, d)))
            return 0;
    return 1;
}

void kvf_repack_ref(const void *args, uint32_t task)
{
    const kvf_repack_args *a = args;
    const kvf_shape *s = &a->shape;
    const uint32_t block = task / a->kv_heads, head = task % a->kv_heads;
    uint8_t *page = kvf_offset_mut(a->blocks[block], head * kvf_page_bytes(s));
    const uint32_t begin = block == 0 ? a->first : 0;
    const uint32_t end = kvf_min_u32(s->page_size, a->first + a->tokens - block * s->page_size);
    for (uint32_t place = begin; place < end; place++) {
        const uint32_t token = block * s->page_size + place - a->first;
        const size_t from = (size_t)token * a->kv_heads + head;
        const void *k = kvf_offset(a->k, from * kvf_key_bytes(s));
        const void *v = kvf_offset(a->v, from * kvf_value_bytes(s));
        uint8_t *to = page + place * kvf_token_bytes(s);
        memcpy(to, k, kvf_key_bytes(s));
        memcpy(to + kvf_key_bytes(s), v, kvf_value_bytes(s));
        if (!vector_is_finite(s, k, s->head_dim) || !vector_is_finite(s, v, kvf_value_dim(s)))
            kvf_fault_note(a->fault, token);
    }
}
