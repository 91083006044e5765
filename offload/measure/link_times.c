/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Times of a measurement, summed up. See link_measure.h.
 */

#include "link_measure.h"

#include <stdlib.h>

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The least value that at least `percent` of the values do not exceed. */
static uint64_t percentile(const uint64_t *sorted, uint32_t count, uint32_t percent)
{
    const uint64_t rank = ((uint64_t)count * percent + 99) / 100;
    return sorted[rank > 0 ? rank - 1 : 0];
}

void kvf_link_times_sum_up(uint64_t *ns, uint32_t count, kvf_link_times *out)
{
    *out = (kvf_link_times){0};
    if (count == 0)
        return;
    qsort(ns, count, sizeof *ns, by_value);
    *out = (kvf_link_times){.min_ns = ns[0],
                            .median_ns = percentile(ns, count, 50),
                            .p95_ns = percentile(ns, count, 95),
                            .p99_ns = percentile(ns, count, 99),
                            .max_ns = ns[count - 1]};
}
