/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CAP_SIMD_H
#define KVF_KERNELS_CAP_SIMD_H

/*
 * Logits under a soft cap, vectorised; see cap.h. Exactness: 7e-7, relative.
 */

#include "cap.h"
#include "common/simd.h"

/* In any unit that the cap has too. */
KVF_ALWAYS_INLINE vf vf_capped(vf x, float cap)
{
    const vf none = vf_set(-INFINITY), all = vf_set(cap);
    const vf y = vf_mul(vf_tanh(x / all), all);
    return (vf)vu_pick((vu)(x == none), (vu)none, (vu)y);
}

/* `count` of them, by whole vectors. Not inlined: few models have a cap. */
static __attribute__((noinline, unused)) void cap_logits(float *s, uint32_t count, float cap)
{
    for (uint32_t i = 0; i < count; i += VF_LANES)
        vf_store(s + i, vf_capped(vf_load(s + i), cap));
}

#endif
