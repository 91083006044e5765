/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SEVERAL_H
#define KVF_RUNTIME_SEVERAL_H

/*
 * Calls with several tokens of a sequence: which of them make one step.
 */

#include "call.h"

/* Tokens of the call, one row each. KVF_FULL: the pool lacks blocks for all of them. */
KVF_CHECKED kvf_status kvf_several_begin(kvf_cache *cache, const kvf_decode_args *args,
                                         uint32_t *rows);
/* Rows from *first on that make one step, as a batch; *first: those after them. */
kvf_decode_args kvf_several_next(const kvf_cache *cache, const kvf_decode_args *args, uint32_t rows,
                                 uint32_t *first);

#endif
