/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_STATIC_SET_H
#define KVF_RUNTIME_STATIC_SET_H

/*
 * Refreshing the static set of a row.
 */

#include "call.h"

/* Whether the next step of this layer, after which `sealed` blocks are sealed, refreshes its static
 * set. */
bool kvf_refresh_is_due(const kvf_kv_group *kv_group, const kvf_layer *layer, uint32_t sealed);

/* Rows again, with the other store where a refresh is due, and the host's note of it. */
void kvf_call_rows_after(kvf_call *call);

/* Refresh the static set of row `index` of the step. */
KVF_CHECKED kvf_status kvf_static_refresh(kvf_call *call, uint32_t index);
/* The same with scores of the caller, which `put` puts into token_score. */
KVF_CHECKED kvf_status kvf_static_seed(kvf_call *call, uint32_t index, const float *scores,
                                       kvf_status (*put)(kvf_call *call, const float *scores));

#endif
