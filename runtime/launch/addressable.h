/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_ADDRESSABLE_H
#define KVF_RUNTIME_ADDRESSABLE_H

/*
 * The blocks of the pool that a call reads or writes are addressable from its beginning to its end.
 *
 * Knows nothing of why they are read, and callers know nothing of where they come from. Where all
 * blocks are always addressable these functions do no more than begin and end a call. A page table
 * may hold old addresses of blocks that no call asked for; nobody reads those. A failure has
 * changed nothing but what is in memory.
 */

#include "call.h"

/* A call on one row of a layer begins: kvf_call_begin, kvf_call_at, and if it `reads` them all
 * sealed blocks of the row become addressable. A failure has ended it. */
KVF_CHECKED kvf_status kvf_call_open(kvf_call *call, uint32_t layer, kvf_sequence *const *sequence,
                                     bool reads, kvf_stream *stream);
/* The same of the call's rows that are to be read whole, but for blocks in the prefill arena. */
KVF_CHECKED kvf_status kvf_addressable_rows(kvf_call *call,
                                            bool (*is_read)(const kvf_kv_group *kv_group,
                                                            const kvf_layer *layer));
/* A call of decode or on page lists ends: as kvf_call_end, unless blocks did not come, which the
 * caller undoes. */
KVF_CHECKED kvf_status kvf_call_close(kvf_call *call, kvf_status status);

/* A call of decode on this layer can fail half-way, because its blocks cannot be read. */
bool kvf_call_may_fail(const kvf_cache *cache, uint32_t layer);

/* Blocks whose addresses the caller looks up itself; and blocks that were just acquired, or are to
 * be written again. */
KVF_CHECKED kvf_status kvf_addressable_blocks(kvf_kv_group *kv_group, const kvf_block *blocks,
                                              uint32_t count);
KVF_CHECKED kvf_status kvf_addressable_fresh(kvf_kv_group *kv_group, const kvf_block *blocks,
                                             uint32_t count);
/* Until whatever the stream has so far is done: blocks that it uses may go, lists can be read. */
KVF_CHECKED kvf_status kvf_addressable_wait(kvf_kv_group *kv_group, kvf_stream *stream);
/* Pages of lists, of KV heads of every row, for the caller too. `find` waits for the lists, checks
 * them, and says where the host reads them. */
KVF_CHECKED kvf_status kvf_addressable_listed(kvf_call *call, const kvf_page_lists *lists,
                                              kvf_status (*find)(kvf_call *call,
                                                                 const kvf_page_lists *lists,
                                                                 const int32_t **indptr,
                                                                 const int32_t **indices));

#endif
