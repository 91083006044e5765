/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opens a transformer: finds tensors by their Hugging Face names and hands them to the device's
 * operations.
 *
 * It knows names and shapes, not the order of operations. Invariant: after open every pointer that
 * a layer of this model needs is set and has the shape the configuration says.
 */

#include "layer_ops.h"
#include "transformer_ops.h"

#include <stdio.h>
#include <stdlib.h>

#define NAME_MAX_BYTES 128u

static const transformer_ops *ops_of(const kvf_runtime *runtime)
{
#if KVF_HAVE_CUDA
    if (runtime && kvf_runtime_device(runtime) == KVF_DEVICE_CUDA)
        return &transformer_cuda_ops;
#else
    (void)runtime;
#endif
    return &transformer_host_ops;
}

void transformer_lay_out(const kvf_transformer_options *options, size_t own, kvf_carver *k,
                         transformer_buffers *b)
{
    const kvf_model_config *m = options->model;
    const uint64_t rows = transformer_rows(options), all = transformer_hidden_rows(options);
    const uint64_t q = transformer_query_width(m), kv = transformer_kv_width(m);
    const size_t element = kvf_dtype_bytes(m->dtype);
    KVF_CARVE(k, b->cosine, all, m->head_dim / 2);
    KVF_CARVE(k, b->sine, all, m->head_dim / 2);
    KVF_CARVE(k, b->hidden, all, m->hidden_size);
    KVF_CARVE_OF(k, b->normed, own, rows, m->hidden_size);
    KVF_CARVE(k, b->qkv, rows, q + 2 * kv);
    KVF_CARVE_OF(k, b->q, element, rows, q);
    KVF_CARVE_OF(k, b->k, element, rows, kv);
    KVF_CARVE_OF(k, b->v, element, rows, kv);
    KVF_CARVE_OF(k, b->attended, element, rows, q);
    KVF_CARVE(k, b->gate_up, transformer_scratch_floats(options));
    KVF_CARVE_OF(k, b->activated, own, rows, m->intermediate_size);
    KVF_CARVE(k, b->logits, options->batch_max, m->vocab_size);
}

uint64_t kvf_transformer_bytes(const kvf_transformer_options *options, uint32_t threads)
{
    return ops_of(options->runtime)->bytes(options, threads);
}

void kvf_transformer_geometry(const kvf_transformer_options *options, kvf_cache_config *cache)
{
    const kvf_model_config *m = options->model;
    cache->layers = m->layers;
    cache->query_heads = m->query_heads;
    cache->kv_heads = m->kv_heads;
    cache->head_dim = m->head_dim;
    cache->value_dim = 0;
    cache->softmax_scale = 0.0f;
    cache->dtype = m->dtype;
    cache->prefill_chunk_max = options->chunk_max;
    if (m->window) {
        cache->head_mask = m->window_mask;
        cache->streaming_sink = 0;
        cache->streaming_recent = m->window;
    }
}

/* A geometry that is not the model's would be attended with, and mean nothing. */
static kvf_status check_geometry(const kvf_model_config *m, const kvf_cache_config *c,
                                 kvf_error *error)
{
    const uint32_t value_dim = c->value_dim ? c->value_dim : c->head_dim;
    const struct {
        const char *name;
        uint32_t given, own;
    } rows[] = {
        {"layers", c->layers, m->layers},          {"query_heads", c->query_heads, m->query_heads},
        {"kv_heads", c->kv_heads, m->kv_heads},    {"head_dim", c->head_dim, m->head_dim},
        {"value_dim", value_dim, m->head_dim},     {"dtype", c->dtype, m->dtype},
        {"tensors", c->tensors, KVF_TENSORS_DTYPE}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].given != rows[i].own)
            return model_fail(error, KVF_INVALID,
                              "%s = %u: the model has %u; leave it to kvf_transformer_geometry",
                              rows[i].name, rows[i].given, rows[i].own);
    if (c->softmax_scale != 0.0f)
        return model_fail(error, KVF_INVALID,
                          "softmax_scale = %g: the model has that of head_dim; leave it to "
                          "kvf_transformer_geometry",
                          (double)c->softmax_scale);
    return KVF_OK;
}

kvf_status kvf_transformer_cache_open(const kvf_transformer *t, const kvf_cache_config *config,
                                      kvf_cache **out, kvf_error *error)
{
    *out = NULL;
    KVF_TRY(check_geometry(&t->model, config, error));
    return kvf_cache_open(t->options.runtime, config, out, error);
}

/* ---- weights ---- */

/* Where binding stands: one pass over the names serves norms, biases and matrices alike. */
typedef struct binder {
    kvf_transformer *t;
    float *next; /* free space of t->vectors */
    kvf_error *error;
    kvf_status status; /* the first failure; nothing happens after it */
} binder;

static const kvf_tensor *bind_tensor(binder *b, const char *name, uint32_t rank,
                                     const uint64_t *shape)
{
    if (b->status != KVF_OK)
        return NULL;
    const kvf_tensor *tensor = NULL;
    const kvf_transformer_options *o = &b->t->options;
    b->status = kvf_weights_find(o->weights, name, rank, shape, &tensor, b->error);
    if (b->status == KVF_OK)
        b->status = kvf_weights_load(tensor, kvf_runtime_threads(o->runtime), b->error);
    if (b->status != KVF_OK)
        return NULL;
    b->t->weight_bytes += tensor->bytes;
    return tensor;
}

static const float *bind_vector(binder *b, const char *name, uint32_t count)
{
    const kvf_tensor *tensor = bind_tensor(b, name, 1, &(uint64_t){count});
    if (!tensor)
        return NULL;
    float *vector = b->next;
    kvf_numbers_widen(tensor->data, tensor->dtype, count, vector);
    b->next += count;
    return vector;
}

static kvf_linear bind_linear(binder *b, const char *name, uint32_t outputs, uint32_t inputs)
{
    kvf_linear linear = {.outputs = outputs, .inputs = inputs};
    const kvf_tensor *tensor = bind_tensor(b, name, 2, (uint64_t[]){outputs, inputs});
    if (tensor) {
        linear.weight = tensor->data;
        linear.dtype = tensor->dtype;
    }
    return linear;
}

/* "model.layers.<layer>.<rest>" */
static const char *layer_name(char name[NAME_MAX_BYTES], uint32_t layer, const char *rest)
{
    snprintf(name, NAME_MAX_BYTES, "model.layers.%u.%s", layer, rest);
    return name;
}

static void bind_mlp(binder *b, uint32_t index)
{
    const kvf_model_config *m = &b->t->model;
    transformer_layer *l = &b->t->layers[index];
    const uint32_t hidden = m->hidden_size, inner = m->intermediate_size;
    char n[NAME_MAX_BYTES];
    l->gate = bind_linear(b, layer_name(n, index, "mlp.gate_proj.weight"), inner, hidden);
    l->up = bind_linear(b, layer_name(n, index, "mlp.up_proj.weight"), inner, hidden);
    l->down = bind_linear(b, layer_name(n, index, "mlp.down_proj.weight"), hidden, inner);
}

static void bind_layer(binder *b, uint32_t index)
{
    const kvf_model_config *m = &b->t->model;
    transformer_layer *l = &b->t->layers[index];
    uint32_t hidden = m->hidden_size;
    uint32_t q = transformer_query_width(m), kv = transformer_kv_width(m);
    char n[NAME_MAX_BYTES];
    l->attention_norm = bind_vector(b, layer_name(n, index, "input_layernorm.weight"), hidden);
    l->mlp_norm = bind_vector(b, layer_name(n, index, "post_attention_layernorm.weight"), hidden);
    l->query = bind_linear(b, layer_name(n, index, "self_attn.q_proj.weight"), q, hidden);
    l->key = bind_linear(b, layer_name(n, index, "self_attn.k_proj.weight"), kv, hidden);
    l->value = bind_linear(b, layer_name(n, index, "self_attn.v_proj.weight"), kv, hidden);
    l->output = bind_linear(b, layer_name(n, index, "self_attn.o_proj.weight"), hidden, q);
    bind_mlp(b, index);
    if (m->architecture->qkv_bias) {
        l->query.bias = bind_vector(b, layer_name(n, index, "self_attn.q_proj.bias"), q);
        l->key.bias = bind_vector(b, layer_name(n, index, "self_attn.k_proj.bias"), kv);
        l->value.bias = bind_vector(b, layer_name(n, index, "self_attn.v_proj.bias"), kv);
    }
    if (m->architecture->qk_norm) {
        l->query_norm =
            bind_vector(b, layer_name(n, index, "self_attn.q_norm.weight"), m->head_dim);
        l->key_norm = bind_vector(b, layer_name(n, index, "self_attn.k_norm.weight"), m->head_dim);
    }
}

/* Where both are one, a file may have either. */
static const char *embedding_name(const kvf_transformer *t)
{
    static const char embedding[] = "model.embed_tokens.weight", head[] = "lm_head.weight";
    const kvf_weights *weights = t->options.weights;
    const bool has_head_only =
        !kvf_weights_get(weights, embedding) && kvf_weights_get(weights, head);
    return t->model.tied_embeddings && has_head_only ? head : embedding;
}

static kvf_status bind_weights(kvf_transformer *t, kvf_error *error)
{
    const kvf_model_config *m = &t->model;
    binder b = {.t = t, .next = t->vectors, .error = error, .status = KVF_OK};
    t->embedding = bind_linear(&b, embedding_name(t), m->vocab_size, m->hidden_size);
    t->final_norm = bind_vector(&b, "model.norm.weight", m->hidden_size);
    for (uint32_t layer = 0; layer < m->layers; layer++)
        bind_layer(&b, layer);
    if (b.status != KVF_OK)
        return b.status;
    if (!m->tied_embeddings) {
        /* One row of the embedding is read in a step, which does not count. */
        t->weight_bytes -= (uint64_t)m->vocab_size * kvf_linear_row_bytes(&t->embedding);
        t->head = bind_linear(&b, "lm_head.weight", m->vocab_size, m->hidden_size);
    } else {
        t->head = t->embedding;
    }
    return b.status;
}

/* ---- open and close ---- */

static size_t vector_count(const kvf_model_config *m)
{
    const size_t layer = 2u * (size_t)m->hidden_size + 2u * (size_t)m->head_dim +
                         transformer_query_width(m) + 2u * (size_t)transformer_kv_width(m);
    return m->hidden_size + m->layers * layer;
}

static void carve(kvf_transformer *t, kvf_carver *k)
{
    const uint32_t rows = transformer_hidden_rows(&t->options);
    KVF_CARVE(k, t->layers, t->model.layers);
    KVF_CARVE(k, t->vectors, vector_count(&t->model));
    KVF_CARVE(k, t->positions, rows);
    KVF_CARVE(k, t->index, rows);
    KVF_CARVE(k, t->recording.sequences, t->options.batch_max);
}

static kvf_status transformer_fill(kvf_transformer *t, kvf_error *error)
{
    kvf_carver carver = {0};
    carve(t, &carver);
    t->memory = calloc(1, carver.bytes);
    if (!t->memory)
        return model_out_of_memory(error, carver.bytes, "norms and biases");
    carve(t, &(kvf_carver){.base = t->memory});
    KVF_TRY(bind_weights(t, error));
    return t->ops->open(t, error);
}

kvf_status kvf_transformer_open(const kvf_transformer_options *options, kvf_transformer **out,
                                kvf_error *error)
{
    *out = NULL;
    if (options->chunk_max == 0 || options->batch_max == 0)
        return model_fail(error, KVF_INVALID, "chunk_max is %u and batch_max %u; give at least 1",
                          options->chunk_max, options->batch_max);
    kvf_transformer *t = calloc(1, sizeof *t);
    if (!t)
        return model_out_of_memory(error, sizeof *t, "the transformer");
    t->options = *options;
    t->model = *options->model;
    t->options.model = &t->model;
    t->ops = ops_of(options->runtime);
    kvf_rope_table_make(&t->model, &t->rope);
    kvf_status status = transformer_fill(t, error);
    if (status != KVF_OK) {
        kvf_transformer_close(t);
        return status;
    }
    *out = t;
    return KVF_OK;
}

void kvf_transformer_close(kvf_transformer *t)
{
    if (!t)
        return;
    kvf_transformer_forget(t);
    if (t->ops)
        t->ops->close(t);
    free(t->memory);
    free(t);
}

uint64_t kvf_transformer_weight_bytes(const kvf_transformer *t)
{
    return t->weight_bytes;
}
