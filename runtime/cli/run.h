/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_RUN_H
#define KVF_CLI_RUN_H

/*
 * `kvferry run`: what its files share.
 *
 * run.c opens and closes, run_tokens.c generates, run_report.c tells. Invariant: a run that is zero
 * or half open can be closed.
 */

#include "generate.h"
#include "memory_plan.h"
#include "options.h"
#include "output_file.h"
#include "prompt.h"
#include "tokenizer.h"

/* What one question, or the one continuation, took. */
typedef struct cli_answer {
    uint32_t prompt_tokens; /* fed as decode steps */
    uint32_t generated;
    kvf_stop stop;
    double first_ms;
    uint32_t first_step; /* in cli_run.step_ms */
    uint32_t steps;
    kvf_stats stats; /* of this answer alone; counters only */
} cli_answer;

typedef struct cli_run {
    cli_run_options options;
    kvf_model_config model;
    kvf_tokenizer *tokenizer; /* NULL: ids in, ids out */
    kvf_weights *weights;
    kvf_token_ids prompt;
    cli_questions questions;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_transformer *transformer;
    kvf_cache *cache;
    kvf_sequence *sequence;
    kvf_sampler *sampler;
    kvf_session session;
    cli_memory_plan plan;
    cli_output ids_output, logits_output;
    cli_answer *answers; /* [answer_max] */
    uint32_t answer_max, answer_count;
    double *step_ms; /* of all decode steps in order */
    uint32_t step_count;
    double load_ms, prefill_ms;
    uint32_t prefilled;
    bool interrupted;
    bool output_failed; /* standard output did not take a token */
} cli_run;

/** Prefill and generate. @return KVF_OK also when interrupted */
KVF_CHECKED kvf_status cli_run_generate(cli_run *run, kvf_error *error);

/** A few lines on stderr. */
void cli_run_summary(const cli_run *run);

/** The statistics where the user asked for them. @return false after a message */
bool cli_run_write_stats(const cli_run *run);

/** The command. @return exit status */
int cli_run_main(int argc, char **argv);

/** `kvferry info`. @return exit status */
int cli_info_main(int argc, char **argv);

#endif
