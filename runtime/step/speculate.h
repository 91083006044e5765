/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SPECULATE_H
#define KVF_RUNTIME_SPECULATE_H

/*
 * Speculation: after a step of a layer, pages that rank next get slots and are fetched while later
 * layers run. The next step of that layer fetches only what is still missing.
 *
 * Answers do not depend on it. What is resident never decides an answer, with one exception: a
 * resident refresh of the static set looks at resident tokens only. So with such a refresh the
 * tables of what would be resident without speculation are kept beside the real ones (`shadow`),
 * and the refresh goes by them.
 *
 * Invariant: a layer has at most one transfer of this kind that nobody has joined
 * (cache->ahead[layer].is_open); its address arrays are written again only after the join.
 * All functions do nothing if dims.ahead_max is 0.
 */

#include "step.h"

/* Per-list pointers and counts in the frame; rows as a refresh sees them. After kvf_step_lists. */
void kvf_ahead_lists(kvf_step *step);
/* After kvf_step_place: count what was of use, and keep the shadow. */
KVF_CHECKED kvf_status kvf_ahead_note(kvf_step *step);
/* After the attention of the step, while its scores are there. */
KVF_CHECKED kvf_status kvf_ahead_fetch(kvf_step *step);

#endif
