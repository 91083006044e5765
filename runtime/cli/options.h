/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_OPTIONS_H
#define KVF_CLI_OPTIONS_H

/*
 * The command line of `kvferry run`: names, ranges, help, and suggestions for what was misspelt.
 *
 * It knows text and ranges, not models. Invariant: options that were parsed are in their ranges,
 * and whatever depends on the model or the machine is left to those who know them.
 */

#include "option_values.h"
#include "prune_options.h"
#include "sampling.h"

#include <stdio.h>

typedef struct cli_run_options {
    const char *model;
    const char *prompt; /* exactly one of these three, or none: standard input */
    const char *prompt_file;
    const char *token_ids_file;
    const char *ask_file; /* NULL = one continuation of the prompt */
    const char *stats;    /* "json" = to standard error, else a file; NULL = none */
    const char *emit_ids_file;
    const char *dump_logits_file;
    uint32_t tokens;         /* to generate */
    uint32_t context_tokens; /* 0 = prompt + tokens */
    bool chat;
    bool dry_run;
    bool ignore_eos;
    bool help;
    kvf_sampling_config sampling;
    kvf_runtime_config runtime;
    kvf_cache_config cache; /* geometry and tokens_max are not set */
    cli_prune_options prune;
} cli_run_options;

/** @return whether to go on; false after a message on stderr: exit with 2 */
bool cli_run_options_parse(int argc, char **argv, cli_run_options *out);

void cli_run_help(FILE *file);

/** Names of settings, for statistics. Never NULL. */
const char *cli_select_name(kvf_select value);
const char *cli_digest_name(kvf_digest_kind value);
const char *cli_group_reduce_name(kvf_group_reduce value);
const char *cli_refresh_name(kvf_refresh value);
const char *cli_restructure_name(kvf_restructure value);
const char *cli_transfer_name(kvf_transfer value);
const char *cli_dtype_name(kvf_dtype value);
const char *cli_device_name(kvf_device_kind value);

#endif
