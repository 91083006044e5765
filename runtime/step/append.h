/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_APPEND_H
#define KVF_RUNTIME_APPEND_H

/*
 * The host's side of appending to one layer of one sequence: limits, blocks, positions. Shared by
 * prefill and decode.
 */

#include "call.h"

/* KVF_FULL or KVF_INVALID, in words; `positions` may be NULL. */
KVF_CHECKED kvf_status kvf_append_check(kvf_cache *cache, const kvf_layer *layer, uint32_t tokens,
                                        const uint32_t *positions);
/* KVF_FULL: the pool has no block left. */
KVF_CHECKED kvf_status kvf_append_full(const kvf_kv_group *kv_group);
/* Host blocks for those that `tokens` more tokens seal; a failure leaves none acquired.
 * Acquire makes them addressable, to be written; reserve does not. */
KVF_CHECKED kvf_status kvf_append_reserve(kvf_layer *layer, uint32_t tokens);
KVF_CHECKED kvf_status kvf_append_acquire(kvf_layer *layer, uint32_t tokens);
/* Undo acquire, for blocks layer->sealed .. end-1. */
void kvf_append_release(kvf_layer *layer, uint32_t end);
/* Length, positions and sealed blocks after the tokens. */
void kvf_append_note(kvf_layer *layer, uint32_t tokens, const uint32_t *positions);

#endif
