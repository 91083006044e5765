/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SHARE_H
#define KVF_RUNTIME_SHARE_H

/*
 * Rows of a step that have sealed blocks in common: forks, and tokens of one sequence. What is a
 * function of the tokens of a block alone, as codes and pages are, is the same for all of them.
 *
 * Knows tables of blocks, and nothing of who forked from whom.
 */

#include "step.h"

/* How many rows one look should serve at most. A tile that is scored for many rows is one task;
 * where a step has few tiles, fewer rows at once leave something to do for the whole device. */
uint32_t kvf_step_rows_at_once(const kvf_step *step, const kvf_device_properties *device);

/* step->order and step->common, for rows that are known, of `most` rows at once, >= 1; and
 * step->shares. */
void kvf_step_share(kvf_step *step, uint32_t most);

#endif
