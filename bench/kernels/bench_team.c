/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A few threads that run one function at the same time; see bench_team.h.
 */

#include "bench_team.h"

#include <time.h>

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run_member(team *t, uint32_t member)
{
    const double start = now(CLOCK_THREAD_CPUTIME_ID);
    t->fn(t->arg, member, t->members);
    t->busy[member] = now(CLOCK_THREAD_CPUTIME_ID) - start;
}

static void *thread_main(void *arg)
{
    team *t = arg;
    const uint32_t member = __atomic_add_fetch(&t->next, 1, __ATOMIC_RELAXED);
    for (;;) {
        pthread_barrier_wait(&t->begin);
        if (t->stopping)
            return NULL;
        run_member(t, member);
        pthread_barrier_wait(&t->end);
    }
}

bool team_open(team *t, uint32_t members)
{
    *t = (team){.members = members};
    if (pthread_barrier_init(&t->begin, NULL, members) != 0 ||
        pthread_barrier_init(&t->end, NULL, members) != 0)
        return false;
    for (uint32_t i = 1; i < members; i++)
        if (pthread_create(&t->threads[i], NULL, thread_main, t) != 0)
            return false;
    return true;
}

void team_close(team *t)
{
    t->stopping = true;
    pthread_barrier_wait(&t->begin);
    for (uint32_t i = 1; i < t->members; i++)
        pthread_join(t->threads[i], NULL);
    pthread_barrier_destroy(&t->begin);
    pthread_barrier_destroy(&t->end);
}

team_times team_run(team *t, team_fn fn, void *arg)
{
    team_times times = {.busy = 0.0};
    t->fn = fn;
    t->arg = arg;
    const double start = now(CLOCK_MONOTONIC);
    pthread_barrier_wait(&t->begin);
    run_member(t, 0);
    pthread_barrier_wait(&t->end);
    times.wall = now(CLOCK_MONOTONIC) - start;
    for (uint32_t i = 0; i < t->members; i++)
        times.busy = t->busy[i] > times.busy ? t->busy[i] : times.busy;
    return times;
}

team_times team_alone(team_fn fn, void *arg)
{
    team_times times;
    const double start = now(CLOCK_MONOTONIC), busy = now(CLOCK_THREAD_CPUTIME_ID);
    fn(arg, 0, 1);
    times.busy = now(CLOCK_THREAD_CPUTIME_ID) - busy;
    times.wall = now(CLOCK_MONOTONIC) - start;
    return times;
}
