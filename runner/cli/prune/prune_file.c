/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes and reads what was tuned; see the header.
 *
 * Invariant: reading changes nothing of *out unless everything was fine.
 */

#include "prune_file.h"

#include <inttypes.h>
#include <string.h>

#define FILE_BYTES_MAX (1u << 20)

const char *const cli_asked_names[] = {"end", "after", NULL};

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
    write_tuned(json, "fastkv", &tuning->fastkv, tuning->asked);
    write_tuned(json, "structkv", &tuning->structkv, tuning->asked);
    write_tuned(json, "asl", &tuning->asl, tuning->asked);
    cli_json_end(json, '}');
}

/* ---- read ---- */

/* An object that must be there and has no other members than these. */
static kvf_status need_object(const json_value *parent, const char *what, const char *key,
                              const char *const *known, const json_value **out, kvf_error *error)
{
    *out = key ? json_get(parent, key) : parent;
    if (!*out)
        return model_fail(error, KVF_CORRUPT,
                          "%s: %s is missing; let kvferry tune write the file again", what, key);
    if ((*out)->kind != JSON_OBJECT)
        return model_fail(error, KVF_CORRUPT, "%s: %s is %s; it must be an object", what,
                          key ? key : "the file", json_kind_name(*out));
    const json_value *unknown = json_unknown_key(*out, known);
    if (unknown)
        return model_fail(error, KVF_CORRUPT,
                          "%s: %s%s%.40s is not known; let kvferry tune write the file again", what,
                          key ? key : "", key ? "." : "", unknown->key);
    return KVF_OK;
}

static kvf_status need_integer(const json_value *object, const char *where, const char *key,
                               uint64_t least, uint64_t most, uint32_t *out, kvf_error *error)
{
    const json_value *value = json_get(object, key);
    char shown[48];
    if (!value)
        return model_fail(error, KVF_CORRUPT,
                          "%s%s is missing; let kvferry tune write the file again", where, key);
    if (value->kind != JSON_INTEGER || value->as.integer < least || value->as.integer > most)
        return model_fail(error, KVF_CORRUPT,
                          "%s%s is %s; it must be a whole number from %llu to %llu", where, key,
                          json_show(value, shown, sizeof shown), (unsigned long long)least,
                          (unsigned long long)most);
    *out = (uint32_t)value->as.integer;
    return KVF_OK;
}

static kvf_status need_same_text(const json_value *object, const char *where, const char *key,
                                 const char *ours, kvf_error *error)
{
    const json_value *value = json_get(object, key);
    char shown[48];
    if (!value || value->kind != JSON_STRING)
        return model_fail(error, KVF_CORRUPT, "%s%s is %s; it must be a string", where, key,
                          value ? json_show(value, shown, sizeof shown) : "missing");
    if (json_is_string(value, ours))
        return KVF_OK;
    return model_fail(error, KVF_INVALID,
                      "%s%s is %.40s, that of this model is %s: the file was tuned for another "
                      "model; run kvferry tune on this one",
                      where, key, json_show(value, shown, sizeof shown), ours);
}

static kvf_status check_model(const json_value *model, const char *where,
                              const cli_model_print *ours, kvf_error *error)
{
    const struct {
        const char *key;
        uint32_t value;
    } numbers[] = {
        {"layers", ours->layers},           {"query_heads", ours->query_heads},
        {"kv_heads", ours->kv_heads},       {"head_dim", ours->head_dim},
        {"hidden_size", ours->hidden_size}, {"vocab_size", ours->vocab_size},
    };
    KVF_TRY(need_same_text(model, where, "family", ours->family, error));
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        uint32_t theirs = 0;
        KVF_TRY(need_integer(model, where, numbers[i].key, 0, UINT32_MAX, &theirs, error));
        if (theirs != numbers[i].value)
            return model_fail(error, KVF_INVALID,
                              "%s%s is %u, that of this model is %u: the file was tuned for "
                              "another model; run kvferry tune on this one",
                              where, numbers[i].key, theirs, numbers[i].value);
    }
    return need_same_text(model, where, "weights", ours->weights, error);
}

/* A list of figures, one per layer; null is a figure that could not be measured. */
static kvf_status check_figures(const json_value *section, const char *where, const char *key,
                                uint32_t count_max, kvf_error *error)
{
    const json_value *list = json_get(section, key);
    char shown[48];
    if (!list || list->kind != JSON_ARRAY || list->size == 0 || list->size > count_max)
        return model_fail(error, KVF_CORRUPT, "%s%s must be a list of 1 to %u numbers", where, key,
                          count_max);
    for (const json_value *v = json_first(list); v; v = json_next(list, v))
        if (!json_is_number(v) && v->kind != JSON_NULL)
            return model_fail(error, KVF_CORRUPT, "%s%s has %s; it must be a list of numbers",
                              where, key, json_show(v, shown, sizeof shown));
    return KVF_OK;
}

static kvf_status check_answers(const json_value *section, const char *where, kvf_error *error)
{
    static const char *const known[] = {"asked", "full", "kept", "computed", NULL};
    const json_value *answers, *asked;
    char inner[160], shown[48];
    uint32_t full = 0, kept = 0;
    snprintf(inner, sizeof inner, "%sanswers.", where);
    KVF_TRY(need_object(section, where, "answers", known, &answers, error));
    asked = json_get(answers, "asked");
    if (asked && !json_is_string(asked, "end") && !json_is_string(asked, "after"))
        return model_fail(error, KVF_CORRUPT, "%sasked is %s; it must be end or after", inner,
                          json_show(asked, shown, sizeof shown));
    KVF_TRY(need_integer(answers, inner, "full", 1, UINT32_MAX, &full, error));
    return need_integer(answers, inner, "kept", 0, full, &kept, error);
}

static kvf_status read_section(const json_value *section, const char *where, const char *policy,
                               uint32_t layers, cli_prune_values *out, kvf_error *error)
{
    static const char *const figures[] = {"scores", "entropy", "sparsity", "variance"};
    const bool is_structkv = strcmp(policy, "structkv") == 0;
    uint32_t layer = 0, first = 0;
    char inner[160];
    KVF_TRY(need_integer(section, where, "layer", 0, layers - 1, &layer, error));
    if (json_get(section, "answers")) {
        KVF_TRY(check_answers(section, where, error));
    } else {
        KVF_TRY(need_integer(section, where, "first_layer", 0, layers - 1, &first, error));
        for (size_t i = 0; i < (is_structkv ? 4u : 1u); i++)
            KVF_TRY(check_figures(section, where, figures[i], layers - first, error));
        if (json_get(section, "recovery"))
            KVF_TRY(check_figures(section, where, "recovery", layers, error));
    }
    const json_value *settings = json_get(section, "settings");
    if (!settings)
        return model_fail(error, KVF_CORRUPT,
                          "%ssettings is missing; let kvferry tune write the file again", where);
    snprintf(inner, sizeof inner, "%ssettings", where);
    KVF_TRY(cli_settings_read(settings, inner, out, error));
    if (strcmp(policy, "asl") == 0) /* whose rule chooses */
        return KVF_OK;
    out->config.settings.layer = layer;
    out->given |= cli_setting_bit("layer");
    if (is_structkv) {
        out->config.settings.pivot = KVF_PIVOT_CALIBRATED;
        out->given |= cli_setting_bit("pivot");
    }
    return KVF_OK;
}

static kvf_status read_document(const json_value *root, const char *what,
                                const cli_model_print *model, const char *policy,
                                cli_prune_values *out, kvf_error *error)
{
    static const char *const top[] = {"kvferry_prune", "model",    "samples", "tokens",
                                      "fastkv",        "structkv", "asl",     NULL};
    static const char *const of_model[] = {"family",     "layers",   "query_heads",
                                           "kv_heads",   "head_dim", "hidden_size",
                                           "vocab_size", "weights",  NULL};
    static const char *const of_section[] = {"layer",   "first_layer", "settings", "scores",
                                             "entropy", "sparsity",    "variance", "recovery",
                                             "answers", NULL};
    const json_value *object, *section;
    char where[128];
    uint32_t version = 0, count = 0;
    if (root->kind != JSON_OBJECT || !json_get(root, "kvferry_prune"))
        return model_fail(
            error, KVF_CORRUPT,
            "%s: kvferry_prune is missing; this is not a file that kvferry tune wrote", what);
    snprintf(where, sizeof where, "%.80s: ", what);
    KVF_TRY(need_integer(root, where, "kvferry_prune", 0, UINT32_MAX, &version, error));
    if (version != CLI_PRUNE_FILE_VERSION)
        return model_fail(error, KVF_UNSUPPORTED,
                          "%s: kvferry_prune is %u, this version reads %u; let kvferry tune write "
                          "the file again",
                          what, version, CLI_PRUNE_FILE_VERSION);
    KVF_TRY(need_object(root, what, NULL, top, &object, error));
    KVF_TRY(need_object(root, what, "model", of_model, &object, error));
    snprintf(where, sizeof where, "%.80s: model.", what);
    KVF_TRY(check_model(object, where, model, error));
    snprintf(where, sizeof where, "%.80s: ", what);
    KVF_TRY(need_integer(root, where, "samples", 1, UINT32_MAX, &count, error));
    KVF_TRY(need_integer(root, where, "tokens", 1, UINT32_MAX, &count, error));
    if (strcmp(policy, "fastkv") != 0 && strcmp(policy, "structkv") != 0 &&
        strcmp(policy, "asl") != 0)
        return model_fail(
            error, KVF_INVALID,
            "%s is for fastkv, structkv and asl, not for %s; leave --prune-config out", what,
            policy);
    if (!json_get(root, policy))
        return model_fail(error, KVF_INVALID,
                          "%s has nothing for %s; run kvferry tune with --method %s", what, policy,
                          policy);
    KVF_TRY(need_object(root, what, policy, of_section, &section, error));
    snprintf(where, sizeof where, "%.80s: %s.", what, policy);
    return read_section(section, where, policy, model->layers, out, error);
}

kvf_status cli_prune_file_parse(const char *text, size_t bytes, const char *what,
                                const cli_model_print *model, const char *policy,
                                cli_prune_values *out, kvf_error *error)
{
    json_document *document = NULL;
    cli_prune_values values = {0};
    KVF_TRY(json_parse(text, bytes, what, NULL, &document, error));
    kvf_status status = read_document(json_root(document), what, model, policy, &values, error);
    json_free(document);
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
    kvf_status status = model_read_file(NULL, path, FILE_BYTES_MAX, &text, error);
    if (status == KVF_OK) {
        cli_model_print_make(model, weights, &print);
        status = cli_prune_file_parse(text.size ? text.bytes : "", text.size, path, &print, policy,
                                      out, error);
    }
    kvf_text_free(NULL, &text);
    return status;
}
