/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Numbers in fp32 to the element type of a cache, the specification. Knows counts, not shapes.
 */

#include "common/convert.h"
#include "variants.h"

void kvf_narrow_ref(const void *args, uint32_t task)
{
    const kvf_narrow_args *a = args;
    const kvf_narrow_job *job = &a->jobs[task / a->parts];
    for (size_t i = kvf_narrow_first(a, task); i < kvf_narrow_end(a, task); i++)
        kvf_element_set(job->to, a->dtype, i, job->from[i]);
}
