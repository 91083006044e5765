/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One list of ids for every list of a row. Knows nothing of what the ids mean.
 */

#include <string.h>

#include "variants.h"

void kvf_spread_ref(const void *args, uint32_t task)
{
    const kvf_spread_args *a = args;
    const uint32_t from = task / a->lists, count = a->from_count[from];
    memcpy(a->ids + (size_t)task * a->ids_max, a->from + (size_t)from * a->ids_max,
           count * sizeof *a->ids);
    a->id_count[task] = count;
}
