/* SPDX-License-Identifier: Apache-2.0 */

/*
 * NaN for rows that are bad, the specification and the only host form. Knows nothing of why they
 * are.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

void kvf_spoil_ref(const void *args, uint32_t task)
{
    const kvf_spoil_args *a = args;
    const size_t elements = (size_t)a->heads * a->head_dim;
    if (!kvf_is_spoilt(a, task))
        return;
    for (size_t i = 0; i < elements; i++)
        kvf_element_set(a->out, a->dtype, task * elements + i, NAN);
    for (uint32_t h = 0; a->lse && h < a->heads; h++)
        a->lse[(size_t)task * a->heads + h] = NAN;
}
