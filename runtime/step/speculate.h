/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SPECULATE_H
#define KVF_RUNTIME_SPECULATE_H

/*
 * Speculation: after a step of a layer, pages that rank next get slots and are fetched while later
 * layers run. The next step of that layer fetches only what is still missing.
 *
 * Nothing of it is on the caller's chain. A stream of the cache's own leaves the caller's behind
 * the attention (kvf_ahead_leave). What ranks and gives slots away is a few launches over scores
 * and tables that all layers share, so the next call, of whatever layer, comes after them: by then
 * matrix products have hidden them. The pages themselves go on until the layer's next step joins
 * them before it gives slots away, or whoever reads tables or reuses pages (kvf_ahead_settle). In
 * a recording the branch forks and joins inside the graph: a graph cannot be waited for half-way,
 * and an end that covers the branch keeps forks, cuts and ends of sequences in order.
 *
 * Answers do not depend on it. What is resident never decides an answer, with one exception: a
 * resident refresh of the static set looks at resident tokens only. So with such a refresh the
 * tables of what would be resident without speculation are kept beside the real ones (`shadow`),
 * and the refresh goes by them.
 *
 * With a disk tier nothing gets a slot ahead of need: what ranks next is read from the file into
 * memory, while later layers run.
 *
 * Invariant: a layer has at most one transfer of this kind that nobody has joined
 * (part->ahead[index].is_open); its address arrays are written again only after the join.
 * All functions do nothing if dims.ahead_max is 0.
 */

#include "step.h"

/* Per-list pointers and counts in the frame; rows as a refresh sees them. After kvf_step_lists. */
void kvf_ahead_lists(kvf_step *step);
/* The last of a step, while its scores and its choice are there: count what was of use, keep the
 * shadow, and begin what the next step of the layer may want. */
KVF_CHECKED kvf_status kvf_ahead_fetch(kvf_step *step);

#endif
