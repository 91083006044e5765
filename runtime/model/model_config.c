/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reading config.json and generation_config.json; see the header for what is kept. The rotary part
 * is in rope_config.c. Fields are read through a reader whose first failure sticks, so that the
 * order of the checks is the order of the text below.
 */

#include "model_config.h"

#include "model_config_reader.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CONFIG_BYTES_MAX (16u << 20)

const char *kvf_model_family_name(kvf_model_family family)
{
    static const char *const names[] = {
        [KVF_FAMILY_LLAMA] = "llama",
        [KVF_FAMILY_MISTRAL] = "mistral",
        [KVF_FAMILY_QWEN2] = "qwen2",
        [KVF_FAMILY_QWEN3] = "qwen3",
    };
    return names[family];
}

/* ---- fields ---- */

void config_refuse(config_reader *reader, const char *field, const json_value *value,
                   const char *fix)
{
    char shown[96];
    if (reader->status == KVF_OK)
        reader->status =
            model_fail(reader->error, KVF_UNSUPPORTED, "%s: %s is %s; %s", reader->file, field,
                       json_show(value, shown, sizeof shown), fix);
}

void config_reject(config_reader *reader, const char *field, const json_value *value,
                   const char *expected)
{
    char shown[96];
    if (reader->status == KVF_OK)
        reader->status =
            model_fail(reader->error, KVF_CORRUPT, "%s: %s is %s, but must be %s", reader->file,
                       field, json_show(value, shown, sizeof shown), expected);
}

uint32_t config_u32(config_reader *reader, const json_value *object, const char *field,
                    config_range range)
{
    const json_value *value = json_get_set(object, field);
    if (value == NULL && range.optional)
        return range.fallback;
    if (value == NULL || value->kind != JSON_INTEGER || value->as.integer < range.min ||
        value->as.integer > range.max) {
        char expected[96];
        snprintf(expected, sizeof expected, "a whole number from %u to %u", range.min, range.max);
        config_reject(reader, field, value, expected);
        return range.min;
    }
    return (uint32_t)value->as.integer;
}

double config_positive(config_reader *reader, const json_value *object, const char *field,
                       double fallback)
{
    const json_value *value = json_get_set(object, field);
    if (value == NULL && fallback > 0)
        return fallback;
    if (!json_is_number(value) || !(json_number(value) > 0)) {
        config_reject(reader, field, value, "a number above 0");
        return 1;
    }
    return json_number(value);
}

bool config_bool(config_reader *reader, const json_value *object, const char *field, bool fallback)
{
    const json_value *value = json_get_set(object, field);
    if (value == NULL)
        return fallback;
    if (value->kind != JSON_TRUE && value->kind != JSON_FALSE)
        config_reject(reader, field, value, "true or false");
    return value->kind == JSON_TRUE;
}

/* ---- what is refused ---- */

/* Fields that change the computation; unset, false and 0 are fine. */
static const struct {
    const char *field;
    const char *fix;
} must_be_unset[] = {
    {"quantization_config",
     "quantised weights are not supported, use the bf16, fp16 or fp32 model"},
    {"compression_config", "compressed weights are not supported, use the bf16 model"},
    {"attention_bias", "attention biases outside Qwen2 are not supported, use a model without"},
    {"mlp_bias", "biases in the MLP are not supported, use a model without"},
    {"use_sliding_window",
     "sliding windows are not supported, set it to false or use another model"},
    {"num_experts", "mixtures of experts are not supported, use a dense model"},
    {"num_local_experts", "mixtures of experts are not supported, use a dense model"},
    {"n_routed_experts", "mixtures of experts are not supported, use a dense model"},
    {"attn_logit_softcapping", "soft-capped attention is not supported, use another model"},
    {"final_logit_softcapping", "soft-capped logits are not supported, use another model"},
    {"query_pre_attn_scalar", "another attention scale is not supported, use another model"},
    {"attention_multiplier", "another attention scale is not supported, use another model"},
    {"residual_multiplier", "scaled residuals are not supported, use another model"},
    {"embedding_multiplier", "scaled embeddings are not supported, use another model"},
    {"logits_scaling", "scaled logits are not supported, use another model"},
    {"no_rope_layers", "layers without RoPE are not supported, use another model"},
};

static bool is_unset(const json_value *value)
{
    return value == NULL || value->kind == JSON_FALSE ||
           (json_is_number(value) && json_number(value) == 0) ||
           ((value->kind == JSON_OBJECT || value->kind == JSON_ARRAY) && value->size == 0);
}

static void check_unsupported(config_reader *reader)
{
    for (size_t i = 0; i < sizeof must_be_unset / sizeof *must_be_unset; i++) {
        const json_value *value = json_get_set(reader->root, must_be_unset[i].field);
        if (!is_unset(value))
            config_refuse(reader, must_be_unset[i].field, value, must_be_unset[i].fix);
    }
    const json_value *act = json_get_set(reader->root, "hidden_act");
    if (act != NULL && !json_is_string(act, "silu"))
        config_refuse(reader, "hidden_act", act, "only \"silu\" is supported");
}

static void read_family(config_reader *reader, kvf_model_config *config)
{
    static const struct {
        const char *architecture;
        kvf_model_family family;
    } known[] = {
        {"LlamaForCausalLM", KVF_FAMILY_LLAMA},       {"MistralForCausalLM", KVF_FAMILY_MISTRAL},
        {"MinistralForCausalLM", KVF_FAMILY_MISTRAL}, {"Qwen2ForCausalLM", KVF_FAMILY_QWEN2},
        {"Qwen3ForCausalLM", KVF_FAMILY_QWEN3},
    };
    const json_value *list = json_get_set(reader->root, "architectures");
    if (list == NULL || list->kind != JSON_ARRAY || list->size != 1) {
        config_reject(reader, "architectures", list, "a list of one name");
        return;
    }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (json_is_string(list + 1, known[i].architecture)) {
            config->family = known[i].family;
            config->qkv_bias = config->family == KVF_FAMILY_QWEN2;
            config->qk_norm = config->family == KVF_FAMILY_QWEN3;
            return;
        }
    }
    config_refuse(reader, "architectures", list + 1,
                  "supported are LlamaForCausalLM, MistralForCausalLM, MinistralForCausalLM, "
                  "Qwen2ForCausalLM and Qwen3ForCausalLM");
}

/*
 * Windows of Mistral. A window that the positions cannot fill says nothing. Ministral-8B-2410
 * alternates layers with a window of 32768 and layers without; which is which is not in config.json
 * and engines disagree. Attending fully in all layers is exact up to the window and offers each
 * token a superset beyond it, from which selection takes what it attends to: accepted, with a note.
 * Smaller windows (Mistral-7B-v0.1: 4096) shape every answer and are refused.
 */
static void check_window(config_reader *reader, kvf_model_config *config)
{
    enum { MINISTRAL_WINDOW = 32768 };
    const json_value *window = json_get_set(reader->root, "sliding_window");
    bool layered = false;
    const json_value *types = json_get_set(reader->root, "layer_types");
    if (types != NULL && types->kind != JSON_ARRAY) {
        config_reject(reader, "layer_types", types, "a list of names");
        return;
    }
    if (types != NULL) {
        for (const json_value *type = json_first(types); type != NULL;
             type = json_next(types, type)) {
            bool sliding = json_is_string(type, "sliding_attention");
            if (!json_is_string(type, "full_attention") &&
                !(sliding && config->family == KVF_FAMILY_MISTRAL && window != NULL))
                config_refuse(reader, "layer_types", type,
                              "only \"full_attention\" is supported, use another model");
            layered = layered || sliding;
        }
    }
    if (config->family != KVF_FAMILY_MISTRAL || window == NULL ||
        (types != NULL && types->size != 0 && !layered))
        return;
    if (window->kind != JSON_INTEGER || window->as.integer == 0) {
        config_reject(reader, "sliding_window", window, "null or a whole number above 0");
    } else if (window->as.integer < config->positions_max) {
        if (window->as.integer < MINISTRAL_WINDOW)
            config_refuse(reader, "sliding_window", window,
                          "windows below 32768 tokens are not supported, use a model without");
        snprintf(config->note, sizeof config->note,
                 "sliding_window %u is not applied: all layers attend to the whole context, as the "
                 "model's own layers do up to that length",
                 (uint32_t)(window->as.integer & UINT32_MAX));
    }
}

/* ---- geometry ---- */

static void read_head_dim(config_reader *reader, kvf_model_config *config)
{
    const json_value *value = json_get_set(reader->root, "head_dim");
    config_range range = {.min = 1, .max = 65536, .optional = true};
    range.fallback = config->family == KVF_FAMILY_QWEN3 ? 128 /* what Transformers assumes */
                                                        : config->hidden_size / config->query_heads;
    if (value == NULL && config->family != KVF_FAMILY_QWEN3 &&
        config->hidden_size % config->query_heads != 0)
        config_reject(reader, "hidden_size", json_get(reader->root, "hidden_size"),
                      "a multiple of num_attention_heads");
    config->head_dim = config_u32(reader, reader->root, "head_dim", range);
    static const uint32_t supported[] = {64, 80, 96, 128, 256};
    for (size_t i = 0; i < sizeof supported / sizeof *supported; i++)
        if (config->head_dim == supported[i])
            return;
    if (reader->status == KVF_OK)
        reader->status =
            model_fail(reader->error, KVF_UNSUPPORTED,
                       "%s: head_dim is %u; 64, 80, 96, 128 and 256 are supported, use "
                       "another model",
                       reader->file, config->head_dim);
}

static void read_kv_heads(config_reader *reader, kvf_model_config *config)
{
    const json_value *root = reader->root;
    config_range range = {.min = 1, .max = 1024};
    /* Transformers' default is the number of query heads for Llama only. */
    range.optional =
        config->family == KVF_FAMILY_LLAMA || json_get(root, "num_key_value_heads") != NULL;
    range.fallback = config->query_heads;
    config->kv_heads = config_u32(reader, root, "num_key_value_heads", range);
    if (config->query_heads % config->kv_heads != 0)
        config_reject(reader, "num_key_value_heads", json_get(root, "num_key_value_heads"),
                      "a divisor of num_attention_heads");
    else if (config->query_heads / config->kv_heads > 16)
        config_refuse(reader, "num_key_value_heads", json_get(root, "num_key_value_heads"),
                      "at most 16 query heads may share a key head, use another model");
    if (config->kv_heads > 1024)
        config_refuse(reader, "num_key_value_heads", json_get(root, "num_key_value_heads"),
                      "at most 1024 are supported");
}

static void read_geometry(config_reader *reader, kvf_model_config *config)
{
    const json_value *root = reader->root;
    config->vocab_size =
        config_u32(reader, root, "vocab_size", (config_range){.min = 1, .max = 1u << 24});
    config->hidden_size =
        config_u32(reader, root, "hidden_size", (config_range){.min = 1, .max = 1u << 20});
    config->intermediate_size =
        config_u32(reader, root, "intermediate_size", (config_range){.min = 1, .max = 1u << 22});
    config->layers =
        config_u32(reader, root, "num_hidden_layers", (config_range){.min = 1, .max = 1024});
    config->query_heads =
        config_u32(reader, root, "num_attention_heads", (config_range){.min = 1, .max = 16384});
    config->positions_max = config_u32(reader, root, "max_position_embeddings",
                                       (config_range){.min = 1, .max = INT32_MAX});
    read_kv_heads(reader, config);
    read_head_dim(reader, config);
    config->norm_eps = config_positive(reader, root, "rms_norm_eps", 1e-6);
    if (config->norm_eps >= 1)
        config_reject(reader, "rms_norm_eps", json_get(root, "rms_norm_eps"), "below 1");
    config->tied_embeddings = config_bool(reader, root, "tie_word_embeddings", false);
}

static void read_dtype(config_reader *reader, kvf_model_config *config)
{
    const char *field = json_get_set(reader->root, "dtype") != NULL ? "dtype" : "torch_dtype";
    const json_value *value = json_get_set(reader->root, field);
    config->dtype = KVF_BF16;
    if (value == NULL || json_is_string(value, "bfloat16"))
        return;
    if (json_is_string(value, "float16"))
        config->dtype = KVF_FP16;
    else if (json_is_string(value, "float32"))
        config->dtype = KVF_FP32;
    else
        config_refuse(reader, field, value, "bfloat16, float16 and float32 are supported");
}

/* ---- token ids ---- */

static void add_eos(config_reader *reader, kvf_model_config *config, const json_value *value)
{
    if (value->kind != JSON_INTEGER || value->as.integer >= config->vocab_size) {
        config_reject(reader, "eos_token_id", value,
                      "an id below vocab_size or a list of such ids");
        return;
    }
    uint32_t id = (uint32_t)value->as.integer;
    for (uint32_t i = 0; i < config->eos_count; i++)
        if (config->eos_ids[i] == id)
            return;
    if (config->eos_count == KVF_EOS_MAX)
        config_refuse(reader, "eos_token_id", value, "more than 8 distinct ids are not supported");
    else
        config->eos_ids[config->eos_count++] = id;
}

static void read_special_ids(config_reader *reader, kvf_model_config *config)
{
    const json_value *eos = json_get_set(reader->root, "eos_token_id");
    if (eos != NULL && eos->kind == JSON_ARRAY) {
        for (const json_value *id = json_first(eos); id != NULL; id = json_next(eos, id))
            add_eos(reader, config, id);
    } else if (eos != NULL) {
        add_eos(reader, config, eos);
    }
    if (json_get_set(reader->root, "bos_token_id") != NULL) {
        config->bos_id = config_u32(reader, reader->root, "bos_token_id",
                                    (config_range){.min = 0, .max = config->vocab_size - 1});
        config->bos_known = true;
    }
}

/* ---- public ---- */

static kvf_status parse_config(const json_document *document, kvf_model_config *config,
                               kvf_error *error)
{
    config_reader reader = {.root = json_root(document), .file = "config.json", .error = error};
    if (reader.root->kind != JSON_OBJECT)
        return model_fail(error, KVF_CORRUPT, "config.json holds %s, not an object",
                          json_kind_name(reader.root));
    read_family(&reader, config);
    if (reader.status == KVF_OK)
        check_unsupported(&reader);
    if (reader.status == KVF_OK)
        read_geometry(&reader, config);
    if (reader.status == KVF_OK)
        check_window(&reader, config);
    if (reader.status == KVF_OK)
        config_read_rope(&reader, config);
    if (reader.status == KVF_OK)
        read_dtype(&reader, config);
    if (reader.status == KVF_OK)
        read_special_ids(&reader, config);
    return reader.status;
}

static kvf_status parse_generation(const char *text, size_t bytes, const kvf_allocator *allocator,
                                   kvf_model_config *config, kvf_error *error)
{
    json_document *document;
    kvf_status status =
        json_parse(text, bytes, "generation_config.json", allocator, &document, error);
    if (status != KVF_OK)
        return status;
    config_reader reader = {
        .root = json_root(document), .file = "generation_config.json", .error = error};
    if (reader.root->kind != JSON_OBJECT)
        status = model_fail(error, KVF_CORRUPT, "generation_config.json holds %s, not an object",
                            json_kind_name(reader.root));
    else
        read_special_ids(&reader, config);
    json_free(document);
    return status != KVF_OK ? status : reader.status;
}

kvf_status kvf_model_config_parse(const char *config, size_t config_bytes, const char *generation,
                                  size_t generation_bytes, const kvf_allocator *allocator,
                                  kvf_model_config *out, kvf_error *error)
{
    kvf_model_config result = {0};
    json_document *document;
    kvf_status status =
        json_parse(config, config_bytes, "config.json", allocator, &document, error);
    if (status != KVF_OK)
        return status;
    status = parse_config(document, &result, error);
    json_free(document);
    if (status == KVF_OK && generation != NULL)
        status = parse_generation(generation, generation_bytes, allocator, &result, error);
    if (status == KVF_OK)
        *out = result;
    return status;
}

static kvf_status read_both(const char *config_path, const char *generation_path,
                            const kvf_allocator *allocator, kvf_model_config *out, kvf_error *error)
{
    kvf_text config;
    kvf_text generation = {0};
    kvf_status status = model_read_file(allocator, config_path, CONFIG_BYTES_MAX, &config, error);
    if (status != KVF_OK)
        return status;
    if (access(generation_path, F_OK) == 0)
        status = model_read_file(allocator, generation_path, CONFIG_BYTES_MAX, &generation, error);
    if (status == KVF_OK)
        status = kvf_model_config_parse(config.bytes, config.size, generation.bytes,
                                        generation.size, allocator, out, error);
    kvf_text_free(allocator, &generation);
    kvf_text_free(allocator, &config);
    return status;
}

kvf_status kvf_model_config_read(const char *directory, const kvf_allocator *allocator,
                                 kvf_model_config *out, kvf_error *error)
{
    char *config = NULL;
    char *generation = NULL;
    kvf_status status = model_path(allocator, directory, "config.json", &config, error);
    if (status == KVF_OK)
        status = model_path(allocator, directory, "generation_config.json", &generation, error);
    if (status == KVF_OK)
        status = read_both(config, generation, allocator, out, error);
    model_free(allocator, generation);
    model_free(allocator, config);
    return status;
}
