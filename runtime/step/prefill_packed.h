/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_PREFILL_PACKED_H
#define KVF_RUNTIME_PREFILL_PACKED_H

/*
 * A prefill chunk where pages are packed.
 *
 * Invariant: token i attends to what a decode step of it would find: blocks that are sealed once it
 * is appended as they are packed, and the others and the sink exactly. So chunks change nothing.
 */

#include "step.h"

/* Append a chunk whose first token is number `base`, seal what leaves the window, and attend,
 * unless the chunk has no queries. */
KVF_CHECKED kvf_status kvf_prefill_packed(kvf_step *step, const kvf_prefill_args *args,
                                          uint32_t base);

#endif
