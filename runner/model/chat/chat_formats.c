/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Templates that are known by name, for models whose files have none, and for those whose own
 * template is not understood. Each is the shape of a family without its parts for tools, system
 * prompts and dates of its own.
 */

#include "chat_template.h"

#include <string.h>

#define MESSAGES "{% for m in messages %}"
#define ANSWER   "{% endfor %}{% if add_generation_prompt %}"

/* One turn after the other, each between the same markers. */
#define TURNS(open, role_end, close)                                                               \
    MESSAGES "{{ '" open "' + m.role + '" role_end "' + m.content + '" close "' }}" ANSWER         \
             "{{ '" open "assistant" role_end "' }}{% endif %}"

/* Earlier answers are given without their thoughts. */
#define WITHOUT_THOUGHTS(then)                                                                     \
    "{% set text = m.content %}{% if m.role == 'assistant' and '</think>' in text %}"              \
    "{% set text = text.split('</think>')[-1]" then " %}{% endif %}"

/* The system prompt stands before the first (or last) question. */
#define MISTRAL(where, open, close, answer)                                                        \
    "{% set s = namespace(text='') %}{% if messages[0].role == 'system' %}"                        \
    "{% set s.text = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}"           \
    "{% endif %}{{ bos_token }}" MESSAGES "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"  \
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"                       \
    "{% if m.role == 'user' %}{{ '" open "' + (s.text if loop." where                              \
    " else '') + m.content + '" close "' }}{% else %}{{ '" answer                                  \
    "' + m.content + eos_token }}{% endif %}{% endfor %}"

/* Markers of DeepSeek, in UTF-8. */
#define BAR       "\xef\xbd\x9c"
#define UNDERLINE "\xe2\x96\x81"

// clang-format off
static const kvf_chat_format formats[] = {
    {"chatml", TURNS("<|im_start|>", "\\n", "<|im_end|>\\n"), NULL, "<|im_end|>"},
    {"qwen3",
     MESSAGES WITHOUT_THOUGHTS(".lstrip('\\n')")
     "{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}"
     ANSWER "{{ '<|im_start|>assistant\\n' }}"
     "{% if enable_thinking is defined and not enable_thinking %}"
     "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
     NULL, "<|im_end|>"},
    {"llama3",
     "{{ bos_token }}" MESSAGES
     "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
     "{{ m.content | trim + '<|eot_id|>' }}"
     ANSWER "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
     "<|begin_of_text|>", "<|eot_id|>"},
    {"mistral", MISTRAL("first", " [INST] ", " [/INST]", " "), "<s>", "</s>"},
    {"mistral-v3", MISTRAL("last", "[INST] ", "[/INST]", " "), "<s>", "</s>"},
    {"mistral-tekken", MISTRAL("last", "[INST]", "[/INST]", ""), "<s>", "</s>"},
    {"deepseek-r1",
     "{{ bos_token }}" MESSAGES WITHOUT_THOUGHTS("")
     "{% if m.role == 'system' %}{{ text }}"
     "{% elif m.role == 'user' %}{{ '<" BAR "User" BAR ">' + text }}"
     "{% else %}{{ '<" BAR "Assistant" BAR ">' + text + eos_token }}{% endif %}"
     ANSWER "{{ '<" BAR "Assistant" BAR "><think>\\n' }}{% endif %}",
     "<" BAR "begin" UNDERLINE "of" UNDERLINE "sentence" BAR ">",
     "<" BAR "end" UNDERLINE "of" UNDERLINE "sentence" BAR ">"},
    {"phi3",
     MESSAGES "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}"
     ANSWER "{{ '<|assistant|>\\n' }}{% endif %}",
     NULL, "<|end|>"},
    {"phi4", TURNS("<|im_start|>", "<|im_sep|>", "<|im_end|>"), NULL, "<|im_end|>"},
    {"zephyr",
     MESSAGES "{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}"
     ANSWER "{{ '<|assistant|>\\n' }}{% endif %}",
     NULL, "</s>"},
};
// clang-format on

const kvf_chat_format *kvf_chat_format_find(const char *name)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].name, name) == 0)
            return &formats[i];
    return NULL;
}
