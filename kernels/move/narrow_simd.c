/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Numbers in fp32 to the element type of a cache, vectorised. Bound: memory bandwidth, 6 bytes per
 * number.
 *
 * Knows counts, not shapes. Exactness: the bits of narrow_ref.c.
 */

#include "common/simd.h"
#include "variants.h"

void KVF_SIMD_NAME(narrow)(const void *args, uint32_t task)
{
    const kvf_narrow_args *a = args;
    const kvf_narrow_job *job = &a->jobs[task / a->parts];
    const size_t first = kvf_narrow_first(a, task), end = kvf_narrow_end(a, task);
    if (first < end)
        vf_round_array((uint16_t *)job->to + first, a->dtype, job->from + first,
                       (uint32_t)(end - first));
}
