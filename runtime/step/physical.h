/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_PHYSICAL_H
#define KVF_RUNTIME_PHYSICAL_H

/*
 * restructure = physical: what a refresh and a fork do differently. Used only if dims.is_physical.
 */

#include "token_scores.h"

/* Row `index` of the step is due: new blocks, their addresses in the frame. On the host. */
void kvf_physical_prepare(kvf_step *step, uint32_t index);
/* Pages, store, bits, digests and page table after the observation. */
KVF_CHECKED kvf_status kvf_physical_permute(kvf_step *step, const kvf_observation *all);
/* KVF_FULL if the pool cannot hold a copy of the parent. */
KVF_CHECKED kvf_status kvf_physical_check(kvf_cache *cache, const kvf_sequence *parent);
/* Blocks of the child's own for every sealed page, after that check. On the host. */
void kvf_physical_acquire(kvf_cache *cache, kvf_layer *child);
/* ... filled from the parent's. */
KVF_CHECKED kvf_status kvf_physical_fork(kvf_cache *cache, const kvf_sequence *parent,
                                         kvf_sequence *child, kvf_stream *stream);

#endif
