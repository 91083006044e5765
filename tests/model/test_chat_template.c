/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The chat formats against the templates restated in make_chat_goldens.py, text and ids, and what
 * is refused.
 */

#include "chat_template.h"
#include "json.h"
#include "model_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { MESSAGES_MAX = 16 };

static const char *const format_names[] = {[KVF_CHAT_LLAMA3] = "llama3",
                                           [KVF_CHAT_MISTRAL] = "mistral",
                                           [KVF_CHAT_QWEN2] = "qwen2",
                                           [KVF_CHAT_QWEN3] = "qwen3"};

static kvf_tokenizer *open_golden(const char *name)
{
    char path[1024];
    size_t size;
    snprintf(path, sizeof path, "%s/%s.tokenizer.json", KVF_GOLDENS, name);
    char *json = fixture_read(path, &size);
    kvf_tokenizer *tokenizer;
    kvf_error error;
    assert_int_equal(kvf_tokenizer_parse(json, size, NULL, &tokenizer, &error), KVF_OK);
    free(json);
    return tokenizer;
}

static kvf_chat chat_of(const json_value *golden, kvf_chat_message *messages)
{
    kvf_chat chat = {.messages = messages};
    const json_value *format = json_get(golden, "format");
    while (!json_is_string(format, format_names[chat.format]))
        chat.format++;
    const json_value *list = json_get(golden, "chat");
    assert_true(list->size <= MESSAGES_MAX);
    for (const json_value *m = json_first(list); m != NULL; m = json_next(list, m)) {
        char role = m->as.string[0];
        messages[chat.count++] = (kvf_chat_message){.role = role == 'S'   ? KVF_ROLE_SYSTEM
                                                            : role == 'U' ? KVF_ROLE_USER
                                                                          : KVF_ROLE_ASSISTANT,
                                                    .text = m->as.string + 2};
    }
    chat.generate = json_get(golden, "generate") != NULL;
    chat.skip_thinking = json_get(golden, "skip_thinking") != NULL;
    const json_value *date = json_get(golden, "date");
    chat.date = date != NULL ? date->as.string : NULL;
    return chat;
}

static void check_case(const json_value *golden)
{
    kvf_chat_message messages[MESSAGES_MAX];
    kvf_chat chat = chat_of(golden, messages);
    kvf_text text = {0};
    kvf_token_ids ids = {0};
    kvf_error error = {0};
    assert_int_equal(kvf_chat_render(&chat, NULL, &text, &error), KVF_OK);
    const json_value *expected = json_get(golden, "text");
    if (text.size != expected->size || memcmp(text.bytes, expected->as.string, text.size) != 0)
        fail_msg("%s:\n%s\nshould be\n%s", format_names[chat.format], text.bytes,
                 expected->as.string);
    kvf_tokenizer *tokenizer = open_golden(json_get(golden, "tokenizer")->as.string);
    assert_int_equal(kvf_chat_encode(&chat, tokenizer, &ids, &error), KVF_OK);
    const json_value *list = json_get(golden, "ids");
    assert_int_equal(ids.count, list->size);
    for (uint32_t i = 0; i < list->size; i++)
        assert_int_equal(ids.ids[i], list[1 + i].as.integer);
    kvf_tokenizer_close(tokenizer);
    kvf_token_ids_free(NULL, &ids);
    kvf_text_free(NULL, &text);
}

static void matches_goldens(void **state)
{
    (void)state;
    size_t size;
    char *text = fixture_read(KVF_GOLDENS "/chat.json", &size);
    json_document *document;
    kvf_error error;
    assert_int_equal(json_parse(text, size, "chat.json", NULL, &document, &error), KVF_OK);
    const json_value *root = json_root(document);
    for (const json_value *c = json_first(root); c != NULL; c = json_next(root, c))
        check_case(c);
    assert_true(root->size >= 190);
    json_free(document);
    free(text);
}

static void refuses_wrong_turns(void **state)
{
    (void)state;
    const kvf_chat_message list[] = {
        {KVF_ROLE_USER, "a"}, {KVF_ROLE_USER, "b"}, {KVF_ROLE_SYSTEM, "c"}};
    kvf_text text = {0};
    kvf_error error = {0};
    kvf_chat chat = {.format = KVF_CHAT_MISTRAL, .messages = list, .count = 2};
    fixture_expect(kvf_chat_render(&chat, NULL, &text, &error), &error, KVF_INVALID,
                   "message 1 is of role user, but must be of role assistant");
    assert_int_equal(text.size, 0);
    chat.format = KVF_CHAT_QWEN2; /* the others take what comes */
    assert_int_equal(kvf_chat_render(&chat, NULL, &text, &error), KVF_OK);
    chat.count = 3;
    fixture_expect(kvf_chat_render(&chat, NULL, &text, &error), &error, KVF_INVALID,
                   "message 2 is of role system; only the first may be");
    chat.count = 0;
    fixture_expect(kvf_chat_render(&chat, NULL, &text, &error), &error, KVF_INVALID, "no messages");
    kvf_text_free(NULL, &text);
}

static void refuses_broken_text(void **state)
{
    (void)state;
    const kvf_chat_message list[] = {{KVF_ROLE_USER, "ab\xff"}};
    for (int format = KVF_CHAT_LLAMA3; format <= KVF_CHAT_QWEN3; format++) {
        kvf_chat chat = {.format = (kvf_chat_format)format, .messages = list, .count = 1};
        kvf_tokenizer *tokenizer = open_golden("llama3");
        kvf_token_ids ids = {0};
        kvf_error error = {0};
        fixture_expect(kvf_chat_encode(&chat, tokenizer, &ids, &error), &error, KVF_INVALID,
                       "(0xff)");
        assert_int_equal(ids.count, 0);
        kvf_tokenizer_close(tokenizer);
    }
}

static void families_have_formats(void **state)
{
    (void)state;
    assert_int_equal(kvf_architecture_find("LlamaForCausalLM")->chat, KVF_CHAT_LLAMA3);
    assert_int_equal(kvf_architecture_find("MistralForCausalLM")->chat, KVF_CHAT_MISTRAL);
    assert_int_equal(kvf_architecture_find("Qwen2ForCausalLM")->chat, KVF_CHAT_QWEN2);
    assert_int_equal(kvf_architecture_find("Qwen3ForCausalLM")->chat, KVF_CHAT_QWEN3);
}

static void survives_failing_allocation(void **state)
{
    (void)state;
    char long_text[2000];
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = '\0';
    const kvf_chat_message list[] = {{KVF_ROLE_USER, long_text}};
    kvf_chat chat = {.messages = list, .count = 1, .generate = true};
    bool reached = true;
    size_t fail_at = 0;
    while (reached) {
        fixture_heap heap = {.fail_at = ++fail_at};
        kvf_allocator allocator = fixture_allocator(&heap);
        kvf_text text = {0};
        kvf_error error = {0};
        kvf_status status = kvf_chat_render(&chat, &allocator, &text, &error);
        if (status != KVF_OK) {
            fixture_expect(status, &error, KVF_OUT_OF_MEMORY, "could not be allocated");
            assert_int_equal(text.size, 0);
        }
        kvf_text_free(&allocator, &text);
        assert_int_equal(heap.live, 0);
        reached = heap.calls >= fail_at;
    }
    assert_true(fail_at > 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_goldens),
        cmocka_unit_test(refuses_wrong_turns),
        cmocka_unit_test(refuses_broken_text),
        cmocka_unit_test(families_have_formats),
        cmocka_unit_test(survives_failing_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
