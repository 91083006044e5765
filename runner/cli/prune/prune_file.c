/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes and reads what was tuned; see the header.
 *
 * Invariant: reading changes nothing of *out unless everything was fine.
 */

#include "prune_file.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define FILE_BYTES_MAX (1u << 20)

const char *const cli_asked_names[] = {"end", "after", NULL};
const char *const cli_method_names[] = {"fastkv", "structkv", "asl"};

/* ---- fingerprint ---- */

#define FNV_START    14695981039346656037u
#define FNV_PRIME    1099511628211u
/* Bytes of each tensor, at its start and its middle: enough to tell a model from its fine-tuned kin
 * without reading all of it. */
#define SAMPLE_BYTES 64u

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t size)
{
    const unsigned char *b = bytes;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ b[i]) * FNV_PRIME;
    return hash;
}

/* The same on every machine, whatever its byte order. */
static uint64_t hash_number(uint64_t hash, uint64_t value)
{
    for (unsigned i = 0; i < 8; i++) {
        const unsigned char byte = (unsigned char)(value >> 8 * i);
        hash = hash_bytes(hash, &byte, 1);
    }
    return hash;
}

static uint64_t hash_tensor(uint64_t hash, const kvf_tensor *tensor)
{
    uint64_t bytes;
    const unsigned char *data = kvf_weights_source(tensor, &bytes);
    const uint64_t size = bytes < SAMPLE_BYTES ? bytes : SAMPLE_BYTES;
    hash = hash_bytes(hash, tensor->name, strlen(tensor->name) + 1);
    hash = hash_number(hash, (uint64_t)tensor->dtype);
    for (uint32_t i = 0; i < tensor->rank; i++)
        hash = hash_number(hash, tensor->shape[i]);
    if (size == 0)
        return hash;
    hash = hash_bytes(hash, data, size);
    return hash_bytes(hash, data + (bytes - size) / 2, size);
}

static uint64_t hash_real(uint64_t hash, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return hash_number(hash, bits);
}

/* One that a logarithm may have made, whose last bits are not the same everywhere. */
static uint64_t hash_rounded(uint64_t hash, double value)
{
    return hash_real(hash, floor(value * 0x1p12 + 0.5));
}

static uint64_t hash_settings(const kvf_model_config *model)
{
    const kvf_rope_config *r = &model->rope;
    const double reals[] = {
        r->theta,     r->factor,    r->low_freq_factor, r->high_freq_factor, r->original_positions,
        r->beta_fast, r->beta_slow, r->truncate,        model->norm_eps};
    uint64_t hash = hash_number(FNV_START, (uint64_t)r->kind);
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++)
        hash = hash_real(hash, reals[i]);
    for (uint32_t i = 0; r->kind == KVF_ROPE_FACTORS && i < model->head_dim / 2; i++)
        hash = hash_real(hash, (double)r->factors[i]);
    return hash_rounded(hash, r->attention_factor);
}

void cli_model_print_make(const kvf_model_config *model, const kvf_weights *weights,
                          cli_model_print *out)
{
    uint64_t hash = FNV_START;
    for (size_t i = 0; i < kvf_weights_count(weights); i++)
        hash = hash_tensor(hash, kvf_weights_at(weights, i));
    *out = (cli_model_print){
        .family = model->architecture->family,
        .layers = model->layers,
        .query_heads = model->query_heads,
        .kv_heads = model->kv_heads,
        .head_dim = model->head_dim,
        .hidden_size = model->hidden_size,
        .vocab_size = model->vocab_size,
    };
    snprintf(out->weights, sizeof out->weights, "%016" PRIx64, hash);
    hash = hash_settings(model);
    snprintf(out->settings, sizeof out->settings, "%08" PRIx32, (uint32_t)(hash ^ hash >> 32));
}

/* ---- write ---- */

static void write_figures(cli_json *json, const char *key, const double *values, uint32_t count)
{
    if (!values)
        return;
    cli_json_array(json, key);
    for (uint32_t i = 0; i < count; i++)
        cli_json_real(json, NULL, values[i]);
    cli_json_end(json, ']');
}

/* How a layer was found: not the layer itself, nor what is decided when it is used. */
static uint32_t settings_mask(const char *policy)
{
    return cli_settings_of(policy) & ~(cli_setting_bit("layer") | cli_setting_bit("keep") |
                                       cli_setting_bit("keep_tokens") | cli_setting_bit("pivot"));
}

/* Settings that were found by answers have a share to keep, too. */
static void write_answered(cli_json *json, const char *policy, const cli_tuned *tuned,
                           uint32_t asked, const kvf_prune_config *config)
{
    const uint32_t kept = cli_setting_bit("keep") | cli_setting_bit("keep_tokens");
    cli_json_object(json, policy);
    cli_json_integer(json, "layer", tuned->layer);
    cli_settings_write(json, "settings", config, settings_mask(policy) | kept);
    cli_json_object(json, "answers");
    cli_json_text(json, "asked", cli_asked_names[asked]);
    cli_json_integer(json, "full", tuned->full);
    cli_json_integer(json, "kept", tuned->kept);
    cli_json_real(json, "computed", tuned->computed);
    cli_json_end(json, '}');
    cli_json_end(json, '}');
}

static void write_tuned(cli_json *json, const char *policy, const cli_tuned *tuned, uint32_t asked)
{
    const kvf_prune_config config = {.settings = tuned->settings};
    if (tuned->keeps) {
        write_answered(json, policy, tuned, asked, &config);
        return;
    }
    if (!tuned->scores)
        return;
    cli_json_object(json, policy);
    cli_json_integer(json, "layer", tuned->layer);
    cli_json_integer(json, "first_layer", tuned->first);
    cli_settings_write(json, "settings", &config, settings_mask(policy));
    write_figures(json, "scores", tuned->scores, tuned->count);
    write_figures(json, "entropy", tuned->entropy, tuned->count);
    write_figures(json, "sparsity", tuned->sparsity, tuned->count);
    write_figures(json, "variance", tuned->variance, tuned->count);
    write_figures(json, "recovery", tuned->recovery, tuned->layers);
    cli_json_end(json, '}');
}

void cli_prune_file_write(cli_json *json, const cli_tuning *tuning)
{
    const cli_model_print *m = &tuning->model;
    cli_json_object(json, NULL);
    cli_json_integer(json, "kvferry_prune", CLI_PRUNE_FILE_VERSION);
    cli_json_object(json, "model");
    cli_json_text(json, "family", m->family);
    cli_json_integer(json, "layers", m->layers);
    cli_json_integer(json, "query_heads", m->query_heads);
    cli_json_integer(json, "kv_heads", m->kv_heads);
    cli_json_integer(json, "head_dim", m->head_dim);
    cli_json_integer(json, "hidden_size", m->hidden_size);
    cli_json_integer(json, "vocab_size", m->vocab_size);
    cli_json_text(json, "weights", m->weights);
    cli_json_end(json, '}');
    cli_json_integer(json, "samples", tuning->samples);
    cli_json_integer(json, "tokens", tuning->tokens);
    for (uint32_t i = 0; i < CLI_METHODS; i++)
        write_tuned(json, cli_method_names[i], &tuning->of[i], tuning->asked);
    cli_json_end(json, '}');
}

/* ---- read ---- */

/* A member that must be an object. */
static kvf_status need_object(json_t *parent, const char *where, const char *key, json_t **out,
                              kvf_error *error)
{
    *out = json_object_get(parent, key);
    if (json_is_object(*out))
        return KVF_OK;
    return model_fail(error, KVF_CORRUPT,
                      "%s%s is %s; it must be an object; let kvferry tune write the file again",
                      where, key, *out ? json_kind_name(*out) : "missing");
}

static kvf_status need_integer(json_t *object, const char *where, const char *key, uint32_t most,
                               uint32_t *out, kvf_error *error)
{
    const json_t *value = json_object_get(object, key);
    uint64_t whole;
    char shown[48];
    if (!value)
        return model_fail(error, KVF_CORRUPT,
                          "%s%s is missing; let kvferry tune write the file again", where, key);
    if (!json_is_whole(value, most, &whole))
        return model_fail(error, KVF_CORRUPT, "%s%s is %s; it must be a whole number from 0 to %u",
                          where, key, json_show(value, shown, sizeof shown), most);
    *out = (uint32_t)whole;
    return KVF_OK;
}

/* Weights tell models apart: their hash has shapes and types, too. */
static kvf_status check_model(json_t *root, const char *where, const cli_model_print *ours,
                              kvf_error *error)
{
    json_t *model;
    char shown[48];
    KVF_TRY(need_object(root, where, "model", &model, error));
    const json_t *weights = json_object_get(model, "weights");
    if (json_is_text(weights, ours->weights))
        return KVF_OK;
    return model_fail(error, KVF_INVALID,
                      "%smodel.weights is %.40s, that of this model is %s: the file was tuned for "
                      "another model; run kvferry tune on this one",
                      where, json_show(weights, shown, sizeof shown), ours->weights);
}

static kvf_status read_section(json_t *section, const char *where, const char *policy,
                               uint32_t layers, cli_prune_values *out, kvf_error *error)
{
    json_t *settings;
    uint32_t layer = 0;
    char inner[160];
    KVF_TRY(need_integer(section, where, "layer", layers - 1, &layer, error));
    KVF_TRY(need_object(section, where, "settings", &settings, error));
    snprintf(inner, sizeof inner, "%ssettings", where);
    KVF_TRY(cli_settings_read(settings, inner, out, error));
    if (strcmp(policy, "asl") == 0) /* whose rule chooses */
        return KVF_OK;
    out->config.settings.layer = layer;
    out->given |= cli_setting_bit("layer");
    if (strcmp(policy, "structkv") == 0) {
        out->config.settings.pivot = KVF_PIVOT_CALIBRATED;
        out->given |= cli_setting_bit("pivot");
    }
    return KVF_OK;
}

static kvf_status read_document(json_t *root, const char *what, const cli_model_print *model,
                                const char *policy, cli_prune_values *out, kvf_error *error)
{
    json_t *section;
    char where[128];
    uint32_t version = 0;
    if (!json_object_get(root, "kvferry_prune"))
        return model_fail(
            error, KVF_CORRUPT,
            "%s: kvferry_prune is missing; this is not a file that kvferry tune wrote", what);
    snprintf(where, sizeof where, "%.80s: ", what);
    KVF_TRY(need_integer(root, where, "kvferry_prune", UINT32_MAX, &version, error));
    if (version != CLI_PRUNE_FILE_VERSION)
        return model_fail(error, KVF_UNSUPPORTED,
                          "%s: kvferry_prune is %u, this version reads %u; let kvferry tune write "
                          "the file again",
                          what, version, CLI_PRUNE_FILE_VERSION);
    KVF_TRY(check_model(root, where, model, error));
    if (strcmp(policy, "fastkv") != 0 && strcmp(policy, "structkv") != 0 &&
        strcmp(policy, "asl") != 0)
        return model_fail(
            error, KVF_INVALID,
            "%s is for fastkv, structkv and asl, not for %s; leave --prune-config out", what,
            policy);
    if (!json_object_get(root, policy))
        return model_fail(error, KVF_INVALID,
                          "%s contains nothing for %s; run kvferry tune with --method %s", what,
                          policy, policy);
    KVF_TRY(need_object(root, where, policy, &section, error));
    snprintf(where, sizeof where, "%.80s: %s.", what, policy);
    return read_section(section, where, policy, model->layers, out, error);
}

kvf_status cli_prune_file_parse(const char *text, size_t bytes, const char *what,
                                const cli_model_print *model, const char *policy,
                                cli_prune_values *out, kvf_error *error)
{
    json_t *document = NULL;
    cli_prune_values values = {0};
    KVF_TRY(json_parse(text, bytes, what, &document, error));
    kvf_status status = read_document(document, what, model, policy, &values, error);
    json_decref(document);
    if (status == KVF_OK)
        *out = values;
    return status;
}

kvf_status cli_prune_file_read(const char *path, const kvf_model_config *model,
                               const kvf_weights *weights, const char *policy,
                               cli_prune_values *out, kvf_error *error)
{
    cli_model_print print;
    kvf_text text = {0};
    kvf_status status = model_read_file(path, FILE_BYTES_MAX, &text, error);
    if (status == KVF_OK) {
        cli_model_print_make(model, weights, &print);
        status = cli_prune_file_parse(text.size ? text.bytes : "", text.size, path, &print, policy,
                                      out, error);
    }
    kvf_text_free(&text);
    return status;
}
