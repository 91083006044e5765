/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SELECT_H
#define KVF_RUNTIME_SELECT_H

/*
 * Choosing pages for the lists of a step.
 *
 * A way to choose enqueues kernels that write ids. It knows nothing of residency, transfer or
 * attention, and no policy: select_policy.h says which way a policy takes.
 */

#include "step.h"

/* Digest scores of the step, and for policies with groups their reduction; or what the caller gave.
 */
KVF_CHECKED kvf_status kvf_select_score(kvf_step *step);

/* A fused step ranks pages in the launch that resolves them (kvf_step_place), if its lists are
 * those that are chosen for. */
bool kvf_ranks_late(const kvf_step *step);

/* As the policy of the cache says, if that is not to come: ids and id_count of every list of the
 * step, ascending. */
KVF_CHECKED kvf_status kvf_select_choose(kvf_step *step);

/* select_oracle.c, select_custom.c */
KVF_CHECKED kvf_status kvf_choose_tokens(kvf_step *step);
KVF_CHECKED kvf_status kvf_choose_by_function(kvf_step *step);

#endif
