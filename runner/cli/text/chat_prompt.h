/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_CHAT_PROMPT_H
#define KVF_CLI_CHAT_PROMPT_H

/*
 * Chats of the command: which format holds, what the user said of it, and messages from a file.
 *
 * It knows options and files, not what a format writes. Invariant: the markers of a format that was
 * chosen are tokens of the model.
 */

#include "chat_format.h"
#include "json.h"

typedef struct cli_chat_options {
    const char *system;
    const char *messages_file;
    uint32_t thinking; /* kvf_chat_thinking */
    uint32_t format;   /* 0 = by the model's own template, else 1 + place in KVF_CHAT_FORMAT_LIST */
    bool chat;
} cli_chat_options;

#define CLI_CHAT_NAME(name) name,

typedef struct cli_chat {
    const kvf_chat_format *format; /* NULL = not chosen */
    kvf_chat_thinking thinking;
    uint32_t end; /* token after an answer */
} cli_chat;

/** Whether the prompt is a chat. */
bool cli_chat_wanted(const cli_chat_options *options);

/** @return KVF_OK; KVF_INVALID, KVF_UNSUPPORTED and others that say what to give instead */
KVF_CHECKED kvf_status cli_chat_choose(const cli_chat_options *options, const char *model,
                                       const kvf_tokenizer *tokenizer, cli_chat *out,
                                       kvf_error *error);

/** The members of a chat. Borrows. */
typedef struct cli_turns {
    const char *system;     /* NULL = none */
    json_t *messages;       /* a list, or an object with a list "messages"; NULL = none */
    const char *path;       /* where they are, for messages */
    const kvf_text *prompt; /* what the user says last; NULL = nothing more */
} cli_turns;

/** The turns, up to the opening of an answer. @return KVF_OK; KVF_INVALID naming what is wrong */
KVF_CHECKED kvf_status cli_chat_encode_turns(const cli_chat *chat, const cli_turns *turns,
                                             const kvf_tokenizer *tokenizer, kvf_token_ids *ids,
                                             kvf_error *error);

/** System prompt, messages of the file, and @p prompt (may be NULL), up to the opening of an
 * answer. */
KVF_CHECKED kvf_status cli_chat_encode(const cli_chat *chat, const cli_chat_options *options,
                                       const kvf_tokenizer *tokenizer, const kvf_text *prompt,
                                       kvf_token_ids *ids, kvf_error *error);

#endif
