/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of chunks in full precision, 16 tokens at a time. Bound: arithmetic, that of dequantize.
 *
 * Knows nothing of who reads them. Exactness: the bits of dequantize_chunks_ref.c.
 */

#include "dequantize_chunks_run.h"
#include "move/quantized_simd.h"
#include "variants.h"

void KVF_SIMD_NAME(dequantize_chunks)(const void *args, uint32_t task)
{
    const kvf_dequantize_chunks_args *a = args;
    kvf_quantized_run run;
    code_tile tile;
    token_vectors vectors;
    const uint32_t tokens = kvf_dequantize_chunks_begin(a, task, &run);
    for (uint32_t first = 0; first < tokens; first += KVF_CODE_LANES)
        dequantize_tokens(&a->paging.shape, &run, first,
                          kvf_min_u32(KVF_CODE_LANES, tokens - first), &tile, &vectors);
}
