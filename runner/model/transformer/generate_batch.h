/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_GENERATE_BATCH_H
#define KVF_MODEL_GENERATE_BATCH_H

/*
 * Many prompts, several answers to each, in one batch that is always as full as rows and memory
 * allow: an answer that ends makes room for the next one.
 *
 * It knows transformers and sequences, not text or files. A prompt is prefilled once, or from where
 * a base that many prompts begin with ends, in pieces between which answers under way make a step;
 * its answers are forks, which begin with what follows from the logits of its last token.
 * Invariant: an answer's tokens follow from its prompt, settings and seed alone, not from what runs
 * beside it. Tokens that a GPU drew for an answer after its end are dropped with its sequence.
 */

#include "generate.h"

typedef struct kvf_batch_prompt {
    const uint32_t *ids; /**< [count], at least 1 */
    uint32_t count;
    uint32_t
        shared; /**< of them, the first ones, which the base of the batch holds: less than count */
    uint32_t tokens;              /**< of each answer, at least 1 */
    uint32_t samples;             /**< answers, at least 1 */
    kvf_sampling_config sampling; /**< answer i draws with seed + i */
} kvf_batch_prompt;

/** An answer on its way. */
typedef struct kvf_batch_answer {
    uint32_t prompt; /**< index of it */
    uint32_t sample;
    uint32_t row;               /**< of the batch; no other answer has it at the same time */
    uint32_t generated;         /**< tokens handed out, an end token included */
    kvf_stop stop;              /**< at the end: why. CALLER also if the batch ended before it */
    bool has_no_logits;         /**< none was a finite number */
    uint32_t drafted, accepted; /**< tokens of drafts; of these, those that were chosen as well */
    double first_ms;            /**< from the start of its prompt to the first token */
    double ms;                  /**< to the last one */
} kvf_batch_answer;

typedef struct kvf_batch_request {
    const kvf_batch_prompt *prompts; /**< [count], borrowed */
    uint32_t count;
    kvf_sequence *base; /**< what is shared; borrowed, NULL = nothing is */
    uint32_t rows;      /**< answers at once; the cache has rows + 1 sequences beside the base */
    uint32_t piece; /**< tokens of prompts that are read while answers under way wait, at most; 0 =
                       whole prompts. One that is pruned is read whole */
    uint64_t tokens_max; /**< host_tokens_max of the cache, less what the base takes */
    uint32_t vocab_size;
    kvf_sampler *sampler; /**< of `rows` rows */
    const uint32_t *eos_ids;
    uint32_t eos_count;
    bool ignores_eos;
    uint32_t draft_tokens; /**< that prompt lookup guesses of an answer in a step, at most: less
                              than tokens_per_step_max of the cache, which can be cut and has no
                              static set; 0 = none. The same tokens as without */
    uint32_t step_rows; /**< tokens of all answers in a step with drafts, at most: batch_max of the
                           transformer. Drafts take the rest */
    /** The next token of an answer, whose index is @p answer's `generated`, from its logits
     * [vocab_size]; KVF_SAMPLER_NONE = there is none. NULL = the sampler's. */
    uint32_t (*choose)(void *user, const kvf_batch_answer *answer, const float *logits);
    /** A token. @return whether the answer goes on */
    bool (*token)(void *user, const kvf_batch_answer *answer, uint32_t id);
    /** An answer ended. Its row is free afterwards. */
    void (*end)(void *user, const kvf_batch_answer *answer);
    /** After a prefill of @p prefilled tokens or a step of @p rows, which took @p ms, without what
     * guesses of drafts take. @return whether to go on */
    bool (*pass)(void *user, uint32_t prefilled, uint32_t rows, double ms);
    void *user;
} kvf_batch_request;

/** Host tokens that a prompt takes with @p answers answers at once. */
uint64_t kvf_batch_tokens(const kvf_batch_prompt *prompt, uint32_t answers, uint32_t local_tokens);

/**
 * Answer all prompts, in their order as far as rows and memory go.
 *
 * @return KVF_OK, also when a callback ended it; KVF_FULL if a prompt does not fit alone; what the
 *         library says. Every answer that began has ended, and no sequence is left
 */
KVF_CHECKED kvf_status kvf_generate_batch(const kvf_session *session,
                                          const kvf_batch_request *request, kvf_error *error);

#endif
