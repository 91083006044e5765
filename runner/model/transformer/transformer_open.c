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

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define NAME_MAX_BYTES 128u

static uint32_t query_width(const kvf_model_config *m)
{
    return transformer_query_width(m);
}

static uint32_t kv_width(const kvf_model_config *m)
{
    return transformer_kv_width(m);
}

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
    b->local_cosine = b->local_sine = NULL;
    if (m->architecture->has_local_rope) {
        KVF_CARVE(k, b->local_cosine, all, m->head_dim / 2);
        KVF_CARVE(k, b->local_sine, all, m->head_dim / 2);
    }
    KVF_CARVE(k, b->hidden, all, m->hidden_size);
    KVF_CARVE_OF(k, b->normed, own, rows, m->hidden_size);
    KVF_CARVE(k, b->qkv, rows, q + 2 * kv);
    KVF_CARVE_OF(k, b->q, element, rows, q);
    KVF_CARVE_OF(k, b->k, element, rows, kv);
    KVF_CARVE_OF(k, b->v, element, rows, kv);
    KVF_CARVE_OF(k, b->attended, element, rows, q);
    KVF_CARVE(k, b->gate_up, transformer_scratch_floats(options));
    KVF_CARVE_OF(k, b->activated, own, transformer_mlp_rows(options), m->intermediate_size);
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
    kvf_runtime *runtime = t->options.runtime;
    *out = NULL;
    KVF_TRY(check_geometry(&t->model, config, error));
    KVF_TRY(kvf_cache_open(runtime, config, out, error));
    for (uint32_t layer = 0; t->model.architecture->has_sinks && layer < t->model.layers; layer++) {
        kvf_attention_params params;
        kvf_attention_params_init(&params);
        params.sinks = t->layers[layer].sinks;
        const kvf_status status =
            kvf_library_told(runtime, kvf_cache_attention_params(*out, layer, &params), error);
        if (status == KVF_OK)
            continue;
        kvf_cache_close(*out);
        *out = NULL;
        return status;
    }
    return KVF_OK;
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

/* A norm's weights, times @p scale. */
static const float *bind_norm(binder *b, const char *name, uint32_t count, float scale)
{
    float *vector = b->next;
    const bool adds_one =
        b->t->model.architecture->norms_add_one && !kvf_weights_of_gguf(b->t->options.weights);
    if (!bind_vector(b, name, count))
        return NULL;
    for (uint32_t i = 0; i < count; i++)
        vector[i] = scale * (adds_one ? 1.0f + vector[i] : vector[i]);
    return vector;
}

static kvf_linear bind_linear(binder *b, const char *name, uint32_t outputs, uint32_t inputs)
{
    kvf_linear linear = {.outputs = outputs, .inputs = inputs};
    const kvf_tensor *tensor = bind_tensor(b, name, 2, (uint64_t[]){outputs, inputs});
    if (tensor) {
        linear.weight = tensor->data;
        linear.blocks = tensor->blocks;
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

/* Vectors of all experts of a layer, [experts, outputs], as biases of @p to. */
static void bind_expert_biases(binder *b, const char *name, kvf_linear *to, uint32_t outputs)
{
    const uint32_t experts = b->t->model.experts;
    const kvf_tensor *tensor = bind_tensor(b, name, 2, (uint64_t[]){experts, outputs});
    if (!tensor)
        return;
    kvf_numbers_widen(tensor->data, tensor->dtype, (size_t)experts * outputs, b->next);
    for (uint32_t i = 0; i < experts; i++, b->next += outputs)
        to[i].bias = b->next;
}

/* One role of all experts of a layer: one tensor, as in GGUF files, or one for each. */
static void bind_experts(binder *b, uint32_t layer, const char *role, kvf_linear *to,
                         uint32_t outputs, uint32_t inputs)
{
    const uint32_t experts = b->t->model.experts;
    char name[NAME_MAX_BYTES], rest[64];
    snprintf(rest, sizeof rest, "mlp.experts.%s.weight", role);
    if (kvf_weights_get(b->t->options.weights, layer_name(name, layer, rest))) {
        const kvf_tensor *all = bind_tensor(b, name, 3, (uint64_t[]){experts, outputs, inputs});
        for (uint32_t i = 0; all && i < experts; i++)
            to[i] = (kvf_linear){.weight = (const char *)all->data + all->bytes / experts * i,
                                 .blocks = all->blocks,
                                 .dtype = all->dtype,
                                 .outputs = outputs,
                                 .inputs = inputs};
        snprintf(rest, sizeof rest, "mlp.experts.%s.bias", role);
        if (b->t->model.architecture->has_more_biases)
            bind_expert_biases(b, layer_name(name, layer, rest), to, outputs);
        return;
    }
    for (uint32_t i = 0; i < experts && b->status == KVF_OK; i++) {
        snprintf(rest, sizeof rest, "mlp.experts.%u.%s.weight", i, role);
        to[i] = bind_linear(b, layer_name(name, layer, rest), outputs, inputs);
        if (b->status == KVF_OK && to[i].dtype != to[0].dtype)
            b->status = model_fail(b->error, KVF_UNSUPPORTED,
                                   "tensor %.120s is %s, but that of expert 0 is %s; use a model "
                                   "whose experts are of one type",
                                   name, kvf_weights_dtype_name(to[i].dtype),
                                   kvf_weights_dtype_name(to[0].dtype));
    }
}

static void bind_mlp(binder *b, uint32_t index)
{
    const kvf_model_config *m = &b->t->model;
    transformer_layer *l = &b->t->layers[index];
    const uint32_t hidden = m->hidden_size, inner = m->intermediate_size;
    const uint32_t count = transformer_mlps(m);
    char n[NAME_MAX_BYTES];
    l->gate = b->t->mlps + (size_t)index * 3 * count;
    l->up = l->gate + count;
    l->down = l->up + count;
    if (m->experts == 0) {
        *l->gate = bind_linear(b, layer_name(n, index, "mlp.gate_proj.weight"), inner, hidden);
        *l->up = bind_linear(b, layer_name(n, index, "mlp.up_proj.weight"), inner, hidden);
        *l->down = bind_linear(b, layer_name(n, index, "mlp.down_proj.weight"), hidden, inner);
        return;
    }
    if (m->architecture->has_more_biases) {
        l->router = bind_linear(b, layer_name(n, index, "mlp.router.weight"), m->experts, hidden);
        l->router.bias = bind_vector(b, layer_name(n, index, "mlp.router.bias"), m->experts);
    } else {
        l->router = bind_linear(b, layer_name(n, index, "mlp.gate.weight"), m->experts, hidden);
    }
    const uint64_t before = b->t->weight_bytes;
    bind_experts(b, index, "gate_proj", l->gate, inner, hidden);
    bind_experts(b, index, "up_proj", l->up, inner, hidden);
    bind_experts(b, index, "down_proj", l->down, hidden, inner);
    b->t->weight_bytes = before + (b->t->weight_bytes - before) / m->experts * m->experts_used;
}

static void bind_norms(binder *b, uint32_t index)
{
    const uint32_t hidden = b->t->model.hidden_size;
    transformer_layer *l = &b->t->layers[index];
    const char *before_mlp = "post_attention_layernorm.weight";
    char n[NAME_MAX_BYTES];
    l->attention_norm = bind_norm(b, layer_name(n, index, "input_layernorm.weight"), hidden, 1);
    if (b->t->model.architecture->has_norms_after) {
        l->attention_after = bind_norm(b, layer_name(n, index, before_mlp), hidden, 1);
        l->mlp_after =
            bind_norm(b, layer_name(n, index, "post_feedforward_layernorm.weight"), hidden, 1);
        before_mlp = "pre_feedforward_layernorm.weight";
    }
    l->mlp_norm = bind_norm(b, layer_name(n, index, before_mlp), hidden, 1);
}

static void bind_layer(binder *b, uint32_t index)
{
    const kvf_model_config *m = &b->t->model;
    transformer_layer *l = &b->t->layers[index];
    uint32_t hidden = m->hidden_size;
    uint32_t q = query_width(m), kv = kv_width(m);
    char n[NAME_MAX_BYTES];
    bind_norms(b, index);
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
    if (m->architecture->has_more_biases)
        l->output.bias = bind_vector(b, layer_name(n, index, "self_attn.o_proj.bias"), hidden);
    if (m->architecture->has_sinks)
        l->sinks = bind_vector(b, layer_name(n, index, "self_attn.sinks"), m->query_heads);
    if (m->architecture->qk_norm) {
        l->query_norm = bind_norm(b, layer_name(n, index, "self_attn.q_norm.weight"), m->head_dim,
                                  m->query_scale);
        l->key_norm = bind_norm(b, layer_name(n, index, "self_attn.k_norm.weight"), m->head_dim, 1);
    }
    l->turns_locally = m->architecture->has_local_rope && kvf_model_layer_has_window(m, index);
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
    t->final_norm = bind_norm(&b, "model.norm.weight", m->hidden_size, 1);
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

/* As Transformers does, and whoever trained the model. */
static float rounded(kvf_dtype dtype, float number)
{
    float as_stored[1];
    kvf_element_set(as_stored, dtype, 0, number);
    return kvf_element_get(as_stored, dtype, 0);
}

static size_t vector_count(const kvf_model_config *m)
{
    const size_t norms = m->architecture->has_norms_after ? 4 : 2;
    size_t layer = norms * (size_t)m->hidden_size + 2u * (size_t)m->head_dim + query_width(m) +
                   2u * (size_t)kv_width(m);
    if (m->architecture->has_more_biases)
        layer += m->hidden_size + m->query_heads +
                 m->experts * (1u + 2u * (size_t)m->intermediate_size + m->hidden_size);
    return m->hidden_size + m->layers * layer;
}

static void carve(kvf_transformer *t, kvf_carver *k)
{
    const uint32_t rows = transformer_hidden_rows(&t->options);
    KVF_CARVE(k, t->layers, t->model.layers);
    KVF_CARVE(k, t->mlps, (size_t)t->model.layers * 3, transformer_mlps(&t->model));
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

kvf_status kvf_transformer_on_gpu(const kvf_model_config *m, const kvf_weights *weights,
                                  kvf_error *error)
{
    if (m->experts)
        return model_fail(error, KVF_UNSUPPORTED,
                          "num_experts is %u: experts are computed on the host only; run this "
                          "model with --device host",
                          m->experts);
    if (m->architecture->has_norms_after)
        return model_fail(error, KVF_UNSUPPORTED,
                          "architectures is %s, which is computed on the host only; run this model "
                          "with --device host",
                          m->architecture->name);
    for (size_t i = 0; i < kvf_weights_count(weights); i++) {
        const kvf_tensor *tensor = kvf_weights_at(weights, i);
        if (tensor->blocks && tensor->blocks->index == GGUF_MXFP4)
            return model_fail(
                error, KVF_UNSUPPORTED,
                "tensor %.120s is MXFP4, which is computed on the host only; run this "
                "model with --device host",
                tensor->name);
    }
    return KVF_OK;
}

kvf_status kvf_transformer_open(const kvf_transformer_options *options, kvf_transformer **out,
                                kvf_error *error)
{
    *out = NULL;
    if (options->chunk_max == 0 || options->batch_max == 0)
        return model_fail(error, KVF_INVALID, "chunk_max is %u and batch_max %u; give at least 1",
                          options->chunk_max, options->batch_max);
    kvf_weights_keep_packed(options->weights);
    if (!ops_of(options->runtime)->is_host)
        KVF_TRY(kvf_transformer_on_gpu(options->model, options->weights, error));
    kvf_transformer *t = calloc(1, sizeof *t);
    if (!t)
        return model_out_of_memory(error, sizeof *t, "the transformer");
    t->options = *options;
    t->model = *options->model;
    t->options.model = &t->model;
    t->ops = ops_of(options->runtime);
    kvf_rope_table_make(&t->model, &t->rope);
    if (t->model.architecture->has_local_rope)
        kvf_rope_table_make_local(&t->model, &t->local_rope);
    t->embedding_scale = rounded(t->model.dtype, sqrtf((float)t->model.hidden_size));
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
