/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A chunk in token order into pages, vectorised; the bits are those of repack_ref.c. Bound: memory
 * bandwidth. The check for NaN and infinity is a loop over exponents that the compiler vectorises
 * for the instruction set at hand.
 */

#include "common/simd.h"
#include "fault.h"
#include "variants.h"

/* Copies one vector and says whether all of it is finite: no exponent has all its bits set. */
KVF_ALWAYS_INLINE int move_vector16(uint16_t *to, const uint16_t *from, uint32_t count,
                                    uint16_t exponent)
{
    uint16_t bad = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint16_t x = from[i];
        to[i] = x;
        bad = (uint16_t)(bad | ((x & exponent) == exponent));
    }
    return bad == 0;
}

KVF_ALWAYS_INLINE int move_vector32(uint32_t *to, const uint32_t *from, uint32_t count)
{
    uint32_t bad = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t x = from[i];
        to[i] = x;
        bad |= (x & 0x7f800000u) == 0x7f800000u;
    }
    return bad == 0;
}

static int move_vector(const kvf_shape *s, void *to, const void *from, uint32_t count)
{
    if (s->dtype == KVF_BF16)
        return move_vector16(to, from, count, 0x7f80u);
    if (s->dtype == KVF_FP16)
        return move_vector16(to, from, count, 0x7c00u);
    return move_vector32(to, from, count);
}

void KVF_SIMD_NAME(repack)(const void *args, uint32_t task)
{
    const kvf_repack_args *a = args;
    const kvf_shape *s = &a->shape;
    const size_t key_bytes = kvf_key_bytes(s), value_bytes = kvf_value_bytes(s);
    const uint32_t block = task / a->kv_heads, head = task % a->kv_heads;
    uint8_t *page = kvf_offset_mut(a->blocks[block], head * kvf_page_bytes(s));
    const uint32_t begin = block == 0 ? a->first : 0;
    const uint32_t end = kvf_min_u32(s->page_size, a->first + a->tokens - block * s->page_size);
    for (uint32_t place = begin; place < end; place++) {
        const uint32_t token = block * s->page_size + place - a->first;
        const size_t from = (size_t)token * a->kv_heads + head;
        uint8_t *to = page + place * kvf_token_bytes(s);
        int keys = move_vector(s, to, kvf_offset(a->k, from * key_bytes), s->head_dim);
        int values =
            move_vector(s, to + key_bytes, kvf_offset(a->v, from * value_bytes), kvf_value_dim(s));
        if (!keys || !values)
            kvf_fault_note(a->fault, token);
    }
}
