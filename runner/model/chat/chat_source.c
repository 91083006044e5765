/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Where a model keeps its chat template, by which its format is known. Part of chat_format.h.
 *
 * It knows names of files and fields. A template is looked at for markers, and never run.
 */

#include "chat_format.h"

#include "json.h"
#include "model_memory.h"
#include "utf8.h"

#define CONFIG_BYTES_MAX   (16u << 20)
#define TEMPLATE_BYTES_MAX (1u << 20)

/* A text, or a list of { name, template }. */
static kvf_status take_template(json_t *root, kvf_text *out, kvf_error *error)
{
    json_t *value = json_get_set(root, "chat_template");
    if (json_is_array(value)) {
        json_t *list = value, *one;
        size_t i;
        value = NULL;
        json_array_foreach (list, i, one)
            if (json_is_text(json_object_get(one, "name"), "default"))
                value = json_object_get(one, "template");
    }
    if (!value)
        return KVF_OK;
    if (!json_is_string(value))
        return model_fail(error, KVF_CORRUPT,
                          "tokenizer_config.json: chat_template must be a text");
    return kvf_text_append(out, json_string_value(value), json_string_length(value), error);
}

static kvf_status read_config(const char *model, kvf_text *out, kvf_error *error)
{
    static const char part[] = "tokenizer_config.json";
    kvf_text config = {0};
    json_t *document = NULL;
    if (!model_has_part(model, part))
        return KVF_OK;
    KVF_TRY(model_read_part(model, part, CONFIG_BYTES_MAX, &config, error));
    kvf_status status =
        json_parse(config.bytes ? config.bytes : "", config.size, part, &document, error);
    if (status == KVF_OK)
        status = take_template(document, out, error);
    json_decref(document);
    kvf_text_free(&config);
    return model_blame_part(model, status, error);
}

/* A file with nothing in it is none. */
static kvf_status read_template(const char *model, kvf_text *out, kvf_error *error)
{
    static const char part[] = "chat_template.jinja";
    if (model_has_part(model, part))
        KVF_TRY(model_read_part(model, part, TEMPLATE_BYTES_MAX, out, error));
    const size_t valid = utf8_valid_prefix(out->bytes, out->size);
    if (valid < out->size)
        return model_fail(error, KVF_CORRUPT,
                          "%s is not UTF-8: byte %zu does not belong there; convert it, or "
                          "download it again",
                          part, valid);
    return out->size > 0 ? KVF_OK : read_config(model, out, error);
}

kvf_status kvf_chat_format_read(const char *model, const kvf_chat_format **out, kvf_error *error)
{
    kvf_text source = {0};
    *out = NULL;
    kvf_status status = read_template(model, &source, error);
    if (status == KVF_OK && source.size == 0)
        status = model_fail(error, KVF_INVALID,
                            "the model has no chat template: no chat_template.jinja, and none in "
                            "tokenizer_config.json or the metadata of its GGUF file");
    if (status == KVF_OK)
        *out = kvf_chat_format_of(source.bytes);
    kvf_text_free(&source);
    return status != KVF_OK || *out
               ? status
               : model_fail(error, KVF_UNSUPPORTED,
                            "the chat template of the model is of no format that is known");
}
