/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_TUNE_H
#define KVF_CLI_TUNE_H

/*
 * `kvferry tune`: how to prune a model, or which of its heads are hot, measured on text. Types and
 * functions that its files share.
 *
 * tune_options.c reads the command line, tune_text.c makes pieces of text, tune_questions.c hides
 * questions in them, tune_search.c looks for settings that keep the answers, tune_measure.c
 * measures what the papers do instead, tune_asl.c how ranks settle, and tune_recovery.c what of
 * attention is left; tune_report.c tells; tune_heads.c finds hot heads, and
 * tune_heads_report.c tells of them; tune.c opens and closes. Invariant: a tune that is zero or
 * half open can be closed.
 */

#include "generate.h"
#include "memory_plan.h"
#include "output.h"
#include "progress.h"
#include "prune_file.h"
#include "prune_settings.h"
#include "tokenizer.h"
#include "transformer.h"

#define TUNE_TEXTS_MAX         64u
#define TUNE_ANSWER_TOKENS_MAX 160u

typedef struct cli_tune_options {
    const char *model;
    const char *texts[TUNE_TEXTS_MAX];
    uint32_t text_count;
    const char *out; /* NULL = nothing is written; "-" = standard output */
    uint32_t method; /* one of three, or the first two */
    bool wants[CLI_METHODS];
    bool heads; /* none of them: hot heads */
    double hot_share;
    bool are_layers_given;
    uint32_t layer_first, layer_last;
    uint32_t samples, tokens;
    uint32_t questions; /* 0 = what the papers measure */
    uint32_t asked;     /* CLI_ASKED_END, or _AFTER */
    const char *lines_file;
    double goal;             /* share of full attention's answers */
    cli_prune_options prune; /* settings only */
    kvf_cache_config cache;  /* of hot heads: pages only */
    kvf_runtime_config runtime;
    const char *cublas; /* where it lies; NULL = looked for */
} cli_tune_options;

/* A line that is hidden, and its prompt: [first, first + count) of cli_tune.prompts, of which the
 * first `body` tokens are the piece. */
typedef struct tune_question {
    char line[512], question[512], answer[128];
    uint32_t first, count, body;
    uint32_t piece;
    uint32_t tokens; /* of an answer that is long enough to be judged */
    bool is_right;   /* by full attention */
} tune_question;

typedef struct cli_tune {
    cli_tune_options options;
    cli_command command;
    kvf_model_config model;
    kvf_tokenizer *tokenizer;
    kvf_weights *weights;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_transformer *transformer;
    kvf_cache *cache;
    cli_memory_plan plan;
    cli_output output;
    kvf_token_ids pieces;     /* [tuning.samples, tuning.tokens] */
    tune_question *questions; /* [question_count] */
    uint32_t question_count;
    kvf_token_ids prompts;
    uint32_t full_right;    /* questions that full attention answers */
    double *figures;        /* what the arrays of `tuning` lie in */
    float *hidden, *pruned; /* [samples, hidden_size], [hidden_size] */
    double *sensitivity;    /* [layers, kv_heads] */
    uint8_t *mask;          /* likewise */
    uint32_t foreseen;      /* answers */
    cli_progress progress;  /* of runs */
    uint64_t runs;          /* that are done */
    cli_tuning tuning;
    bool interrupted;
} cli_tune;

/** @return -1 to go on, else the exit status */
int cli_tune_options_parse(int argc, char **argv, cli_command *command, cli_tune_options *out);

/** Pieces of equal length, evenly from all texts. */
KVF_CHECKED kvf_status cli_tune_read(cli_tune *tune, kvf_error *error);

/** Settings of a method: its defaults, and what was given. */
void cli_tune_config(const cli_tune *tune, const char *policy, kvf_prune_config *out);

/** A session without sampling. */
kvf_session cli_tune_session(const cli_tune *tune, kvf_prune *prune);

/** Run the model; fills tuning. @return KVF_OK also when interrupted */
KVF_CHECKED kvf_status cli_tune_measure(cli_tune *tune, kvf_error *error);

typedef struct cli_tune_prompt {
    const uint32_t *ids;
    uint32_t count;
} cli_tune_prompt;

/** One run more is done. */
static inline void cli_tune_ran(cli_tune *tune)
{
    cli_progress_at(&tune->progress, ++tune->runs);
}

/** The last hidden state [hidden_size] of a prompt, in a sequence that is gone afterwards. */
KVF_CHECKED kvf_status cli_tune_run(const cli_tune *tune, kvf_prune *prune,
                                    const cli_tune_prompt *prompt, float *hidden, kvf_error *error);

/** Let ASL look at prompts without a choice: where the variance of ranks is greatest, which becomes
 * layer_min, and how it falls. Fills its tuning but for layer and threshold.
 * @param figures  [layers] of zeros, which become its scores
 * @return KVF_OK also when interrupted; KVF_INVALID if it does not fall */
KVF_CHECKED kvf_status cli_tune_asl_curve(cli_tune *tune, double *figures, kvf_error *error);

/** The same, with the layer and the threshold that the curve alone gives. */
KVF_CHECKED kvf_status cli_tune_asl_measure(cli_tune *tune, double *figures, kvf_error *error);

/** The threshold with which the mean prompt chooses this layer, or an earlier one whose variance is
 * no greater: halfway to what was the least before. 0 = none */
double cli_tune_asl_threshold(const cli_tuned *asl, uint32_t layer);

/** The share of the attention of whole pieces that is on tokens that layers get with this setting.
 * @param figures  [layers] of zeros, which become the method's recovery */
KVF_CHECKED kvf_status cli_tune_recovery(cli_tune *tune, uint32_t method, double *figures,
                                         kvf_error *error);

/** Make prompts with questions of the pieces. */
KVF_CHECKED kvf_status cli_tune_hide(cli_tune *tune, kvf_error *error);

/** The answer as it follows its question, after @p ids. */
KVF_CHECKED kvf_status cli_tune_answer(const cli_tune *tune, const tune_question *q,
                                       kvf_token_ids *ids, kvf_error *error);

/** Ask them; fills tuning. @return KVF_OK also when interrupted */
KVF_CHECKED kvf_status cli_tune_search(cli_tune *tune, kvf_error *error);

/** How the cache is, when hot heads are looked for. */
void cli_tune_heads_cache(const cli_tune *tune, kvf_cache_config *config);

/** Find hot heads; fills sensitivity and mask. @return KVF_OK also when interrupted */
KVF_CHECKED kvf_status cli_tune_heads(cli_tune *tune, kvf_error *error);

/** The result, for people: shares, and a map. */
void cli_tune_heads_print(const cli_tune *tune, FILE *file);

/** Share of a full prefill's tokens that FastKV computes with these settings at this layer: all up
 * to it, few after it. */
double cli_tune_share(const cli_tune *tune, const kvf_prune_settings *settings, uint32_t layer);

/** The result, for people. */
void cli_tune_print(const cli_tune *tune, FILE *file);

#endif
