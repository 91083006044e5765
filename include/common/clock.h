/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_CLOCK_H
#define KVF_COMMON_CLOCK_H

/*
 * The clock that never goes back, which knows no date: only differences mean something. And ends of
 * waits for a condition.
 */

#include <stdint.h>
#include <time.h>

static inline uint64_t kvf_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline double kvf_now_ms(void)
{
    return (double)kvf_now_ns() * 1e-6;
}

static inline double kvf_now_seconds(void)
{
    return (double)kvf_now_ns() * 1e-9;
}

/* `ns` from now, on the clock of a condition. */
static inline struct timespec kvf_clock_in(clockid_t clock, uint64_t ns)
{
    struct timespec at;
    clock_gettime(clock, &at);
    ns += (uint64_t)at.tv_nsec;
    at.tv_sec += (time_t)(ns / 1000000000u);
    at.tv_nsec = (long)(ns % 1000000000u);
    return at;
}

#endif
