/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks into storage format, the specification. Knows nothing of what else sealing does.
 */

#include "quantized.h"
#include "quantized_run.h"
#include "variants.h"

void kvf_quantize_ref(const void *args, uint32_t task)
{
    const kvf_quantize_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_quantized_run run;
    float x[KVF_HEAD_DIM_MAX];
    if (!kvf_quantize_begin(a, task, &run))
        return;
    for (uint32_t t = 0; t < a->paging.block_size; t++) {
        char *page = run.home + t / s->page_size * kvf_stored_page_bytes(s);
        char *exact = run.exact + t * kvf_token_bytes(s);
        kvf_quantize_token(s, page, t % s->page_size, exact, x);
        if (!(run.sink >> t & 1))
            kvf_dequantize_token(s, page, t % s->page_size, exact, x);
    }
}
