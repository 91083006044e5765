/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Listed pages in full precision; what is quantized comes back up to 16 tokens at a time. Bound:
 * bytes of exact pages; arithmetic of quantized ones, about 12 operations per channel of a key and
 * 8 of a value.
 *
 * Knows nothing of who reads them. Exactness: the bits of read_ref.c.
 */

#include "quantized_simd.h"
#include "variants.h"

void KVF_SIMD_NAME(read)(const void *args, uint32_t task)
{
    const kvf_read_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_quantized_run run;
    code_tile tile;
    token_vectors vectors;
    for (int32_t i = a->indptr[task]; i < a->indptr[task + 1]; i++) {
        if (!kvf_read_page(a, task, (uint32_t)a->indices[i],
                           (char *)a->out + (size_t)i * kvf_page_bytes(s), &run))
            continue;
        for (uint32_t first = 0; first < s->page_size; first += KVF_CODE_LANES)
            dequantize_tokens(s, &run, first, kvf_min_u32(KVF_CODE_LANES, s->page_size - first),
                              &tile, &vectors);
    }
}
