/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SEQUENCE_H
#define KVF_RUNTIME_SEQUENCE_H

/*
 * Sequences: begun, ended, cleared, checked.
 */

#include "cache.h"

/* KVF_FULL if none is free. */
KVF_CHECKED kvf_status kvf_sequence_begin(kvf_cache *cache, kvf_sequence **out);
void kvf_sequence_end(kvf_sequence *sequence);
/* The sequence is empty again, as if it had just begun; later calls overwrite what they need in the
 * cache's order. */
KVF_CHECKED kvf_status kvf_sequence_clear(kvf_cache *cache, kvf_sequence *sequence);

/* One layer is empty again, likewise. */
void kvf_layer_clear(kvf_layer *layer);

/* `to` holds what `from` does, in its own arrays; blocks are not copied. */
void kvf_layer_copy(kvf_layer *to, const kvf_layer *from);

KVF_CHECKED kvf_status kvf_sequence_check(kvf_cache *cache, const kvf_sequence *sequence);
KVF_CHECKED kvf_status kvf_layer_check(kvf_cache *cache, uint32_t layer);
/* Whether a key or value was not finite, and the refusal of what comes after it. */
bool kvf_sequence_fault(const kvf_sequence *sequence, uint32_t *layer, uint32_t *token);
KVF_CHECKED kvf_status kvf_sequence_fail(kvf_cache *cache, uint32_t layer, uint32_t token);

#endif
