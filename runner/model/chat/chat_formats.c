/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The formats: what stands around the messages of each, and which markers tell a model's template
 * apart from others. Part of chat_format.h.
 *
 * It knows texts, not tokens or files. Invariant: what is written equals what Jinja renders by the
 * templates of tests/model/make_chat_goldens.py.
 */

#include "chat_format.h"
#include "chat_parts.h"
#include "utf8.h"

#include <string.h>

static void put_bytes(chat_writer *w, const char *bytes, size_t size)
{
    if (w->status == KVF_OK && size > 0)
        w->status = kvf_text_append(w->text, bytes, size, w->error);
}

static void put(chat_writer *w, const char *text)
{
    put_bytes(w, text, text ? strlen(text) : 0);
}

/* ---- the text of a message ---- */

/* Python strips the same: White_Space and 0x1c to 0x1f. */
static bool is_stripped(uint32_t code)
{
    return utf8_is_space(code) || (code >= 0x1c && code <= 0x1f);
}

/* Without the white space around it. */
static void put_stripped(chat_writer *w, const kvf_chat_message *m)
{
    const size_t size = strlen(m->text);
    size_t first = size, end = 0;
    uint32_t code;
    for (size_t at = 0, length; at < size; at += length) {
        length = utf8_decode(m->text + at, size - at, &code);
        if (length == 0) /* which the tokenizer refuses */
            length = 1;
        else if (is_stripped(code))
            continue;
        first = at < first ? at : first;
        end = at + length;
    }
    if (first < end)
        put_bytes(w, m->text + first, end - first);
}

/* Behind the last thought of an answer; earlier answers are given without their thoughts. */
static const char *after_thoughts(const kvf_chat_message *m)
{
    static const char closing[] = "</think>";
    const char *text = m->text, *next = text;
    while (m->role == KVF_ROLE_ASSISTANT && (next = strstr(next, closing)) != NULL)
        text = next += sizeof closing - 1;
    return text;
}

static void put_after_thoughts(chat_writer *w, const kvf_chat_message *m)
{
    put(w, after_thoughts(m));
}

static void put_answer_alone(chat_writer *w, const kvf_chat_message *m)
{
    const char *text = after_thoughts(m);
    while (text != m->text && *text == '\n')
        text++;
    put(w, text);
}

/* ---- the order of messages ---- */

/* One turn after the other, each with its role in front. */
static void put_turns(chat_writer *w, const kvf_chat *chat)
{
    const kvf_chat_format *f = chat->format;
    put(w, f->begin);
    for (size_t i = 0; i < chat->count; i++) {
        const kvf_chat_message *m = &chat->messages[i];
        put(w, f->turn.open);
        put(w, kvf_chat_role_name(m->role));
        put(w, f->turn.middle);
        if (f->put_text)
            f->put_text(w, m);
        else
            put(w, m->text);
        put(w, f->turn.close);
    }
    if (!chat->generate)
        return;
    put(w, f->turn.open);
    put(w, "assistant");
    put(w, f->turn.middle);
    if (f->thinks && chat->thinking == KVF_THINKING_OFF)
        put(w, "<think>\n\n</think>\n\n");
}

/* Questions and answers alternate; the system prompt stands inside the first or last question. */
static void put_instructions(chat_writer *w, const kvf_chat *chat)
{
    const kvf_chat_format *f = chat->format;
    const kvf_chat_message *messages = chat->messages;
    const size_t first = messages[0].role == KVF_ROLE_SYSTEM;
    const size_t told = f->system_is_last ? chat->count - 1 : first;
    put(w, f->begin);
    for (size_t i = first; i < chat->count; i++) {
        const bool is_question = messages[i].role == KVF_ROLE_USER;
        if (is_question != ((i - first) % 2 == 0)) {
            w->refusal = "user and assistant must take turns";
            return;
        }
        put(w, is_question ? f->turn.open : f->turn.middle);
        if (is_question && first && i == told) {
            put(w, messages[0].text);
            put(w, "\n\n");
        }
        put(w, messages[i].text);
        put(w, is_question ? f->turn.close : "</s>");
    }
}

/* Markers of DeepSeek, in UTF-8. */
#define BAR                "\xef\xbd\x9c"
#define UNDERLINE          "\xe2\x96\x81"
#define DEEPSEEK_BEGIN     "<" BAR "begin" UNDERLINE "of" UNDERLINE "sentence" BAR ">"
#define DEEPSEEK_END       "<" BAR "end" UNDERLINE "of" UNDERLINE "sentence" BAR ">"
#define DEEPSEEK_USER      "<" BAR "User" BAR ">"
#define DEEPSEEK_ASSISTANT "<" BAR "Assistant" BAR ">"

static void put_deepseek(chat_writer *w, const kvf_chat *chat)
{
    static const char *const opens[] = {[KVF_ROLE_SYSTEM] = "",
                                        [KVF_ROLE_USER] = DEEPSEEK_USER,
                                        [KVF_ROLE_ASSISTANT] = DEEPSEEK_ASSISTANT};
    put(w, chat->format->begin);
    for (size_t i = 0; i < chat->count; i++) {
        const kvf_chat_message *m = &chat->messages[i];
        put(w, opens[m->role]);
        put_after_thoughts(w, m);
        if (m->role == KVF_ROLE_ASSISTANT)
            put(w, DEEPSEEK_END);
    }
    if (chat->generate)
        put(w, DEEPSEEK_ASSISTANT "<think>\n");
}

/* ---- the table ---- */

static const kvf_chat_format formats[] = {
    {.name = "chatml",
     .put = put_turns,
     .turn = {"<|im_start|>", "\n", "<|im_end|>\n"},
     .markers = {"<|im_start|>", "<|im_end|>"},
     .has = {"<|im_start|>", "<|im_end|>"},
     .lacks = {"<|im_sep|>", "</think>"}},
    {.name = "qwen3",
     .put = put_turns,
     .put_text = put_answer_alone,
     .turn = {"<|im_start|>", "\n", "<|im_end|>\n"},
     .thinks = true,
     .markers = {"<|im_start|>", "<|im_end|>"},
     .has = {"<|im_start|>", "<|im_end|>", "</think>"}},
    {.name = "phi4",
     .put = put_turns,
     .turn = {"<|im_start|>", "<|im_sep|>", "<|im_end|>"},
     .markers = {"<|im_start|>", "<|im_sep|>", "<|im_end|>"},
     .has = {"<|im_sep|>"}},
    {.name = "llama3",
     .put = put_turns,
     .put_text = put_stripped,
     .begin = "<|begin_of_text|>",
     .turn = {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"},
     .markers = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     .has = {"<|start_header_id|>"}},
    {.name = "phi3",
     .put = put_turns,
     .turn = {"<|", "|>\n", "<|end|>\n"},
     .markers = {"<|end|>"},
     .has = {"<|assistant|>", "<|end|>"}},
    {.name = "zephyr",
     .put = put_turns,
     .turn = {"<|", "|>\n", "</s>\n"},
     .markers = {"</s>"},
     .has = {"<|user|>", "<|assistant|>", "+ eos_token"},
     .lacks = {"<|end|>", "eos_token +"}},
    {.name = "mistral",
     .put = put_instructions,
     .begin = "<s>",
     .turn = {" [INST] ", " ", " [/INST]"},
     .markers = {"<s>", "</s>"},
     .has = {"[INST] ", " [/INST]"},
     .lacks = {"[SYSTEM_PROMPT]", "<<SYS>>", "[AVAILABLE_TOOLS]"}},
    {.name = "mistral-v3",
     .put = put_instructions,
     .system_is_last = true,
     .begin = "<s>",
     .turn = {"[INST] ", " ", "[/INST]"},
     .markers = {"<s>", "</s>"},
     .has = {"[INST] ", "[AVAILABLE_TOOLS]"},
     .lacks = {"[SYSTEM_PROMPT]"}},
    {.name = "mistral-tekken",
     .put = put_instructions,
     .system_is_last = true,
     .begin = "<s>",
     .turn = {"[INST]", "", "[/INST]"},
     .markers = {"<s>", "</s>"},
     .has = {"[INST]", "[AVAILABLE_TOOLS]"},
     .lacks = {"[SYSTEM_PROMPT]", "[INST] "}},
    {.name = "deepseek-r1",
     .put = put_deepseek,
     .begin = DEEPSEEK_BEGIN,
     .markers = {DEEPSEEK_BEGIN, DEEPSEEK_USER, DEEPSEEK_ASSISTANT, DEEPSEEK_END},
     .has = {DEEPSEEK_ASSISTANT, "<think>"}},
};

const kvf_chat_format *kvf_chat_format_find(const char *name)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].name, name) == 0)
            return &formats[i];
    return NULL;
}

static bool is_told_by(const kvf_chat_format *f, const char *source)
{
    for (size_t i = 0; i < CHAT_SIGNS_MAX; i++)
        if ((f->has[i] && !strstr(source, f->has[i])) ||
            (f->lacks[i] && strstr(source, f->lacks[i])))
            return false;
    return true;
}

const kvf_chat_format *kvf_chat_format_of(const char *source)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (is_told_by(&formats[i], source))
            return &formats[i];
    return NULL;
}
