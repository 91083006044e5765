/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_GENERATE_H
#define KVF_MODEL_GENERATE_H

/*
 * Prompt in, tokens out: prefill chunk by chunk, then one decode step per token, or a draft of
 * several that a step checks. Or tokens in, what they cost out.
 *
 * It knows transformers and sequences, not text, terminals or files. The caller watches through two
 * functions and may stop it inside a prompt, also one that is pruned, or after any token.
 * Invariant: the host waits once per step, and nothing is allocated.
 */

#include "model_memory.h"
#include "sampling.h"
#include "transformer.h"

/*
 * Drafts: what may follow the ids that were seen, by prompt lookup (what followed the last time
 * that the newest tokens came up).
 *
 * It knows ids, not models: whoever takes a draft finds out how much of it is right, and says so.
 * Invariant: nothing is allocated after create; what a draft says follows from the ids that were
 * seen and from what was said of drafts before it.
 */

/** Tokens of a draft, at most: with the one that is fed anyway as many as a decode call takes. */
#define KVF_DRAFT_MAX 15u

typedef struct kvf_draft kvf_draft;

/** @param most     tokens of a draft, 1 … KVF_DRAFT_MAX
 *  @param ids_max  that are ever seen
 *  @return KVF_OK; KVF_OUT_OF_MEMORY */
KVF_CHECKED kvf_status kvf_draft_create(uint32_t most, size_t ids_max, kvf_draft **out,
                                        kvf_error *error);
void kvf_draft_destroy(kvf_draft *draft);

/** Ids of prompt and answer, in their order. Those beyond ids_max are not kept. */
void kvf_draft_see(kvf_draft *draft, const uint32_t *ids, size_t count);
/** Keep the first @p count ids. */
void kvf_draft_cut(kvf_draft *draft, size_t count);

/** Tokens that may follow. @param ids receives them
 * @return how many: at most @p most and at most the draft's own; 0 if the newest two never came up
 * before */
uint32_t kvf_draft_guess(const kvf_draft *draft, uint32_t most, uint32_t *ids);
/** The first @p right ids of the last guess of @p guessed were right: the next is longer or shorter
 */
void kvf_draft_learn(kvf_draft *draft, uint32_t guessed, uint32_t right);

/** The objects that a generation uses. All borrowed. */
typedef struct kvf_session {
    kvf_runtime *runtime;
    kvf_transformer *transformer;
    kvf_cache *cache;
    kvf_stream *stream;
    kvf_prune *prune; /**< of the cache; NULL = prompts are not pruned */
    uint32_t chunk; /**< prompt tokens that go through all layers before the next ones; 0 = layer by
                       layer. Needed where the pruner evicts by chunks */
    uint32_t step_tokens; /**< given tokens of a sequence that one step takes: at most batch_max of
                             the transformer and tokens_per_step_max of the cache; 0 = 1 */
} kvf_session;

/** Wait for what was enqueued. @param enqueued what enqueueing said
 * @return KVF_OK, or what went wrong while enqueueing or running, as a message */
KVF_CHECKED kvf_status kvf_session_finish(const kvf_session *session, kvf_status enqueued,
                                          kvf_error *error);

/** The newest @p count tokens of a sequence go. @return what kvf_sequence_truncate says */
KVF_CHECKED kvf_status kvf_session_cut(const kvf_session *session, kvf_sequence *sequence,
                                       uint32_t count);

/** Whether tokens of drafts can be taken back. @return KVF_OK; KVF_UNSUPPORTED says why not */
KVF_CHECKED kvf_status kvf_session_check_draft(const kvf_session *session, kvf_error *error);

/** Called for each generated token with the logits it was chosen from. It may use the transformer
 * after it read them. @return whether to go on */
typedef bool (*kvf_token_fn)(void *user, uint32_t id, const float *logits);

typedef enum kvf_stop {
    KVF_STOP_LENGTH, /**< as many tokens as were asked for */
    KVF_STOP_EOS,    /**< an end token, which was handed out as the last one */
    KVF_STOP_CALLER, /**< a callback said so */
} kvf_stop;

typedef struct kvf_prefill_request {
    kvf_sequence *sequence;
    const uint32_t *ids; /**< [count] */
    uint32_t count;      /**< 0 is allowed and does nothing */
    bool wants_logits;   /**< those of the last id become row 0 of the transformer's logits */
    kvf_prefill_progress_fn progress; /**< may be NULL */
    void *user;
} kvf_prefill_request;

/** Append a prompt to a sequence. All its tokens attend to all before them, the last one too, so
 * that the first token of an answer follows from dense attention. @p stop receives LENGTH or
 * CALLER; after CALLER a sequence that was stopped inside a chunk can only be destroyed. */
KVF_CHECKED kvf_status kvf_generate_prefill(const kvf_session *session,
                                            const kvf_prefill_request *request, kvf_stop *stop,
                                            kvf_error *error);

/** Append tokens as decode steps, step_tokens of the session at a time: what each attends to is
 * selected for it, with the bits of single steps. @p stop receives LENGTH, or CALLER after whole
 * steps. */
KVF_CHECKED kvf_status kvf_generate_extend(const kvf_session *session,
                                           const kvf_prefill_request *request, kvf_stop *stop,
                                           kvf_error *error);

typedef struct kvf_decode_request {
    kvf_sequence *sequence;
    uint32_t tokens; /**< to generate; the first follows from row 0 of the transformer's logits */
    kvf_sampler *sampler;    /**< whose row 0 it is */
    const uint32_t *eos_ids; /**< [eos_count] */
    uint32_t eos_count;
    kvf_token_fn token; /**< may be NULL */
    void *user;
    kvf_draft *draft; /**< has seen all that the sequence holds: what it guesses is fed
                         with the token in front of it, and what the sampler draws otherwise is
                         taken back. The same tokens as without; NULL = none */
} kvf_decode_request;

typedef struct kvf_decode_result {
    kvf_stop stop;
    uint32_t generated;         /**< tokens handed out, an end token included */
    double first_ms;            /**< from the call to the first token */
    double *step_ms;            /**< [tokens] of the caller, or NULL: time of each step in order,
                                     without that of guessing a draft */
    uint32_t steps;             /**< how many are filled */
    uint32_t drafted, accepted; /**< tokens of drafts; of these, those that were drawn as well */
} kvf_decode_result;

/**
 * Generate, after a prompt whose last token's logits are there.
 *
 * @param result  step_ms is set by the caller; the rest is filled
 * With a draft the transformer's batch_max and the cache's tokens_per_step_max are its length and
 * one more; the cache can be cut (kvf_sequence_truncate), and has no static set.
 *
 * @return KVF_OK; KVF_NOT_FINITE if no logit is a number; what the library says
 */
KVF_CHECKED kvf_status kvf_generate_decode(const kvf_session *session,
                                           const kvf_decode_request *request,
                                           kvf_decode_result *result, kvf_error *error);

/** Tokens that are given, to be scored. */
typedef struct kvf_score_request {
    kvf_sequence *sequence;
    const uint32_t *ids; /**< [count] fed as decode steps, but for the last */
    uint32_t count; /**< at least 1; the first is scored by row 0 of the transformer's logits */
    uint32_t vocab_size;
    float *loss;     /**< [count] receives -ln p(id | the sequence, ids in front of it) */
    bool *likeliest; /**< [count]: whether no other id is more probable; may be NULL */
    kvf_prefill_progress_fn progress; /**< called after each step; may be NULL */
    void *user;
} kvf_score_request;

/**
 * Feed ids as decode steps, step_tokens of the session at a time, and score each by the logits of
 * the id before it.
 *
 * @param result  as of kvf_generate_decode, but that a token of several in a step is told of too,
 *                with its share of the time; nothing is generated
 * One loss more than steps is filled
 * @return KVF_OK; KVF_NOT_FINITE if a loss is no number; what the library says
 */
KVF_CHECKED kvf_status kvf_generate_score(const kvf_session *session,
                                          const kvf_score_request *request,
                                          kvf_decode_result *result, kvf_error *error);

#endif
