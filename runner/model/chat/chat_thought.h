/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CHAT_THOUGHT_H
#define KVF_MODEL_CHAT_THOUGHT_H

/*
 * What a model thought, apart from what it answered: <think> ... </think>.
 *
 * It knows texts, not tokens. Invariant: what is behind the end of the thought is the answer, and
 * a text in which no thought begins is all answer.
 */

#include <stdbool.h>
#include <stddef.h>

/** Parts of a text, without the white space around them. */
typedef struct kvf_thought {
    const char *reasoning; /**< [reasoning_size], or NULL = there is none */
    size_t reasoning_size;
    const char *answer; /**< [answer_size] */
    size_t answer_size;
} kvf_thought;

/** Whether a prompt ends inside a thought, so that what follows goes on with it. */
bool kvf_thought_is_open(const char *prompt, size_t size);

/** @param open  kvf_thought_is_open of the prompt */
kvf_thought kvf_thought_split(const char *text, size_t size, bool open);

#endif
