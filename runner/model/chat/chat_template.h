/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CHAT_TEMPLATE_H
#define KVF_MODEL_CHAT_TEMPLATE_H

/*
 * A chat as the text that a model was trained on: its own template is run, as Transformers'
 * apply_chat_template does. A few templates are known by name, for models that lost theirs.
 *
 * It knows roles and texts, and no family of models. Invariant: the text, encoded with add_special
 * = false, is what the template gives for the same messages.
 */

#include "jinja.h"
#include "tokenizer.h"

#include <stdbool.h>
#include <stddef.h>

typedef enum kvf_chat_role {
    KVF_ROLE_SYSTEM,
    KVF_ROLE_USER,
    KVF_ROLE_ASSISTANT,
    KVF_ROLE_DEVELOPER,
    KVF_ROLE_TOOL,
} kvf_chat_role;

/** "system", "user", "assistant", "developer" or "tool"; NULL for a number that is none. */
const char *kvf_chat_role_name(unsigned role);

typedef struct kvf_chat_message {
    kvf_chat_role role;
    const char *text;        /**< UTF-8, zero-terminated */
    const json_value *given; /**< instead: an object with role, content and more; else NULL */
} kvf_chat_message;

/**
 * Check a message in the form of Transformers: its role, its fields, its content, which may be a
 * list of text parts.
 *
 * @param where  what the message is called in an error
 * @return KVF_OK; KVF_INVALID
 */
KVF_CHECKED kvf_status kvf_chat_message_read(const json_value *value, const char *where,
                                             kvf_chat_message *out, kvf_error *error);

/** A template and the special tokens that it may name. All borrowed. */
typedef struct kvf_chat_format {
    const char *name;   /**< for messages; NULL = the model's own */
    const char *source; /**< Jinja, zero-terminated */
    const char *bos;    /**< spelling; NULL = not known */
    const char *eos;
} kvf_chat_format;

/** Names of templates that are known: X(name). */
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

/** NULL if it is not known. */
const kvf_chat_format *kvf_chat_format_find(const char *name);

/** The value of `enable_thinking` for the template. */
typedef enum kvf_chat_thinking {
    KVF_THINKING_DEFAULT, /**< nothing */
    KVF_THINKING_ON,
    KVF_THINKING_OFF,
} kvf_chat_thinking;

typedef struct kvf_chat {
    const kvf_chat_format *format;
    const kvf_chat_message *messages; /**< [count], at least one */
    size_t count;
    const json_value *tools; /**< a list of descriptions, or NULL */
    bool generate;           /**< end with the opening of an answer */
    kvf_chat_thinking thinking;
    const jinja_day *today; /**< for templates that write the date; NULL = they cannot ask */
} kvf_chat;

/**
 * Append the rendered chat to @p text. A template gets messages as they are given; lists of text
 * parts as one text, part by line, if it does not write such a list.
 *
 * @return KVF_OK; KVF_INVALID what the template refuses, such as turns out of order;
 *         KVF_UNSUPPORTED what it uses and is not known here; KVF_CORRUPT, KVF_FULL,
 *         KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_chat_render(const kvf_chat *chat, kvf_text *text, kvf_error *error);

/** Render and encode. Markers inside message texts are read as tokens, as the published path does.
 */
KVF_CHECKED kvf_status kvf_chat_encode(const kvf_chat *chat, const kvf_tokenizer *tokenizer,
                                       kvf_token_ids *ids, kvf_error *error);

/** Whether the template asks for this variable. */
bool kvf_chat_asks(const kvf_chat_format *format, const char *variable);

/**
 * Whether the markers that the template writes around messages are tokens of this tokenizer, and
 * which token ends an answer.
 *
 * @param end  receives the id, or UINT32_MAX if no single token does, or the template does not
 *             take the question, answer and question that this is asked with
 * @return KVF_OK; KVF_INVALID naming the marker; else as kvf_chat_render
 */
KVF_CHECKED kvf_status kvf_chat_check(const kvf_chat_format *format, const kvf_tokenizer *tokenizer,
                                      uint32_t *end, kvf_error *error);

/*
 * Where a model keeps its chat template, and how its special tokens are spelt.
 *
 * It knows names of files and fields, not what a template says. Invariant: a source that has no
 * template has an empty one.
 */

/** Owned texts. Zero-initialise; free with kvf_chat_source_free. */
typedef struct kvf_chat_source {
    kvf_text source; /**< bytes NULL: the model has none */
    kvf_text bos, eos;
} kvf_chat_source;

/**
 * From a directory or a GGUF file: `chat_template.jinja`, else `chat_template` of
 * `tokenizer_config.json` (of several the one named "default"), and `bos_token` and `eos_token`
 * from there. A part that is not there says nothing.
 *
 * @return KVF_OK; KVF_CORRUPT, KVF_SYSTEM, KVF_OUT_OF_MEMORY, and @p out is free then
 */
KVF_CHECKED kvf_status kvf_chat_source_read(const char *model, kvf_chat_source *out,
                                            kvf_error *error);
void kvf_chat_source_free(kvf_chat_source *source);

/** The format that the model itself has; `source` is NULL if there is none. Borrows. */
kvf_chat_format kvf_chat_source_format(const kvf_chat_source *source);

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
