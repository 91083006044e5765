/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The time in stream order. Knows nothing of what is timed; a phase is what lies between two
 * stamps that share `last`.
 */

#include <time.h>

#include "paging.h"
#include "variants.h"

void kvf_stamp_ref(const void *args, uint32_t task)
{
    const kvf_stamp_args *a = args;
    struct timespec t;
    (void)task;
    clock_gettime(CLOCK_MONOTONIC, &t);
    const uint64_t now = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    if (a->sum)
        *a->sum += now - *a->last;
    *a->last = now;
}
