/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A few threads that run one function at the same time; see bench_team.h.
 */

#include "bench_team.h"

#include "common/clock.h"

static double busy_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run_member(team *t, uint32_t member)
{
    const double start = busy_seconds();
    t->fn(t->arg, member, t->members);
    t->busy[member] = busy_seconds() - start;
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
    const double start = kvf_now_seconds();
    pthread_barrier_wait(&t->begin);
    run_member(t, 0);
    pthread_barrier_wait(&t->end);
    times.wall = kvf_now_seconds() - start;
    for (uint32_t i = 0; i < t->members; i++)
        times.busy = t->busy[i] > times.busy ? t->busy[i] : times.busy;
    return times;
}

team_times team_alone(team_fn fn, void *arg)
{
    team_times times;
    const double start = kvf_now_seconds(), busy = busy_seconds();
    fn(arg, 0, 1);
    times.busy = busy_seconds() - busy;
    times.wall = kvf_now_seconds() - start;
    return times;
}
