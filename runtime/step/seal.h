/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SEAL_H
#define KVF_RUNTIME_SEAL_H

/*
 * Sealing the blocks that a call completes, and their way to the pool.
 */

#include "step.h"

/* For a decode step. Seal: bits, sink and digests of the pages that the step completes, and their
 * way from the ring to the pool. Publish: wait for that and point the page tables there. */
KVF_CHECKED kvf_status kvf_step_seal(kvf_step *step);
KVF_CHECKED kvf_status kvf_step_publish(kvf_step *step);

/* The blocks that this call seals: bits, sink, digests. Rows of the step name their present place.
 * `chunk_fault` is of a chunk that begins at token `chunk_first`, or NULL. */
KVF_CHECKED kvf_status kvf_step_seal_blocks(kvf_step *step, const uint32_t *chunk_fault,
                                            uint32_t chunk_first);
/* Pages of these blocks into slots, while their bytes are at hand. */
KVF_CHECKED kvf_status kvf_step_admit(kvf_step *step);
/* Page tables of the step's rows: sealed blocks in the pool, the others in the ring. */
KVF_CHECKED kvf_status kvf_step_point_tables(kvf_step *step);

/* Blocks to the pool on the write-back stream: from[i] to to[i], neighbours in one copy. */
KVF_CHECKED kvf_status kvf_write_back(kvf_kv_group *kv_group, void *const *to,
                                      const void *const *from, uint32_t count);

#endif
