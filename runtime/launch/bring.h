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
/* All blocks of the step's rows that `is_wanted` wants; NULL = of every row. */
KVF_CHECKED kvf_status kvf_bring_rows(kvf_step *step, bool (*is_wanted)(const kvf_part *part,
                                                                        const kvf_layer *layer));
/* Blocks whose addresses the caller looks up itself. */
KVF_CHECKED kvf_status kvf_bring_blocks(kvf_part *part, const kvf_block *blocks, uint32_t count);
/* Blocks that were just acquired, or are to be written again. */
KVF_CHECKED kvf_status kvf_bring_fresh(kvf_part *part, const kvf_block *blocks, uint32_t count);
/* In stream order: lists that the host will look at are complete; then until that is so. */
KVF_CHECKED kvf_status kvf_bring_note(kvf_step *step);
KVF_CHECKED kvf_status kvf_bring_wait(kvf_step *step);
/* After the choice of a step. While step->is_late, pages that it chose may not be addressable. */
KVF_CHECKED kvf_status kvf_bring_chosen(kvf_step *step);
/* Where pages stay: spans of late pages are attended as those of misses are; waiting for them. */
KVF_CHECKED kvf_status kvf_bring_mark(kvf_step *step);
KVF_CHECKED kvf_status kvf_bring_late(kvf_step *step);
/* Where pages move, while some are late: misses that are addressable now and were not before. */
KVF_CHECKED kvf_status kvf_bring_misses(kvf_step *step, kvf_choice *out);
/* After a failure of something else: no read is left in flight. */
void kvf_bring_drop(kvf_step *step);
/* Pages of lists as of kvf_page_lists, of KV heads of every row, which the host can read by now. */
KVF_CHECKED kvf_status kvf_bring_listed(kvf_step *step, const int32_t *indptr,
                                        const int32_t *indices);
/* Blocks that this call wanted may go: whatever it enqueued was waited for, or ended with
 * kvf_step_end. */
void kvf_bring_again(kvf_part *part);

#endif
