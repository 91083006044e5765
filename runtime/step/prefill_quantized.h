/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_PREFILL_QUANTIZED_H
#define KVF_RUNTIME_PREFILL_QUANTIZED_H

/*
 * A chunk where pages are quantized: of a prompt, or of tokens that are kept.
 *
 * Invariant: token i attends to what a decode step of it would find: blocks that are sealed once it
 * is appended as they are quantized, and the others and the sink exactly. So chunks change nothing.
 */

#include "call.h"

/* Append a chunk whose first token is number `base`, seal what leaves the window, and attend,
 * unless the chunk has no queries. */
KVF_CHECKED kvf_status kvf_prefill_quantized(kvf_call *call, const kvf_prefill_args *args,
                                             uint32_t base);

/* Where tokens that are kept were quantized, in device memory; see carry in move_args.h. */
typedef struct kvf_carried {
    const void *const *from; /* [blocks] */
    const uint32_t *ids;     /* [kv_heads, stride] */
    uint32_t blocks;
    uint32_t stride;
} kvf_carried;
/* Append kept tokens of the layer once more: the chunk has them in full precision, without queries.
 * Quantized tokens move as they are, where their page is sealed again. */
KVF_CHECKED kvf_status kvf_carry_quantized(kvf_call *call, const kvf_prefill_args *args,
                                           uint32_t base, const kvf_carried *carried);

#endif
