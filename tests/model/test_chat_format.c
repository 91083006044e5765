/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chat formats against what Jinja renders by templates of their shape (goldens/chat.json, written
 * by make_chat_goldens.py). Then messages, what is refused and how, the markers, and by what a
 * model's own template is known; and thoughts in answers.
 */

#include "chat_format.h"
#include "json.h"
#include "model_fixture.h"
#include "refusals.h"
#include "unit.h"
#include "watched_heap.h"

enum { MESSAGES_MAX = 16 };

#define NAME(name) name,
static const char *const names[] = {KVF_CHAT_FORMAT_LIST(NAME)};
enum { FORMATS = sizeof names / sizeof *names };

/* ---- goldens ---- */

static kvf_chat chat_of(json_t *list, kvf_chat_message *messages)
{
    kvf_chat chat = {.messages = messages};
    json_t *m;
    size_t i;
    assert_true(json_array_size(list) <= MESSAGES_MAX);
    json_array_foreach (list, i, m) {
        const char role = json_string_value(m)[0];
        messages[chat.count++] = (kvf_chat_message){role == 'S'   ? KVF_ROLE_SYSTEM
                                                    : role == 'U' ? KVF_ROLE_USER
                                                                  : KVF_ROLE_ASSISTANT,
                                                    json_string_value(m) + 2,
                                                    {0}};
    }
    return chat;
}

/* @p expected is a text, or {"refused": why}. */
static void check_render(const kvf_chat *chat, json_t *expected, const char *name)
{
    kvf_text text = {0};
    kvf_error error = {0};
    const kvf_status status = kvf_chat_render(chat, &text, &error);
    if (json_is_object(expected)) {
        assert_int_equal(status, KVF_INVALID);
        assert_non_null(
            strstr(error.text, json_string_value(json_object_get(expected, "refused"))));
        assert_non_null(strstr(error.text, name));
    } else if (status != KVF_OK) {
        fail_msg("%s: %s", name, error.text);
    } else if (text.size != json_string_length(expected) ||
               (text.size && memcmp(text.bytes, json_string_value(expected), text.size) != 0)) {
        fail_msg("%s:\n%s\nshould be\n%s", name, text.bytes, json_string_value(expected));
    }
    kvf_text_free(&text);
}

/* [format, chat, whether an answer is opened, enable_thinking or null, text] */
TEST(renders_as_jinja)
{
    size_t size, checked = 0, refused = 0;
    kvf_error error;
    json_t *document;
    char *json = fixture_read(KVF_GOLDENS "/chat.json", &size);
    assert_int_equal(json_parse(json, size, "chat.json", &document, &error), KVF_OK);
    json_t *chats = json_object_get(document, "chats");
    json_t *cases = json_object_get(document, "cases");
    json_t *c;
    json_array_foreach (cases, checked, c) {
        kvf_chat_message messages[MESSAGES_MAX];
        kvf_chat chat = chat_of(
            json_array_get(chats, (size_t)json_number_value(json_array_get(c, 1))), messages);
        const char *name = json_string_value(json_array_get(c, 0));
        json_t *thinking = json_array_get(c, 3);
        chat.format = kvf_chat_format_find(name);
        chat.generate = json_is_true(json_array_get(c, 2));
        chat.thinking = json_is_null(thinking)   ? KVF_THINKING_DEFAULT
                        : json_is_true(thinking) ? KVF_THINKING_ON
                                                 : KVF_THINKING_OFF;
        check_render(&chat, json_array_get(c, 4), name);
        refused += json_is_object(json_array_get(c, 4));
    }
    const size_t chat_count = json_array_size(chats);
    assert_true(chat_count >= 24 && checked == chat_count * 2 * (FORMATS + 2));
    assert_true(refused > 0 && refused < checked / 10);
    json_decref(document);
    free(json);
}

TEST(every_name_has_a_format)
{
    for (size_t i = 0; i < FORMATS; i++) {
        const kvf_chat_format *format = kvf_chat_format_find(names[i]);
        assert_non_null(format);
        assert_string_equal(kvf_chat_format_name(format), names[i]);
        assert_int_equal(kvf_chat_format_thinks(format), strcmp(names[i], "qwen3") == 0);
    }
    assert_null(kvf_chat_format_find("nobody"));
    assert_null(kvf_chat_role_name(KVF_ROLE_ASSISTANT + 1));
}

/* ---- messages ---- */

TEST(parts_become_lines)
{
    static const char json[] =
        "{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"\"}, "
        "{\"type\": \"text\", \"text\": \"b\"}, {\"type\": \"text\", \"text\": \"c\"}]}";
    static const char none[] = "{\"role\": \"assistant\", \"content\": []}";
    json_t *document;
    kvf_chat_message message;
    kvf_error error;
    assert_int_equal(json_parse(json, sizeof json - 1, "m", &document, &error), KVF_OK);
    assert_int_equal(kvf_chat_message_read(document, "m", &message, &error), KVF_OK);
    assert_string_equal(message.text, "\nb\nc");
    assert_int_equal(message.role, KVF_ROLE_USER);
    kvf_text_free(&message.joined);
    json_decref(document);
    assert_int_equal(json_parse(none, sizeof none - 1, "m", &document, &error), KVF_OK);
    assert_int_equal(kvf_chat_message_read(document, "m", &message, &error), KVF_OK);
    assert_string_equal(message.text, "");
    json_decref(document);
}

/* FIELDS of a message. */
static kvf_status read_row(void *user, char *change, size_t size, kvf_error *error)
{
    json_t *document;
    kvf_chat_message message;
    kvf_status status = json_parse_as_written(change, strlen(change), "messages", &document, error);
    if (status != KVF_OK)
        return status;
    status = kvf_chat_message_read(document, "m.json: message 3", &message, error);
    kvf_text_free(&message.joined);
    json_decref(document);
    return status;
}

TEST(refuses_messages)
{
    refusals_check(&(refusals){.path = "tests/model/message.refusals", .call = read_row});
}

/* The text keeps its beginning, whatever fails. */
TEST(a_failure_leaves_the_text)
{
    static const kvf_chat_message list[] = {{KVF_ROLE_USER, "a", {0}}, {KVF_ROLE_USER, "b", {0}}};
    const kvf_chat_format *mistral = kvf_chat_format_find("mistral");
    const kvf_chat chat = {.format = mistral, .messages = list, .count = 2};
    const kvf_chat none = {.format = mistral};
    kvf_text text = {0};
    kvf_error error = {0};
    assert_int_equal(kvf_text_append(&text, "kept", 4, &error), KVF_OK);
    fixture_expect(kvf_chat_render(&none, &text, &error), &error, KVF_INVALID, "no messages");
    fixture_expect(kvf_chat_render(&chat, &text, &error), &error, KVF_INVALID,
                   "the chat format mistral refuses these messages: user and assistant must take "
                   "turns");
    assert_string_equal(text.bytes, "kept");
    kvf_text_free(&text);
    for (size_t i = 0; i < FORMATS; i++) {
        const kvf_chat one = {
            .format = kvf_chat_format_find(names[i]), .messages = list, .count = 1};
        heap h = {.fail_at = 1};
        heap_watch(&h);
        assert_int_equal(kvf_chat_render(&one, &text, &error), KVF_OUT_OF_MEMORY);
        kvf_text_free(&text);
        assert_int_equal(heap_left(), 0);
    }
}

TEST(refuses_broken_text)
{
    const kvf_chat_message list[] = {{KVF_ROLE_USER, "ab\xff", {0}}};
    kvf_tokenizer *tokenizer = fixture_tokenizer("llama3");
    for (size_t i = 0; i < FORMATS; i++) {
        const kvf_chat chat = {
            .format = kvf_chat_format_find(names[i]), .messages = list, .count = 1};
        kvf_token_ids ids = {0};
        kvf_error error = {0};
        fixture_expect(kvf_chat_encode(&chat, tokenizer, &ids, &error), &error, KVF_INVALID,
                       "(0xff)");
        assert_int_equal(ids.count, 0);
    }
    kvf_tokenizer_close(tokenizer);
}

/* ---- markers ---- */

TEST(checks_markers)
{
    kvf_tokenizer *tokenizer = fixture_tokenizer("llama3");
    kvf_error error = {0};
    uint32_t end, eot;
    assert_true(kvf_tokenizer_find(tokenizer, "<|eot_id|>", &eot));
    assert_int_equal(kvf_chat_check(kvf_chat_format_find("llama3"), tokenizer, &end, &error),
                     KVF_OK);
    assert_int_equal(end, eot);
    fixture_expect(kvf_chat_check(kvf_chat_format_find("chatml"), tokenizer, &end, &error), &error,
                   KVF_INVALID, "chat format chatml writes '<|im_start|>', which is no token");
    kvf_tokenizer_close(tokenizer);
}

/* ---- the format of a model ---- */

static void expect_format(const char *source, const char *name)
{
    const kvf_chat_format *format = kvf_chat_format_of(source);
    if (!name && format)
        fail_msg("'%s' is %s", source, kvf_chat_format_name(format));
    if (name && (!format || strcmp(kvf_chat_format_name(format), name) != 0))
        fail_msg("'%s' is %s, not %s", source, format ? kvf_chat_format_name(format) : "not known",
                 name);
}

/* Pieces of templates as families publish them. */
TEST(a_template_is_known_by_its_markers)
{
    expect_format("{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'}}",
                  "chatml");
    expect_format("{%- set content = content.split('</think>')[-1] %}{{- '<|im_start|>' + "
                  "message.role }}<|im_end|>",
                  "qwen3");
    expect_format("{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}", "phi4");
    expect_format("{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>'",
                  "llama3");
    expect_format("{{'<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}"
                  "{{- '<|assistant|>\n' -}}",
                  "phi3");
    expect_format("{{ '<|user|>\n' + message['content'] + eos_token }}{{ '<|assistant|>' }}",
                  "zephyr");
    expect_format("{{ '<|user|>\n' + message['content'] }}{{ '<|assistant|>\n' + message['content']"
                  " + eos_token + '\n' }}",
                  NULL);
    expect_format("{{ '[INST] ' + message['content'] + ' [/INST]' }}", "mistral");
    expect_format("{{ '[INST] <<SYS>>' + message['content'] + ' [/INST]' }}", NULL);
    expect_format("[AVAILABLE_TOOLS] {{- \"[INST] \" + message[\"content\"] + \"[/INST]\" }}",
                  "mistral-v3");
    expect_format("[AVAILABLE_TOOLS]{{- \"[INST]\" + message[\"content\"] + \"[/INST]\" }}",
                  "mistral-tekken");
    expect_format("[SYSTEM_PROMPT][AVAILABLE_TOOLS]{{- \"[INST]\" + message[\"content\"] }}", NULL);
    expect_format("{{'<\xef\xbd\x9c"
                  "Assistant\xef\xbd\x9c><think>\\n'}}",
                  "deepseek-r1");
    expect_format("<|start|>assistant<|channel|>analysis<|message|><|end|>", NULL);
    expect_format("<start_of_turn>user", NULL);
    expect_format("", NULL);
}

static void expect_read(const char *model, const char *name)
{
    const kvf_chat_format *format;
    kvf_error error = {0};
    fixture_must(kvf_chat_format_read(model, &format, &error), &error);
    assert_string_equal(kvf_chat_format_name(format), name);
}

TEST(finds_the_template)
{
    static const char config[] = "tokenizer_config.json", jinja[] = "chat_template.jinja";
    char *folder = fixture_directory_create();
    const kvf_chat_format *format;
    kvf_error error = {0};
    fixture_expect(kvf_chat_format_read(folder, &format, &error), &error, KVF_INVALID,
                   "the model has no chat template");
    fixture_write_text(folder, config, "{\"chat_template\": null}");
    fixture_expect(kvf_chat_format_read(folder, &format, &error), &error, KVF_INVALID,
                   "the model has no chat template");
    fixture_write_text(folder, config, "{\"chat_template\": \"<|start_header_id|>\"}");
    expect_read(folder, "llama3");
    fixture_write_text(folder, config,
                       "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"<|im_sep|>\"}"
                       ", {\"name\": \"default\", \"template\": \"<|start_header_id|>\"}]}");
    expect_read(folder, "llama3");
    fixture_write_text(folder, jinja, "<|im_start|><|im_end|>");
    expect_read(folder, "chatml");
    fixture_write_text(folder, jinja, "");
    expect_read(folder, "llama3");
    fixture_write_text(folder, jinja, "{{ messages }}");
    fixture_expect(kvf_chat_format_read(folder, &format, &error), &error, KVF_UNSUPPORTED,
                   "of no format that is known");
    fixture_write_text(folder, jinja, "five\xff");
    fixture_expect(kvf_chat_format_read(folder, &format, &error), &error, KVF_CORRUPT,
                   "chat_template.jinja is not UTF-8: byte 4 does not belong there");
    fixture_write_text(folder, jinja, "");
    fixture_write_text(folder, config, "{\"chat_template\": 3}");
    fixture_expect(kvf_chat_format_read(folder, &format, &error), &error, KVF_CORRUPT,
                   "tokenizer_config.json: chat_template must be a text");
    fixture_write_text(folder, config, "{");
    heap h = {0};
    heap_watch(&h);
    fixture_expect(kvf_chat_format_read(folder, &format, &error), &error, KVF_CORRUPT,
                   "tokenizer_config.json");
    assert_int_equal(heap_left(), 0);
    fixture_directory_remove(folder);
}

/* ---- thoughts and answers apart: with and without markers, opened by the prompt, cut off ---- */

static void expect_parts(const char *text, bool open, const char *reasoning, const char *answer)
{
    const kvf_thought parts = kvf_thought_split(text, strlen(text), open);
    assert_int_equal(parts.answer_size, strlen(answer));
    assert_memory_equal(parts.answer, answer, parts.answer_size);
    assert_int_equal(!parts.reasoning, !reasoning);
    if (!reasoning)
        return;
    assert_int_equal(parts.reasoning_size, strlen(reasoning));
    assert_memory_equal(parts.reasoning, reasoning, parts.reasoning_size);
}

TEST(a_thought_is_in_front_of_the_answer)
{
    expect_parts("\n<think>\nwhy?\n</think>\n\nbecause", false, "why?", "because");
    expect_parts("why?</think>because </think>", true, "why?", "because </think>");
    expect_parts("<think>why?</think>because", true, "why?", "because");
    expect_parts("<think></think>because", false, "", "because");
}

TEST(without_one_all_is_answer)
{
    expect_parts("because", false, NULL, "because");
    expect_parts("", false, NULL, "");
    expect_parts("it says </think> here", false, NULL, "it says </think> here");
    expect_parts("say <think>a</think>", false, NULL, "say <think>a</think>");
}

TEST(one_that_was_cut_is_all_reasoning)
{
    expect_parts("<think>why", false, "why", "");
    expect_parts("why</thin", true, "why</thin", "");
    expect_parts("", true, "", "");
    expect_parts("<think>", false, "", "");
    expect_parts("<thin", false, NULL, "<thin");
}

TEST(a_prompt_may_open_it)
{
    assert_true(kvf_thought_is_open("x<think>\n", 9));
    assert_true(kvf_thought_is_open("<think>", 7));
    assert_false(kvf_thought_is_open("<think>\n\n</think>\n\n", 19));
    assert_false(kvf_thought_is_open("think>", 6));
    assert_false(kvf_thought_is_open("", 0));
}
