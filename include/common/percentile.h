/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_PERCENTILE_H
#define KVF_COMMON_PERCENTILE_H

/*
 * Percentiles of measurements, by nearest rank: always a value that occurred.
 */

#include <stddef.h>
#include <stdlib.h>

static inline int kvf_is_more(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline void kvf_sort(double *values, size_t count)
{
    qsort(values, count, sizeof *values, kvf_is_more);
}

/* The least value that at least `percent` of the values do not exceed; count >= 1. */
static inline double kvf_percentile(const double *sorted, size_t count, unsigned percent)
{
    const size_t rank = (count * percent + 99) / 100;
    return sorted[rank > 0 ? rank - 1 : 0];
}

#endif
