/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chat templates against what Transformers renders by them (goldens/chat.json, written by
 * make_chat_goldens.py): chats, the language itself, and ids. Then what is refused and how, the
 * bounds, the markers, and where a model keeps its template.
 */

#include "chat_template.h"
#include "gguf_image.h"
#include "json.h"
#include "model_fixture.h"
#include "refusals.h"
#include "unit.h"
#include "watched_heap.h"

enum { MESSAGES_MAX = 16 };

static kvf_tokenizer *open_golden(const char *name)
{
    char path[1024];
    size_t size;
    snprintf(path, sizeof path, "%s/%s.tokenizer.json", KVF_GOLDENS, name);
    char *json = fixture_read(path, &size);
    kvf_tokenizer *tokenizer;
    kvf_error error;
    assert_int_equal(kvf_tokenizer_parse(json, size, &tokenizer, &error), KVF_OK);
    free(json);
    return tokenizer;
}

/* ---- goldens ---- */

typedef struct goldens {
    char *text;
    json_document *document;
    const json_value *root;
    jinja_day day;
} goldens;

static const json_value *at(const json_value *list, uint32_t index)
{
    const json_value *one = json_first(list);
    while (index-- > 0)
        one = json_next(list, one);
    return one;
}

static goldens open_goldens(void)
{
    goldens g = {0};
    size_t size;
    kvf_error error;
    g.text = fixture_read(KVF_GOLDENS "/chat.json", &size);
    assert_int_equal(json_parse_as_written(g.text, size, "chat.json", &g.document, &error), KVF_OK);
    g.root = json_root(g.document);
    const json_value *day = json_get(g.root, "day");
    g.day = (jinja_day){(uint32_t)at(day, 0)->as.integer, (uint32_t)at(day, 1)->as.integer,
                        (uint32_t)at(day, 2)->as.integer};
    return g;
}

static void close_goldens(goldens *g)
{
    json_free(g->document);
    free(g->text);
}

static const char *text_of(const json_value *value)
{
    return value && value->kind == JSON_STRING ? value->as.string : NULL;
}

static kvf_chat_format format_of(const json_value *template)
{
    return (kvf_chat_format){.source = text_of(json_get(template, "source")),
                             .bos = text_of(json_get(template, "bos")),
                             .eos = text_of(json_get(template, "eos"))};
}

static kvf_chat chat_of(const goldens *g, uint32_t index, kvf_chat_message *messages)
{
    kvf_chat chat = {.messages = messages, .today = &g->day};
    const json_value *list = at(json_get(g->root, "chats"), index);
    assert_true(list->size <= MESSAGES_MAX);
    for (const json_value *m = json_first(list); m; m = json_next(list, m)) {
        const char role = m->as.string[0];
        messages[chat.count++] = (kvf_chat_message){role == 'S'   ? KVF_ROLE_SYSTEM
                                                    : role == 'U' ? KVF_ROLE_USER
                                                                  : KVF_ROLE_ASSISTANT,
                                                    m->as.string + 2, NULL};
    }
    return chat;
}

/* @p expected is null where Transformers refuses. */
static void check_render(const kvf_chat *chat, const json_value *expected, const char *name)
{
    kvf_text text = {0};
    kvf_error error = {0};
    const kvf_status status = kvf_chat_render(chat, &text, &error);
    if (expected->kind == JSON_NULL) {
        if (status == KVF_OK)
            fail_msg("%s: rendered what Transformers refuses: %s", name, text.bytes);
        assert_int_equal(error.status, status);
        assert_non_null(strstr(error.text, "the chat template"));
    } else if (status != KVF_OK) {
        fail_msg("%s: %s", name, error.text);
    } else if (text.size != expected->size ||
               (text.size && memcmp(text.bytes, expected->as.string, text.size) != 0)) {
        fail_msg("%s:\n%s\nshould be\n%s", name, text.bytes, expected->as.string);
    }
    kvf_text_free(&text);
}

static void renders_as_transformers(void **state)
{
    goldens g = open_goldens();
    uint32_t checked = 0;
    const json_value *templates = json_get(g.root, "templates");
    for (const json_value *t = json_first(templates); t; t = json_next(templates, t)) {
        const kvf_chat_format format = format_of(t);
        const json_value *cases = json_get(t, "cases");
        for (const json_value *c = json_first(cases); c; c = json_next(cases, c), checked++) {
            kvf_chat_message messages[MESSAGES_MAX];
            kvf_chat chat = chat_of(&g, (uint32_t)at(c, 0)->as.integer, messages);
            const json_value *thinking = at(c, 2);
            chat.format = &format;
            chat.generate = at(c, 1)->kind == JSON_TRUE;
            chat.thinking = thinking->kind == JSON_NULL   ? KVF_THINKING_DEFAULT
                            : thinking->kind == JSON_TRUE ? KVF_THINKING_ON
                                                          : KVF_THINKING_OFF;
            check_render(&chat, at(c, 3), json_get(t, "name")->as.string);
        }
    }
    assert_true(checked >= 600);
    close_goldens(&g);
}

static void speaks_the_language(void **state)
{
    goldens g = open_goldens();
    const json_value *snippets = json_get(g.root, "snippets");
    for (const json_value *s = json_first(snippets); s; s = json_next(snippets, s)) {
        const kvf_chat_format format = {.source = at(s, 0)->as.string, .bos = "<s>", .eos = "</s>"};
        kvf_chat_message messages[MESSAGES_MAX];
        kvf_chat chat = chat_of(&g, 3, messages);
        chat.format = &format;
        chat.generate = true;
        check_render(&chat, at(s, 1), format.source);
    }
    assert_true(snippets->size >= 85);
    close_goldens(&g);
}

static void expect_text(const char *source, const char *message, const char *expected)
{
    const kvf_chat_message list = {KVF_ROLE_USER, message, NULL};
    const kvf_chat_format format = {.source = source};
    const kvf_chat chat = {.format = &format, .messages = &list, .count = 1};
    kvf_text text = {0};
    kvf_error error = {0};
    if (kvf_chat_render(&chat, &text, &error) != KVF_OK)
        fail_msg("%s: %s", source, error.text);
    assert_string_equal(text.bytes, expected);
    kvf_text_free(&text);
}

static void reads_a_list_once(void **state)
{
    expect_text("{% set n = namespace(x=0) %}"
                "{% macro f() %}{% set n.x = n.x + 1 %}{{ n.x }}{% endmacro %}"
                "{{ (f(), 2)[0] }}{{ ((f(), 1), 2)[0][0] }}{{ (f(),)|length }}{{ n.x }}",
                "", "1213");
}

/* A long text with many matches stays within the memory of a template. */
static void replaces_in_a_long_text(void **state)
{
    enum { LINES = 20000 };
    char *lines = malloc(4 * LINES + 1), *words = malloc(5 * LINES + 1);
    assert_true(lines && words);
    for (size_t i = 0; i < LINES; i++) {
        strcpy(lines + 4 * i, "abc\n");
        strcpy(words + 5 * i, "abc, ");
    }
    expect_text("{{ messages[0].content.replace('\n', ', ') }}", lines, words);
    expect_text("{{ messages[0].content.split('\n')|join(', ') }}", lines, words);
    free(lines);
    free(words);
}

static void gives_the_ids_of_tokenizers(void **state)
{
    goldens g = open_goldens();
    const json_value *rows = json_get(g.root, "ids");
    for (const json_value *r = json_first(rows); r; r = json_next(rows, r)) {
        const json_value *templates = json_get(g.root, "templates"), *t = json_first(templates);
        while (!json_is_string(json_get(t, "name"), at(r, 0)->as.string))
            t = json_next(templates, t);
        const kvf_chat_format format = format_of(t);
        kvf_chat_message messages[MESSAGES_MAX];
        kvf_chat chat = chat_of(&g, (uint32_t)at(r, 2)->as.integer, messages);
        kvf_token_ids ids = {0};
        kvf_error error = {0};
        kvf_tokenizer *tokenizer = open_golden(at(r, 1)->as.string);
        chat.format = &format;
        chat.generate = true;
        assert_int_equal(kvf_chat_encode(&chat, tokenizer, &ids, &error), KVF_OK);
        assert_int_equal(ids.count, at(r, 3)->size);
        for (uint32_t i = 0; i < ids.count; i++)
            assert_int_equal(ids.ids[i], at(r, 3)[1 + i].as.integer);
        kvf_token_ids_free(&ids);
        kvf_tokenizer_close(tokenizer);
    }
    assert_int_equal(rows->size, 15);
    close_goldens(&g);
}

/* ---- formats by name ---- */

/* Chats as the command makes them: a system prompt at most first, then turns, a question last. */
static bool is_plain(const kvf_chat *chat)
{
    const size_t first = chat->messages[0].role == KVF_ROLE_SYSTEM;
    for (size_t i = first; i < chat->count; i++)
        if (chat->messages[i].role != ((i - first) % 2 ? KVF_ROLE_ASSISTANT : KVF_ROLE_USER))
            return false;
    return (chat->count - first) % 2 == 1;
}

static void formats_by_name_equal_their_family(void **state)
{
    goldens g = open_goldens();
    uint32_t checked = 0;
    const json_value *templates = json_get(g.root, "templates");
    for (const json_value *t = json_first(templates); t; t = json_next(templates, t)) {
        const json_value *names = json_get(t, "named"), *cases = json_get(t, "cases");
        for (const json_value *n = json_first(names); n; n = json_next(names, n))
            for (const json_value *c = json_first(cases); c; c = json_next(cases, c)) {
                kvf_chat_message messages[MESSAGES_MAX];
                kvf_chat chat = chat_of(&g, (uint32_t)at(c, 0)->as.integer, messages);
                if (at(c, 1)->kind != JSON_TRUE || !is_plain(&chat))
                    continue;
                chat.format = kvf_chat_format_find(n->as.string);
                assert_non_null(chat.format);
                kvf_chat_format format = *chat.format;
                format.bos = format.bos ? text_of(json_get(t, "bos")) : NULL;
                format.eos = text_of(json_get(t, "eos"));
                chat.format = &format;
                chat.generate = true;
                if (at(c, 2)->kind == JSON_FALSE)
                    chat.thinking = KVF_THINKING_OFF;
                check_render(&chat, at(c, 3), n->as.string);
                checked++;
            }
    }
    assert_true(checked >= 96);
    close_goldens(&g);
}

static void every_name_has_a_format(void **state)
{
#define NAME(name) name,
    static const char *const names[] = {KVF_CHAT_FORMAT_LIST(NAME)};
    static const char *const opened[] = {"<|assistant|>\n", "<|im_start|>assistant<|im_sep|>"};
    static const kvf_chat_message hello = {KVF_ROLE_USER, "Hello", NULL};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const kvf_chat chat = {.format = kvf_chat_format_find(names[i]),
                               .messages = &hello,
                               .count = 1,
                               .generate = true};
        kvf_text text = {0};
        kvf_error error = {0};
        assert_non_null(chat.format);
        assert_string_equal(chat.format->name, names[i]);
        assert_int_equal(kvf_chat_render(&chat, &text, &error), KVF_OK);
        const char *end = strcmp(names[i], "phi4") == 0 ? opened[1] : opened[0];
        if (strcmp(names[i], "phi3") == 0 || strcmp(names[i], "zephyr") == 0 || end == opened[1])
            assert_string_equal(text.bytes + text.size - strlen(end), end);
        kvf_text_free(&text);
    }
    assert_null(kvf_chat_format_find("nobody"));
}

/* ---- messages with more than a text ---- */

/* [template, talk, whether there are tools, text] */
static void renders_talks(void **state)
{
    goldens opened = open_goldens(), *g = &opened;
    const json_value *cases = json_get(g->root, "of_talks");
    size_t count = 0, refused = 0;
    for (const json_value *c = json_first(cases); c; c = json_next(cases, c), count++) {
        kvf_chat_message messages[MESSAGES_MAX];
        kvf_error error = {0};
        const kvf_chat_format format = {.source = text_of(at(json_get(g->root, "tool_templates"),
                                                             (uint32_t)at(c, 0)->as.integer)),
                                        .bos = "<s>",
                                        .eos = "</s>"};
        kvf_chat chat = {
            .format = &format, .messages = messages, .generate = true, .today = &g->day};
        const json_value *talk = at(json_get(g->root, "talks"), (uint32_t)at(c, 1)->as.integer);
        char name[64];
        for (const json_value *m = json_first(talk); m; m = json_next(talk, m))
            if (kvf_chat_message_read(m, "m", &messages[chat.count++], &error) != KVF_OK)
                fail_msg("%s", error.text);
        if (at(c, 2)->kind == JSON_TRUE)
            chat.tools = json_get(g->root, "tools");
        snprintf(name, sizeof name, "%.30s, talk %u", format.source,
                 (unsigned)at(c, 1)->as.integer);
        check_render(&chat, at(c, 3), name);
        refused += at(c, 3)->kind == JSON_NULL;
    }
    assert_true(count == 132 && refused > 0 && refused < count / 2);
    close_goldens(g);
}

/* FIELDS of a message. */
static kvf_status read_row(void *user, char *change, size_t size, kvf_error *error)
{
    json_document *document;
    kvf_chat_message message;
    kvf_status status = json_parse_as_written(change, strlen(change), "messages", &document, error);
    if (status != KVF_OK)
        return status;
    status = kvf_chat_message_read(json_root(document), "m.json: message 3", &message, error);
    json_free(document);
    return status;
}

static void refuses_messages(void **state)
{
    refusals_check(&(refusals){.path = "tests/model/message.refusals", .call = read_row});
}

/* ---- what is refused ---- */

static kvf_status render_row(void *user, char *change, size_t size, kvf_error *error)
{
    static const kvf_chat_message list[] = {
        {KVF_ROLE_USER, "a", NULL}, {KVF_ROLE_ASSISTANT, "b", NULL}, {KVF_ROLE_USER, "c", NULL}};
    const kvf_chat_format format = {.source = change};
    const kvf_chat chat = {.format = &format, .messages = list, .count = 3};
    kvf_text text = {0};
    assert_int_equal(kvf_text_append(&text, "kept", 4, error), KVF_OK);
    const kvf_status status = kvf_chat_render(&chat, &text, error);
    assert_string_equal(text.bytes, "kept");
    kvf_text_free(&text);
    return status;
}

/* Templates that are not known, broken, or without bounds. */
static void refuses_templates(void **state)
{
    refusals_check(&(refusals){.path = "tests/model/chat.refusals", .call = render_row});
    const kvf_chat_format format = {.source = ""};
    const kvf_chat none = {.format = &format};
    kvf_text text = {0};
    kvf_error error = {0};
    fixture_expect(kvf_chat_render(&none, &text, &error), &error, KVF_INVALID, "no messages");
}

static void refuses_broken_text(void **state)
{
    const kvf_chat_message list[] = {{KVF_ROLE_USER, "ab\xff", NULL}};
    const kvf_chat chat = {.format = kvf_chat_format_find("chatml"), .messages = list, .count = 1};
    kvf_tokenizer *tokenizer = open_golden("llama3");
    kvf_token_ids ids = {0};
    kvf_error error = {0};
    fixture_expect(kvf_chat_encode(&chat, tokenizer, &ids, &error), &error, KVF_INVALID, "(0xff)");
    assert_int_equal(ids.count, 0);
    kvf_tokenizer_close(tokenizer);
}

/* ---- markers ---- */

static void checks_markers(void **state)
{
    kvf_tokenizer *tokenizer = open_golden("llama3");
    kvf_error error = {0};
    uint32_t end, eot;
    assert_true(kvf_tokenizer_find(tokenizer, "<|eot_id|>", &eot));
    assert_int_equal(kvf_chat_check(kvf_chat_format_find("llama3"), tokenizer, &end, &error),
                     KVF_OK);
    assert_int_equal(end, eot);
    fixture_expect(kvf_chat_check(kvf_chat_format_find("chatml"), tokenizer, &end, &error), &error,
                   KVF_INVALID, "chat format chatml writes '<|im_start|>', which is no token");
    const kvf_chat_format lost = {.source = "{{ bos_token }}{{ messages[0].content }}",
                                  .bos = "<begin>"};
    fixture_expect(kvf_chat_check(&lost, tokenizer, &end, &error), &error, KVF_INVALID,
                   "writes '<begin>'");
    /* plain words around messages are no tokens, and none ends an answer */
    const kvf_chat_format plain = {
        .source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}. {% endfor %}"};
    assert_int_equal(kvf_chat_check(&plain, tokenizer, &end, &error), KVF_OK);
    assert_int_equal(end, UINT32_MAX);
    /* a template that refuses the question cannot be asked */
    const kvf_chat_format strict = {.source = "a{{ raise_exception('no') }}"};
    heap h = {0};
    heap_watch(&h);
    assert_int_equal(kvf_chat_check(&strict, tokenizer, &end, &error), KVF_OK);
    assert_int_equal(heap_left(), 0);
    const kvf_chat_format unknown = {.source = "{% include 'x' %}"};
    fixture_expect(kvf_chat_check(&unknown, tokenizer, &end, &error), &error, KVF_UNSUPPORTED,
                   "include");
    assert_true(kvf_chat_asks(kvf_chat_format_find("qwen3"), "enable_thinking"));
    assert_false(kvf_chat_asks(kvf_chat_format_find("llama3"), "enable_thinking"));
    kvf_tokenizer_close(tokenizer);
}

/* ---- where it is ---- */

/* Expects @p source (NULL = none), with <s> before it and </s> after it. */
static void expect_source(const char *folder, const char *source)
{
    kvf_chat_source found;
    kvf_error error = {0};
    assert_int_equal(kvf_chat_source_read(folder, &found, &error), KVF_OK);
    const kvf_chat_format format = kvf_chat_source_format(&found);
    if (source)
        assert_string_equal(format.source, source);
    else
        assert_null(format.source);
    assert_string_equal(format.bos ? format.bos : "<s>", "<s>");
    assert_string_equal(format.eos ? format.eos : "</s>", "</s>");
    kvf_chat_source_free(&found);
}

static void finds_the_template(void **state)
{
    static const char config[] = "tokenizer_config.json";
    char *folder = fixture_directory_create();
    kvf_chat_source found;
    kvf_error error = {0};
    expect_source(folder, NULL);
    fixture_write_text(folder, config, "{\"bos_token\": null}");
    expect_source(folder, NULL);
    fixture_write_text(folder, config,
                       "{\"bos_token\": \"<s>\", \"eos_token\": {\"content\": \"</s>\"}, "
                       "\"chat_template\": \"one\"}");
    expect_source(folder, "one");
    fixture_write_text(folder, config,
                       "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"two\"}, "
                       "{\"name\": \"default\", \"template\": \"three\"}]}");
    expect_source(folder, "three");
    fixture_write_text(folder, "chat_template.jinja", "four");
    expect_source(folder, "four");
    fixture_write_text(folder, "chat_template.jinja", "");
    expect_source(folder, "three");
    fixture_write_text(folder, "chat_template.jinja", "five\xff");
    fixture_expect(kvf_chat_source_read(folder, &found, &error), &error, KVF_CORRUPT,
                   "chat_template.jinja is not UTF-8: byte 4 does not belong there");
    fixture_write_text(folder, "chat_template.jinja", "four");
    fixture_write_text(folder, config, "{\"eos_token\": 3}");
    fixture_expect(kvf_chat_source_read(folder, &found, &error), &error, KVF_CORRUPT,
                   "tokenizer_config.json: eos_token must be a text");
    fixture_write_text(folder, config, "{");
    fixture_expect(kvf_chat_source_read(folder, &found, &error), &error, KVF_CORRUPT,
                   "tokenizer_config.json");
    fixture_directory_remove(folder);
}

static void finds_the_template_of_a_gguf_file(void **state)
{
    static const char *const tokens[] = {"a", "<s>", "</s>"};
    char *folder = fixture_directory_create(), path[1024];
    gguf_image image = {0};
    kvf_chat_source found;
    kvf_error error = {0};
    gguf_image_text(&image, "general.architecture", "llama");
    gguf_image_text(&image, "tokenizer.ggml.model", "gpt2");
    gguf_image_texts(&image, "tokenizer.ggml.tokens", tokens, 3);
    gguf_image_u32(&image, "tokenizer.ggml.bos_token_id", 1);
    gguf_image_u32(&image, "tokenizer.ggml.eos_token_id", 2);
    gguf_image_text(&image, "tokenizer.chat_template", "{{ \"\xc3\xa9\\n\" }}");
    gguf_image_write(&image, folder, "model.gguf");
    snprintf(path, sizeof path, "%s/model.gguf", folder);
    if (kvf_chat_source_read(path, &found, &error) != KVF_OK)
        fail_msg("%s", error.text);
    const kvf_chat_format format = kvf_chat_source_format(&found);
    assert_string_equal(format.source, "{{ \"\xc3\xa9\\n\" }}");
    assert_string_equal(format.bos, "<s>");
    assert_string_equal(format.eos, "</s>");
    kvf_chat_source_free(&found);
    gguf_image_free(&image);
    fixture_directory_remove(folder);
}

int main(void)
{
    return unit_run(renders_as_transformers, speaks_the_language, reads_a_list_once,
                    replaces_in_a_long_text, gives_the_ids_of_tokenizers,
                    formats_by_name_equal_their_family, every_name_has_a_format, renders_talks,
                    refuses_messages, refuses_templates, refuses_broken_text, checks_markers,
                    finds_the_template, finds_the_template_of_a_gguf_file);
}
