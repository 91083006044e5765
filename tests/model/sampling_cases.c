/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. It knows no sampler. */

#include "sampling_cases.h"

#include <math.h>

#include "common/random.h"

void sampling_logits(float *logits, uint32_t count, uint32_t kind, uint64_t *random)
{
    for (uint32_t i = 0; i < count; i++) {
        const float normal = kvf_random_normal(random);
        logits[i] = kind == 0   ? 3.0f * normal
                    : kind == 1 ? (float)kvf_random_below(random, 4)
                    : kind == 2 ? 1e4f * normal
                    : kind == 3 ? 1.0f
                                : normal * 0x1p125f;
        const uint32_t odd = kvf_random_below(random, 50);
        if (kind == 4 && odd < 3)
            logits[i] = odd == 0 ? NAN : odd == 1 ? INFINITY : -INFINITY;
    }
}

kvf_sampling_config sampling_case(uint32_t n, uint64_t *random)
{
    static const double temperatures[] = {0.0, 0.3, 1.0, 5.0, 100.0};
    static const double top_ps[] = {1.0, 1.0, 0.95, 0.3, 1e-9};
    static const double min_ps[] = {0.0, 0.0, 0.05, 0.7, 1.0};
    static const double penalties[] = {1.0, 1.3, 0.5};
    static const uint32_t top_ks[] = {0, 0, 1, 40, 1000};
    return (kvf_sampling_config){.temperature = temperatures[n % 5],
                                 .top_p = top_ps[n / 5 % 5],
                                 .min_p = min_ps[n / 25 % 5],
                                 .top_k = top_ks[n / 125 % 5],
                                 .repetition_penalty = penalties[kvf_random_below(random, 3)],
                                 .seed = kvf_random_next(random)};
}
