/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CHAT_FORMAT_H
#define KVF_MODEL_CHAT_FORMAT_H

/*
 * A chat as the text that a model was trained on. Ten formats are known by name; each is the shape
 * of a family's published template without its parts for tools, dates and system prompts.
 *
 * It knows roles and texts, and no family of models. Invariant: the text, encoded with add_special
 * = false, has the markers of the format as tokens.
 */

#include "json.h"
#include "tokenizer.h"

#include <stdbool.h>
#include <stddef.h>

typedef enum kvf_chat_role {
    KVF_ROLE_SYSTEM,
    KVF_ROLE_USER,
    KVF_ROLE_ASSISTANT,
} kvf_chat_role;

/** "system", "user" or "assistant"; NULL for a number that is none. */
const char *kvf_chat_role_name(unsigned role);

typedef struct kvf_chat_message {
    kvf_chat_role role;
    const char *text; /**< UTF-8, zero-terminated */
    kvf_text joined;  /**< that `text` points to if it was a list of parts */
} kvf_chat_message;

/**
 * A message in the form of Transformers: `role`, and `content`, a text or a list of text parts,
 * which become lines.
 *
 * @param where  what the message is called in an error
 * @param out    borrows from @p value; freed with kvf_text_free(&out->joined), also after an error
 * @return KVF_OK; KVF_INVALID; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_chat_message_read(json_t *value, const char *where,
                                             kvf_chat_message *out, kvf_error *error);

/** Names of the formats: X(name). */
#define KVF_CHAT_FORMAT_LIST(X)                                                                    \
    X("chatml")                                                                                    \
    X("deepseek-r1")                                                                               \
    X("llama3")                                                                                    \
    X("mistral")                                                                                   \
    X("mistral-v3")                                                                                \
    X("mistral-tekken")                                                                            \
    X("phi3")                                                                                      \
    X("phi4")                                                                                      \
    X("qwen3")                                                                                     \
    X("zephyr")

typedef struct kvf_chat_format kvf_chat_format;

/** NULL if it is not known. */
const kvf_chat_format *kvf_chat_format_find(const char *name);
const char *kvf_chat_format_name(const kvf_chat_format *format);
/** Whether the opening of an answer can tell the model not to think. */
bool kvf_chat_format_thinks(const kvf_chat_format *format);

/** Whether the model is to think before it answers. */
typedef enum kvf_chat_thinking {
    KVF_THINKING_DEFAULT, /**< as the format has it */
    KVF_THINKING_ON,
    KVF_THINKING_OFF,
} kvf_chat_thinking;

typedef struct kvf_chat {
    const kvf_chat_format *format;
    const kvf_chat_message *messages; /**< [count], at least one */
    size_t count;
    bool generate; /**< end with the opening of an answer */
    kvf_chat_thinking thinking;
} kvf_chat;

/**
 * Append the chat to @p text, which an error leaves as it was.
 *
 * @return KVF_OK; KVF_INVALID if the format refuses the messages, such as turns out of order;
 *         KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_chat_render(const kvf_chat *chat, kvf_text *text, kvf_error *error);

/** Render and encode. Markers inside message texts are read as tokens, as the published path does.
 */
KVF_CHECKED kvf_status kvf_chat_encode(const kvf_chat *chat, const kvf_tokenizer *tokenizer,
                                       kvf_token_ids *ids, kvf_error *error);

/** Whether the markers of the format are tokens of this tokenizer. @param end  receives the one
 * that ends an answer. @return KVF_OK; KVF_INVALID naming the marker */
KVF_CHECKED kvf_status kvf_chat_check(const kvf_chat_format *format, const kvf_tokenizer *tokenizer,
                                      uint32_t *end, kvf_error *error);

/** The format of a chat template by the markers in it; NULL if none is known that has them. */
const kvf_chat_format *kvf_chat_format_of(const char *source);

/**
 * The format of a model, a directory or a GGUF file, by its chat template: `chat_template.jinja`,
 * else `chat_template` of `tokenizer_config.json` (of several the one named "default").
 *
 * @return KVF_OK; KVF_INVALID if the model has no template; KVF_UNSUPPORTED if its format is not
 *         known; KVF_CORRUPT, KVF_SYSTEM, KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_chat_format_read(const char *model, const kvf_chat_format **out,
                                            kvf_error *error);

/*
 * A model's thoughts, apart from its answer: <think> ... </think>.
 *
 * It knows texts, not tokens. Invariant: the text after the end of the thought is the answer, and a
 * text in which no thought begins is all answer.
 */

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
