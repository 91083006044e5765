/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Merge of partial attention results by log-sum-exp, the specification. Splits are summed in their
 * order, and a split that attended to nothing (lse = -infinity) is never read, whatever its values.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

static void merge_query(const kvf_merge_args *a, uint32_t list, uint32_t g, uint32_t splits)
{
    const uint32_t d_count = kvf_value_dim(&a->shape);
    const size_t query = (size_t)list * a->group + g;
    const double sink = (double)kvf_merge_sink(a, query);
    double top = sink, sum = 0.0;
    double acc[KVF_HEAD_DIM_MAX] = {0.0};
    for (uint32_t s = 0; s < splits; s++) {
        const size_t part = ((size_t)list * a->splits_max + s) * a->group + g;
        top = fmax(top, (double)a->partial_lse[part]);
    }
    if (sink > -INFINITY)
        sum = exp(sink - top);
    for (uint32_t s = 0; s < splits; s++) {
        const size_t part = ((size_t)list * a->splits_max + s) * a->group + g;
        if (a->partial_lse[part] == -INFINITY)
            continue;
        double weight = exp((double)a->partial_lse[part] - top);
        sum += weight;
        for (uint32_t d = 0; d < d_count; d++)
            acc[d] += weight * (double)a->partial_o[part * d_count + d];
    }
    for (uint32_t d = 0; d < d_count; d++)
        kvf_element_set(a->out, a->shape.dtype, query * d_count + d,
                        sum > 0.0 ? (float)(acc[d] / sum) : 0.0f);
    if (a->lse)
        a->lse[query] = sum > 0.0 ? (float)(top + log(sum)) : -INFINITY;
}

void kvf_merge_ref(const void *args, uint32_t task)
{
    const kvf_merge_args *a = args;
    const uint32_t splits = kvf_div_ceil_u32(a->span_count[task], a->split);
    for (uint32_t g = 0; g < a->group; g++)
        merge_query(a, task, g, splits);
}
