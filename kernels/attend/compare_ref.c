/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sparse against dense results. Knows nothing of how either came about. exp(lse - dense lse) is
 * the attention mass of the tokens that were attended, their recall.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

void kvf_compare_ref(const void *args, uint32_t task)
{
    const kvf_compare_args *a = args;
    (void)task;
    for (size_t i = 0; i < (size_t)a->heads * kvf_value_dim(&a->shape); i++) {
        const double x = (double)kvf_element_get(a->out, a->shape.dtype, i);
        const double error = fabs(x - (double)kvf_element_get(a->dense, a->shape.dtype, i));
        if (error > a->counters->error_max)
            a->counters->error_max = error;
    }
    for (uint32_t h = 0; h < a->heads; h++)
        a->counters->recall_sum += exp((double)a->lse[h] - (double)a->dense_lse[h]);
    a->counters->verified += a->heads;
}
