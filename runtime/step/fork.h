/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_FORK_H
#define KVF_RUNTIME_FORK_H

/*
 * A second sequence from the same tokens.
 */

#include "step.h"

/* The parent was checked. A failure after the first copy breaks the cache. */
KVF_CHECKED kvf_status kvf_fork(kvf_cache *cache, kvf_sequence *parent, kvf_stream *stream,
                                kvf_sequence **out);

/* Arrays of a fork in its frame: a row per layer. */
void kvf_fork_take(kvf_step *step);

#endif
