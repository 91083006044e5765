/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PRUNE_COMPLETE_H
#define KVF_PRUNE_COMPLETE_H

/*
 * A pruned sequence and its whole form: made from the layers that lost nothing, filled by the
 * caller, and then in the place of the pruned one.
 *
 * Knows no policy, no pruner and no model. Invariant: until the end the pruned sequence is not
 * touched, and the end cannot fail half-way.
 */

#include "cache.h"

/* What kvferry/prune.h says of kvf_complete_begin and kvf_complete_end. */
KVF_CHECKED kvf_status kvf_whole_begin(kvf_cache *cache, kvf_sequence *sequence,
                                       uint32_t first_layer, uint32_t tokens, kvf_stream *stream,
                                       kvf_sequence **whole);
KVF_CHECKED kvf_status kvf_whole_end(kvf_cache *cache, kvf_sequence *sequence, kvf_sequence *whole,
                                     kvf_stream *stream);

#endif
