/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The input is a chat template for a few messages. Whatever it is: it ends within its bounds, an
 * error names it, a failure leaves the text as it was, and nothing leaks when an allocation fails.
 */

#include "chat_template.h"
#include "fuzz_heap.h"
#include "fuzz_input.h"
#include "watched_heap.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const kvf_chat_message messages[] = {{KVF_ROLE_SYSTEM, " be\n", NULL},
                                                {KVF_ROLE_USER, "a \xc3\xa9", NULL},
                                                {KVF_ROLE_ASSISTANT, "<think>b</think>c", NULL},
                                                {KVF_ROLE_USER, "", NULL}};
    static const jinja_day day = {2026, 3, 9};
    heap h = {.fail_at = fuzz_heap_choose(data, size)};
    kvf_text text = {0}, source = {0};
    kvf_error error = {.text = ""};
    if (size == 0 || kvf_text_append(&source, data, size, &error) != KVF_OK)
        return 0;
    const kvf_chat_format format = {.source = source.bytes, .bos = "<s>", .eos = "</s>"};
    const kvf_chat chat = {.format = &format,
                           .messages = messages + data[0] % 2,
                           .count = 4u - data[0] % 2,
                           .generate = data[0] & 4,
                           .thinking = (kvf_chat_thinking)(data[0] % 3),
                           .today = data[0] & 8 ? &day : NULL};
    heap_watch(&h);
    const kvf_status status = kvf_chat_render(&chat, &text, &error);
    fuzz_heap_told(&h, status);
    fuzz_require(status == KVF_OK || (error.status == status && error.text[0] && text.size == 0));
    fuzz_require(text.size == 0 || text.bytes[text.size] == '\0');
    kvf_text_free(&text);
    fuzz_require(heap_left() == 0);
    kvf_text_free(&source);
    return 0;
}
