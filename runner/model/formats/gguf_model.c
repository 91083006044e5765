/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fields of a model; see the header. Sizes are held against config.json's own limits by its reader;
 * here, what a GGUF file says in another way is put into Hugging Face's words, and what the runner
 * does not compute is refused by the file's own names.
 */

#include "gguf_parts.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

kvf_dtype gguf_model_dtype(const gguf_type *type)
{
    return strcmp(type->name, "F32") == 0   ? KVF_FP32
           : strcmp(type->name, "F16") == 0 ? KVF_FP16
                                            : KVF_BF16;
}

/* ---- what the weights need ---- */

static void read_architecture(gguf_writer *w, const kvf_architecture **out)
{
    static const char key[] = "general.architecture";
    char fix[256];
    const gguf_string *name = gguf_text(w, key);
    *out = name ? kvf_architecture_find_gguf(name->bytes, name->size) : NULL;
    if (!name)
        gguf_reject(w, key, "text");
    else if (!*out)
        gguf_refuse(w, key, kvf_architecture_gguf_names(fix, sizeof fix));
    w->family = *out ? (*out)->gguf : "";
}

bool gguf_keeps_type(const gguf_tensor *tensor)
{
    return tensor->rank == 1;
}

/* One plain type for all matrices keeps it; anything else becomes BF16. */
static kvf_dtype common_dtype(const gguf *file)
{
    const gguf_type *common = NULL;
    for (size_t i = 0; i < gguf_tensor_count(file); i++) {
        const gguf_tensor *tensor = gguf_tensor_at(file, i);
        if (gguf_keeps_type(tensor))
            continue;
        if (tensor->type->numbers != 1 || (common && common != tensor->type))
            return KVF_BF16;
        common = tensor->type;
    }
    return common ? gguf_model_dtype(common) : KVF_BF16;
}

static void read_model(gguf_writer *w, gguf_model *out)
{
    char key[GGUF_KEY_BYTES];
    *out = (gguf_model){0};
    read_architecture(w, &out->architecture);
    if (w->status != KVF_OK)
        return;
    out->layers = gguf_count(w, gguf_family_key(w, "block_count", key), 0);
    out->query_heads = gguf_count(w, gguf_family_key(w, "attention.head_count", key), 0);
    out->kv_heads =
        gguf_count(w, gguf_family_key(w, "attention.head_count_kv", key), out->query_heads);
    out->dtype = common_dtype(w->file);
}

kvf_status gguf_model_read(const gguf *file, gguf_model *out, kvf_error *error)
{
    gguf_writer w = {.file = file, .error = error};
    read_model(&w, out);
    return w.status;
}

/* ---- what is refused ---- */

/* Fields of these architectures that change the computation; absent, 0, and what is neutral are
 * fine. */
static const struct {
    const char *rest;
    double neutral;
    const char *fix;
} must_be_neutral[] = {
    {"expert_count", 0,
     "mixtures of experts are not supported, use a dense model, or llama.cpp with kvferry-llama"},
    {"rope.scale_linear", 1, "the old field is not supported, convert the model again"},
    {"rope.scaling.yarn_ext_factor", 1, "this scale of RoPE is not supported, use another model"},
    {"rope.scaling.yarn_attn_factor", 1, "this scale of RoPE is not supported, use another model"},
    {"rope.scaling.attn_factor", 1, "this scale of RoPE is not supported, use another model"},
};

static void check_neutral(gguf_writer *w)
{
    char key[GGUF_KEY_BYTES];
    for (size_t i = 0; i < sizeof must_be_neutral / sizeof *must_be_neutral; i++) {
        const double value = gguf_real(w, gguf_family_key(w, must_be_neutral[i].rest, key), 0);
        if (value != 0 && value != must_be_neutral[i].neutral)
            gguf_refuse(w, key, must_be_neutral[i].fix);
    }
    if (!gguf_flag(w, gguf_family_key(w, "attention.causal", key), true))
        gguf_refuse(w, key, "only causal attention is supported, use another model");
    const uint32_t context = gguf_count(w, gguf_family_key(w, "context_length", key), 0);
    const double window = gguf_real(w, gguf_family_key(w, "attention.sliding_window", key), 0);
    if (window > 0 && window < context)
        gguf_refuse(w, key, "sliding windows are not supported, use another model");
}

/* ---- config.json ---- */

/* Query, key and value of a head have one size, and all of it is rotated. */
static uint32_t read_head_dim(gguf_writer *w, const gguf_model *model, uint32_t width)
{
    char key[GGUF_KEY_BYTES];
    const uint32_t shared = width / model->query_heads;
    gguf_family_key(w, "attention.key_length", key);
    if (!gguf_find(w->file, key) && width % model->query_heads != 0)
        gguf_reject(w, key, "there, for embedding_length is no multiple of attention.head_count");
    const uint32_t head_dim = gguf_count(w, key, shared ? shared : 1);
    static const char *const same[] = {"attention.value_length", "rope.dimension_count"};
    for (size_t i = 0; i < 2; i++)
        if (gguf_count(w, gguf_family_key(w, same[i], key), head_dim) != head_dim)
            gguf_refuse(w, key,
                        "it must be the size of a head (attention.key_length, or "
                        "embedding_length by attention.head_count), use another model");
    return head_dim;
}

static void put_rope(gguf_writer *w)
{
    static const char *const numbers[][2] = {
        {"rope.scaling.factor", "factor"},
        {"rope.scaling.original_context_length", "original_max_position_embeddings"},
        {"rope.scaling.yarn_beta_fast", "beta_fast"},
        {"rope.scaling.yarn_beta_slow", "beta_slow"},
    };
    char key[GGUF_KEY_BYTES];
    gguf_put(w, ",\"rope_theta\":%.17g",
             gguf_real(w, gguf_family_key(w, "rope.freq_base", key), 10000));
    const gguf_string *type = gguf_text(w, gguf_family_key(w, "rope.scaling.type", key));
    if (!type || gguf_string_is(*type, "none"))
        return;
    gguf_put(w, ",\"rope_scaling\":{\"rope_type\":");
    gguf_put_string(w, *type);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (gguf_find(w->file, gguf_family_key(w, numbers[i][0], key)))
            gguf_put(w, ",\"%s\":%.17g", numbers[i][1], gguf_real(w, key, NAN));
    gguf_put(w, "}");
}

/* Ids of tokens that begin and end texts. */
static void put_ids(gguf_writer *w)
{
    static const char *const ends[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    static const char begin[] = "tokenizer.ggml.bos_token_id";
    const char *comma = "";
    gguf_put(w, ",\"eos_token_id\":[");
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        if (!gguf_find(w->file, ends[i]))
            continue;
        gguf_put(w, "%s%.17g", comma, gguf_real(w, ends[i], NAN));
        comma = ",";
    }
    gguf_put(w, "]");
    if (gguf_find(w->file, begin))
        gguf_put(w, ",\"bos_token_id\":%.17g", gguf_real(w, begin, NAN));
}

static void write_config(gguf_writer *w)
{
    static const char *const dtypes[] = {
        [KVF_BF16] = "bfloat16", [KVF_FP16] = "float16", [KVF_FP32] = "float32"};
    char key[GGUF_KEY_BYTES];
    gguf_model model;
    read_model(w, &model);
    if (w->status != KVF_OK)
        return;
    check_neutral(w);
    const gguf_tensor *embedding = gguf_tensor_find(w->file, "token_embd.weight");
    if (!embedding && w->status == KVF_OK)
        w->status = model_fail(w->error, KVF_CORRUPT,
                               "%.120s: tensor token_embd.weight is missing; the file is no whole "
                               "model",
                               gguf_name(w->file));
    const uint32_t width = gguf_count(w, gguf_family_key(w, "embedding_length", key), 0);
    gguf_put(w, "{\"architectures\":[\"%s\"],\"torch_dtype\":\"%s\"", model.architecture->name,
             dtypes[model.dtype]);
    gguf_put(w, ",\"hidden_size\":%u,\"num_hidden_layers\":%u", width, model.layers);
    gguf_put(w, ",\"num_attention_heads\":%u,\"num_key_value_heads\":%u", model.query_heads,
             model.kv_heads);
    gguf_put(w, ",\"head_dim\":%u,\"vocab_size\":%" PRIu64, read_head_dim(w, &model, width),
             embedding ? embedding->shape[0] : 1);
    gguf_put(w, ",\"intermediate_size\":%u",
             gguf_count(w, gguf_family_key(w, "feed_forward_length", key), 0));
    gguf_put(w, ",\"max_position_embeddings\":%u",
             gguf_count(w, gguf_family_key(w, "context_length", key), 0));
    gguf_put(w, ",\"rms_norm_eps\":%.17g",
             gguf_real(w, gguf_family_key(w, "attention.layer_norm_rms_epsilon", key), NAN));
    gguf_put(w, ",\"tie_word_embeddings\":%s",
             gguf_tensor_find(w->file, "output.weight") ? "false" : "true");
    put_rope(w);
    put_ids(w);
    gguf_put(w, "}");
}

static const struct part_row {
    const char *name;
    void (*write)(gguf_writer *w);
} parts[] = {{"config.json", write_config},
             {"tokenizer.json", gguf_write_tokenizer},
             {"tokenizer_config.json", gguf_write_tokenizer_config}};

static const struct part_row *find_part(const char *name)
{
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(parts[i].name, name) == 0)
            return &parts[i];
    return NULL;
}

bool gguf_has_part(const char *part)
{
    return find_part(part) != NULL;
}

kvf_status gguf_write_part(const gguf *file, const char *part, kvf_text *out, kvf_error *error)
{
    gguf_writer w = {.file = file, .text = out, .error = error};
    const struct part_row *row = find_part(part);
    if (!row)
        return model_fail(error, KVF_SYSTEM, "%.120s: a GGUF file has no %s", gguf_name(file),
                          part);
    row->write(&w);
    return w.status;
}

/* ---- beside config.json ---- */

static kvf_status read_rope_factors(const gguf *file, kvf_rope_config *rope, uint32_t head_dim,
                                    kvf_error *error)
{
    const gguf_tensor *tensor = gguf_tensor_find(file, GGUF_ROPE_FACTORS);
    if (!tensor)
        return KVF_OK;
    if (rope->kind != KVF_ROPE_DEFAULT || tensor->rank != 1 || tensor->shape[0] != head_dim / 2 ||
        strcmp(tensor->type->name, "F32") != 0)
        return model_fail(error, KVF_UNSUPPORTED,
                          "%.120s: tensor " GGUF_ROPE_FACTORS " has %" PRIu64
                          " numbers of type %s; %u of F32 are supported, without another "
                          "rope.scaling.type",
                          gguf_name(file), tensor->shape[0], tensor->type->name, head_dim / 2);
    rope->kind = KVF_ROPE_FACTORS;
    memcpy(rope->factors, tensor->data, (size_t)tensor->bytes);
    for (uint32_t i = 0; i < head_dim / 2; i++)
        if (!(rope->factors[i] > 0) || isinf(rope->factors[i]))
            return model_fail(error, KVF_CORRUPT,
                              "%.120s: tensor " GGUF_ROPE_FACTORS
                              " has %g at %u, but must have numbers above 0",
                              gguf_name(file), (double)rope->factors[i], i);
    return KVF_OK;
}

kvf_status gguf_model_finish(const gguf *file, kvf_model_config *config, kvf_error *error)
{
    return read_rope_factors(file, &config->rope, config->head_dim, error);
}
