/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prints what a template renders, for make_chat_goldens.py, which compares it with Transformers.
 *
 * usage: render_chat TEMPLATE.jinja 0|1 default|on|off YYYY-MM-DD MESSAGE...
 *
 * The second argument: whether the text ends with the opening of an answer; the third: what the
 * template is told of enable_thinking. A message is S:, U: or A: and its text.
 */

#include "chat_template.h"

#include <stdio.h>
#include <string.h>

enum { MESSAGES_MAX = 64 };

static int render(char **argv, int argc, const kvf_text *source)
{
    kvf_chat_message messages[MESSAGES_MAX];
    kvf_text text = {0};
    kvf_error error = {0};
    jinja_day day;
    const kvf_chat_format format = {.source = source->bytes, .bos = "<s>", .eos = "</s>"};
    kvf_chat chat = {
        .format = &format, .messages = messages, .generate = argv[2][0] == '1', .today = &day};
    chat.thinking = strcmp(argv[3], "on") == 0    ? KVF_THINKING_ON
                    : strcmp(argv[3], "off") == 0 ? KVF_THINKING_OFF
                                                  : KVF_THINKING_DEFAULT;
    if (sscanf(argv[4], "%4u-%2u-%2u", &day.year, &day.month, &day.day) != 3)
        return 2;
    for (int i = 5; i < argc && chat.count < MESSAGES_MAX; i++)
        messages[chat.count++] = (kvf_chat_message){argv[i][0] == 'S'   ? KVF_ROLE_SYSTEM
                                                    : argv[i][0] == 'U' ? KVF_ROLE_USER
                                                                        : KVF_ROLE_ASSISTANT,
                                                    argv[i] + 2};
    const kvf_status status = kvf_chat_render(&chat, NULL, &text, &error);
    if (status != KVF_OK)
        fprintf(stderr, "%s\n", error.text);
    else if (text.size > 0)
        fwrite(text.bytes, 1, text.size, stdout);
    kvf_text_free(NULL, &text);
    return status != KVF_OK;
}

int main(int argc, char **argv)
{
    kvf_text source = {0};
    kvf_error error = {0};
    if (argc < 6) {
        fputs("usage: render_chat TEMPLATE 0|1 default|on|off YYYY-MM-DD MESSAGE...\n", stderr);
        return 2;
    }
    if (model_read_file(NULL, argv[1], 1u << 20, &source, &error) != KVF_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 2;
    }
    const int result = render(argv, argc, &source);
    kvf_text_free(NULL, &source);
    return result;
}
