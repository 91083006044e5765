/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Listed pages in full precision, the specification. Knows nothing of who reads them.
 */

#include "quantized_run.h"
#include "variants.h"

static void dequantize_page(const kvf_shape *s, const kvf_quantized_run *run)
{
    float x[KVF_HEAD_DIM_MAX];
    for (uint32_t t = 0; t < s->page_size; t++)
        if (!(run->sink >> t & 1))
            kvf_dequantize_token(s, run->home, t, run->exact + t * kvf_token_bytes(s), x);
}

void kvf_read_ref(const void *args, uint32_t task)
{
    const kvf_read_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_quantized_run run;
    for (int32_t i = a->indptr[task]; i < a->indptr[task + 1]; i++)
        if (kvf_read_page(a, task, (uint32_t)a->indices[i],
                          (char *)a->out + (size_t)i * kvf_page_bytes(s), &run))
            dequantize_page(s, &run);
}
