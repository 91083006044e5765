/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks into storage format and back, and kept tokens into the blocks that they seal, 16
 * tokens at a time. Bound: arithmetic, per channel about 6 operations for a key and 4 for a value,
 * each way.
 *
 * Knows nothing of who reads them. Exactness: the bits of quantize_ref.c.
 */

#include "quantized_simd.h"
#include "variants.h"

void KVF_SIMD_NAME(quantize)(const void *args, uint32_t task)
{
    const kvf_quantize_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_quantized_run run;
    code_tile tile;
    token_vectors vectors;
    if (!kvf_quantize_begin(a, task, &run))
        return;
    for (uint32_t first = 0; first < a->paging.block_size; first += KVF_CODE_LANES) {
        const uint32_t count = tokens_at(&a->paging, first);
        quantize_keys(s, &run, first, count, &tile, &vectors);
        for (uint32_t r = 0; r < count; r++)
            quantize_value(s, &run, first + r, vectors.at[r]);
        dequantize_tokens(s, &run, first, count, &tile, &vectors);
    }
}

void KVF_SIMD_NAME(dequantize)(const void *args, uint32_t task)
{
    const kvf_dequantize_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_quantized_run run;
    code_tile tile;
    token_vectors vectors;
    if (!kvf_dequantize_begin(a, task, &run))
        return;
    for (uint32_t first = 0; first < a->paging.block_size; first += KVF_CODE_LANES)
        dequantize_tokens(s, &run, first, tokens_at(&a->paging, first), &tile, &vectors);
    for (uint32_t t = 0; t < a->paging.block_size; t++)
        if (run.sink >> t & 1)
            kvf_dequantize_sink(a, &run, t);
}

/* Few are quantized here, the newest, so they are one by one. */
void KVF_SIMD_NAME(carry)(const void *args, uint32_t task)
{
    const kvf_carry_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    const uint32_t tokens = a->paging.block_size;
    code_tile tile;
    token_vectors vectors;
    for (uint32_t b = a->row->sealed_before; b < a->row->sealed; b++) {
        const kvf_quantized_run run = kvf_carry_run(a, task, b);
        for (uint32_t t = kvf_carry_moved(a, &run); t < tokens; t++)
            kvf_quantize_token(s, run.home + t / s->page_size * kvf_stored_page_bytes(s),
                               t % s->page_size, run.exact + t * kvf_token_bytes(s), vectors.at[0]);
        for (uint32_t first = 0; first < tokens; first += KVF_CODE_LANES)
            dequantize_tokens(s, &run, first, tokens_at(&a->paging, first), &tile, &vectors);
    }
}
