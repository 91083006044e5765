/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BATCH_INPUT_H
#define KVF_CLI_BATCH_INPUT_H

/*
 * What a batch has to answer: prompts from a file of JSON lines, or one prompt several times.
 *
 * It knows files and fields, not what runs them. Invariant: every id of a token is one that the
 * model has, settings are in their ranges, and no two lines have the same id.
 */

#include "generate_batch.h"
#include "prompt.h"

/* What results say of a prompt. */
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

#endif
