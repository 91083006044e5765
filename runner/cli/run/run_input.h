/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_RUN_INPUT_H
#define KVF_CLI_RUN_INPUT_H

/*
 * The input of `kvferry run` and `kvferry score`: what was asked, and what was read for it.
 *
 * It is written by run_input.c, and by saved_prompt.c where a prompt is loaded; nobody changes it
 * once it was read. Invariant: an input that is zero or half read can be closed.
 */

#include "prompt.h"
#include "run_options.h"
#include "tokenizer.h"

/* The prompt of --load. */
typedef struct cli_loaded {
    kvf_token_ids prompt;
    uint32_t tokens; /* of it, those that its sequence has */
} cli_loaded;

typedef struct cli_input {
    cli_run_options options;
    cli_command command;
    kvf_model_config model;
    kvf_weights *weights;
    kvf_tokenizer *tokenizer;          /* NULL: ids in, ids out */
    cli_chat chat;                     /* if the prompt is one */
    uint32_t end_ids[KVF_EOS_MAX + 1]; /* [end_count] tokens that end an answer */
    uint32_t end_count;
    kvf_token_ids prompt;
    kvf_token_ids text; /* of `score` */
    cli_questions questions;
    cli_loaded loaded;
    cli_jobs jobs;   /* of a batch */
    cli_given given; /* answers to score; none = they are generated */
    uint32_t rows;   /* answers at once, at most; 0 = no batch */
} cli_input;

struct cli_machine;

/** Read, and check against the model. With --load the runtime of @p machine is opened. */
KVF_CHECKED kvf_status cli_input_read(cli_input *in, struct cli_machine *machine, kvf_error *error);
void cli_input_close(cli_input *in);

/** Tokens of the prompt, the text, the longest question and the answer. */
uint32_t cli_input_tokens(const cli_input *in);
/** Tokens of the longest prompt. */
uint32_t cli_input_prompt_tokens(const cli_input *in);

#endif
