/* SPDX-License-Identifier: Apache-2.0 */

/*
 * From messages to the variables of a template, and what is asked of a template in advance; see the
 * header.
 */

#include "chat_template.h"

#include "chat_channels.h"

#include <string.h>

const char *kvf_chat_role_name(unsigned role)
{
    static const char *const names[] = {[KVF_ROLE_SYSTEM] = "system",
                                        [KVF_ROLE_USER] = "user",
                                        [KVF_ROLE_ASSISTANT] = "assistant",
                                        [KVF_ROLE_DEVELOPER] = "developer",
                                        [KVF_ROLE_TOOL] = "tool"};
    return role < sizeof names / sizeof *names ? names[role] : NULL;
}

/* ---- messages ---- */

static kvf_status bad_message(const char *where, const char *what, kvf_error *error)
{
    return model_fail(error, KVF_INVALID, "%s: %s", where, what);
}

/* {"type": "text", "text": ...} */
static kvf_status check_part(const json_value *part, const char *where, kvf_error *error)
{
    char shown[64];
    const json_value *type = json_get(part, "type"), *text = json_get(part, "text");
    if (!json_is_string(type, "text"))
        return model_fail(error, KVF_INVALID,
                          "%s: a part of its content has type %s; only text can be read, so give "
                          "{\"type\": \"text\", \"text\": ...}",
                          where, json_show(type, shown, sizeof shown));
    if (!text || text->kind != JSON_STRING)
        return bad_message(where, "a part of its content has no text", error);
    return KVF_OK;
}

static kvf_status check_content(const json_value *value, const char *where, kvf_error *error)
{
    const json_value *content = json_get_set(value, "content");
    const json_value *calls = json_get_set(value, "tool_calls");
    if (calls && calls->kind != JSON_ARRAY)
        return bad_message(where, "tool_calls must be a list", error);
    if (!content)
        return calls ? KVF_OK : bad_message(where, "it has no content", error);
    if (content->kind == JSON_STRING)
        return strlen(content->as.string) == content->size
                   ? KVF_OK
                   : bad_message(where, "content must be a text without zero bytes", error);
    if (content->kind != JSON_ARRAY)
        return bad_message(where, "content must be a text, or a list of text parts", error);
    for (const json_value *part = json_first(content); part; part = json_next(content, part))
        KVF_TRY(check_part(part, where, error));
    return KVF_OK;
}

kvf_status kvf_chat_message_read(const json_value *value, const char *where, kvf_chat_message *out,
                                 kvf_error *error)
{
    static const char *const known[] = {"role",     "content",    "reasoning_content",
                                        "thinking", "tool_calls", "tool_call_id",
                                        "name",     "reasoning",  NULL};
    const json_value *role = json_get(value, "role");
    char shown[64];
    unsigned which = 0;
    if (value->kind != JSON_OBJECT || !role)
        return bad_message(where, "it must be an object with role and content", error);
    const json_value *unknown = json_unknown_key(value, known);
    if (unknown)
        return model_fail(error, KVF_INVALID,
                          "%s: it has the field \"%.80s\"; known are role, content, name, "
                          "tool_calls, tool_call_id, reasoning_content, reasoning and thinking",
                          where, unknown->key);
    while (kvf_chat_role_name(which) && !json_is_string(role, kvf_chat_role_name(which)))
        which++;
    if (!kvf_chat_role_name(which))
        return model_fail(error, KVF_INVALID,
                          "%s: role is %s; give system, developer, user, assistant or tool", where,
                          json_show(role, shown, sizeof shown));
    *out = (kvf_chat_message){.role = (kvf_chat_role)which, .given = value};
    return check_content(value, where, error);
}

/* ---- variables ---- */

/* Text parts, one to a line. */
static jinja_value join_parts(jinja_machine *m, const json_value *content)
{
    size_t i = 0;
    const jinja_value texts = jinja_list_new(m, content->size);
    for (const json_value *part = json_first(content); part && i < texts.size;
         part = json_next(content, part))
        texts.as.items[i++] = jinja_from_json(m, json_get(part, "text"));
    return jinja_join_texts(m, texts, "\n");
}

/* A thought goes by three names; as in Transformers a template finds it by the two that are asked
 * for. */
static jinja_value given_message(jinja_machine *m, const json_value *given)
{
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    const json_value *thought = NULL;
    for (size_t i = 0; i < 3 && !thought; i++)
        thought = json_get_set(given, names[i]);
    if (!thought)
        return jinja_from_json(m, given);
    const jinja_value map = jinja_map_new(m), value = jinja_from_json(m, thought);
    jinja_map_put(m, map, "thinking", value);
    for (const json_value *one = json_first(given); one; one = json_next(given, one))
        jinja_map_put(m, map, one->key, jinja_from_json(m, one));
    jinja_map_put(m, map, "reasoning_content", value);
    return map;
}

static jinja_value message_of(jinja_machine *m, const kvf_chat_message *message, bool joins)
{
    if (!message->given) {
        jinja_value map = jinja_map_new(m);
        jinja_map_put(m, map, "role", jinja_words(kvf_chat_role_name(message->role)));
        jinja_map_put(m, map, "content", jinja_words(message->text));
        return map;
    }
    const jinja_value map = given_message(m, message->given);
    const json_value *content = json_get(message->given, "content");
    if (joins && content && content->kind == JSON_ARRAY)
        jinja_map_put(m, map, "content", join_parts(m, content));
    return map;
}

/* Stands for a message. No template looks for it. */
static const char message_mark[] = "\x02";

/* One message, of one part. */
static jinja_value question_in_parts(jinja_machine *m)
{
    jinja_value messages = jinja_list_new(m, 1), parts = jinja_list_new(m, 1);
    jinja_value message = jinja_map_new(m), part = jinja_map_new(m);
    jinja_map_put(m, part, "type", jinja_words("text"));
    jinja_map_put(m, part, "text", jinja_words(message_mark));
    if (parts.size == 1 && messages.size == 1) {
        parts.as.items[0] = part;
        messages.as.items[0] = message;
    }
    jinja_map_put(m, message, "role", jinja_words("user"));
    jinja_map_put(m, message, "content", parts);
    return messages;
}

/* Variables that Transformers sets besides messages. */
static void set_variables(jinja_machine *m, const kvf_chat *chat)
{
    jinja_set_global(m, "tools", chat->tools ? jinja_from_json(m, chat->tools) : jinja_none());
    jinja_set_global(m, "documents", jinja_none());
    jinja_set_global(m, "add_generation_prompt", jinja_bool(chat->generate));
    if (chat->format->bos)
        jinja_set_global(m, "bos_token", jinja_words(chat->format->bos));
    if (chat->format->eos)
        jinja_set_global(m, "eos_token", jinja_words(chat->format->eos));
    if (chat->thinking != KVF_THINKING_DEFAULT)
        jinja_set_global(m, "enable_thinking", jinja_bool(chat->thinking == KVF_THINKING_ON));
}

/* ---- rendering ---- */

typedef enum chat_parts { PARTS_GIVEN, PARTS_JOINED, PARTS_TRIED } chat_parts;

static size_t input_bytes(const kvf_chat *chat)
{
    size_t bytes = chat->tools ? jinja_json_bytes(chat->tools) : 0;
    for (size_t i = 0; i < chat->count; i++)
        bytes += chat->messages[i].given ? jinja_json_bytes(chat->messages[i].given)
                                         : strlen(chat->messages[i].text);
    return bytes;
}

static kvf_status render(const kvf_chat *chat, chat_parts parts, kvf_text *text, kvf_error *error)
{
    const size_t bytes = input_bytes(chat);
    jinja_machine *m = jinja_open(chat->today, bytes);
    if (!m)
        return model_out_of_memory(error, bytes, "a chat");
    jinja_value list = parts == PARTS_TRIED ? question_in_parts(m) : jinja_list_new(m, chat->count);
    for (size_t i = 0; parts != PARTS_TRIED && i < list.size; i++)
        list.as.items[i] = message_of(m, &chat->messages[i], parts == PARTS_JOINED);
    jinja_set_global(m, "messages", list);
    set_variables(m, chat);
    const kvf_status status =
        jinja_run(m, chat->format->source, strlen(chat->format->source), text, error);
    jinja_close(m);
    return status;
}

/* Whether the template writes the text of a list of parts. */
static bool takes_parts(const kvf_chat *chat)
{
    kvf_text text = {0};
    const kvf_chat question = {.format = chat->format, .today = chat->today};
    const kvf_status status = render(&question, PARTS_TRIED, &text, NULL);
    const bool takes = status == KVF_OK && text.bytes && strstr(text.bytes, message_mark);
    kvf_text_free(&text);
    return takes;
}

static bool has_parts(const kvf_chat *chat)
{
    for (size_t i = 0; i < chat->count; i++) {
        const json_value *content =
            chat->messages[i].given ? json_get(chat->messages[i].given, "content") : NULL;
        if (content && content->kind == JSON_ARRAY)
            return true;
    }
    return false;
}

kvf_status kvf_chat_render(const kvf_chat *chat, kvf_text *text, kvf_error *error)
{
    if (chat->count == 0)
        return model_fail(error, KVF_INVALID, "the chat has no messages; give at least one");
    const bool joins = has_parts(chat) && !takes_parts(chat);
    return render(chat, joins ? PARTS_JOINED : PARTS_GIVEN, text, error);
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

bool kvf_chat_asks(const kvf_chat_format *format, const char *variable)
{
    return strstr(format->source, variable);
}

/* ---- markers ---- */

/* Markers, which are tokens wherever they are. Others, such as <|user|> in Zephyr's format and
 * [INST] of the first Mistral, are plain text for some models. */
static const char *const markers[] = {
    "<|im_start|>",
    "<|im_end|>",
    "<|im_sep|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[SYSTEM_PROMPT]",
    "<\357\275\234User\357\275\234>",
    "<\357\275\234Assistant\357\275\234>",
};

static kvf_status check_marker(const kvf_chat_format *format, const kvf_tokenizer *tokenizer,
                               const char *text, const char *marker, kvf_error *error)
{
    uint32_t id;
    if (!marker || !marker[0] || !strstr(text, marker) ||
        kvf_tokenizer_find(tokenizer, marker, &id))
        return KVF_OK;
    return model_fail(error, KVF_INVALID,
                      "the chat format %s%swrites '%s', which is no token of this model; give "
                      "--chat-format another NAME, or --prompt-file with the model's own tokens",
                      format->name ? format->name : "", format->name ? " " : "of the template ",
                      marker);
}

static kvf_status check_markers(const kvf_chat_format *format, const kvf_tokenizer *tokenizer,
                                const char *text, kvf_error *error)
{
    for (size_t i = 0; i < sizeof markers / sizeof *markers; i++)
        KVF_TRY(check_marker(format, tokenizer, text, markers[i], error));
    KVF_TRY(check_marker(format, tokenizer, text, format->bos, error));
    return check_marker(format, tokenizer, text, format->eos, error);
}

/* The token that follows an answer, if it is a marker. */
static kvf_status find_end(const kvf_tokenizer *tokenizer, const char *behind, uint32_t *end,
                           kvf_error *error)
{
    kvf_token_ids ids = {0};
    KVF_TRY(kvf_tokenizer_encode(tokenizer, behind, strlen(behind), false, &ids, error));
    if (ids.count > 0) {
        const char *spelling = kvf_tokenizer_token(tokenizer, ids.ids[0]);
        if (spelling && (kvf_tokenizer_is_special(tokenizer, ids.ids[0]) ||
                         (spelling[0] == '<' && spelling[strlen(spelling) - 1] == '>')))
            *end = ids.ids[0];
    }
    kvf_token_ids_free(&ids);
    return KVF_OK;
}

kvf_status kvf_chat_check(const kvf_chat_format *format, const kvf_tokenizer *tokenizer,
                          uint32_t *end, kvf_error *error)
{
    static const kvf_chat_message messages[] = {{KVF_ROLE_USER, message_mark, NULL},
                                                {KVF_ROLE_ASSISTANT, message_mark, NULL},
                                                {KVF_ROLE_USER, message_mark, NULL}};
    static const jinja_day day = {2024, 1, 1};
    const kvf_chat chat = {
        .format = format, .messages = messages, .count = 3, .generate = true, .today = &day};
    kvf_text text = {0};
    *end = UINT32_MAX;
    kvf_status status = kvf_chat_render(&chat, &text, error);
    if (status == KVF_INVALID) {
        kvf_text_free(&text);
        return KVF_OK;
    }
    const char *mark = status == KVF_OK && text.bytes ? strstr(text.bytes, message_mark) : NULL;
    if (mark)
        mark = strstr(mark + 1, message_mark); /* the answer */
    if (status == KVF_OK && text.bytes)
        status = check_markers(format, tokenizer, text.bytes, error);
    if (status == KVF_OK && mark)
        status = find_end(tokenizer, mark + 1, end, error);
    const kvf_channels channels = kvf_channels_of(tokenizer);
    if (channels.known && *end == channels.end) /* which ends thoughts, too */
        *end = channels.call;
    kvf_text_free(&text);
    return status;
}
