/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Made-up models: names and shapes of all families, numbers from splitmix64.
 *
 * It knows what make_logits_goldens.py knows. Invariant: every number is exact in the type that it
 * is stored in.
 */

#include "random_model.h"
#include "common/convert.h"
#include "common/random.h"
#include "weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TENSOR_NAME_BYTES 96
#define BLOCK_NUMBERS     4096u

typedef struct tensor_plan {
    char name[TENSOR_NAME_BYTES];
    uint64_t shape[2];
    uint32_t rank;
} tensor_plan;

typedef struct model_plan {
    tensor_plan *tensors;
    size_t count;
    kvf_dtype dtype;
} model_plan;

random_stream random_stream_of(const char *name)
{
    random_stream stream = {0xcbf29ce484222325u};
    for (; *name; name++)
        stream.state = (stream.state ^ (unsigned char)*name) * 0x100000001b3u;
    return stream;
}

uint64_t random_stream_next(random_stream *stream)
{
    return kvf_random_next(&stream->state);
}

float random_stream_unit(random_stream *stream)
{
    return (float)((double)(random_stream_next(stream) >> 40) / 8388608.0 - 1.0);
}

static void plan_add(model_plan *plan, int layer, const char *name, uint64_t rows, uint64_t columns)
{
    tensor_plan *t = &plan->tensors[plan->count++];
    if (layer < 0)
        snprintf(t->name, sizeof t->name, "%s", name);
    else
        snprintf(t->name, sizeof t->name, "model.layers.%d.%s", layer, name);
    t->shape[0] = rows;
    t->shape[1] = columns;
    t->rank = columns ? 2 : 1;
}

static void plan_mlp(model_plan *plan, const kvf_model_config *m, int layer)
{
    plan_add(plan, layer, "mlp.gate_proj.weight", m->intermediate_size, m->hidden_size);
    plan_add(plan, layer, "mlp.up_proj.weight", m->intermediate_size, m->hidden_size);
    plan_add(plan, layer, "mlp.down_proj.weight", m->hidden_size, m->intermediate_size);
}

static void plan_layer(model_plan *plan, const kvf_model_config *m, int layer)
{
    uint64_t h = m->hidden_size, q = (uint64_t)m->query_heads * m->head_dim;
    uint64_t kv = (uint64_t)m->kv_heads * m->head_dim;
    plan_add(plan, layer, "input_layernorm.weight", h, 0);
    plan_add(plan, layer, "post_attention_layernorm.weight", h, 0);
    plan_add(plan, layer, "self_attn.q_proj.weight", q, h);
    plan_add(plan, layer, "self_attn.k_proj.weight", kv, h);
    plan_add(plan, layer, "self_attn.v_proj.weight", kv, h);
    plan_add(plan, layer, "self_attn.o_proj.weight", h, q);
    plan_mlp(plan, m, layer);
    if (m->architecture->qkv_bias) {
        plan_add(plan, layer, "self_attn.q_proj.bias", q, 0);
        plan_add(plan, layer, "self_attn.k_proj.bias", kv, 0);
        plan_add(plan, layer, "self_attn.v_proj.bias", kv, 0);
    }
    if (m->architecture->qk_norm) {
        plan_add(plan, layer, "self_attn.q_norm.weight", m->head_dim, 0);
        plan_add(plan, layer, "self_attn.k_norm.weight", m->head_dim, 0);
    }
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* The scale of a raw number, 0 for a norm. */
static double tensor_scale(const tensor_plan *t)
{
    if (ends_with(t->name, "norm.weight"))
        return 0.0;
    if (ends_with(t->name, "bias"))
        return 0.5;
    double scale = 1.0;
    if (!strstr(t->name, "embed_tokens"))
        while (scale * scale * (double)t->shape[1] > 3.0)
            scale /= 2.0;
    return scale;
}

static float number_make(uint64_t z, double scale, kvf_dtype dtype)
{
    if (scale == 0.0)
        return (float)(1.0 + ((double)(z >> 57) - 64.0) / 128.0);
    double unit = dtype == KVF_FP32 ? (double)(z >> 40) / 8388608.0 : (double)(z >> 56) / 128.0;
    return (float)((unit - 1.0) * scale);
}

static uint64_t tensor_count(const tensor_plan *t)
{
    return t->shape[0] * (t->rank == 2 ? t->shape[1] : 1);
}

static bool write_tensor(FILE *file, const tensor_plan *t, kvf_dtype dtype)
{
    unsigned char block[BLOCK_NUMBERS * sizeof(float)];
    random_stream stream = random_stream_of(t->name);
    double scale = tensor_scale(t);
    const size_t element = kvf_dtype_bytes(dtype);
    for (uint64_t left = tensor_count(t); left > 0;) {
        size_t count = left < BLOCK_NUMBERS ? (size_t)left : BLOCK_NUMBERS;
        for (size_t i = 0; i < count; i++)
            kvf_element_set(block, dtype, i,
                            number_make(random_stream_next(&stream), scale, dtype));
        if (fwrite(block, element, count, file) != count)
            return false;
        left -= count;
    }
    return true;
}

static const char *dtype_name(kvf_dtype dtype)
{
    return dtype == KVF_FP32 ? "F32" : dtype == KVF_FP16 ? "F16" : "BF16";
}

static bool write_header(FILE *file, const model_plan *plan)
{
    size_t capacity = plan->count * 256 + 64, size = 1;
    char *text = malloc(capacity);
    if (!text)
        return false;
    text[0] = '{';
    uint64_t offset = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const tensor_plan *t = &plan->tensors[i];
        uint64_t end = offset + tensor_count(t) * kvf_dtype_bytes(plan->dtype);
        char columns[32] = "";
        if (t->rank == 2)
            snprintf(columns, sizeof columns, ",%llu", (unsigned long long)t->shape[1]);
        size += (size_t)snprintf(
            text + size, capacity - size,
            "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%llu%s],\"data_offsets\":[%llu,%llu]}",
            i ? "," : "", t->name, dtype_name(plan->dtype), (unsigned long long)t->shape[0],
            columns, (unsigned long long)offset, (unsigned long long)end);
        offset = end;
    }
    text[size++] = '}';
    while (size % 8)
        text[size++] = ' ';
    uint64_t length = size; /* little endian, as every machine this runs on */
    bool done = fwrite(&length, sizeof length, 1, file) == 1 && fwrite(text, 1, size, file) == size;
    free(text);
    return done;
}

/* Says why it is not whole. */
static bool close_file(FILE *file, const char *path, bool done)
{
    if (file && fclose(file) != 0)
        done = false;
    if (!done)
        perror(path);
    return done;
}

static bool write_weights(const char *path, const model_plan *plan)
{
    FILE *file = fopen(path, "wb");
    bool done = file && write_header(file, plan);
    for (size_t i = 0; i < plan->count && done; i++)
        done = write_tensor(file, &plan->tensors[i], plan->dtype);
    return close_file(file, path, done);
}

static bool write_config(const char *path, const char *text)
{
    FILE *file = fopen(path, "wb");
    return close_file(file, path, file && fwrite(text, 1, strlen(text), file) == strlen(text));
}

bool random_model_write(const char *directory, const char *config_text)
{
    kvf_model_config m;
    kvf_error error;
    if (kvf_model_config_parse(config_text, strlen(config_text), NULL, 0, &m, &error)) {
        fprintf(stderr, "%s\n", error.text);
        return false;
    }
    model_plan plan = {.dtype = m.dtype};
    plan.tensors = calloc(4u + (size_t)m.layers * 16u, sizeof *plan.tensors);
    if (!plan.tensors)
        return false;
    plan_add(&plan, -1, "model.embed_tokens.weight", m.vocab_size, m.hidden_size);
    for (uint32_t layer = 0; layer < m.layers; layer++)
        plan_layer(&plan, &m, (int)layer);
    plan_add(&plan, -1, "model.norm.weight", m.hidden_size, 0);
    if (!m.tied_embeddings)
        plan_add(&plan, -1, "lm_head.weight", m.vocab_size, m.hidden_size);
    char path[4096];
    snprintf(path, sizeof path, "%s/config.json", directory);
    bool done = write_config(path, config_text);
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    done = done && write_weights(path, &plan);
    free(plan.tensors);
    return done;
}
