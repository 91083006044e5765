/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_GIVEN_ANSWERS_H
#define KVF_CLI_GIVEN_ANSWERS_H

/*
 * Finished answers of a batch, read back from its lines of JSON.
 *
 * It knows lines and prompts, not what scores them. Invariant: every answer belongs to a job and
 * has at least one token, all of the model's; jobs without an answer are gone.
 */

#include "batch_input.h"

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
