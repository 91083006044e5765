/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SEAL_H
#define KVF_RUNTIME_SEAL_H

/*
 * Sealing the blocks that a call completes, and their way to the pool.
 */

#include "call.h"

/* For a decode step. Seal: bits, sink and digests of the pages that the step completes, and their
 * way from the ring to the pool. Publish: wait for that and point the page tables there. */
KVF_CHECKED kvf_status kvf_call_seal(kvf_call *call);
KVF_CHECKED kvf_status kvf_call_publish(kvf_call *call);

/* The blocks that this call seals: bits, sink, digests. Rows of the step name their present place.
 * `chunk_fault` is of a chunk that begins at token `chunk_first`, or NULL. */
KVF_CHECKED kvf_status kvf_call_seal_blocks(kvf_call *call, const uint32_t *chunk_fault,
                                            uint32_t chunk_first);
/* Pages of these blocks into slots, while their bytes are at hand. */
KVF_CHECKED kvf_status kvf_call_admit(kvf_call *call);
/* Page tables of the call's rows: sealed blocks in the pool, the others in the ring. */
KVF_CHECKED kvf_status kvf_call_point_tables(kvf_call *call);

/* Blocks to the pool on the write-back stream: from[i] to to[i], neighbours in one copy. */
KVF_CHECKED kvf_status kvf_write_back(kvf_kv_group *kv_group, void *const *to,
                                      const void *const *from, uint32_t count);

#endif
