/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of chunks in full precision, the specification. Knows nothing of who reads them.
 */

#include "dequantize_chunks_run.h"
#include "quantized.h"
#include "variants.h"

void kvf_dequantize_chunks_ref(const void *args, uint32_t task)
{
    const kvf_dequantize_chunks_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_quantized_run run;
    float x[KVF_HEAD_DIM_MAX];
    const uint32_t tokens = kvf_dequantize_chunks_begin(a, task, &run);
    for (uint32_t t = 0; t < tokens; t++)
        kvf_dequantize_token(s, run.home + t / s->page_size * kvf_stored_page_bytes(s),
                             t % s->page_size, run.exact + t * kvf_token_bytes(s), x);
}
