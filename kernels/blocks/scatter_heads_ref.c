/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Outputs of streaming heads among the others, the specification and the only host form. Knows
 * nothing of attention.
 */

#include <string.h>

#include "variants.h"

void kvf_scatter_heads_ref(const void *args, uint32_t task)
{
    const kvf_scatter_heads_args *a = args;
    for (uint32_t h = 0; h < a->kv_heads; h++) {
        const size_t at = ((size_t)task * a->kv_heads + h) * a->group;
        if (!a->streaming[h])
            continue;
        memcpy((char *)a->out + at * a->row_bytes, kvf_offset(a->from, at * a->row_bytes),
               (size_t)a->group * a->row_bytes);
        if (a->lse)
            memcpy(a->lse + at, a->from_lse + at, a->group * sizeof *a->lse);
    }
}
