/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CAP_H
#define KVF_KERNELS_CAP_H

/*
 * The logit of a reference: a product in double, and under a soft cap, cap tanh(s / cap), the
 * specification; a cap of 0 is none.
 *
 * Knows nothing of attention. Capped logits have the order of those that were not; -infinity, which
 * is no token, stays, and so does NaN.
 */

#include <math.h>

#include "common/convert.h"

KVF_INLINE double kvf_capped(double s, float cap)
{
    return cap > 0.0f && s > -INFINITY ? (double)cap * tanh(s / (double)cap) : s;
}

/* q.k of a reference, in double. Four sums, of which none waits for another. */
KVF_INLINE double kvf_sum_of_products(const float *q, const float *k, uint32_t head_dim)
{
    double sum[4] = {0.0};
    for (size_t d = 0; d < head_dim; d += 4)
        for (size_t i = 0; i < 4; i++)
            sum[i] += (double)q[d + i] * (double)k[d + i];
    return sum[0] + sum[1] + (sum[2] + sum[3]);
}

#endif
