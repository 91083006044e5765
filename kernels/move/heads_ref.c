/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chosen heads of tokens, quantized or put back, the specification. Knows nothing of attention.
 */

#include <string.h>

#include "variants.h"

void kvf_heads_ref(const void *args, uint32_t task)
{
    const kvf_heads_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->tokens, KVF_HEADS_TOKENS);
    const kvf_heads_job *job = &a->jobs[task / parts];
    const uint32_t first = task % parts * KVF_HEADS_TOKENS;
    const uint32_t end = kvf_min_u32(a->tokens, first + KVF_HEADS_TOKENS);
    for (uint32_t token = first; token < end; token++)
        for (uint32_t i = 0; i < job->count; i++) {
            const size_t from =
                (size_t)token * job->from_heads + (job->from_head ? job->from_head[i] : i);
            const size_t to = (size_t)token * job->to_heads + (job->to_head ? job->to_head[i] : i);
            memcpy((char *)job->to + to * job->bytes, kvf_offset(job->from, from * job->bytes),
                   job->bytes);
        }
}
