/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reading config.json and generation_config.json; see the header for what is kept. The rotary part
 * is in rope_config.c. Fields are read through a reader whose first failure sticks, so that the
 * order of the checks is the order of the text below.
 */

#include "model_config.h"

#include "gguf_parts.h"
#include "model_config_reader.h"
#include "model_memory.h"
#include "weights.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/text.h"

#define CONFIG_BYTES_MAX (16u << 20)
#define WINDOW_MAX       (1u << 20) /* of kvf_cache_config.streaming_recent */

/* To add an architecture without a new operation, add a row. */
static const kvf_architecture architectures[] = {
    {.name = "LlamaForCausalLM",
     .gguf = "llama", /* Mistral's too */
     .gguf_turns_neighbours = true,
     .family = "llama",
     .has_one_kv_head_each = true},
    {.name = "MistralForCausalLM", .family = "mistral", .has_windows = true, .window = 4096},
    {.name = "MinistralForCausalLM", .family = "mistral", .has_windows = true, .window = 4096},
    {.name = "Qwen2ForCausalLM", .gguf = "qwen2", .family = "qwen2", .qkv_bias = true},
    {.name = "Qwen3ForCausalLM",
     .gguf = "qwen3",
     .family = "qwen3",
     .qk_norm = true,
     .head_dim = 128},
};

#define ARCHITECTURES (sizeof architectures / sizeof *architectures)

const kvf_architecture *kvf_architecture_find_gguf(const char *name, size_t size)
{
    for (size_t i = 0; i < ARCHITECTURES; i++)
        if (architectures[i].gguf && strlen(architectures[i].gguf) == size &&
            memcmp(architectures[i].gguf, name, size) == 0)
            return &architectures[i];
    return NULL;
}

const char *kvf_architecture_gguf_names(char *buffer, size_t size)
{
    size_t used = (size_t)snprintf(buffer, size, "supported are");
    const char *comma = "";
    for (size_t i = 0; i < ARCHITECTURES && used < size; i++) {
        if (!architectures[i].gguf)
            continue;
        used += (size_t)snprintf(buffer + used, size - used, "%s %s", comma, architectures[i].gguf);
        comma = ",";
    }
    return buffer;
}

/* ---- fields ---- */

void config_refuse(config_reader *reader, const char *field, json_t *value, const char *fix)
{
    char shown[96];
    if (reader->status == KVF_OK)
        reader->status =
            model_fail(reader->error, KVF_UNSUPPORTED, "%s: %s is %s; %s", reader->file, field,
                       json_show(value, shown, sizeof shown), fix);
}

void config_reject(config_reader *reader, const char *field, json_t *value, const char *expected)
{
    char shown[96];
    if (reader->status == KVF_OK)
        reader->status =
            model_fail(reader->error, KVF_CORRUPT, "%s: %s is %s, but must be %s", reader->file,
                       field, json_show(value, shown, sizeof shown), expected);
}

uint32_t config_u32(config_reader *reader, json_t *object, const char *field, config_range range)
{
    json_t *value = json_get_set(object, field);
    if (!value && range.optional)
        return range.fallback;
    uint64_t whole;
    if (!json_is_whole(value, range.max, &whole) || whole < range.min) {
        char expected[96];
        snprintf(expected, sizeof expected, "a whole number from %u to %u", range.min, range.max);
        config_reject(reader, field, value, expected);
        return range.min;
    }
    return (uint32_t)whole;
}

double config_positive(config_reader *reader, json_t *object, const char *field, double fallback)
{
    json_t *value = json_get_set(object, field);
    if (!value && fallback > 0)
        return fallback;
    if (!json_is_number(value) || !(json_number_value(value) > 0)) {
        config_reject(reader, field, value, "a number above 0");
        return 1;
    }
    return json_number_value(value);
}

bool config_bool(config_reader *reader, json_t *object, const char *field, bool fallback)
{
    json_t *value = json_get_set(object, field);
    if (!value)
        return fallback;
    if (!json_is_boolean(value))
        config_reject(reader, field, value, "true or false");
    return json_is_true(value);
}

/* ---- what is refused ---- */

/* Fields of these architectures that change the computation; unset, false and 0 are fine. */
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
};

static bool is_unset(json_t *value)
{
    return !value || json_is_false(value) ||
           (json_is_number(value) && json_number_value(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_array(value) && json_array_size(value) == 0);
}

static void check_unsupported(config_reader *reader, kvf_model_config *config)
{
    (void)config;
    for (size_t i = 0; i < sizeof must_be_unset / sizeof *must_be_unset; i++) {
        json_t *value = json_get_set(reader->root, must_be_unset[i].field);
        if (!is_unset(value))
            config_refuse(reader, must_be_unset[i].field, value, must_be_unset[i].fix);
    }
    json_t *act = json_get_set(reader->root, "hidden_act");
    if (act && !json_is_text(act, "silu"))
        config_refuse(reader, "hidden_act", act, "only \"silu\" is supported");
}

/* Sentences after each other. */
__attribute__((format(printf, 2, 3))) static void add_note(kvf_model_config *config,
                                                           const char *format, ...)
{
    const size_t used = strlen(config->note);
    va_list arguments;
    va_start(arguments, format);
    const int lead =
        snprintf(config->note + used, sizeof config->note - used, "%s", used ? "; " : "");
    kvf_vformat(config->note + used + (size_t)lead, sizeof config->note - used - (size_t)lead,
                format, arguments);
    va_end(arguments);
}

static void read_architecture(config_reader *reader, kvf_model_config *config)
{
    char fix[256] = "supported are ";
    static const char others[] = "; others run in llama.cpp with kvferry-llama";
    json_t *list = json_get_set(reader->root, "architectures");
    json_t *name = json_array_get(list, 0);
    if (json_array_size(list) != 1) {
        config_reject(reader, "architectures", list, "a list of one name");
        return;
    }
    for (size_t i = 0; i < ARCHITECTURES; i++) {
        const size_t used = strlen(fix);
        const char *comma = i == 0 ? "" : i + 1 < ARCHITECTURES ? ", " : " and ";
        snprintf(fix + used, sizeof fix - used, "%s%s", comma, architectures[i].name);
        if (json_is_text(name, architectures[i].name))
            config->architecture = &architectures[i];
    }
    if (!config->architecture)
        config_refuse(reader, "architectures", name, strcat(fix, others));
}

/* ---- windows ---- */

/* Whether a list of kinds names windows. */
static bool names_windows(config_reader *reader, const kvf_model_config *config, json_t *types,
                          bool has_window)
{
    bool slides = false;
    json_t *type;
    size_t i;
    json_array_foreach (types, i, type) {
        const bool is_sliding = json_is_text(type, "sliding_attention");
        if (!json_is_text(type, "full_attention") &&
            !(is_sliding && config->architecture->has_windows && has_window))
            config_refuse(reader, "layer_types", type,
                          "only \"full_attention\" is supported, use another model");
        slides = slides || is_sliding;
    }
    return slides;
}

/* @p types of layers; NULL = all have windows. */
static void set_windows(config_reader *reader, kvf_model_config *config, uint32_t window,
                        json_t *types)
{
    const uint32_t heads = config->kv_heads;
    if (window > WINDOW_MAX) {
        config_refuse(reader, "sliding_window", json_object_get(reader->root, "sliding_window"),
                      "windows of at most 1048576 tokens are supported, use another model");
        return;
    }
    if (types && json_array_size(types) != config->layers) {
        config_reject(reader, "layer_types", types, "a list of one name for each layer");
        return;
    }
    if (config->layers * heads > KVF_WINDOW_HEADS_MAX) {
        config_refuse(reader, "num_key_value_heads",
                      json_object_get(reader->root, "num_key_value_heads"),
                      "with windows at most 4096 are supported in all layers, use another model");
        return;
    }
    config->window = window;
    for (uint32_t layer = 0; layer < config->layers; layer++)
        memset(config->window_mask + (size_t)layer * heads,
               json_is_text(json_array_get(types, layer), "full_attention"), heads);
}

/*
 * A window that the positions cannot fill says nothing. Ministral-8B-2410 alternates layers with a
 * window of 32768 and layers without; which is which is not in its config.json and engines
 * disagree. Attending fully in all layers is exact up to the window and offers each token a
 * superset beyond it, from which selection takes what it attends to: accepted, with a note.
 */
static void read_windows(config_reader *reader, kvf_model_config *config)
{
    enum { MINISTRAL_WINDOW = 32768 };
    const kvf_architecture *own = config->architecture;
    json_t *window = json_object_get(reader->root, "sliding_window");
    json_t *types = json_get_set(reader->root, "layer_types");
    const bool has_window = window ? !json_is_null(window) : own->window != 0;
    if (types && !json_is_array(types)) {
        config_reject(reader, "layer_types", types, "a list of names");
        return;
    }
    const bool slides =
        json_array_size(types) == 0 || names_windows(reader, config, types, has_window);
    if (!own->has_windows || !slides || !has_window)
        return;
    const uint32_t tokens = config_u32(
        reader, reader->root, "sliding_window",
        (config_range){.min = 1, .max = INT32_MAX, .fallback = own->window, .optional = true});
    if (tokens >= config->positions_max)
        return;
    if (json_array_size(types) != 0)
        set_windows(reader, config, tokens, types);
    else if (tokens < MINISTRAL_WINDOW)
        set_windows(reader, config, tokens, NULL);
    else
        add_note(config,
                 "sliding_window %u is not applied: all layers attend to the whole context, as the "
                 "model's own layers do up to that length",
                 tokens);
}

/* ---- geometry ---- */

static void read_head_dim(config_reader *reader, kvf_model_config *config)
{
    json_t *value = json_get_set(reader->root, "head_dim");
    config_range range = {.min = 1, .max = 65536, .optional = true};
    const uint32_t assumed = config->architecture->head_dim;
    range.fallback = assumed ? assumed : config->hidden_size / config->query_heads;
    if (!value && !assumed && config->hidden_size % config->query_heads != 0)
        config_reject(reader, "hidden_size", json_object_get(reader->root, "hidden_size"),
                      "a multiple of num_attention_heads");
    config->head_dim = config_u32(reader, reader->root, "head_dim", range);
    if (reader->status == KVF_OK && (config->head_dim % 16 != 0 || config->head_dim > 256))
        reader->status = model_fail(reader->error, KVF_UNSUPPORTED,
                                    "%s: head_dim is %u; multiples of 16 up to 256 are supported, "
                                    "use another model",
                                    reader->file, config->head_dim);
}

static void read_kv_heads(config_reader *reader, kvf_model_config *config)
{
    json_t *root = reader->root;
    config_range range = {.min = 1, .max = 1024};
    range.optional =
        config->architecture->has_one_kv_head_each || json_object_get(root, "num_key_value_heads");
    range.fallback = config->query_heads;
    config->kv_heads = config_u32(reader, root, "num_key_value_heads", range);
    if (config->query_heads % config->kv_heads != 0)
        config_reject(reader, "num_key_value_heads", json_object_get(root, "num_key_value_heads"),
                      "a divisor of num_attention_heads");
    else if (config->query_heads / config->kv_heads > 128)
        config_refuse(reader, "num_key_value_heads", json_object_get(root, "num_key_value_heads"),
                      "at most 128 query heads may share a key head, use another model");
    if (config->kv_heads > 1024)
        config_refuse(reader, "num_key_value_heads", json_object_get(root, "num_key_value_heads"),
                      "at most 1024 are supported");
}

static void read_geometry(config_reader *reader, kvf_model_config *config)
{
    json_t *root = reader->root;
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
    config->positions_by = "max_position_embeddings";
    read_kv_heads(reader, config);
    read_head_dim(reader, config);
    config->norm_eps = config_positive(reader, root, "rms_norm_eps", 1e-6);
    if (config->norm_eps >= 1)
        config_reject(reader, "rms_norm_eps", json_object_get(root, "rms_norm_eps"), "below 1");
    config->tied_embeddings = config_bool(reader, root, "tie_word_embeddings", false);
}

static void read_dtype(config_reader *reader, kvf_model_config *config)
{
    const char *field = json_get_set(reader->root, "dtype") ? "dtype" : "torch_dtype";
    json_t *value = json_get_set(reader->root, field);
    config->dtype = KVF_BF16;
    config->dtype_known = value;
    if (!value || json_is_text(value, "bfloat16"))
        return;
    if (json_is_text(value, "float16"))
        config->dtype = KVF_FP16;
    else if (json_is_text(value, "float32"))
        config->dtype = KVF_FP32;
    else
        config_refuse(reader, field, value, "bfloat16, float16 and float32 are supported");
}

/* ---- token ids ---- */

static void add_eos(config_reader *reader, kvf_model_config *config, json_t *value)
{
    uint64_t whole;
    if (!json_is_whole(value, config->vocab_size - 1, &whole)) {
        config_reject(reader, "eos_token_id", value,
                      "an id below vocab_size or a list of such ids");
        return;
    }
    const uint32_t id = (uint32_t)whole;
    if (kvf_ids_have(config->eos_ids, config->eos_count, id))
        return;
    if (config->eos_count == KVF_EOS_MAX)
        config_refuse(reader, "eos_token_id", value, "more than 8 distinct ids are not supported");
    else
        config->eos_ids[config->eos_count++] = id;
}

static void read_special_ids(config_reader *reader, kvf_model_config *config)
{
    json_t *eos = json_get_set(reader->root, "eos_token_id");
    if (json_is_array(eos)) {
        json_t *id;
        size_t i;
        json_array_foreach (eos, i, id)
            add_eos(reader, config, id);
    } else if (eos) {
        add_eos(reader, config, eos);
    }
    if (json_get_set(reader->root, "bos_token_id")) {
        config->bos_id = config_u32(reader, reader->root, "bos_token_id",
                                    (config_range){.min = 0, .max = config->vocab_size - 1});
        config->bos_known = true;
    }
}

/* ---- public ---- */

typedef void (*read_part_fn)(config_reader *reader, kvf_model_config *config);

/* Reads one part after the other, up to the first failure. @p parts end with NULL. */
static kvf_status parse(const char *file, const char *text, size_t bytes, const read_part_fn *parts,
                        kvf_model_config *config, kvf_error *error)
{
    json_t *document;
    KVF_TRY(json_parse(text, bytes, file, &document, error));
    config_reader reader = {.root = document, .file = file, .error = error};
    if (!json_is_object(reader.root))
        reader.status = model_fail(error, KVF_CORRUPT, "%s holds %s, not an object", file,
                                   json_kind_name(reader.root));
    for (; *parts && reader.status == KVF_OK; parts++)
        (*parts)(&reader, config);
    json_decref(document);
    return reader.status;
}

kvf_status kvf_model_config_parse(const char *config, size_t config_bytes, const char *generation,
                                  size_t generation_bytes, kvf_model_config *out, kvf_error *error)
{
    static const read_part_fn all[] = {
        read_architecture, check_unsupported, read_geometry,    config_read_rope,
        read_windows,      read_dtype,        read_special_ids, NULL};
    static const read_part_fn ids[] = {read_special_ids, NULL};
    kvf_model_config result = {0};
    KVF_TRY(parse("config.json", config, config_bytes, all, &result, error));
    if (generation)
        KVF_TRY(parse("generation_config.json", generation, generation_bytes, ids, &result, error));
    *out = result;
    return KVF_OK;
}

static bool is_same(const kvf_tensor *a, const kvf_tensor *b)
{
    uint64_t bytes, other;
    const void *source = kvf_weights_source(a, &bytes), *copy = kvf_weights_source(b, &other);
    return a->dtype == b->dtype && bytes == other && memcmp(source, copy, (size_t)bytes) == 0;
}

void kvf_model_config_fit(kvf_model_config *config, const kvf_weights *weights)
{
    const kvf_tensor *embedding = kvf_weights_get(weights, "model.embed_tokens.weight");
    const kvf_tensor *head = kvf_weights_get(weights, "lm_head.weight");
    if (!config->dtype_known && kvf_weights_count(weights) > 0)
        config->dtype = kvf_weights_at(weights, 0)->dtype;
    if (config->tied_embeddings && embedding && head && !is_same(embedding, head)) {
        config->tied_embeddings = false;
        add_note(config, "tie_word_embeddings is true, but the file has a lm_head.weight that is "
                         "not model.embed_tokens.weight: it is taken, as Transformers does");
    }
}

/* Fields that only a GGUF file has. */
static kvf_status finish_gguf(const char *model, kvf_model_config *out, kvf_error *error)
{
    gguf *file;
    KVF_TRY(gguf_open(model, &file, error));
    const kvf_status status = gguf_model_finish(file, out, error);
    gguf_close(file);
    return status;
}

kvf_status kvf_model_config_read(const char *model, kvf_model_config *out, kvf_error *error)
{
    static const char other[] = "generation_config.json";
    kvf_text config, generation = {0};
    KVF_TRY(model_check_folder(model, error));
    KVF_TRY(model_read_part(model, "config.json", CONFIG_BYTES_MAX, &config, error));
    kvf_status status = KVF_OK;
    if (model_has_part(model, other))
        status = model_read_part(model, other, CONFIG_BYTES_MAX, &generation, error);
    if (status == KVF_OK)
        status =
            model_blame_part(model,
                             kvf_model_config_parse(config.bytes, config.size, generation.bytes,
                                                    generation.size, out, error),
                             error);
    kvf_text_free(&generation);
    kvf_text_free(&config);
    return status == KVF_OK && gguf_is_file(model) ? finish_gguf(model, out, error) : status;
}
