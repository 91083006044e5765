/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "cuda_products.h"

bool cuda_is_small_batch(const transformer_step *s, const cuda_weights *w)
{
    return s->separate && w->parts[0]->inputs % 8 == 0 && s->t->model.dtype != KVF_FP32;
}

static uint32_t outputs_of(const cuda_weights *w)
{
    uint32_t outputs = 0;
    for (uint32_t i = 0; i < w->count; i++)
        outputs += w->parts[i]->outputs;
    return outputs;
}

kvf_small_batch_gemm cuda_small_batch(const transformer_step *s, const cuda_weights *w,
                                      const void *x)
{
    return (kvf_small_batch_gemm){.dtype = s->t->model.dtype,
                                  .rows = s->rows,
                                  .inputs = w->parts[0]->inputs,
                                  .outputs = outputs_of(w),
                                  .weight = w->parts[0]->weight,
                                  .x = x};
}

/* Rows of a batch that are not thin go one by one, because cuBLAS rounds by their number. */
static kvf_status multiply_rows(kvf_cublas *cublas, const transformer_step *s,
                                kvf_cublas_product product)
{
    const size_t x_bytes = product.inputs * kvf_dtype_bytes(product.dtype);
    const char *x = product.x;
    product.rows = s->separate ? 1 : s->rows;
    for (uint32_t row = 0; row < s->rows; row += product.rows) {
        KVF_TRY(kvf_cublas_multiply(cublas, &product, kvf_stream_native(s->stream)));
        x += product.rows * x_bytes;
        product.x = x;
        product.y += (size_t)product.rows * product.y_stride;
    }
    return KVF_OK;
}

kvf_status cuda_multiply(kvf_cublas *cublas, const transformer_step *s, const cuda_weights *w,
                         const void *x, float *y, bool accumulate)
{
    const uint32_t outputs = outputs_of(w);
    if (cuda_is_small_batch(s, w)) {
        const kvf_small_batch_gemm thin = cuda_small_batch(s, w, x);
        return launched(
            kvf_small_batch_gemm_cuda(&thin, y, accumulate, kvf_stream_native(s->stream)));
    }
    kvf_cublas_product product = {.dtype = s->t->model.dtype,
                                  .outputs = outputs,
                                  .inputs = w->parts[0]->inputs,
                                  .weight = w->parts[0]->weight,
                                  .x = x,
                                  .y = y,
                                  .y_stride = outputs,
                                  .accumulate = accumulate};
    return multiply_rows(cublas, s, product);
}
