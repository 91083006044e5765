/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SELECT_H
#define KVF_RUNTIME_SELECT_H

/*
 * Choosing pages for the lists of a step, and scores of single tokens.
 *
 * A way to choose enqueues kernels that write ids. It knows nothing of residency, transfer or
 * attention, and no policy: select_policy.h says which way a policy takes.
 */

#include "call.h"

/* Digest scores of the step, and for policies with groups their reduction; or what the caller gave.
 */
KVF_CHECKED kvf_status kvf_select_score(kvf_call *call);

/* A fused step ranks pages in the launch that resolves them (kvf_call_place), if its lists are
 * those that are chosen for. */
bool kvf_topk_is_fused(const kvf_call *call);

/* The step scores pages by codes, so its queries are rotated before. */
bool kvf_select_rotates(const kvf_call *call);

/* Where the launch that ranks pages makes their scores, too: of what. Else its `mass` is NULL. */
kvf_reduce_mass_args kvf_select_masses(const kvf_call *call);

/* As the policy of the cache says, if that is not to come: ids and id_count of every list of the
 * step, ascending. */
KVF_CHECKED kvf_status kvf_select_choose(kvf_call *call);

/* select_oracle.c, select_custom.c */
KVF_CHECKED kvf_status kvf_choose_tokens(kvf_call *call);
KVF_CHECKED kvf_status kvf_choose_by_function(kvf_call *call);

/*
 * Scores of single tokens of one row of a step.
 */

/* Attention of the last `window` queries of a row over its tokens, into token_score. */
typedef struct kvf_observation {
    uint32_t index;        /* row of the step */
    uint32_t resident;     /* see kvf_cover_args */
    uint32_t take_tokens;  /* 0 = the row's share */
    const void *q;         /* [window, query heads, head_dim] */
    const uint32_t *limit; /* on the device, [window]; NULL = limit_first */
    uint32_t window;
    uint32_t ring_slots, ring_first, limit_first; /* see kvf_observe_args */
} kvf_observation;
KVF_CHECKED kvf_status kvf_call_cover(kvf_call *call, const kvf_observation *o);
/* Arguments that all launches over a cover share. */
kvf_observe_args kvf_call_observe_args(const kvf_call *call, uint32_t resident);
KVF_CHECKED kvf_status kvf_call_observe(kvf_call *call, const kvf_observation *o);
/* Stride of token_score after it. */
uint32_t kvf_token_stride(const kvf_kv_group *kv_group, uint32_t resident);
/* The best candidates of the observation, [kv_heads, dims.tokens_max]. */
KVF_CHECKED kvf_status kvf_call_top_tokens(kvf_call *call, uint32_t resident, int32_t *ids,
                                           uint32_t *count);

#endif
