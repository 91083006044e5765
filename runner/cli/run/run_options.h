/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_RUN_OPTIONS_H
#define KVF_CLI_RUN_OPTIONS_H

/*
 * The command lines of `kvferry run` and `kvferry score`.
 *
 * It knows rows, not models. Invariant: options that were parsed are in their ranges, and whatever
 * depends on the model or the machine is left to those who know them.
 */

#include "chat_prompt.h"
#include "options.h"
#include "printer.h"
#include "prune_settings.h"
#include "sampling.h"

/* How tokens after what the cache has are read. */
typedef enum cli_extend {
    CLI_EXTEND_DEFAULT, /* questions as steps, all else densely */
    CLI_EXTEND_SPARSE,  /* as steps, each of which selects */
    CLI_EXTEND_DENSE,
} cli_extend;

typedef struct cli_run_options {
    const char *model;
    const char *prompt; /* exactly one of these three, or none: standard input */
    const char *prompt_file;
    const char *token_ids_file;
    const char *ask_file;     /* NULL = one continuation of the prompt */
    const char *prompts_file; /* prompts as JSON lines; NULL = one prompt */
    const char *text_file;    /* of `score`: what follows the prompt; NULL = `run` */
    const char *answers_file; /* of `score`: finished answers, as JSON lines */
    const char *stats;        /* "json" = to standard error, else a file; NULL = none */
    const char *save_file;    /* of the prefilled prompt; NULL = none */
    const char *load_file;    /* of its beginning; NULL = none */
    bool reselect;            /* also where it was saved under other settings */
    cli_extend extend;
    const char *cublas; /* where it lies; NULL = looked for */
    const char *emit_ids_file;
    const char *dump_logits_file;
    uint32_t tokens;       /* to generate */
    uint32_t draft_tokens; /* of a draft by prompt lookup, at most; 0 = there is none */
    uint32_t samples;      /* answers to a prompt; 0 = one, as text */
    uint32_t batch;        /* answers at once; 0 = what memory has room for */
    uint32_t logprobs;     /* likeliest tokens told beside each token of a batch */
    uint64_t memory_bytes; /* of keys and values of a batch on the host; 0 = what the batch needs */
    uint32_t context_tokens; /* 0 = prompt + tokens */
    cli_chat_options chat;
    cli_stop_texts stop;
    bool dry_run;
    bool ignore_eos;
    kvf_sampling_config sampling;
    kvf_runtime_config runtime;
    kvf_cache_config cache; /* geometry and tokens_max are not set */
    cli_prune_options prune;
    double complete_share; /* of the time of an answer, for what pruning left out */
} cli_run_options;

/** The settings of kvf_sampling_config: 0, 1, ...; NULL after the last. */
const kvf_setting *cli_sampling_setting(uint32_t index);

/** @return -1 to go on, else the exit status */
int cli_run_options_parse(int argc, char **argv, cli_command *command, cli_run_options *out);
int cli_score_options_parse(int argc, char **argv, cli_command *command, cli_run_options *out);

#endif
