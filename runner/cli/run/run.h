/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_RUN_H
#define KVF_CLI_RUN_H

/*
 * `kvferry run` and `kvferry score`: the answers under way, and what was counted meanwhile.
 *
 * run.c begins and ends, run_tokens.c generates, run_batch.c generates many answers at once,
 * run_score.c scores a text or answers, run_complete.c completes what pruning left out. They read
 * input and machine, and write a run alone; run_report.c tells of all three. Invariant: a run that
 * is zero or half open can be closed.
 */

#include <kvferry/save.h>

#include "logprobs.h"
#include "output.h"
#include "run_input.h"
#include "run_machine.h"

/* Time and counters of one question, or of the one continuation. */
typedef struct cli_answer {
    uint32_t prompt_tokens; /* fed as decode steps */
    uint32_t generated;
    kvf_stop stop;
    bool interrupted;
    double first_ms;
    uint32_t first_step; /* in cli_run.step_ms */
    uint32_t steps;
    kvf_stats stats; /* of this answer alone; counters only */
} cli_answer;

/* Many answers at once. */
typedef struct cli_batch {
    uint32_t answers, failed;
    uint64_t generated;
    uint64_t rows_sum; /* over all steps */
    double first_ms;   /* of the first answer to the first prompt */
    double ms;
} cli_batch;

/* Answers that were drawn under one selection, scored again. */
typedef struct cli_rescored {
    char selection[CLI_SELECTION_BYTES];
    double *values; /* [count] differences of log-probabilities, a token each */
    uint32_t count, capacity;
} cli_rescored;

/* All given answers, scored again. */
typedef struct cli_rescores {
    cli_rescored *of; /* [count] */
    uint32_t count;
    double sum; /* of log-probabilities */
} cli_rescores;

/* The text of `score`. */
typedef struct cli_scored {
    float *losses;   /* [count] of its tokens */
    bool *likeliest; /* [count] whether the model would have said the same */
    uint32_t count;
} cli_scored;

/* Tokens of a pruned prompt that were computed later. */
typedef struct cli_complete {
    uint32_t tokens;
    uint64_t rows, rows_left; /* over the deeper layers */
    double ms;
    double beside_start_ms, beside_ms; /* of an answer, and what was spent while it came */
    bool is_whole;
} cli_complete;

/* Tokens that pruning left of the prompt. */
typedef struct cli_pruned {
    kvf_prune_stats stats;  /* of the prefill */
    uint32_t *layer_tokens; /* [layers] that a layer held after the prefill */
} cli_pruned;

typedef struct cli_answers {
    cli_answer *of; /* [max] */
    uint32_t max, count;
} cli_answers;

/* Decode steps of all answers, in order. */
typedef struct cli_steps {
    double *ms; /* [count] */
    uint32_t count;
} cli_steps;

typedef struct cli_run {
    const cli_input *in;
    const cli_machine *machine;
    kvf_sequence *sequence; /* NULL in a batch without --load */
    cli_answers answers;
    cli_steps steps;
    cli_batch batch;
    cli_rescores rescores;
    cli_scored scored;
    cli_pruned pruned;
    cli_complete complete;
    uint64_t drafted, accepted; /* tokens of drafts */
    double prefill_ms, restore_ms;
    uint32_t prefilled;
    cli_output ids, logits; /* files of --emit-ids and --dump-logits */
    kvf_save *save;         /* under way, or NULL */
    bool interrupted;
    bool output_failed; /* standard output did not take a token */
} cli_run;

/** Prefill and generate. @return KVF_OK also when interrupted */
KVF_CHECKED kvf_status cli_run_generate(cli_run *run, kvf_error *error);

/** Answer all jobs. @return KVF_OK also when interrupted */
KVF_CHECKED kvf_status cli_run_batch(cli_run *run, kvf_error *error);
/** A line for each prompt of the jobs: how many tokens it has. @return false if it failed */
bool cli_run_print_jobs(const cli_input *in);

/** For a long operation: shows how far it is. @return whether to go on: nobody interrupted it */
bool cli_run_go_on(void *progress, uint32_t done, uint32_t total);

/** Counters between two readings, of those that an answer tells. */
kvf_stats cli_stats_between(const kvf_stats *before, const kvf_stats *after);

/** Prefill and score. The first answer's counters are of the text. @return KVF_OK also when
 * interrupted */
KVF_CHECKED kvf_status cli_run_score(cli_run *run, kvf_error *error);

/** The whole prompt; the logits of its last token become row 0 of the transformer's. @return KVF_OK
 * also when interrupted */
KVF_CHECKED kvf_status cli_run_prefill(cli_run *run, kvf_error *error);

/** After the prefill: remember what pruning left of it. */
KVF_CHECKED kvf_status cli_run_prune_note(cli_run *run, kvf_error *error);

/* Scoring answers, run_score.c. */

/** Members of a line: what an answer's tokens are worth now, and the difference. @return false if
 * out of memory */
bool cli_rescore_write(cli_run *run, cli_json *json, const cli_given_answer *given,
                       const cli_logprobs *now);
void cli_rescore_free(cli_rescores *rescores);

/* Completing a pruned prompt, run_complete.c. */

/** After a prompt: a line if its hidden states could not be written. */
void cli_run_complete_note(const cli_run *run);
/** Rows that are not computed. */
uint64_t cli_run_complete_left(const cli_run *run);
/** Between tokens of the answer that began at @p start_ms: so much that it is --complete-share of
 * the time since. */
void cli_run_complete_beside(cli_run *run, double start_ms);
/** All rows, or until Ctrl-C. */
void cli_run_complete_all(cli_run *run);
/** If no row is left, the prompt becomes whole. */
void cli_run_complete_end(cli_run *run);

/* Files of `--save` and `--load`, saved_prompt.c. */

/** With --load: the sequence of the run becomes the file's. @return as kvf_sequence_restore */
KVF_CHECKED kvf_status cli_saved_load(cli_run *run, kvf_error *error);
/** With --save, after the prefill: the file is on its way. @return as kvf_sequence_save */
KVF_CHECKED kvf_status cli_saved_begin(cli_run *run, kvf_error *error);
/** Wait for it, if it is. @return false after a message */
bool cli_saved_end(cli_run *run);

#endif
