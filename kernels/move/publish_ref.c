/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A miss list for a thread of the host, the specification. Knows nothing of who moves the pages.
 * Invariant: the word `request` is written last, with release order.
 */

#include "variants.h"

void kvf_publish_ref(const void *args, uint32_t task)
{
    const kvf_publish_args *a = args;
    const uint32_t n = *a->count;
    const int is_others = n == 0 || (n >= a->low && n < a->high);
    (void)task;
    for (uint32_t i = 0; !is_others && n <= a->list_max && i < n; i++) {
        a->out_from[i] = a->from[i];
        a->out_to[i] = a->to[i];
    }
    *a->out_count = is_others ? 0 : n;
    if (is_others)
        __atomic_store_n(a->done, a->ticket, __ATOMIC_RELEASE);
    __atomic_store_n(a->request, a->ticket, __ATOMIC_RELEASE);
}
