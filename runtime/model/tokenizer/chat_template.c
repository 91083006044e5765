/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The chat formats; see the header. Each function below is one family's published template without
 * the parts for tools, in the order in which the template writes.
 */

#include "chat_template.h"

#include "utf8.h"

#include <string.h>

/* A piece of text, not zero-terminated. */
typedef struct chat_span {
    const char *bytes;
    size_t size;
} chat_span;

/* The first failure sticks, so that a template reads like the text it writes. */
typedef struct chat_writer {
    const kvf_allocator *allocator;
    kvf_text *text;
    kvf_error *error;
    kvf_status status;
} chat_writer;

static chat_span whole(const char *text)
{
    return (chat_span){text, strlen(text)};
}

static void put_span(chat_writer *writer, chat_span span)
{
    if (writer->status == KVF_OK)
        writer->status =
            kvf_text_append(writer->allocator, writer->text, span.bytes, span.size, writer->error);
}

static void put(chat_writer *writer, const char *text)
{
    put_span(writer, whole(text));
}

static const char *role_name(kvf_chat_role role)
{
    static const char *const names[] = {
        [KVF_ROLE_SYSTEM] = "system", [KVF_ROLE_USER] = "user", [KVF_ROLE_ASSISTANT] = "assistant"};
    return names[role];
}

static bool has_system(const kvf_chat *chat)
{
    return chat->messages[0].role == KVF_ROLE_SYSTEM;
}

/* ---- trimming ---- */

/* What Jinja's trim removes, which is what Python's str.strip does: White_Space and 0x1c to 0x1f.
 */
static bool is_blank(uint32_t code)
{
    return utf8_is_space(code) || (code >= 0x1c && code <= 0x1f);
}

static chat_span trim(const char *text)
{
    chat_span span = whole(text);
    uint32_t code = 0;
    while (span.size > 0) {
        size_t length = utf8_decode(span.bytes, span.size, &code);
        if (length == 0 || !is_blank(code))
            break;
        span.bytes += length;
        span.size -= length;
    }
    while (span.size > 0) {
        size_t start = span.size - 1;
        while (start > 0 && ((unsigned char)span.bytes[start] & 0xc0) == 0x80)
            start--;
        size_t length = utf8_decode(span.bytes + start, span.size - start, &code);
        if (length != span.size - start || !is_blank(code))
            break;
        span.size = start;
    }
    return span;
}

static chat_span trim_newlines_left(chat_span span)
{
    while (span.size > 0 && span.bytes[0] == '\n') {
        span.bytes++;
        span.size--;
    }
    return span;
}

static chat_span trim_newlines_right(chat_span span)
{
    while (span.size > 0 && span.bytes[span.size - 1] == '\n')
        span.size--;
    return span;
}

/* ---- families ---- */

static void write_llama3(chat_writer *writer, const kvf_chat *chat)
{
    size_t first = has_system(chat) ? 1 : 0;
    put(writer, "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
                "Cutting Knowledge Date: December 2023\nToday Date: ");
    put(writer, chat->date ? chat->date : "26 Jul 2024");
    put(writer, "\n\n");
    if (first == 1)
        put_span(writer, trim(chat->messages[0].text));
    put(writer, "<|eot_id|>");
    for (size_t i = first; i < chat->count; i++) {
        put(writer, "<|start_header_id|>");
        put(writer, role_name(chat->messages[i].role));
        put(writer, "<|end_header_id|>\n\n");
        put_span(writer, trim(chat->messages[i].text));
        put(writer, "<|eot_id|>");
    }
    if (chat->generate)
        put(writer, "<|start_header_id|>assistant<|end_header_id|>\n\n");
}

/* The system prompt goes before the last user message, and nowhere if the chat does not end with
 * one. */
static void write_mistral(chat_writer *writer, const kvf_chat *chat)
{
    size_t first = has_system(chat) ? 1 : 0;
    put(writer, "<s>");
    for (size_t i = first; i < chat->count; i++) {
        const kvf_chat_message *message = &chat->messages[i];
        kvf_chat_role expected = (i - first) % 2 == 0 ? KVF_ROLE_USER : KVF_ROLE_ASSISTANT;
        if (message->role != expected && writer->status == KVF_OK)
            writer->status =
                model_fail(writer->error, KVF_INVALID,
                           "message %zu is of role %s, but must be of role %s: after the "
                           "system message, user and assistant take turns",
                           i, role_name(message->role), role_name(expected));
        if (message->role == KVF_ROLE_USER) {
            put(writer, "[INST]");
            if (i + 1 == chat->count && first == 1) {
                put(writer, chat->messages[0].text);
                put(writer, "\n\n");
            }
            put(writer, message->text);
            put(writer, "[/INST]");
        } else {
            put(writer, message->text);
            put(writer, "</s>");
        }
    }
}

static void write_chatml_turn(chat_writer *writer, const kvf_chat_message *message)
{
    put(writer, "<|im_start|>");
    put(writer, role_name(message->role));
    put(writer, "\n");
    put(writer, message->text);
    put(writer, "<|im_end|>\n");
}

static void write_qwen2(chat_writer *writer, const kvf_chat *chat)
{
    if (!has_system(chat))
        put(writer, "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
                    "assistant.<|im_end|>\n");
    for (size_t i = 0; i < chat->count; i++)
        write_chatml_turn(writer, &chat->messages[i]);
    if (chat->generate)
        put(writer, "<|im_start|>assistant\n");
}

static bool ends_with(const char *text, const char *end)
{
    size_t size = strlen(text);
    size_t end_size = strlen(end);
    return size >= end_size && strcmp(text + size - end_size, end) == 0;
}

/* The last message of the user that is no answer of a tool; the last message if there is none. */
static size_t last_query(const kvf_chat *chat)
{
    static const char open[] = "<tool_response>";
    for (size_t i = chat->count; i-- > 0;) {
        const kvf_chat_message *message = &chat->messages[i];
        if (message->role == KVF_ROLE_USER &&
            !(strncmp(message->text, open, sizeof open - 1) == 0 &&
              ends_with(message->text, "</tool_response>")))
            return i;
    }
    return chat->count - 1;
}

/* The last place where @p needle is in span, or NULL. */
static const char *find_last(chat_span span, const char *needle)
{
    size_t size = strlen(needle);
    for (size_t at = span.size; at-- > 0;)
        if (span.size - at >= size && memcmp(span.bytes + at, needle, size) == 0)
            return span.bytes + at;
    return NULL;
}

/* What stands between <think> and the first </think>, and what stands after the last. */
static void split_thinking(const char *text, chat_span *thinking, chat_span *answer)
{
    static const char open[] = "<think>";
    static const char close[] = "</think>";
    *answer = whole(text);
    *thinking = (chat_span){text, 0};
    const char *first = strstr(text, close);
    if (!first)
        return;
    const char *last = find_last(*answer, close);
    *answer = trim_newlines_left(whole(last + sizeof close - 1));
    *thinking = trim_newlines_right((chat_span){text, (size_t)(first - text)});
    const char *start = find_last(*thinking, open);
    if (start) {
        start += sizeof open - 1;
        thinking->size -= (size_t)(start - thinking->bytes);
        thinking->bytes = start;
    }
    *thinking = trim_newlines_left(*thinking);
}

static void write_qwen3(chat_writer *writer, const kvf_chat *chat)
{
    size_t query = last_query(chat);
    for (size_t i = 0; i < chat->count; i++) {
        const kvf_chat_message *message = &chat->messages[i];
        if (message->role != KVF_ROLE_ASSISTANT) {
            write_chatml_turn(writer, message);
            continue;
        }
        chat_span thinking;
        chat_span answer;
        split_thinking(message->text, &thinking, &answer);
        put(writer, "<|im_start|>assistant\n");
        if (i > query && (i + 1 == chat->count || thinking.size != 0)) {
            put(writer, "<think>\n");
            put_span(writer, trim_newlines_right(trim_newlines_left(thinking)));
            put(writer, "\n</think>\n\n");
            answer = trim_newlines_left(answer);
        }
        put_span(writer, answer);
        put(writer, "<|im_end|>\n");
    }
    if (chat->generate)
        put(writer, chat->skip_thinking ? "<|im_start|>assistant\n<think>\n\n</think>\n\n"
                                        : "<|im_start|>assistant\n");
}

/* ---- public ---- */

kvf_status kvf_chat_render(const kvf_chat *chat, const kvf_allocator *allocator, kvf_text *text,
                           kvf_error *error)
{
    static void (*const write[])(chat_writer *, const kvf_chat *) = {
        [KVF_CHAT_LLAMA3] = write_llama3,
        [KVF_CHAT_MISTRAL] = write_mistral,
        [KVF_CHAT_QWEN2] = write_qwen2,
        [KVF_CHAT_QWEN3] = write_qwen3,
    };
    if (chat->count == 0)
        return model_fail(error, KVF_INVALID, "the chat has no messages; give at least one");
    for (size_t i = 1; i < chat->count; i++)
        if (chat->messages[i].role == KVF_ROLE_SYSTEM)
            return model_fail(error, KVF_INVALID,
                              "message %zu is of role system; only the first may be", i);
    chat_writer writer = {.allocator = allocator, .text = text, .error = error};
    size_t size = text->size;
    write[chat->format](&writer, chat);
    if (writer.status != KVF_OK && text->capacity != 0) {
        text->size = size;
        text->bytes[size] = '\0';
    }
    return writer.status;
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
