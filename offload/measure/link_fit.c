/* SPDX-License-Identifier: Apache-2.0 */

/* Numbers about times: a line through points, and order statistics. Knows nothing of links. */

#include <stdlib.h>

#include "link_measure.h"

kvf_status kvf_link_fit(const double *x, const double *y, uint32_t count, int weighted,
                        kvf_link_line *out)
{
    double sw = 0, sx = 0, sy = 0;
    *out = (kvf_link_line){0};
    for (uint32_t i = 0; i < count; i++) {
        if (weighted && !(y[i] > 0))
            return KVF_INVALID;
        const double w = weighted ? 1 / (y[i] * y[i]) : 1;
        sw += w;
        sx += w * x[i];
        sy += w * y[i];
    }
    if (count < 2 || !(sw > 0))
        return KVF_INVALID;
    /* Round the means, so that large x do not cancel. */
    const double mx = sx / sw, my = sy / sw;
    double sxx = 0, sxy = 0, syy = 0;
    for (uint32_t i = 0; i < count; i++) {
        const double w = weighted ? 1 / (y[i] * y[i]) : 1;
        sxx += w * (x[i] - mx) * (x[i] - mx);
        sxy += w * (x[i] - mx) * (y[i] - my);
        syy += w * (y[i] - my) * (y[i] - my);
    }
    if (!(sxx > 0))
        return KVF_INVALID;
    out->slope = sxy / sxx;
    out->intercept = my - out->slope * mx;
    out->r_squared = syy > 0 ? sxy * sxy / (sxx * syy) : 1;
    return KVF_OK;
}

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
