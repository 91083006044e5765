/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CHAT_TEMPLATE_H
#define KVF_MODEL_CHAT_TEMPLATE_H

/*
 * The chat formats of the four families, written out in C instead of interpreting Jinja.
 *
 * It knows roles and markers, not ids. Invariant: the text, encoded with add_special = false, is
 * what the family's own template gives for the same messages.
 */

#include "model_config.h"
#include "tokenizer.h"

typedef enum kvf_chat_role { KVF_ROLE_SYSTEM, KVF_ROLE_USER, KVF_ROLE_ASSISTANT } kvf_chat_role;

typedef struct kvf_chat_message {
    kvf_chat_role role;
    const char *text; /**< UTF-8, zero-terminated */
} kvf_chat_message;

typedef struct kvf_chat {
    kvf_chat_format format;
    const kvf_chat_message *messages; /**< [count] at least one; system first if at all; Mistral
                                           demands that user and assistant take turns */
    size_t count;
    bool generate;      /**< end with the opening of an assistant turn */
    bool skip_thinking; /**< Qwen3 with generate: an empty <think> block first */
    const char *date;   /**< Llama-3: "26 Jul 2024" if NULL */
} kvf_chat;

/**
 * Append the rendered chat to @p text.
 * @return KVF_OK; KVF_INVALID naming the message whose role is out of turn; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_chat_render(const kvf_chat *chat, const kvf_allocator *allocator,
                                       kvf_text *text, kvf_error *error);

/** Render and encode. Markers inside message texts are read as tokens, as the published path does.
 */
KVF_CHECKED kvf_status kvf_chat_encode(const kvf_chat *chat, const kvf_tokenizer *tokenizer,
                                       kvf_token_ids *ids, kvf_error *error);

#endif
