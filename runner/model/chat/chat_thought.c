/* SPDX-License-Identifier: Apache-2.0 */

/* Thoughts and answers; see the header. */

#include "chat_format.h"

#include <string.h>

#include "common/text.h"

static const char opening[] = "<think>", closing[] = "</think>";

#define LENGTH(marker) (sizeof(marker) - 1)

static void trim(const char **text, size_t *size)
{
    for (; *size > 0 && kvf_is_space(**text); (*size)--)
        (*text)++;
    while (*size > 0 && kvf_is_space((*text)[*size - 1]))
        (*size)--;
}

bool kvf_thought_is_open(const char *prompt, size_t size)
{
    trim(&prompt, &size);
    return size >= LENGTH(opening) &&
           memcmp(prompt + size - LENGTH(opening), opening, LENGTH(opening)) == 0;
}

kvf_thought kvf_thought_split(const char *text, size_t size, bool open)
{
    kvf_thought parts = {.answer = text, .answer_size = size};
    const char *start = text;
    size_t rest = size;
    trim(&start, &rest);
    if (rest >= LENGTH(opening) && memcmp(start, opening, LENGTH(opening)) == 0) {
        start += LENGTH(opening);
        rest -= LENGTH(opening);
    } else if (!open) {
        trim(&parts.answer, &parts.answer_size);
        return parts;
    }
    const char *end = memmem(start, rest, closing, LENGTH(closing));
    parts.reasoning = start;
    parts.reasoning_size = end ? (size_t)(end - start) : rest;
    parts.answer = end ? end + LENGTH(closing) : start + rest;
    parts.answer_size = (size_t)(start + rest - parts.answer);
    trim(&parts.reasoning, &parts.reasoning_size);
    trim(&parts.answer, &parts.answer_size);
    return parts;
}
