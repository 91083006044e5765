/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_DRAFT_H
#define KVF_MODEL_DRAFT_H

/*
 * Drafts: what may follow the ids that were seen, by prompt lookup (what followed the last time
 * that the newest tokens came up), or by whoever else guesses.
 *
 * It knows ids, not models: whoever takes a draft finds out how much of it is right, and says so.
 * Invariant: nothing is allocated after create; what a draft says follows from the ids that were
 * seen and from what was said of drafts before it.
 */

#include "model_memory.h"

/** Tokens of a draft, at most: with the one that is fed anyway as many as a decode call takes. */
#define KVF_DRAFT_MAX 15u

typedef struct kvf_draft kvf_draft;

/** Guess what follows ids [count], at least one. @p guess receives @p guessed of them, at most
 * @p most, which is at least 1. @return KVF_OK, or what went wrong */
typedef kvf_status (*kvf_guess_fn)(void *user, const uint32_t *ids, size_t count, uint32_t most,
                                   uint32_t *guess, uint32_t *guessed, kvf_error *error);

/** @param most     tokens of a draft, 1 … KVF_DRAFT_MAX
 *  @param ids_max  that are ever seen
 *  @return KVF_OK; KVF_OUT_OF_MEMORY */
KVF_CHECKED kvf_status kvf_draft_create(uint32_t most, size_t ids_max, kvf_draft **out,
                                        kvf_error *error);
void kvf_draft_destroy(kvf_draft *draft);

/** From here on @p guess does, in place of prompt lookup. */
void kvf_draft_ask(kvf_draft *draft, kvf_guess_fn guess, void *user);

/** Ids of prompt and answer, in their order. Those beyond ids_max are not kept. */
void kvf_draft_see(kvf_draft *draft, const uint32_t *ids, size_t count);
/** Keep the first @p count ids. */
void kvf_draft_cut(kvf_draft *draft, size_t count);

/** Tokens that may follow. @param ids receives @p count of them: at most @p most and at most the
 * draft's own; by prompt lookup none if the newest two never came up before
 * @return KVF_OK; what the guess returns */
KVF_CHECKED kvf_status kvf_draft_guess(const kvf_draft *draft, uint32_t most, uint32_t *ids,
                                       uint32_t *count, kvf_error *error);
/** The first @p right ids of the last guess of @p guessed were right: the next is longer or shorter
 */
void kvf_draft_learn(kvf_draft *draft, uint32_t guessed, uint32_t right);

#endif
