/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages whose list is the device's, the specification. Knows nothing of how bytes travel.
 *
 * Invariant: the task that arrives last writes the word `done`, with release order, after the bytes
 * of all others; it leaves `arrived` at zero.
 */

#include <string.h>

#include "variants.h"

void kvf_move_ref(const void *args, uint32_t task)
{
    const kvf_move_args *a = args;
    const uint32_t n = *a->count;
    if (n < a->low || n >= a->high)
        return;
    for (uint32_t i = task; i < n; i += a->blocks)
        memcpy(a->to[i], a->from[i], a->bytes);
    if (!a->done || __atomic_add_fetch(a->arrived, 1, __ATOMIC_ACQ_REL) != a->blocks)
        return;
    __atomic_store_n(a->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(a->done, a->value, __ATOMIC_RELEASE);
}
