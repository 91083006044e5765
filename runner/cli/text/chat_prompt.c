/* SPDX-License-Identifier: Apache-2.0 */

/* Chats of the command; see the header. */

#include "chat_prompt.h"

#include <stdio.h>
#include <string.h>

#define MESSAGES_BYTES_MAX (1u << 30)

bool cli_chat_wanted(const cli_chat_options *o)
{
    return o->chat || o->messages_file;
}

/* ---- the format ---- */

static kvf_status advise(kvf_error *error)
{
#define COMMA(name) name ", "
    static const char advice[] = "; give --chat-format " KVF_CHAT_FORMAT_LIST(
        COMMA) "or --prompt-file with the special tokens in the text";
    const size_t used = strlen(error->text), size = sizeof error->text;
    const size_t room = size - sizeof advice;
    memcpy(error->text + (used < room ? used : room), advice, sizeof advice);
    return error->status;
}

kvf_status cli_chat_choose(const cli_chat_options *o, const char *model,
                           const kvf_tokenizer *tokenizer, cli_chat *out, kvf_error *error)
{
    static const char *const names[] = {KVF_CHAT_FORMAT_LIST(CLI_CHAT_NAME)};
    kvf_status status = KVF_OK;
    *out = (cli_chat){.thinking = (kvf_chat_thinking)o->thinking};
    if (o->format)
        out->format = kvf_chat_format_find(names[o->format - 1]);
    else
        status = kvf_chat_format_read(model, &out->format, error);
    if (status == KVF_INVALID || status == KVF_UNSUPPORTED)
        return advise(error);
    KVF_TRY(status);
    if (o->thinking != KVF_THINKING_DEFAULT && !kvf_chat_format_thinks(out->format))
        return model_fail(error, KVF_INVALID,
                          "--thinking: the chat format %s cannot express it; leave it out",
                          kvf_chat_format_name(out->format));
    return kvf_chat_check(out->format, tokenizer, &out->end, error);
}

/* ---- messages ---- */

/* A list, or an object with a list "messages". */
static json_t *message_list(json_t *root)
{
    json_t *list = json_is_object(root) ? json_object_get(root, "messages") : root;
    return json_is_array(list) ? list : NULL;
}

/* Messages of a list after @p *count others. The document must outlive them. */
static kvf_status add_messages(const char *path, json_t *root, kvf_chat_message **messages,
                               size_t *count, kvf_error *error)
{
    json_t *list = message_list(root);
    static const char *const known[] = {"messages", NULL};
    const char *other = json_unknown_key(root, known);
    if (!list)
        return model_fail(error, KVF_INVALID, "%s must hold a list of messages", path);
    if (other)
        return model_fail(error, KVF_INVALID,
                          "%s has \"%.80s\" beside messages, which is not read; leave it out", path,
                          other);
    /* One for the prompt. */
    kvf_chat_message *grown = model_grow(*messages, *count * sizeof *grown,
                                         (*count + json_array_size(list) + 1) * sizeof *grown);
    if (!grown)
        return model_out_of_memory(error, json_array_size(list) * sizeof *grown, "messages");
    *messages = grown;
    size_t index;
    json_t *one;
    json_array_foreach (list, index, one) {
        char where[300];
        snprintf(where, sizeof where, "%.250s: message %zu", path, index);
        KVF_TRY(kvf_chat_message_read(one, where, &grown[(*count)++], error));
    }
    return KVF_OK;
}

static kvf_status encode(const cli_chat *chat, const kvf_tokenizer *tokenizer,
                         const kvf_chat_message *messages, size_t count, kvf_token_ids *ids,
                         kvf_error *error)
{
    const kvf_chat all = {.format = chat->format,
                          .messages = messages,
                          .count = count,
                          .generate = true,
                          .thinking = chat->thinking};
    if (count > 0 && messages[count - 1].role == KVF_ROLE_ASSISTANT)
        return model_fail(error, KVF_INVALID,
                          "the last message is the assistant's; end with a question, or give it "
                          "with --prompt");
    for (size_t i = 1; i < count; i++)
        if (messages[i].role == KVF_ROLE_SYSTEM)
            return model_fail(
                error, KVF_INVALID,
                "message %zu is of role system; only the first may be, and with --system none", i);
    return kvf_chat_encode(&all, tokenizer, ids, error);
}

kvf_status cli_chat_encode_turns(const cli_chat *chat, const cli_turns *turns,
                                 const kvf_tokenizer *tokenizer, kvf_token_ids *ids,
                                 kvf_error *error)
{
    const kvf_text *prompt = turns->prompt;
    if (prompt && memchr(prompt->bytes, '\0', prompt->size))
        return model_fail(error, KVF_INVALID, "the prompt holds a zero byte; --chat takes text");
    size_t count = 0;
    kvf_chat_message *messages = model_alloc_zero(2, sizeof *messages);
    if (!messages)
        return model_out_of_memory(error, 2 * sizeof *messages, "messages");
    if (turns->system)
        messages[count++] = (kvf_chat_message){.role = KVF_ROLE_SYSTEM, .text = turns->system};
    kvf_status status = KVF_OK;
    if (turns->messages)
        status = add_messages(turns->path, turns->messages, &messages, &count, error);
    if (status == KVF_OK && prompt)
        messages[count++] = (kvf_chat_message){.role = KVF_ROLE_USER, .text = prompt->bytes};
    if (status == KVF_OK)
        status = encode(chat, tokenizer, messages, count, ids, error);
    for (size_t i = 0; i < count; i++)
        kvf_text_free(&messages[i].joined);
    model_free(messages);
    return status;
}

kvf_status cli_chat_encode(const cli_chat *chat, const cli_chat_options *o,
                           const kvf_tokenizer *tokenizer, const kvf_text *prompt,
                           kvf_token_ids *ids, kvf_error *error)
{
    cli_turns turns = {.system = o->system, .path = o->messages_file, .prompt = prompt};
    json_t *document = NULL;
    kvf_text text = {0};
    kvf_status status = KVF_OK;
    if (o->messages_file) {
        status = model_read_file(o->messages_file, MESSAGES_BYTES_MAX, &text, error);
        if (status == KVF_OK)
            status = json_parse_as_written(text.bytes ? text.bytes : "", text.size,
                                           o->messages_file, &document, error);
        kvf_text_free(&text);
    }
    if (document)
        turns.messages = document;
    if (status == KVF_OK)
        status = cli_chat_encode_turns(chat, &turns, tokenizer, ids, error);
    json_decref(document);
    return status;
}
