/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SHARE_H
#define KVF_RUNTIME_SHARE_H

/*
 * Rows of a step that have sealed blocks in common: forks, and tokens of one sequence. What is a
 * function of the tokens of a block alone, as codes are, is the same for all of them.
 *
 * Knows tables of blocks, and nothing of who forked from whom.
 */

#include "step.h"

/* step->order and step->common, for rows that are known. */
void kvf_step_share(kvf_step *step);

#endif
