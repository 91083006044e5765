/* SPDX-License-Identifier: Apache-2.0 */

/* Messages, and a format asked to write them; see the header. */

#include "chat_format.h"

#include "chat_parts.h"

#include <string.h>

const char *kvf_chat_role_name(unsigned role)
{
    static const char *const names[] = {
        [KVF_ROLE_SYSTEM] = "system", [KVF_ROLE_USER] = "user", [KVF_ROLE_ASSISTANT] = "assistant"};
    return role < sizeof names / sizeof *names ? names[role] : NULL;
}

/* ---- messages ---- */

static kvf_status bad_message(const char *where, const char *what, kvf_error *error)
{
    return model_fail(error, KVF_INVALID, "%s: %s", where, what);
}

/* {"type": "text", "text": ...} becomes a line. */
static kvf_status add_part(json_t *part, bool is_first, const char *where, kvf_text *out,
                           kvf_error *error)
{
    char shown[64];
    const json_t *type = json_object_get(part, "type"), *text = json_object_get(part, "text");
    if (!json_is_text(type, "text"))
        return model_fail(error, KVF_INVALID,
                          "%s: a part of its content has type %s; only text can be read, so give "
                          "{\"type\": \"text\", \"text\": ...}",
                          where, json_show(type, shown, sizeof shown));
    if (!json_plain_text(text))
        return bad_message(where, "text of a part must be a text without zero bytes", error);
    if (!is_first)
        KVF_TRY(kvf_text_append(out, "\n", 1, error));
    return kvf_text_append(out, json_string_value(text), json_string_length(text), error);
}

static kvf_status read_content(json_t *content, const char *where, kvf_chat_message *out,
                               kvf_error *error)
{
    if (!content)
        return bad_message(where, "it has no content", error);
    if (!json_is_array(content) && !json_is_string(content))
        return bad_message(where, "content must be a text, or a list of text parts", error);
    if (json_is_string(content)) {
        out->text = json_string_value(content);
        return json_plain_text(content)
                   ? KVF_OK
                   : bad_message(where, "content must be a text without zero bytes", error);
    }
    json_t *part;
    size_t i;
    json_array_foreach (content, i, part)
        KVF_TRY(add_part(part, i == 0, where, &out->joined, error));
    out->text = out->joined.bytes ? out->joined.bytes : "";
    return KVF_OK;
}

kvf_status kvf_chat_message_read(json_t *value, const char *where, kvf_chat_message *out,
                                 kvf_error *error)
{
    static const char *const known[] = {"role", "content", NULL};
    json_t *role = json_object_get(value, "role");
    char shown[64];
    unsigned which = 0;
    *out = (kvf_chat_message){.text = ""};
    if (!json_is_object(value) || !role)
        return bad_message(where, "it must be an object with role and content", error);
    const char *unknown = json_unknown_key(value, known);
    if (unknown)
        return model_fail(error, KVF_INVALID,
                          "%s: it has the field \"%.80s\"; known are role and content, so leave "
                          "it out",
                          where, unknown);
    while (kvf_chat_role_name(which) && !json_is_text(role, kvf_chat_role_name(which)))
        which++;
    if (!kvf_chat_role_name(which))
        return model_fail(error, KVF_INVALID, "%s: role is %s; give system, user or assistant",
                          where, json_show(role, shown, sizeof shown));
    out->role = (kvf_chat_role)which;
    return read_content(json_get_set(value, "content"), where, out, error);
}

/* ---- formats ---- */

const char *kvf_chat_format_name(const kvf_chat_format *format)
{
    return format->name;
}

bool kvf_chat_format_thinks(const kvf_chat_format *format)
{
    return format->thinks;
}

kvf_status kvf_chat_render(const kvf_chat *chat, kvf_text *text, kvf_error *error)
{
    const size_t before = text->size;
    chat_writer writer = {.text = text, .error = error};
    if (chat->count == 0)
        return model_fail(error, KVF_INVALID, "the chat has no messages; give at least one");
    chat->format->put(&writer, chat);
    if (writer.status == KVF_OK && !writer.refusal)
        return KVF_OK;
    text->size = before;
    if (text->bytes)
        text->bytes[before] = '\0';
    return writer.status != KVF_OK
               ? writer.status
               : model_fail(error, KVF_INVALID, "the chat format %s refuses these messages: %s",
                            chat->format->name, writer.refusal);
}

kvf_status kvf_chat_encode(const kvf_chat *chat, const kvf_tokenizer *tokenizer, kvf_token_ids *ids,
                           kvf_error *error)
{
    kvf_text text = {0};
    kvf_status status = kvf_chat_render(chat, &text, error);
    if (status == KVF_OK)
        status = kvf_tokenizer_encode(tokenizer, text.bytes, text.size, false, ids, error);
    kvf_text_free(&text);
    return status;
}

kvf_status kvf_chat_check(const kvf_chat_format *format, const kvf_tokenizer *tokenizer,
                          uint32_t *end, kvf_error *error)
{
    *end = UINT32_MAX;
    for (size_t i = 0; i < CHAT_MARKERS_MAX && format->markers[i]; i++)
        if (!kvf_tokenizer_find(tokenizer, format->markers[i], end))
            return model_fail(error, KVF_INVALID,
                              "the chat format %s writes '%s', which is no token of this model; "
                              "give --chat-format another NAME, or --prompt-file with the model's "
                              "own tokens",
                              format->name, format->markers[i]);
    return KVF_OK;
}
