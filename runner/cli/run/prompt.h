/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_PROMPT_H
#define KVF_CLI_PROMPT_H

/*
 * From what the user gave to token ids: a prompt, those of a batch, and finished answers.
 *
 * It knows files, standard input, chats and numbers as text. Invariant: every id it returns is one
 * that the model has.
 */

#include "chat_prompt.h"
#include "generate_batch.h"
#include "json.h"
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

/** The text after the prompt, for `score`: no special tokens in front. @return as cli_prompt_read
 */
KVF_CHECKED kvf_status cli_text_read(const char *path, const kvf_model_config *model,
                                     const kvf_tokenizer *tokenizer, kvf_token_ids *ids,
                                     kvf_error *error);

/** The line after @p line, which is NULL for the first, without its newline. @return false after
 * the last */
bool cli_next_line(const kvf_text *text, const char **line, size_t *size);

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

/*
 * A file of JSON objects, one per line; blank lines count and say nothing.
 *
 * It knows lines, not what they mean.
 */

/** A line: @p where names file and line, for messages. */
typedef kvf_status (*cli_line_fn)(void *user, json_t *line, const char *where, uint64_t number,
                                  kvf_error *error);

/** @return KVF_OK; what reading, the line's JSON or @p fn says */
KVF_CHECKED kvf_status cli_json_lines(const char *path, cli_line_fn fn, void *user,
                                      kvf_error *error);

/*
 * Prompts of a batch: from a file of JSON lines, or one prompt several times.
 *
 * It knows files and fields, not what runs them. Invariant: every id of a token is one that the
 * model has, settings are in their ranges, and no two lines have the same id.
 */

/* A prompt, as results name it. */
typedef struct cli_job {
    char *name;      /* "id" of the line if that is a text, or NULL */
    uint64_t number; /* if it is a number, or the number of the line */
    uint64_t line;   /* of the file, from 1; 0 = it is not from one */
    size_t first;    /* in ids */
    bool thinks;     /* the prompt ends inside a thought */
} cli_job;

typedef struct cli_jobs {
    kvf_batch_prompt *prompts; /* [count] */
    cli_job *jobs;             /* [count] */
    uint32_t count, capacity;
    kvf_token_ids ids; /* of all prompts */
    uint32_t longest;  /* tokens of a prompt */
    uint32_t most;     /* of a prompt and an answer */
    uint64_t answers;  /* of all */
    bool told_start;   /* that a prompt begins with what the tokenizer adds too */
} cli_jobs;

typedef struct cli_job_source {
    const cli_run_options *options;
    const kvf_model_config *model;
    const kvf_tokenizer *tokenizer;
    const kvf_token_ids *before; /* what every line goes on from, or NULL */
    uint32_t shared;             /* of what every prompt begins with: what need not be prefilled */
    /* The chat format, when the first line needs one. */
    kvf_status (*chat)(void *user, const cli_chat **chat, kvf_error *error);
    void *user;
} cli_job_source;

/** Lines of --prompts. @return KVF_OK; KVF_INVALID, KVF_CORRUPT and others that name the line */
KVF_CHECKED kvf_status cli_jobs_read(const cli_job_source *source, cli_jobs *out, kvf_error *error);
/** One prompt. */
KVF_CHECKED kvf_status cli_jobs_single(const cli_job_source *source, const kvf_token_ids *prompt,
                                       cli_jobs *out, kvf_error *error);
void cli_jobs_free(cli_jobs *jobs);

/*
 * Finished answers of a batch, read back from its lines of JSON.
 *
 * It knows lines and prompts, not what scores them. Invariant: every answer belongs to a job and
 * has at least one token, all of the model's; jobs without an answer are gone.
 */

#define CLI_SELECTION_BYTES 64

typedef struct cli_given_answer {
    uint32_t job;
    uint64_t sample; /* as the line says */
    size_t first;    /* in ids and logprobs */
    uint32_t count;
    bool has_logprobs;
    char selection[CLI_SELECTION_BYTES]; /* policy and budget, or "" */
} cli_given_answer;

/** Zero-initialise. */
typedef struct cli_given {
    cli_given_answer *answers; /* [count] by job, as in the file */
    uint32_t count, capacity;
    uint32_t *first; /* [jobs] in answers */
    kvf_token_ids ids;
    float *logprobs; /* [ids] NaN where a line has none */
} cli_given;

/** Lines of --answers, for prompts that were read: each gets its answers as samples, and as many
 * tokens as the longest has. @return KVF_OK; KVF_INVALID, KVF_CORRUPT and others naming the line */
KVF_CHECKED kvf_status cli_given_read(const char *path, const kvf_model_config *model,
                                      cli_jobs *jobs, cli_given *out, kvf_error *error);
const cli_given_answer *cli_given_of(const cli_given *given, const kvf_batch_answer *answer);
void cli_given_free(cli_given *given);

#endif
