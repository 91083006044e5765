/* SPDX-License-Identifier: Apache-2.0 */

/* Thoughts and answers apart: with and without markers, opened by the prompt, cut off, in channels.
 */

#include "chat_channels.h"
#include "chat_template.h"
#include "model_fixture.h"
#include "unit.h"

static void check(const char *text, bool open, const char *reasoning, const char *answer)
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

static void a_thought_is_in_front_of_the_answer(void **state)
{
    check("\n<think>\nwhy?\n</think>\n\nbecause", false, "why?", "because");
    check("why?</think>because </think>", true, "why?", "because </think>");
    check("<think>why?</think>because", true, "why?", "because");
    check("<think></think>because", false, "", "because");
}

static void without_one_all_is_answer(void **state)
{
    check("because", false, NULL, "because");
    check("", false, NULL, "");
    check("it says </think> here", false, NULL, "it says </think> here");
    check("say <think>a</think>", false, NULL, "say <think>a</think>");
}

static void one_that_was_cut_is_all_reasoning(void **state)
{
    check("<think>why", false, "why", "");
    check("why</thin", true, "why</thin", "");
    check("", true, "", "");
    check("<think>", false, "", "");
    check("<thin", false, NULL, "<thin");
}

static void a_prompt_may_open_it(void **state)
{
    assert_true(kvf_thought_is_open("x<think>\n", 9));
    assert_true(kvf_thought_is_open("<think>", 7));
    assert_false(kvf_thought_is_open("<think>\n\n</think>\n\n", 19));
    assert_false(kvf_thought_is_open("think>", 6));
    assert_false(kvf_thought_is_open("", 0));
}

/* ---- channels ---- */

static kvf_tokenizer *open_tokenizer(const char *path)
{
    size_t size;
    kvf_error error = {0};
    kvf_tokenizer *tokenizer;
    char *json = fixture_read(path, &size);
    assert_int_equal(kvf_tokenizer_parse(json, size, &tokenizer, &error), KVF_OK);
    free(json);
    return tokenizer;
}

/* The tokens of a text, as they are shown. */
static void check_shown(const kvf_tokenizer *tokenizer, const char *written, const char *shown)
{
    kvf_channels channels = kvf_channels_of(tokenizer);
    kvf_token_stream stream = {.tokenizer = tokenizer, .skip_special = true};
    kvf_token_ids ids = {0};
    kvf_text all = {0};
    kvf_error error;
    assert_int_equal(kvf_tokenizer_encode(tokenizer, written, strlen(written), false, &ids, &error),
                     KVF_OK);
    for (size_t i = 0; i < ids.count; i++) {
        kvf_text text = {0};
        assert_int_equal(kvf_token_stream_push(&stream, ids.ids[i], &text, NULL), KVF_OK);
        assert_int_equal(kvf_channels_push(&channels, ids.ids[i], &text), KVF_OK);
        if (text.size)
            assert_int_equal(kvf_text_append(&all, text.bytes, text.size, NULL), KVF_OK);
        kvf_text_free(&text);
    }
    assert_string_equal(all.bytes ? all.bytes : "", shown);
    kvf_text_free(&all);
    kvf_token_ids_free(&ids);
}

static void channels_become_thoughts(void **state)
{
    kvf_tokenizer *o200k = open_tokenizer(KVF_GOLDENS "/o200k.tokenizer.json");
    kvf_tokenizer *other = open_tokenizer(KVF_GOLDENS "/qwen2.tokenizer.json");
    check_shown(o200k, "an answer", "an answer");
    check_shown(o200k,
                "<|channel|>analysis<|message|>Hm, two.<|end|><|start|>assistant<|channel|>final"
                "<|message|>Two.<|return|>",
                "<think>Hm, two.</think>\n\nTwo.");
    check_shown(o200k, "<|channel|>final<|message|>Two.<|end|>", "Two.\n");
    check_shown(o200k, "<|channel|>analysis<|message|>Hm", "<think>Hm");
    check_shown(o200k,
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>"
                "commentary json<|message|>{}<|call|>",
                "<think>a</think>\n\nassistant to=functions.f commentary json\n{}");
    check_shown(o200k, "a<|message|>b<|start|><|channel|>", "ab");
    char head[600] = "<|start|>";
    memset(head + 9, 'x', 400);
    check_shown(o200k, head, "");
    check_shown(other, "<|channel|>final<|message|>Two.<|end|>",
                "<|channel|>final<|message|>Two.<|end|>");
    kvf_tokenizer_close(other);
    kvf_tokenizer_close(o200k);
}

/* Messages of channels end with the same token, thoughts too. */
static void a_thought_ends_no_answer(void **state)
{
    const kvf_chat_format format = {
        .source = "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content + "
                  "'<|end|>' }}{% endfor %}{{ '<|start|>assistant' }}"};
    kvf_tokenizer *tokenizer = open_tokenizer(KVF_GOLDENS "/o200k.tokenizer.json");
    kvf_error error = {0};
    uint32_t end, call;
    assert_true(kvf_tokenizer_find(tokenizer, "<|call|>", &call));
    assert_int_equal(kvf_chat_check(&format, tokenizer, &end, &error), KVF_OK);
    assert_int_equal(end, call);
    kvf_tokenizer_close(tokenizer);
}

int main(void)
{
    return unit_run(a_thought_is_in_front_of_the_answer, without_one_all_is_answer,
                    one_that_was_cut_is_all_reasoning, a_prompt_may_open_it,
                    channels_become_thoughts, a_thought_ends_no_answer);
}
