/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks of a row in full precision, the specification. Knows nothing of who reads them.
 */

#include "quantized.h"
#include "quantized_run.h"
#include "variants.h"

void kvf_dequantize_ref(const void *args, uint32_t task)
{
    const kvf_dequantize_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_quantized_run run;
    float x[KVF_HEAD_DIM_MAX];
    if (!kvf_dequantize_begin(a, task, &run))
        return;
    for (uint32_t t = 0; t < a->paging.block_size; t++) {
        const char *page = run.home + t / s->page_size * kvf_stored_page_bytes(s);
        if (run.sink >> t & 1)
            kvf_dequantize_sink(a, &run, t);
        else
            kvf_dequantize_token(s, page, t % s->page_size, run.exact + t * kvf_token_bytes(s), x);
    }
}
