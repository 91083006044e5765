/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prints what a template renders, for make_chat_goldens.py, which compares it with Transformers.
 *
 * usage: render_chat TEMPLATE.jinja 0|1 default|on|off YYYY-MM-DD MESSAGES TOOLS
 *
 * The second argument: whether the text ends with the opening of an answer; the third: what the
 * template is told of enable_thinking. Messages and tools are lists in JSON; null is no tools.
 */

#include "chat_template.h"

#include <stdio.h>
#include <string.h>

enum { MESSAGES_MAX = 64 };

static kvf_status read_messages(const json_value *list, kvf_chat_message *messages, size_t *count,
                                kvf_error *error)
{
    for (const json_value *m = json_first(list); m && *count < MESSAGES_MAX; m = json_next(list, m))
        KVF_TRY(kvf_chat_message_read(m, "a message", &messages[(*count)++], error));
    return KVF_OK;
}

static kvf_status render(char **argv, const kvf_text *source, kvf_text *text, kvf_error *error)
{
    kvf_chat_message messages[MESSAGES_MAX];
    json_document *list = NULL, *tools = NULL;
    jinja_day day;
    const kvf_chat_format format = {.source = source->bytes, .bos = "<s>", .eos = "</s>"};
    kvf_chat chat = {
        .format = &format, .messages = messages, .generate = argv[2][0] == '1', .today = &day};
    chat.thinking = strcmp(argv[3], "on") == 0    ? KVF_THINKING_ON
                    : strcmp(argv[3], "off") == 0 ? KVF_THINKING_OFF
                                                  : KVF_THINKING_DEFAULT;
    if (sscanf(argv[4], "%4u-%2u-%2u", &day.year, &day.month, &day.day) != 3)
        return KVF_INVALID;
    kvf_status status = json_parse_as_written(argv[5], strlen(argv[5]), "messages", &list, error);
    if (status == KVF_OK)
        status = json_parse_as_written(argv[6], strlen(argv[6]), "tools", &tools, error);
    if (status == KVF_OK)
        status = read_messages(json_root(list), messages, &chat.count, error);
    if (status == KVF_OK) {
        chat.tools = json_root(tools)->kind == JSON_ARRAY ? json_root(tools) : NULL;
        status = kvf_chat_render(&chat, text, error);
    }
    json_free(list);
    json_free(tools);
    return status;
}

int main(int argc, char **argv)
{
    kvf_text source = {0}, text = {0};
    kvf_error error = {0};
    if (argc != 7) {
        fputs("usage: render_chat TEMPLATE 0|1 default|on|off YYYY-MM-DD MESSAGES TOOLS\n", stderr);
        return 2;
    }
    if (model_read_file(argv[1], 1u << 20, &source, &error) != KVF_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 2;
    }
    const kvf_status status = render(argv, &source, &text, &error);
    if (status != KVF_OK)
        fprintf(stderr, "%s\n", error.text);
    else if (text.size > 0)
        fwrite(text.bytes, 1, text.size, stdout);
    kvf_text_free(&text);
    kvf_text_free(&source);
    return status != KVF_OK;
}
