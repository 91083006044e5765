/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CAP_H
#define KVF_KERNELS_CAP_H

/*
 * A logit s under a soft cap, cap tanh(s / cap), the specification; a cap of 0 is none.
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

#endif
