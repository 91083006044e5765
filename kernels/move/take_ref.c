/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tokens of pages by index, the specification; exact, bytes only.
 *
 * Knows nothing of why these tokens. Every KV head has tokens of its own, so one output token may
 * be several input tokens. The output is in token order, as a prefill chunk is.
 */

#include <string.h>

#include "variants.h"

void kvf_take_ref(const void *args, uint32_t task)
{
    const kvf_take_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->count, KVF_TAKE_TOKENS);
    const uint32_t head = task / parts, first = task % parts * KVF_TAKE_TOKENS;
    const uint32_t end = kvf_min_u32(a->count, first + KVF_TAKE_TOKENS);
    const size_t bytes = kvf_key_bytes(&a->shape), value_bytes = kvf_value_bytes(&a->shape);
    for (uint32_t i = first; i < end; i++) {
        const uint32_t id = a->ids[(size_t)head * a->stride + i];
        const uint32_t place = id % a->shape.page_size;
        const void *page =
            kvf_offset(a->blocks[id / a->shape.page_size], head * kvf_page_bytes(&a->shape));
        const size_t to = (size_t)i * a->kv_heads + head;
        memcpy(kvf_offset_mut(a->k, to * bytes), kvf_page_key(&a->shape, page, place), bytes);
        memcpy(kvf_offset_mut(a->v, to * value_bytes), kvf_page_value(&a->shape, page, place),
               value_bytes);
    }
}
