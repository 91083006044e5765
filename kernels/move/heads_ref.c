/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chosen heads of rows, quantized or put back, the specification. Knows nothing of attention.
 */

#include <string.h>

#include "variants.h"

void kvf_heads_ref(const void *args, uint32_t task)
{
    const kvf_heads_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->rows, KVF_HEADS_ROWS);
    const kvf_heads_job *job = &a->jobs[task / parts];
    const uint32_t first = task % parts * KVF_HEADS_ROWS;
    const uint32_t end = kvf_min_u32(a->rows, first + KVF_HEADS_ROWS);
    for (uint32_t row = first; row < end; row++)
        for (uint32_t i = 0; i < job->count; i++) {
            const size_t from =
                (size_t)row * job->from_heads + (job->from_head ? job->from_head[i] : i);
            const size_t to = (size_t)row * job->to_heads + (job->to_head ? job->to_head[i] : i);
            memcpy((char *)job->to + to * job->bytes, kvf_offset(job->from, from * job->bytes),
                   job->bytes);
        }
}
