/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_PAGES_H
#define KVF_RUNTIME_PAGES_H

/*
 * A decode step on the pages of a KV group.
 */

#include "call.h"

/* How many rows of the step have their static set refreshed, or are verified. */
typedef struct kvf_due {
    uint32_t refreshes;
    uint32_t verifies;
} kvf_due;

/* Arrays of a step in its frame; if it refreshes static sets, kvf_call_rows_after comes after it.
 * Nothing where all heads stream. */
void kvf_pages_take(kvf_call *call);
/* Append, seal, refresh, score, choose, with queries, keys and values of the KV group's heads: ids
 * of every list, and page tables that are up to date. */
KVF_CHECKED kvf_status kvf_pages_select(kvf_call *call, const kvf_decode_args *args,
                                        const kvf_due *due);
/* From append to verification. */
KVF_CHECKED kvf_status kvf_pages_decode(kvf_call *call, const kvf_decode_args *args,
                                        const kvf_due *due);

#endif
