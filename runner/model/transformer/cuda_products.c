/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. Nothing here waits. */

#include "cuda_products.h"

#define PANEL_BYTES_MAX ((size_t)16 << 20)

size_t cuda_panel_bytes(const kvf_model_config *model)
{
    const size_t bytes =
        (size_t)model->intermediate_size * model->hidden_size * kvf_dtype_bytes(model->dtype);
    return bytes < PANEL_BYTES_MAX ? bytes : PANEL_BYTES_MAX;
}

static kvf_status launched(int status)
{
    return status == 0 ? KVF_OK : KVF_DEVICE_FAILED;
}

bool cuda_is_thin(const transformer_step *s, const cuda_weights *w)
{
    return s->separate && w->parts[0]->inputs % 8 == 0 && s->t->model.dtype != KVF_FP32;
}

static kvf_thin_part part_of(const kvf_linear *linear)
{
    return (kvf_thin_part){.weight = linear->weight,
                           .row_bytes = kvf_linear_row_bytes(linear),
                           .blocks = linear->blocks ? linear->blocks->index : GGUF_PLAIN,
                           .outputs = linear->outputs};
}

kvf_thin_product cuda_thin(const transformer_step *s, const cuda_weights *w, const void *x)
{
    kvf_thin_product product = {.dtype = s->t->model.dtype,
                                .rows = s->rows,
                                .inputs = w->parts[0]->inputs,
                                .part_count = w->count,
                                .x = x};
    for (uint32_t i = 0; i < w->count; i++)
        product.parts[i] = part_of(w->parts[i]);
    return product;
}

/* Rows of a batch that are not thin go one by one, because cuBLAS rounds by their number. */
static kvf_status multiply_rows(const cuda_products *p, const transformer_step *s,
                                kvf_cublas_product product)
{
    const size_t x_bytes = product.inputs * kvf_dtype_bytes(product.dtype);
    const char *x = product.x;
    product.rows = s->separate ? 1 : s->rows;
    for (uint32_t row = 0; row < s->rows; row += product.rows) {
        KVF_TRY(kvf_cublas_multiply(p->cublas, &product, kvf_stream_native(s->stream)));
        x += product.rows * x_bytes;
        product.x = x;
        product.y += (size_t)product.rows * product.y_stride;
    }
    return KVF_OK;
}

/* Panel by panel of as many outputs as fit one. */
static kvf_status multiply_blocks(const cuda_products *p, const transformer_step *s,
                                  const kvf_linear *linear, kvf_cublas_product product)
{
    const size_t row_bytes = product.inputs * kvf_dtype_bytes(product.dtype);
    const uint32_t outputs_max = (uint32_t)(p->panel_bytes / row_bytes);
    float *y = product.y;
    for (uint32_t done = 0; done < linear->outputs; done += product.outputs) {
        const uint32_t rest = linear->outputs - done;
        product.outputs = rest < outputs_max ? rest : outputs_max;
        product.weight = p->panel;
        product.y = y + done;
        const kvf_thin_widen widen = {.dtype = product.dtype,
                                      .inputs = product.inputs,
                                      .first = done,
                                      .rows = product.outputs,
                                      .part = part_of(linear),
                                      .to = p->panel};
        KVF_TRY(launched(kvf_thin_widen_cuda(&widen, kvf_stream_native(s->stream))));
        KVF_TRY(multiply_rows(p, s, product));
    }
    return KVF_OK;
}

kvf_status cuda_multiply(const cuda_products *p, const transformer_step *s, const cuda_weights *w,
                         const void *x, float *y, bool accumulate)
{
    uint32_t outputs = 0;
    bool has_blocks = false;
    for (uint32_t i = 0; i < w->count; i++) {
        outputs += w->parts[i]->outputs;
        has_blocks = has_blocks || w->parts[i]->blocks;
    }
    if (cuda_is_thin(s, w)) {
        const kvf_thin_product thin = cuda_thin(s, w, x);
        return launched(kvf_thin_product_cuda(&thin, y, accumulate, kvf_stream_native(s->stream)));
    }
    kvf_cublas_product product = {.dtype = s->t->model.dtype,
                                  .outputs = outputs,
                                  .inputs = w->parts[0]->inputs,
                                  .weight = w->parts[0]->weight,
                                  .x = x,
                                  .y = y,
                                  .y_stride = outputs,
                                  .accumulate = accumulate};
    if (!has_blocks)
        return multiply_rows(p, s, product);
    for (uint32_t i = 0; i < w->count; i++) {
        const kvf_linear *linear = w->parts[i];
        product.outputs = linear->outputs;
        product.weight = linear->weight;
        KVF_TRY(linear->blocks ? multiply_blocks(p, s, linear, product)
                               : multiply_rows(p, s, product));
        product.y += linear->outputs;
    }
    return KVF_OK;
}
