/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks into storage format, back in full precision, and kept tokens of quantized pages
 * into the blocks that they seal: the specification. Knows nothing of who reads them.
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

static void carry_run(const kvf_carry_args *a, const kvf_quantized_run *run)
{
    const kvf_shape *s = &a->paging.shape;
    const uint32_t moved = kvf_carry_moved(a, run);
    float x[KVF_HEAD_DIM_MAX];
    for (uint32_t t = 0; t < a->paging.block_size; t++) {
        char *page = run->home + t / s->page_size * kvf_stored_page_bytes(s);
        char *exact = run->exact + t * kvf_token_bytes(s);
        if (t >= moved)
            kvf_quantize_token(s, page, t % s->page_size, exact, x);
        if (!(run->sink >> t & 1))
            kvf_dequantize_token(s, page, t % s->page_size, exact, x);
    }
}

void kvf_carry_ref(const void *args, uint32_t task)
{
    const kvf_carry_args *a = args;
    for (uint32_t b = a->row->sealed_before; b < a->row->sealed; b++) {
        const kvf_quantized_run run = kvf_carry_run(a, task, b);
        carry_run(a, &run);
    }
}
