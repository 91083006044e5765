/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_TEAM_H
#define KVF_BENCH_TEAM_H

/*
 * A few threads that run one function at the same time, and how long they took; and the
 * numbers that they read.
 *
 * Knows nothing of kernels. Two clocks: `wall` is what a user waits; `busy` is the processor time
 * of the slowest thread, which is the wall time of a machine that does nothing else.
 */

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/random.h"

#define TEAM_MAX 64u

typedef void (*team_fn)(void *arg, uint32_t member, uint32_t members);

typedef struct team_times {
    double wall;
    double busy;
} team_times;

typedef struct team {
    pthread_t threads[TEAM_MAX];
    pthread_barrier_t begin;
    pthread_barrier_t end;
    double busy[TEAM_MAX];
    team_fn fn;
    void *arg;
    uint32_t members; /* the caller is member 0 */
    uint32_t next;    /* numbers the threads as they start */
    bool stopping;
} team;

/* False if a thread could not be started. */
bool team_open(team *t, uint32_t members);
void team_close(team *t);
team_times team_run(team *t, team_fn fn, void *arg);

/* One call on the caller's thread alone. */
team_times team_alone(team_fn fn, void *arg);

/*
 * Numbers that benchmarks of attention read. It knows bf16 only: what is filled has 16-bit
 * elements.
 */

/* bf16 numbers of magnitude 0.5 to 1, random sign. */
static inline void bench_fill(void *to, size_t bytes, uint64_t seed)
{
    uint64_t *p = to;
    for (size_t i = 0; i < bytes / 8; i++)
        p[i] =
            (kvf_random_next(&seed) & UINT64_C(0x807f807f807f807f)) | UINT64_C(0x3f003f003f003f00);
}

#endif
