/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages that came ahead of need: which slots hold them, and how many of them were chosen later.
 *
 * Knows nothing of how they were foreseen. A bit says that the slot's page was brought before any
 * step chose it.
 */

#include "variants.h"

void kvf_ahead_ref(const void *args, uint32_t task)
{
    const kvf_ahead_args *a = args;
    const size_t row = (size_t)task * a->ids_max;
    uint32_t *marks = a->marks[task];
    uint64_t n = 0;
    for (uint32_t i = 0; i < a->id_count[task]; i++) {
        if (a->slot_of_id[row + i] < 0)
            continue;
        const uint32_t slot = (uint32_t)a->slot_of_id[row + i], bit = 1u << slot % 32;
        const uint32_t missed = a->missed[row + i], was = marks[slot / 32] & bit;
        if (!a->is_use && missed) {
            marks[slot / 32] |= bit;
            n++;
        } else if (a->is_use) {
            marks[slot / 32] &= ~bit;
            n += was && !missed;
        }
    }
    __atomic_fetch_add(a->is_use ? &a->counters->pages_ahead_used : &a->counters->pages_ahead, n,
                       __ATOMIC_RELAXED);
}
