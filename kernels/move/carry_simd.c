/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kept tokens of quantized pages into the blocks that they seal; what comes back, 16 tokens at a
 * time. Bound: arithmetic, about 12 operations per channel of a key and 8 of a value.
 *
 * Knows nothing of why these tokens. Few are quantized here, the newest, so they are one by one.
 * Exactness: the bits of carry_ref.c.
 */

#include "quantized_simd.h"
#include "variants.h"

void KVF_SIMD_NAME(carry)(const void *args, uint32_t task)
{
    const kvf_carry_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    const uint32_t tokens = a->paging.block_size;
    code_tile tile;
    quantized_rows rows;
    for (uint32_t b = a->row->sealed_before; b < a->row->sealed; b++) {
        const kvf_quantized_run run = kvf_carry_run(a, task, b);
        for (uint32_t t = kvf_carry_moved(a, &run); t < tokens; t++)
            kvf_quantize_token(s, run.home + t / s->page_size * kvf_stored_page_bytes(s),
                               t % s->page_size, run.exact + t * kvf_token_bytes(s), rows.at[0]);
        for (uint32_t first = 0; first < tokens; first += KVF_CODE_LANES)
            dequantize_tokens(s, &run, first, tokens_at(&a->paging, first), &tile, &rows);
    }
}
