/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_DRAFT_MODEL_H
#define KVF_MODEL_DRAFT_MODEL_H

/*
 * A model that guesses: the likeliest tokens of a smaller one, which has the same vocabulary.
 *
 * It knows a session and a sequence of that model, not the one that checks. Invariant: what the
 * sequence holds is a beginning of the ids that were seen last, and of what was guessed after
 * them.
 */

#include "generate.h"

typedef struct kvf_draft_model kvf_draft_model;

/**
 * @param session   of the model that guesses, borrowed; its cache can be cut. step_tokens of it are
 *                  read in one step, more of them as a prompt
 * @param sequence  empty, of that cache; borrowed
 * @param ids_max   that are ever seen or guessed
 * @return KVF_OK; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_draft_model_create(const kvf_session *session, kvf_sequence *sequence,
                                              uint32_t vocab_size, size_t ids_max,
                                              kvf_draft_model **out, kvf_error *error);
void kvf_draft_model_destroy(kvf_draft_model *model);

/** As a kvf_guess_fn, whose user is the model. */
KVF_CHECKED kvf_status kvf_draft_model_guess(void *model, const uint32_t *ids, size_t count,
                                             uint32_t most, uint32_t *guess, uint32_t *guessed,
                                             kvf_error *error);

#endif
