/* SPDX-License-Identifier: Apache-2.0 */

/* Reading chat templates; see the header. */

#include "chat_template.h"

#include "json.h"
#include "model_memory.h"
#include "utf8.h"

#define CONFIG_BYTES_MAX   (16u << 20)
#define TEMPLATE_BYTES_MAX (1u << 20)

static kvf_status corrupt(const char *field, kvf_error *error)
{
    return model_fail(error, KVF_CORRUPT, "tokenizer_config.json: %s must be a text", field);
}

/* A text, or an object whose "content" is one. */
static kvf_status read_token(const json_value *root, const char *field, kvf_text *out,
                             kvf_error *error)
{
    const json_value *value = json_get_set(root, field);
    if (value && value->kind == JSON_OBJECT)
        value = json_get(value, "content");
    if (!value)
        return KVF_OK;
    if (value->kind != JSON_STRING)
        return corrupt(field, error);
    return kvf_text_append(out, value->as.string, value->size, error);
}

/* A text, or a list of { name, template }. */
static kvf_status read_template(const json_value *root, kvf_text *out, kvf_error *error)
{
    const json_value *value = json_get_set(root, "chat_template");
    if (value && value->kind == JSON_ARRAY) {
        const json_value *list = value;
        value = NULL;
        for (const json_value *one = json_first(list); one; one = json_next(list, one))
            if (json_is_string(json_get(one, "name"), "default"))
                value = json_get(one, "template");
    }
    if (!value || out->bytes)
        return KVF_OK;
    if (value->kind != JSON_STRING)
        return corrupt("chat_template", error);
    if (value->size > TEMPLATE_BYTES_MAX)
        return model_fail(error, KVF_UNSUPPORTED,
                          "tokenizer_config.json: a chat_template of %u bytes is not supported",
                          value->size);
    return kvf_text_append(out, value->as.string, value->size, error);
}

static kvf_status read_config(const char *text, size_t bytes, kvf_chat_source *out,
                              kvf_error *error)
{
    json_document *document;
    KVF_TRY(json_parse(text, bytes, "tokenizer_config.json", &document, error));
    const json_value *root = json_root(document);
    kvf_status status = read_template(root, &out->source, error);
    if (status == KVF_OK)
        status = read_token(root, "bos_token", &out->bos, error);
    if (status == KVF_OK)
        status = read_token(root, "eos_token", &out->eos, error);
    json_free(document);
    return status;
}

/*
 * A file with nothing in it is none. The one in tokenizer_config.json was checked with that file.
 */
static kvf_status read_template_part(const char *model, const char *part, kvf_text *out,
                                     kvf_error *error)
{
    KVF_TRY(model_read_part(model, part, TEMPLATE_BYTES_MAX, out, error));
    if (out->size == 0)
        kvf_text_free(out);
    const size_t valid = utf8_valid_prefix(out->bytes, out->size);
    return valid == out->size
               ? KVF_OK
               : model_fail(error, KVF_CORRUPT,
                            "%s is not UTF-8: byte %zu does not belong there; convert it, or "
                            "download it again",
                            part, valid);
}

kvf_status kvf_chat_source_read(const char *model, kvf_chat_source *out, kvf_error *error)
{
    static const char *const config_part = "tokenizer_config.json";
    static const char *const template_part = "chat_template.jinja";
    kvf_text config = {0};
    kvf_status status = KVF_OK;
    *out = (kvf_chat_source){0};
    if (model_has_part(model, template_part))
        status = read_template_part(model, template_part, &out->source, error);
    if (status == KVF_OK && model_has_part(model, config_part))
        status = model_read_part(model, config_part, CONFIG_BYTES_MAX, &config, error);
    if (status == KVF_OK && config.bytes)
        status = model_blame_part(model, read_config(config.bytes, config.size, out, error), error);
    kvf_text_free(&config);
    if (status != KVF_OK)
        kvf_chat_source_free(out);
    return status;
}

void kvf_chat_source_free(kvf_chat_source *source)
{
    kvf_text_free(&source->source);
    kvf_text_free(&source->bos);
    kvf_text_free(&source->eos);
}

kvf_chat_format kvf_chat_source_format(const kvf_chat_source *source)
{
    return (kvf_chat_format){
        .source = source->source.bytes, .bos = source->bos.bytes, .eos = source->eos.bytes};
}
