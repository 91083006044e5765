/* SPDX-License-Identifier: Apache-2.0 */

/*
 * From messages to the variables of a template, and what is asked of a template in advance; see the
 * header.
 */

#include "chat_template.h"

#include <string.h>

const char *kvf_chat_role_name(kvf_chat_role role)
{
    static const char *const names[] = {
        [KVF_ROLE_SYSTEM] = "system", [KVF_ROLE_USER] = "user", [KVF_ROLE_ASSISTANT] = "assistant"};
    return names[role];
}

/* The variables that Transformers sets. */
static void set_variables(jinja_machine *m, const kvf_chat *chat)
{
    jinja_value list = jinja_list_new(m, chat->count);
    for (size_t i = 0; i < list.size; i++) {
        jinja_value message = jinja_map_new(m);
        jinja_map_put(m, message, "role", jinja_words(kvf_chat_role_name(chat->messages[i].role)));
        jinja_map_put(m, message, "content", jinja_words(chat->messages[i].text));
        list.as.items[i] = message;
    }
    jinja_set_global(m, "messages", list);
    jinja_set_global(m, "tools", jinja_none());
    jinja_set_global(m, "documents", jinja_none());
    jinja_set_global(m, "add_generation_prompt", jinja_bool(chat->generate));
    if (chat->format->bos)
        jinja_set_global(m, "bos_token", jinja_words(chat->format->bos));
    if (chat->format->eos)
        jinja_set_global(m, "eos_token", jinja_words(chat->format->eos));
    if (chat->thinking != KVF_THINKING_DEFAULT)
        jinja_set_global(m, "enable_thinking", jinja_bool(chat->thinking == KVF_THINKING_ON));
}

kvf_status kvf_chat_render(const kvf_chat *chat, const kvf_allocator *allocator, kvf_text *text,
                           kvf_error *error)
{
    size_t bytes = 0;
    if (chat->count == 0)
        return model_fail(error, KVF_INVALID, "the chat has no messages; give at least one");
    for (size_t i = 0; i < chat->count; i++)
        bytes += strlen(chat->messages[i].text);
    jinja_machine *m = jinja_open(allocator, chat->today, bytes);
    if (!m)
        return model_out_of_memory(error, bytes, "a chat");
    set_variables(m, chat);
    const kvf_status status =
        jinja_run(m, chat->format->source, strlen(chat->format->source), text, error);
    jinja_close(m);
    return status;
}

kvf_status kvf_chat_encode(const kvf_chat *chat, const kvf_tokenizer *tokenizer, kvf_token_ids *ids,
                           kvf_error *error)
{
    const kvf_allocator *allocator = kvf_tokenizer_allocator(tokenizer);
    kvf_text text = {0};
    kvf_status status = kvf_chat_render(chat, allocator, &text, error);
    if (status == KVF_OK)
        status = kvf_tokenizer_encode(tokenizer, text.bytes, text.size, false, ids, error);
    kvf_text_free(allocator, &text);
    return status;
}

bool kvf_chat_knows_thinking(const kvf_chat_format *format)
{
    return strstr(format->source, "enable_thinking");
}

/* ---- markers ---- */

/* Stands for a message. No template looks for it. */
static const char message_mark[] = "\x02";

/* What is a token wherever it is a marker. Others, such as <|user|> in Zephyr's format and [INST]
 * of the first Mistral, are plain text for some models. */
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
    kvf_token_ids_free(kvf_tokenizer_allocator(tokenizer), &ids);
    return KVF_OK;
}

kvf_status kvf_chat_check(const kvf_chat_format *format, const kvf_tokenizer *tokenizer,
                          uint32_t *end, kvf_error *error)
{
    static const kvf_chat_message messages[] = {{KVF_ROLE_USER, message_mark},
                                                {KVF_ROLE_ASSISTANT, message_mark},
                                                {KVF_ROLE_USER, message_mark}};
    static const jinja_day day = {2024, 1, 1};
    const kvf_allocator *allocator = kvf_tokenizer_allocator(tokenizer);
    const kvf_chat chat = {
        .format = format, .messages = messages, .count = 3, .generate = true, .today = &day};
    kvf_text text = {0};
    *end = UINT32_MAX;
    kvf_status status = kvf_chat_render(&chat, allocator, &text, error);
    if (status == KVF_INVALID)
        return KVF_OK;
    const char *mark = status == KVF_OK && text.bytes ? strstr(text.bytes, message_mark) : NULL;
    if (mark)
        mark = strstr(mark + 1, message_mark); /* the answer */
    if (status == KVF_OK && text.bytes)
        status = check_markers(format, tokenizer, text.bytes, error);
    if (status == KVF_OK && mark)
        status = find_end(tokenizer, mark + 1, end, error);
    kvf_text_free(allocator, &text);
    return status;
}
