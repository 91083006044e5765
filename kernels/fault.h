/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_FAULT_H
#define KVF_KERNELS_FAULT_H

/*
 * The lowest index at which something was wrong, kept by tasks that run at the same time. The
 * result is a minimum, so it does not depend on their order.
 */

#include <stdint.h>

static inline void kvf_fault_note(uint32_t *fault, uint32_t index)
{
    uint32_t seen = __atomic_load_n(fault, __ATOMIC_RELAXED);
    while (index < seen &&
           !__atomic_compare_exchange_n(fault, &seen, index, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

#endif
