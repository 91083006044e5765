/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_COMPLETION_H
#define KVF_MODEL_COMPLETION_H

/*
 * The tokens that a pruned prompt left out of its deeper layers, computed later: the hidden states
 * of all its tokens at the pivot, kept in host memory or in a file, and the work from there on,
 * piece by piece.
 *
 * It knows layers and sequences, not when there is time. Invariant: a sequence whose completion is
 * dropped, or failed, is what pruning left; what is enqueued is waited for by each call.
 */

#include "transformer.h"

typedef struct kvf_completion kvf_completion;

/** For a prompt of so many tokens: their hidden states, which are fp32. */
void kvf_completion_plan(const kvf_model_config *model, uint32_t tokens, bool on_disk,
                         kvf_hidden_plan *plan);

/**
 * Room for one prompt at a time.
 *
 * @param disk_path  folder of a private file for it, or NULL
 * @return as kvf_hidden_open
 */
KVF_CHECKED kvf_status kvf_completion_open(kvf_runtime *runtime, const kvf_model_config *model,
                                           uint32_t tokens_max, const char *disk_path,
                                           kvf_completion **out, kvf_error *error);
/** Before the cache is closed. NULL is fine. */
void kvf_completion_close(kvf_completion *completion);

/** Prompts that are pruned alone leave their hidden states here, each in place of the one before;
 * NULL = nowhere. A prompt of more than tokens_max, one that no layer shortens, or one whose file
 * cannot be written, leaves none. */
void kvf_transformer_keep(kvf_transformer *transformer, kvf_completion *completion);

/** Why the file could not be written for the latest prompt, which stays pruned; else NULL. */
const kvf_error *kvf_completion_lost(const kvf_completion *completion);

/** The sequence that something is left to compute of, or NULL. */
const kvf_sequence *kvf_completion_of(const kvf_completion *completion);
/** The prompt's tokens. */
uint32_t kvf_completion_tokens(const kvf_completion *completion);
/** Rows that are left, over the deeper layers; and all of them. */
uint64_t kvf_completion_left(const kvf_completion *completion);
uint64_t kvf_completion_rows(const kvf_completion *completion);

/**
 * Compute the next rows of a layer, at most chunk_max: the first time it takes a sequence of the
 * cache. Something must be left.
 *
 * @return as kvf_complete_begin and kvf_prefill; after an error it is dropped
 *
 * Stream: waits for it.
 */
KVF_CHECKED kvf_status kvf_completion_step(kvf_completion *completion, kvf_transformer *transformer,
                                           kvf_cache *cache, kvf_stream *stream);

/**
 * Nothing is left: the sequence goes on completed. Its recordings are dropped.
 *
 * @param ids  [count] of the tokens that it got after the prompt
 * @return as kvf_transformer_prefill and kvf_complete_end; after an error it is dropped
 *
 * Stream: waits for it.
 */
KVF_CHECKED kvf_status kvf_completion_end(kvf_completion *completion, kvf_transformer *transformer,
                                          kvf_cache *cache, const uint32_t *ids, uint32_t count,
                                          kvf_stream *stream);

/** Give up, before the sequence is destroyed, and after its stream was waited for. */
void kvf_completion_drop(kvf_completion *completion, kvf_transformer *transformer);

#endif
