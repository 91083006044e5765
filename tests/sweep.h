/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_SWEEP_H
#define KVF_TESTS_SWEEP_H

/*
 * Sweeps: the n-th allocation, call or request fails, for every n.
 *
 * With KVF_TEST_SWEEP=8 in the environment only every eighth is tried, and a line says how many
 * were left out, in the words that .ci/count.py counts.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* From one n to the next. */
static inline uint32_t sweep_step(void)
{
    const char *text = getenv("KVF_TEST_SWEEP");
    const int step = text ? atoi(text) : 1;
    return step > 1 ? (uint32_t)step : 1;
}

/* At the end of a sweep, or of anything else of which some cases were left out. */
static inline void sweep_tell(uint64_t tried, uint64_t of)
{
    if (tried < of)
        printf("# left out: %llu of %llu\n", (unsigned long long)(of - tried),
               (unsigned long long)of);
}

/* The same for every `step`-th of them. */
static inline void sweep_tell_step(uint64_t of, uint32_t step)
{
    sweep_tell((of + step - 1) / step, of);
}

#endif
