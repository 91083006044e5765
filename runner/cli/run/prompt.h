/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_PROMPT_H
#define KVF_CLI_PROMPT_H

/*
 * From what the user gave to token ids.
 *
 * It knows files, standard input, chats and numbers as text. Invariant: every id it returns is one
 * that the model has.
 */

#include "chat_prompt.h"
#include "model_config.h"
#include "run_options.h"
#include "tokenizer.h"

/**
 * The prompt. @p tokenizer may be NULL if ids are given as numbers, @p chat if there is none.
 * @return KVF_OK; KVF_INVALID for an empty prompt (without --load), text that is no UTF-8, an id
 * out of range
 */
KVF_CHECKED kvf_status cli_prompt_read(const cli_run_options *options,
                                       const kvf_model_config *model,
                                       const kvf_tokenizer *tokenizer, const cli_chat *chat,
                                       kvf_token_ids *ids, kvf_error *error);

/** Tell whether a text, encoded with special tokens, spells the one that was put in front of it. */
bool cli_note_start(const char *where, const kvf_tokenizer *tokenizer, const uint32_t *ids,
                    size_t count);

/** A tokenizer may know ids that the model has no row for: KVF_INVALID. */
KVF_CHECKED kvf_status cli_check_ids(const kvf_model_config *model, const kvf_token_ids *ids,
                                     kvf_error *error);

/** What follows the prompt, for `score`: no special tokens in front. @return as cli_prompt_read */
KVF_CHECKED kvf_status cli_text_read(const char *path, const kvf_model_config *model,
                                     const kvf_tokenizer *tokenizer, kvf_token_ids *ids,
                                     kvf_error *error);

/** Questions, one after the other: question i is ids[starts[i] … starts[i + 1] - 1]. */
typedef struct cli_questions {
    kvf_token_ids ids;
    kvf_token_ids starts; /* [count + 1] */
    uint32_t count;
    uint32_t longest; /* tokens */
} cli_questions;

/** Lines of a file, blank ones left out. */
KVF_CHECKED kvf_status cli_questions_read(const char *path, const kvf_model_config *model,
                                          const kvf_tokenizer *tokenizer, cli_questions *out,
                                          kvf_error *error);
void cli_questions_free(cli_questions *questions);

#endif
