/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The time in stream order. Knows nothing of what is timed; a phase is what lies between two
 * stamps that share `last`.
 */

#include "common/clock.h"
#include "variants.h"

void kvf_stamp_ref(const void *args, uint32_t task)
{
    const kvf_stamp_args *a = args;
    const uint64_t now = kvf_now_ns();
    (void)task;
    if (a->sum)
        *a->sum += now - *a->last;
    *a->last = now;
}
