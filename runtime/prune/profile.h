/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PRUNE_PROFILE_H
#define KVF_PRUNE_PROFILE_H

/*
 * The shape of each query head's attention: from the vectors that scoring left in device memory to
 * a few numbers per head.
 *
 * Knows no policy. Invariant: the same vectors give the same bits.
 */

#include "pruner.h"

/* From prune->heads [query_heads, candidates] to prune->profile [query_heads], both in device
 * memory: entropy, variance, and the mass on the top floor(mass_share * tokens), where tokens are
 * the candidates and the window. */
KVF_CHECKED kvf_status kvf_prune_profile_enqueue(kvf_prune *prune, uint32_t candidates,
                                                 kvf_stream *stream);

#endif
