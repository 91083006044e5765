/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention again, over other pages; see the header.
 *
 * It knows page lists and rows of a matrix, not what they are for. Invariant: sums have one order,
 * so the same steps give the same bits, whatever the number of threads.
 */

#include "head_sensitivity.h"

#include "common/base.h"
#include "common/carve.h"
#include "layer_ops.h"

#include <stdlib.h>
#include <string.h>

struct kvf_head_sensitivity {
    kvf_runtime *runtime;
    const kvf_model_config *model;
    kvf_cache *cache;
    kvf_stream *stream;
    void *memory;          /* what follows */
    kvf_page_lists lists;  /* one per KV head, all alike */
    void *streamed;        /* [query_heads, head_dim] of the model's type */
    float *changed, *wide; /* [query_heads x head_dim] o - o', and o' */
    float *row;            /* [query_heads x head_dim] of the matrix */
    double *of_layer;      /* [kv_heads] */
    double *sums;          /* [layers, kv_heads] over `steps` */
    uint32_t steps;
};

static size_t lay_out(kvf_head_sensitivity *h, void *base)
{
    const kvf_model_config *m = h->model;
    const size_t width = (size_t)m->query_heads * m->head_dim;
    kvf_carver k = {.base = base};
    h->lists.capacity = m->kv_heads * kvf_select_pages_max(h->cache);
    KVF_CARVE(&k, h->of_layer, m->kv_heads);
    KVF_CARVE(&k, h->sums, (size_t)m->layers * m->kv_heads);
    KVF_CARVE(&k, h->changed, width);
    KVF_CARVE(&k, h->wide, width);
    KVF_CARVE(&k, h->row, width);
    KVF_CARVE(&k, h->lists.indptr, m->kv_heads + 1);
    KVF_CARVE(&k, h->lists.last_page_len, m->kv_heads);
    KVF_CARVE(&k, h->lists.indices, h->lists.capacity);
    KVF_CARVE_OF(&k, h->streamed, kvf_dtype_bytes(m->dtype), width);
    return k.bytes;
}

kvf_status kvf_head_sensitivity_open(kvf_runtime *runtime, const kvf_model_config *model,
                                     kvf_cache *cache, kvf_stream *stream,
                                     kvf_head_sensitivity **out, kvf_error *error)
{
    kvf_head_sensitivity *h = calloc(1, sizeof *h);
    *out = h;
    if (!h)
        return model_out_of_memory(error, sizeof *h, "the sensitivity of heads");
    *h = (kvf_head_sensitivity){
        .runtime = runtime, .model = model, .cache = cache, .stream = stream};
    const size_t bytes = lay_out(h, NULL);
    if (kvf_memory_alloc(runtime, bytes, &h->memory) != KVF_OK) {
        kvf_head_sensitivity_close(h);
        *out = NULL;
        return model_out_of_memory(error, bytes, "the sensitivity of heads");
    }
    lay_out(h, h->memory);
    return KVF_OK;
}

void kvf_head_sensitivity_close(kvf_head_sensitivity *h)
{
    if (!h)
        return;
    kvf_memory_free(h->runtime, h->memory);
    free(h);
}

/* The sink, and newest pages: together no more tokens than the budget. */
static void list_pages(kvf_head_sensitivity *h, uint32_t length)
{
    const kvf_cache_config *c = kvf_cache_settings(h->cache);
    const uint32_t pages = kvf_div_ceil_u32(length, c->page_size);
    const uint32_t sink = kvf_min_u32(kvf_div_ceil_u32(c->sink_tokens, c->page_size), pages);
    const uint32_t newest = (c->budget_tokens - c->sink_tokens) / c->page_size;
    const uint32_t first = pages > sink + newest ? pages - newest : sink;
    int32_t count = 0;
    for (uint32_t head = 0; head < h->model->kv_heads; head++) {
        for (uint32_t page = 0; page < sink; page++)
            h->lists.indices[count++] = (int32_t)page;
        for (uint32_t page = first; page < pages; page++)
            h->lists.indices[count++] = (int32_t)page;
        h->lists.indptr[head + 1] = count;
        h->lists.last_page_len[head] = (int32_t)(length - (pages - 1) * c->page_size);
    }
}

static kvf_status stream(kvf_head_sensitivity *h, const kvf_attention_view *view)
{
    const kvf_decode_args args = {.layer = view->layer,
                                  .batch = 1,
                                  .sequences = view->sequences,
                                  .q = view->q,
                                  .out = h->streamed};
    list_pages(h, kvf_sequence_length(view->sequences[0], view->layer));
    KVF_TRY(kvf_attend_pages(h->cache, &args, &h->lists, h->stream));
    return kvf_stream_wait(h->stream);
}

/* The loss of the layer's output by each KV head, squared. */
static void project(kvf_head_sensitivity *h, const kvf_linear *w)
{
    const uint32_t heads = h->model->kv_heads;
    const size_t part = w->inputs / heads;
    memset(h->of_layer, 0, heads * sizeof *h->of_layer);
    for (uint32_t output = 0; output < w->outputs; output++) {
        const char *from = (const char *)w->weight + output * kvf_linear_row_bytes(w);
        kvf_numbers_widen(from, w->dtype, w->inputs, h->row);
        for (uint32_t head = 0; head < heads; head++) {
            const double lost = kvf_dot(h->row + head * part, h->changed + head * part, part);
            h->of_layer[head] += lost * lost;
        }
    }
}

kvf_status kvf_head_sensitivity_see(void *sensitivity, const kvf_attention_view *view)
{
    kvf_head_sensitivity *h = sensitivity;
    const kvf_model_config *m = h->model;
    const size_t width = view->output->inputs;
    if (view->batch != 1)
        return KVF_INVALID;
    KVF_TRY(stream(h, view));
    kvf_numbers_widen(view->attended, m->dtype, width, h->changed);
    kvf_numbers_widen(h->streamed, m->dtype, width, h->wide);
    for (size_t i = 0; i < width; i++)
        h->changed[i] -= h->wide[i];
    project(h, view->output);
    const double size = kvf_dot(view->hidden, view->hidden, m->hidden_size);
    for (uint32_t head = 0; head < m->kv_heads; head++)
        h->sums[(size_t)view->layer * m->kv_heads + head] += h->of_layer[head] / size;
    h->steps += view->layer + 1 == m->layers;
    return KVF_OK;
}

void kvf_head_sensitivity_take(kvf_head_sensitivity *h, double *sums)
{
    const size_t heads = (size_t)h->model->layers * h->model->kv_heads;
    for (size_t i = 0; i < heads && h->steps; i++)
        sums[i] += h->sums[i] / h->steps;
    memset(h->sums, 0, heads * sizeof *h->sums);
    h->steps = 0;
}
