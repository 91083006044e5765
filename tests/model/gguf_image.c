/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "gguf_image.h"
#include "unit.h"

#include "common/convert.h"
#include "common/random.h"
#include "model_fixture.h"

enum { KIND_U32 = 4, KIND_I32 = 5, KIND_F32 = 6, KIND_BOOL = 7, KIND_TEXT = 8, KIND_ARRAY = 9 };

static void put(kvf_text *text, const void *bytes, size_t size)
{
    assert_int_equal(kvf_text_append(text, bytes, size, NULL), KVF_OK);
}

static void put_u32(kvf_text *text, uint32_t value)
{
    put(text, &value, sizeof value);
}

static void put_u64(kvf_text *text, uint64_t value)
{
    put(text, &value, sizeof value);
}

static void put_text(kvf_text *text, const char *value)
{
    put_u64(text, strlen(value));
    put(text, value, strlen(value));
}

static void begin_field(gguf_image *image, const char *key, uint32_t kind)
{
    put_text(&image->fields, key);
    put_u32(&image->fields, kind);
    image->field_count++;
}

void gguf_image_raw(gguf_image *image, const char *key, uint32_t kind, const void *bytes,
                    size_t size)
{
    begin_field(image, key, kind);
    put(&image->fields, bytes, size);
}

void gguf_image_u32(gguf_image *image, const char *key, uint32_t value)
{
    gguf_image_raw(image, key, KIND_U32, &value, sizeof value);
}

void gguf_image_f32(gguf_image *image, const char *key, float value)
{
    gguf_image_raw(image, key, KIND_F32, &value, sizeof value);
}

void gguf_image_flag(gguf_image *image, const char *key, bool value)
{
    const uint8_t byte = value;
    gguf_image_raw(image, key, KIND_BOOL, &byte, 1);
}

void gguf_image_text(gguf_image *image, const char *key, const char *value)
{
    begin_field(image, key, KIND_TEXT);
    put_text(&image->fields, value);
}

void gguf_image_texts(gguf_image *image, const char *key, const char *const *texts, uint64_t count)
{
    begin_field(image, key, KIND_ARRAY);
    put_u32(&image->fields, KIND_TEXT);
    put_u64(&image->fields, count);
    for (uint64_t i = 0; i < count; i++)
        put_text(&image->fields, texts[i]);
}

void gguf_image_i32s(gguf_image *image, const char *key, const int32_t *numbers, uint64_t count)
{
    begin_field(image, key, KIND_ARRAY);
    put_u32(&image->fields, KIND_I32);
    put_u64(&image->fields, count);
    put(&image->fields, numbers, (size_t)count * sizeof *numbers);
}

/* Zeros up to a multiple of the alignment. */
static void pad(const gguf_image *image, kvf_text *text)
{
    const uint32_t alignment = image->alignment ? image->alignment : 32;
    while (text->size % alignment != 0)
        put(text, "", 1);
}

void gguf_image_tensor(gguf_image *image, const char *name, uint32_t type, uint32_t rank,
                       const uint64_t *shape, const void *bytes, size_t size)
{
    put_text(&image->tensors, name);
    put_u32(&image->tensors, rank);
    for (uint32_t i = rank; i-- > 0;)
        put_u64(&image->tensors, shape[i]);
    put_u32(&image->tensors, type);
    put_u64(&image->tensors, image->data.size);
    put(&image->data, bytes, size);
    pad(image, &image->data);
    image->tensor_count++;
}

void *gguf_image_make(const gguf_image *image, size_t *size)
{
    kvf_text out = {0};
    put(&out, "GGUF", 4);
    put_u32(&out, 3);
    put_u64(&out, image->tensor_count);
    put_u64(&out, image->field_count);
    put(&out, image->fields.bytes, image->fields.size);
    put(&out, image->tensors.bytes, image->tensors.size);
    pad(image, &out);
    put(&out, image->data.bytes, image->data.size);
    *size = out.size;
    return out.bytes;
}

void gguf_image_write(const gguf_image *image, const char *directory, const char *name)
{
    size_t size;
    void *bytes = gguf_image_make(image, &size);
    fixture_write(directory, name, bytes, size);
    free(bytes);
}

void gguf_image_free(gguf_image *image)
{
    kvf_text_free(&image->fields);
    kvf_text_free(&image->tensors);
    kvf_text_free(&image->data);
    *image = (gguf_image){0};
}

/* ---- a model ---- */

static const char *const layer_names[][2] = {
    {"input_layernorm.weight", "attn_norm.weight"},
    {"post_attention_layernorm.weight", "ffn_norm.weight"},
    {"self_attn.q_proj.weight", "attn_q.weight"},
    {"self_attn.k_proj.weight", "attn_k.weight"},
    {"self_attn.v_proj.weight", "attn_v.weight"},
    {"self_attn.q_proj.bias", "attn_q.bias"},
    {"self_attn.k_proj.bias", "attn_k.bias"},
    {"self_attn.v_proj.bias", "attn_v.bias"},
    {"self_attn.o_proj.weight", "attn_output.weight"},
    {"self_attn.q_norm.weight", "attn_q_norm.weight"},
    {"self_attn.k_norm.weight", "attn_k_norm.weight"},
    {"mlp.gate_proj.weight", "ffn_gate.weight"},
    {"mlp.up_proj.weight", "ffn_up.weight"},
    {"mlp.down_proj.weight", "ffn_down.weight"},
};

static void name_in_gguf(const char *hf, char *out, size_t size)
{
    unsigned layer;
    int at = 0;
    if (sscanf(hf, "model.layers.%u.%n", &layer, &at) == 1 && at > 0) {
        for (size_t i = 0; i < sizeof layer_names / sizeof *layer_names; i++)
            if (strcmp(hf + at, layer_names[i][0]) == 0)
                snprintf(out, size, "blk.%u.%s", layer, layer_names[i][1]);
    } else {
        snprintf(out, size, "%s",
                 strcmp(hf, "lm_head.weight") == 0      ? "output.weight"
                 : strcmp(hf, "model.norm.weight") == 0 ? "output_norm.weight"
                                                        : "token_embd.weight");
    }
}

/* Heads of a matrix whose rows turn: pairs of rows (i, i + half) become neighbours. */
static uint64_t row_of_file(uint64_t row, uint64_t rows, uint32_t heads)
{
    if (heads == 0)
        return row;
    const uint64_t size = rows / heads, half = size / 2, i = row % size;
    return row - i + (i < half ? 2 * i : 2 * (i - half) + 1);
}

static void add_tensor(gguf_image *image, const kvf_model_config *config, const kvf_tensor *from,
                       uint32_t type)
{
    char name[128] = "";
    name_in_gguf(from->name, name, sizeof name);
    const kvf_dtype dtype = type == IMAGE_F32 ? KVF_FP32 : type == IMAGE_F16 ? KVF_FP16 : KVF_BF16;
    const bool is_llama = strcmp(config->architecture->family, "llama") == 0 ||
                          strcmp(config->architecture->family, "mistral") == 0;
    const uint32_t heads = !is_llama                       ? 0
                           : strstr(name, "attn_q.weight") ? config->query_heads
                           : strstr(name, "attn_k.weight") ? config->kv_heads
                                                           : 0;
    const uint64_t rows = from->rank > 1 ? from->shape[0] : 1;
    const uint64_t columns = from->shape[from->rank - 1];
    const size_t size = (size_t)(rows * columns) * kvf_dtype_bytes(dtype);
    char *bytes = malloc(size);
    assert_non_null(bytes);
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t i = 0; i < columns; i++)
            kvf_element_set(bytes, dtype, (size_t)(row_of_file(row, rows, heads) * columns + i),
                            kvf_element_get(from->data, from->dtype, (size_t)(row * columns + i)));
    gguf_image_tensor(image, name, type, from->rank, from->shape, bytes, size);
    free(bytes);
}

static void add_count(gguf_image *image, const char *family, const char *rest, uint32_t value)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", family, rest);
    gguf_image_u32(image, key, value);
}

static void add_real(gguf_image *image, const char *family, const char *rest, double value)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", family, rest);
    gguf_image_f32(image, key, (float)value);
}

/* Scaling of Llama 3 is a tensor of divisors; the others are fields. */
static void add_rope(gguf_image *image, const char *family, const kvf_model_config *config)
{
    const kvf_rope_config *rope = &config->rope;
    char key[128];
    add_real(image, family, "rope.freq_base", rope->theta);
    if (rope->kind == KVF_ROPE_LLAMA3) {
        kvf_rope_table scaled, plain;
        kvf_model_config unscaled = *config;
        unscaled.rope.kind = KVF_ROPE_DEFAULT;
        kvf_rope_table_make(config, &scaled);
        kvf_rope_table_make(&unscaled, &plain);
        for (uint32_t i = 0; i < plain.count; i++)
            plain.inv_freq[i] /= scaled.inv_freq[i];
        const uint64_t count = plain.count;
        gguf_image_tensor(image, "rope_freqs.weight", IMAGE_F32, 1, &count, plain.inv_freq,
                          plain.count * sizeof *plain.inv_freq);
    } else if (rope->kind != KVF_ROPE_DEFAULT) {
        snprintf(key, sizeof key, "%s.rope.scaling.type", family);
        gguf_image_text(image, key, rope->kind == KVF_ROPE_LINEAR ? "linear" : "yarn");
        add_real(image, family, "rope.scaling.factor", rope->factor);
        if (rope->kind == KVF_ROPE_YARN)
            add_count(image, family, "rope.scaling.original_context_length",
                      (uint32_t)rope->original_positions);
    }
}

void gguf_image_model(gguf_image *image, const kvf_model_config *config, kvf_weights *weights,
                      uint32_t type)
{
    const char *family = config->architecture->family;
    if (strcmp(family, "mistral") == 0)
        family = "llama";
    gguf_image_text(image, "general.architecture", family);
    add_count(image, family, "block_count", config->layers);
    add_count(image, family, "context_length", config->positions_max);
    add_count(image, family, "embedding_length", config->hidden_size);
    add_count(image, family, "feed_forward_length", config->intermediate_size);
    add_count(image, family, "attention.head_count", config->query_heads);
    add_count(image, family, "attention.head_count_kv", config->kv_heads);
    add_count(image, family, "attention.key_length", config->head_dim);
    add_count(image, family, "attention.value_length", config->head_dim);
    add_real(image, family, "attention.layer_norm_rms_epsilon", config->norm_eps);
    add_rope(image, family, config);
    for (size_t i = 0; i < kvf_weights_count(weights); i++) {
        const kvf_tensor *tensor = kvf_weights_at(weights, i);
        assert_int_equal(kvf_weights_load(tensor, 1, NULL), KVF_OK);
        add_tensor(image, config, tensor, tensor->rank == 1 ? IMAGE_F32 : type);
    }
}

/* ---- blocks ---- */

char *gguf_image_blocks(const gguf_type *type, size_t count)
{
    static const struct {
        const char *name;
        int32_t halves[2];
    } scales[] = {{"F16", {0, -1}},  {"BF16", {0, -1}}, {"F32", {2, -1}},
                  {"Q4_0", {0, -1}}, {"Q4_1", {0, 2}},  {"Q8_0", {0, -1}}};
    const size_t size = count * type->bytes;
    uint64_t state = type->id;
    char *bytes = malloc(size + 8);
    assert_non_null(bytes);
    for (size_t at = 0; at < size; at += 8) {
        const uint64_t word = kvf_random_next(&state);
        memcpy(bytes + at, &word, sizeof word);
    }
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++)
        for (size_t block = 0; strcmp(scales[i].name, type->name) == 0 && block < count; block++)
            for (size_t k = 0; k < 2 && scales[i].halves[k] >= 0; k++)
                bytes[block * type->bytes + (size_t)scales[i].halves[k] + 1] &= (char)0xbf;
    return bytes;
}
