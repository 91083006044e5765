/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_LOGPROBS_H
#define KVF_CLI_LOGPROBS_H

/*
 * Log-probabilities of an answer's tokens, in nats, as they were chosen.
 *
 * It knows logits, not where they come from. Invariant: one entry per token that was added.
 */

#include "output.h"

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

#endif
