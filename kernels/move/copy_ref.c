/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scattered equal blocks of bytes, the specification. Knows nothing of pages. Blocks that a launch
 * writes do not overlap each other or anything that it reads.
 */

#include <string.h>

#include "variants.h"

void kvf_copy_ref(const void *args, uint32_t task)
{
    const kvf_copy_args *a = args;
    const uint32_t first = task * a->per_task;
    const uint32_t end = kvf_min_u32(a->count, first + a->per_task);
    for (uint32_t i = first; i < end; i++)
        memcpy(a->to[i], a->from[i], a->bytes);
}
