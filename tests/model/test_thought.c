/* SPDX-License-Identifier: Apache-2.0 */

/* Thoughts and answers apart: with and without markers, opened by the prompt, cut off. */

#include "chat_format.h"
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

TEST(a_thought_is_in_front_of_the_answer)
{
    check("\n<think>\nwhy?\n</think>\n\nbecause", false, "why?", "because");
    check("why?</think>because </think>", true, "why?", "because </think>");
    check("<think>why?</think>because", true, "why?", "because");
    check("<think></think>because", false, "", "because");
}

TEST(without_one_all_is_answer)
{
    check("because", false, NULL, "because");
    check("", false, NULL, "");
    check("it says </think> here", false, NULL, "it says </think> here");
    check("say <think>a</think>", false, NULL, "say <think>a</think>");
}

TEST(one_that_was_cut_is_all_reasoning)
{
    check("<think>why", false, "why", "");
    check("why</thin", true, "why</thin", "");
    check("", true, "", "");
    check("<think>", false, "", "");
    check("<thin", false, NULL, "<thin");
}

TEST(a_prompt_may_open_it)
{
    assert_true(kvf_thought_is_open("x<think>\n", 9));
    assert_true(kvf_thought_is_open("<think>", 7));
    assert_false(kvf_thought_is_open("<think>\n\n</think>\n\n", 19));
    assert_false(kvf_thought_is_open("think>", 6));
    assert_false(kvf_thought_is_open("", 0));
}
