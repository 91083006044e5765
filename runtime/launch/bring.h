/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_BRING_H
#define KVF_RUNTIME_BRING_H

/*
 * Blocks that a phase reads become addressable: into memory, and their addresses into page tables.
 *
 * Knows nothing of why they are read. Every phase that reads or writes blocks of the pool asks
 * here first, and the call that it belongs to keeps them. A page table may hold old addresses of
 * blocks that nobody asked for; nobody reads those. All functions do nothing if the pool does
 * not spill. A failure has changed nothing but what is in memory.
 */

#include "step.h"

/* Sealed blocks first .. end - 1 of a row. `end` may be UINT32_MAX: all that are sealed and do
 * not lie in the prefill arena. */
KVF_CHECKED kvf_status kvf_bring(kvf_step *step, kvf_layer *state, uint32_t first, uint32_t end);
/* All blocks of the step's rows that `is_wanted` wants; NULL = of every row. `before`, if any, is
 * called first. */
KVF_CHECKED kvf_status kvf_bring_rows(kvf_step *step,
                                      bool (*is_wanted)(const kvf_kv_group *kv_group,
                                                        const kvf_layer *layer),
                                      kvf_status (*before)(kvf_step *step));
/* Blocks whose addresses the caller looks up itself. */
KVF_CHECKED kvf_status kvf_bring_blocks(kvf_kv_group *kv_group, const kvf_block *blocks,
                                        uint32_t count);
/* Blocks that were just acquired, or are to be written again. */
KVF_CHECKED kvf_status kvf_bring_fresh(kvf_kv_group *kv_group, const kvf_block *blocks,
                                       uint32_t count);
/* Until whatever the stream has so far is done: blocks that it uses may go, lists can be read. */
KVF_CHECKED kvf_status kvf_bring_wait(kvf_kv_group *kv_group, kvf_stream *stream);
/* After the choice of a step. While step->is_late, pages that it chose may not be addressable. */
KVF_CHECKED kvf_status kvf_bring_chosen(kvf_step *step);
/* Where pages stay: spans of late pages are attended as those of misses are; waiting for them. */
KVF_CHECKED kvf_status kvf_bring_mark(kvf_step *step);
KVF_CHECKED kvf_status kvf_bring_late(kvf_step *step);
/* Where pages move, while some are late: misses that are addressable now and were not before. */
KVF_CHECKED kvf_status kvf_bring_misses(kvf_step *step, kvf_choice *out);
/* After a failure of something else: no read is left in flight. */
void kvf_bring_drop(kvf_step *step);
/* Pages of lists, of KV heads of every row, for the caller too. `find` waits for the lists, checks
 * them, and says where the host reads them. */
KVF_CHECKED kvf_status kvf_bring_listed(kvf_step *step, const kvf_page_lists *lists,
                                        kvf_status (*find)(kvf_step *step,
                                                           const kvf_page_lists *lists,
                                                           const int32_t **indptr,
                                                           const int32_t **indices));

#endif
