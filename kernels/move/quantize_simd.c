/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks into storage format and back, 16 tokens at a time. Bound: arithmetic, per channel
 * about 6 operations for a key and 4 for a value, each way.
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
    quantized_rows rows;
    if (!kvf_quantize_begin(a, task, &run))
        return;
    for (uint32_t first = 0; first < a->paging.block_size; first += KVF_CODE_LANES) {
        const uint32_t count = tokens_at(&a->paging, first);
        quantize_keys(s, &run, first, count, &tile, &rows);
        for (uint32_t r = 0; r < count; r++)
            quantize_value(s, &run, first + r, rows.at[r]);
        dequantize_tokens(s, &run, first, count, &tile, &rows);
    }
}

void KVF_SIMD_NAME(dequantize)(const void *args, uint32_t task)
{
    const kvf_dequantize_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_quantized_run run;
    code_tile tile;
    quantized_rows rows;
    if (!kvf_dequantize_begin(a, task, &run))
        return;
    for (uint32_t first = 0; first < a->paging.block_size; first += KVF_CODE_LANES)
        dequantize_tokens(s, &run, first, tokens_at(&a->paging, first), &tile, &rows);
    for (uint32_t t = 0; t < a->paging.block_size; t++)
        if (run.sink >> t & 1)
            kvf_dequantize_sink(a, &run, t);
}
