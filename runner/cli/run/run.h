/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_RUN_H
#define KVF_CLI_RUN_H

/*
 * `kvferry run` and `kvferry score`: what their files share.
 *
 * run.c opens and closes, run_input.c reads, run_plan.c says what it will take, run_prune.c prunes,
 * run_tokens.c generates, run_batch.c generates many answers at once, run_score.c scores a text or
 * answers, run_report.c tells.
 * Invariant: a run that is zero or half open can be closed.
 */

#include <kvferry/save.h>

#include "completion.h"
#include "generate.h"
#include "memory_plan.h"
#include "output.h"
#include "prompt.h"
#include "run_options.h"
#include "tokenizer.h"

/*
 * Log-probabilities of an answer's tokens, in nats, as they were chosen.
 *
 * It knows logits, not where they come from. Invariant: one entry per token that was added.
 */

#define CLI_LIKELY_MAX 20u

typedef struct cli_likely {
    uint32_t id;
    float logprob;
} cli_likely;

/** Zero-initialise but for `top`. */
typedef struct cli_logprobs {
    uint32_t top; /* likeliest tokens that are told beside each, at most CLI_LIKELY_MAX */
    uint32_t count, capacity;
    float *model;       /* [capacity] of softmax(logits) */
    float *drawn;       /* [capacity] of what the token was drawn from */
    cli_likely *likely; /* [capacity, top] of softmax(logits); ties to the lower id */
} cli_logprobs;

/** A token that was chosen from logits [vocab_size] with probability e^drawn. @return false if out
 * of memory */
bool cli_logprobs_add(cli_logprobs *logprobs, const float *logits, uint32_t vocab_size, uint32_t id,
                      double drawn);
/** Members `logprobs`, `draw_logprobs` if @p has_drawn, and `top_logprobs` if any are wanted. */
void cli_logprobs_write(cli_json *json, const cli_logprobs *logprobs, bool has_drawn);
void cli_logprobs_free(cli_logprobs *logprobs);

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
    uint32_t rows;      /* answers at once, at most; 0 = no batch */
    uint32_t step_rows; /* tokens in a step, at most: of answers, and of what drafts guess */
    uint32_t piece;     /* of prompts, tokens that are read between two steps, at most */
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
    size_t count, capacity;
} cli_rescored;

/* All given answers, scored again. */
typedef struct cli_rescores {
    cli_rescored *of; /* [count] */
    uint32_t count;
    double sum; /* of log-probabilities */
} cli_rescores;

/* The text of `score`. */
typedef struct cli_scored {
    kvf_token_ids text;
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

/* Drafts of several tokens per step. */
typedef struct cli_drafting {
    kvf_draft *of; /* NULL = a token per step */
    uint64_t proposed, accepted;
} cli_drafting;

/* How prompts are pruned, and what that left. */
typedef struct cli_pruning {
    kvf_prune *of; /* NULL = prompts are not pruned */
    kvf_prune_config config;
    kvf_prune_stats stats;      /* of the prefill */
    uint32_t *layer_tokens;     /* [layers] that a layer held after the prefill */
    kvf_completion *completion; /* NULL = pruned prompts stay pruned */
    cli_complete complete;
} cli_pruning;

/* Heads that stream. */
typedef struct cli_head_mask {
    uint8_t *of; /* [layers, kv_heads] of --head-mask, or NULL */
    uint32_t streaming;
} cli_head_mask;

/* The prompt of --load. */
typedef struct cli_loaded {
    kvf_token_ids prompt;
    uint32_t tokens; /* of it, those that its sequence has */
    double ms;       /* to restore it */
} cli_loaded;

typedef struct cli_answers {
    cli_answer *of; /* [max] */
    uint32_t max, count;
} cli_answers;

/* Decode steps of all answers, in order. */
typedef struct cli_steps {
    double *ms; /* [count] */
    uint32_t count;
} cli_steps;

/* Files that a run writes beside its answers. */
typedef struct cli_outputs {
    cli_output ids, logits, stats;
} cli_outputs;

typedef struct cli_run {
    cli_run_options options;
    cli_command command;
    kvf_model_config model;
    kvf_tokenizer *tokenizer; /* NULL: ids in, ids out */
    kvf_weights *weights;
    cli_chat chat;                     /* if the prompt is one */
    uint32_t end_ids[KVF_EOS_MAX + 1]; /* [end_count] tokens that end an answer */
    uint32_t end_count;
    kvf_token_ids prompt;
    cli_questions questions;
    cli_jobs jobs; /* of a batch */
    cli_batch batch;
    cli_given given; /* answers to score; none = they are generated */
    cli_rescores rescores;
    cli_scored scored;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_transformer *transformer;
    kvf_cache *cache;
    kvf_sequence *sequence;
    kvf_sampler *sampler;
    cli_drafting draft;
    kvf_session session;
    cli_pruning prune;
    cli_head_mask head_mask;
    cli_memory_plan plan;
    cli_outputs outputs;
    cli_answers answers;
    cli_steps steps;
    double load_ms, prefill_ms;
    uint32_t prefilled;
    cli_loaded loaded;
    kvf_save *save; /* under way, or NULL */
    bool interrupted;
    bool output_failed; /* standard output did not take a token */
} cli_run;

/** The input, run_input.c: read, and checked against the model. */
KVF_CHECKED kvf_status cli_run_read_input(cli_run *run, kvf_error *error);

/** Tokens of the prompt, the text, the longest question and the answer. */
uint32_t cli_run_tokens_needed(const cli_run *run);

/** The plan, run_plan.c: the cache's settings, and the memory of everything. Needs the
 * input and the runtime. */
KVF_CHECKED kvf_status cli_run_make_plan(cli_run *run, kvf_error *error);

/** How the model is opened. */
kvf_transformer_options cli_run_transformer_options(const cli_run *run);

/** Prefill and generate. @return KVF_OK also when interrupted */
KVF_CHECKED kvf_status cli_run_generate(cli_run *run, kvf_error *error);

/** A line for each prompt of the jobs: how many tokens it has. @return false if it failed */
bool cli_run_print_jobs(const cli_run *run);

/** Answer all jobs. @return KVF_OK also when interrupted */
KVF_CHECKED kvf_status cli_run_batch(cli_run *run, kvf_error *error);

/** For a long operation: shows how far it is. @return whether to go on: nobody interrupted it */
bool cli_run_go_on(void *progress, uint32_t done, uint32_t total);

/** Counters between two readings, of those that an answer tells. */
kvf_stats cli_stats_between(const kvf_stats *before, const kvf_stats *after);

/** Prefill and score. The first answer's counters are of the text. @return KVF_OK also when
 * interrupted */
KVF_CHECKED kvf_status cli_run_score(cli_run *run, kvf_error *error);

/* Scoring answers, run_score.c. */

/** Members of a line: what an answer's tokens are worth now, and the difference. @return false if
 * out of memory */
bool cli_rescore_write(cli_run *run, cli_json *json, const cli_given_answer *given,
                       const cli_logprobs *now);
void cli_rescore_write_all(cli_json *json, const cli_run *run);
void cli_rescore_summary(const cli_run *run);
void cli_rescore_free(cli_rescores *rescores);

/** The whole prompt; the logits of its last token become row 0 of the transformer's. @return KVF_OK
 * also when interrupted */
KVF_CHECKED kvf_status cli_run_prefill(cli_run *run, kvf_error *error);

/* What `run` and `tune` have in common. */

/** A runtime's log, to stderr. */
void cli_log_line(void *user, int level, const char *line);

/** Sets chunk_max, which follows from the device and the prompt, and batch_max. */
void cli_transformer_fit(kvf_transformer_options *options, uint32_t tokens);

/** Behind a plan: a line if tensors of a file are widened. */
void cli_note_widening(const kvf_weights *weights);

/** Memory that weights, runner and cache will take, and what there is. */
KVF_CHECKED kvf_status cli_plan_make(const kvf_transformer_options *options,
                                     const kvf_cache_config *cache, cli_memory_plan *plan,
                                     kvf_error *error);

/** Tokens of the longest prompt. */
uint32_t cli_run_prompt_tokens(const cli_run *run);

/** A runtime on the device of @p config; with `auto`, on one that computes the model, which
 * @p config says then. @return as kvf_runtime_open */
KVF_CHECKED kvf_status cli_runtime_open(kvf_runtime_config *config, const kvf_model_config *model,
                                        kvf_weights *weights, kvf_runtime **out, kvf_error *error);

/** Tensors that a file holds in another type or order than is needed. @return KVF_OK also if
 * interrupted */
KVF_CHECKED kvf_status cli_weights_convert(kvf_weights *weights, const kvf_runtime *runtime,
                                           kvf_error *error);

/* Pruning and head masks, run_prune.c. */

/** Settings, checked against model and prompt, into the cache's. Needs model, weights, prompt. */
KVF_CHECKED kvf_status cli_run_prune_prepare(cli_run *run, kvf_error *error);
/** Chunks of a prefill. */
void cli_run_prune_options(const cli_run *run, kvf_transformer_options *options);
/** Tokens that go through all layers at once; 0 = layer by layer, or as the device likes it. */
uint32_t cli_run_prune_chunk(const cli_run *run);
/** Its part of the memory plan. Needs the cache's settings. */
KVF_CHECKED kvf_status cli_run_prune_plan(cli_run *run, kvf_error *error);
/** The pruner, if there is one. Needs the cache and the transformer. */
KVF_CHECKED kvf_status cli_run_prune_open(cli_run *run, kvf_error *error);
/** After the prefill: remember what it left. */
KVF_CHECKED kvf_status cli_run_prune_note(cli_run *run, kvf_error *error);
void cli_run_prune_summary(const cli_run *run);
/** Members of the statistics: prune, head_mask, footprint. */
void cli_run_prune_write(cli_json *json, const cli_run *run);
/** Before the cache is closed. */
void cli_run_prune_close(cli_run *run);

/* Completing a pruned prompt, run_complete.c. */

bool cli_run_completes(const cli_run *run);
/** Room for the completed sequence beside the pruned one. */
void cli_run_complete_reserve(const cli_run *run, kvf_cache_config *cache);
/** Hidden states, in the memory plan. */
void cli_run_complete_plan(cli_run *run);
/** Needs the transformer. */
KVF_CHECKED kvf_status cli_run_complete_open(cli_run *run, kvf_error *error);
/** Before the cache is closed. */
void cli_run_complete_close(cli_run *run);
/** Behind a prompt: a line if its hidden states could not be written. */
void cli_run_complete_note(const cli_run *run);
/** Rows that are not computed. */
uint64_t cli_run_complete_left(const cli_run *run);
/** Some rows. @return whether more are left */
bool cli_run_complete_step(cli_run *run);
/** Between tokens of the answer that began at @p start_ms: so much that it is --complete-share of
 * the time since. */
void cli_run_complete_beside(cli_run *run, double start_ms);
/** All rows, or until Ctrl-C. */
void cli_run_complete_all(cli_run *run);
/** If no row is left, the prompt becomes whole. */
void cli_run_complete_end(cli_run *run);
void cli_run_complete_write(cli_json *json, const cli_run *run);

/** A few lines on stderr. */
void cli_run_summary(const cli_run *run);

/** The statistics where the user asked for them. @return false after a message */
bool cli_run_write_stats(cli_run *run);

/** The result of `score`, to standard output. @return false after a message */
bool cli_run_print_score(const cli_run *run);

/** A command that is a form of `run`: options by @p parse (-1 to go on), everything opened, then
 * @p work, which returns KVF_OK also when interrupted, and what there is to tell.
 * @return exit status */
int cli_run_command(int argc, char **argv,
                    int (*parse)(int argc, char **argv, cli_command *command, cli_run_options *out),
                    kvf_status (*work)(cli_run *run, kvf_error *error));

/*
 * `--save` and `--load`: a prompt that was prefilled once.
 *
 * A file's note is the ids of its prompt, and its model is the fingerprint of the one that runs. It
 * knows files and ids, not how a prompt is prefilled. Invariant: what is loaded is the beginning of
 * the prompt.
 */

/** With --load: sets run->loaded.prompt, the prompt of the file, and run->loaded.tokens, how many
 * of its tokens the sequence has; a last one may wait to be fed. Needs model and weights; opens the
 * runtime.
 * @return KVF_OK; KVF_INVALID; as kvf_runtime_open and kvf_saved_read */
KVF_CHECKED kvf_status cli_saved_read(cli_run *run, kvf_error *error);

/** The prompt begins with what is loaded, or is what was saved if none was given.
 * @return KVF_OK; KVF_INVALID says which token differs */
KVF_CHECKED kvf_status cli_saved_match(cli_run *run, kvf_error *error);

/** With --save: the file can be written, as far as can be said. Needs the runtime.
 * @return KVF_OK, KVF_UNSUPPORTED, KVF_SYSTEM */
KVF_CHECKED kvf_status cli_saved_check(const cli_run *run, kvf_error *error);

/** With --load: the sequence of the run becomes the file's. @return as kvf_sequence_restore */
KVF_CHECKED kvf_status cli_saved_load(cli_run *run, kvf_error *error);

/** With --load: host tokens that its sequence takes, window included; else 0. */
uint64_t cli_saved_room(const cli_run *run);

/** With --save, after the prefill: the file is on its way. @return as kvf_sequence_save */
KVF_CHECKED kvf_status cli_saved_begin(cli_run *run, kvf_error *error);

/** Wait for it, if it is. @return false after a message */
bool cli_saved_end(cli_run *run);

#endif
