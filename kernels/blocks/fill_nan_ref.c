/* SPDX-License-Identifier: Apache-2.0 */

/*
 * NaN for rows that are bad, the specification and the only host form. Knows nothing of why they
 * are.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

void kvf_fill_nan_ref(const void *args, uint32_t task)
{
    const kvf_fill_nan_args *a = args;
    const kvf_query_chunk bad = kvf_rows_to_fill(a, task);
    const size_t first = (size_t)bad.first * a->heads, count = (size_t)bad.tokens * a->heads;
    for (size_t i = 0; i < count * a->value_dim; i++)
        kvf_element_set(a->out, a->dtype, first * a->value_dim + i, NAN);
    for (size_t i = 0; a->lse && i < count; i++)
        a->lse[first + i] = NAN;
}
