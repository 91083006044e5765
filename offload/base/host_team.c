/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The compute team of the host device, also used by the gather workers.
 *
 * Jobs stand in one short list under one lock, taken twice per job and per helper, never per task.
 * A helper that finds nothing spins for SPIN_NS and then sleeps, so that a run of short launches
 * finds it awake and an idle process costs nothing.
 *
 * Invariant: a job is in the list only while its caller is inside kvf_team_run; a helper touches a
 * job only between the lock regions in which it raised and lowered job->helpers.
 */

#include "host_team.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "common/clock.h"
#include "common/text.h"

/* About the wake-up time of a sleeping thread on a shared machine: spinning longer than a wake-up
 * takes would cost others more than it saves here. */
#define SPIN_NS    20000u
#define SPIN_TURNS 32u

typedef struct helper {
    kvf_team *team;
    pthread_t thread;
} helper;

struct kvf_team {
    kvf_context *context;
    pthread_mutex_t lock;
    pthread_cond_t work;
    kvf_team_job *jobs;    /* guarded by lock */
    uint32_t sleepers;     /* guarded by lock */
    bool is_closing;       /* guarded by lock */
    atomic_uint announced; /* grows with every job and at the end; what spinning helpers watch */
    bool has_guests;       /* threads that come by through kvf_team_help */
    uint32_t threads;      /* with the caller */
    uint32_t helper_count; /* that run */
    helper *helpers;       /* [threads - 1] */
};

static void work_on(kvf_team_job *job)
{
    for (;;) {
        uint_fast64_t task = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (task >= job->tasks)
            return;
        job->fn(job->args, (uint32_t)task);
    }
}

/* The first job with a task to claim; under the lock. */
static kvf_team_job *find_job(const kvf_team *team)
{
    kvf_team_job *job = team->jobs;
    while (job && atomic_load_explicit(&job->next, memory_order_relaxed) >= job->tasks)
        job = job->below;
    return job;
}

/* Work on a job until none of its tasks is left; under the lock, which is let go meanwhile. */
static void join_job(kvf_team *team, kvf_team_job *job)
{
    atomic_fetch_add_explicit(&job->helpers, 1, memory_order_relaxed);
    pthread_mutex_unlock(&team->lock);
    work_on(job);
    pthread_mutex_lock(&team->lock);
    if (atomic_fetch_sub_explicit(&job->helpers, 1, memory_order_release) == 1 && job->is_waited)
        pthread_cond_signal(&job->done);
}

static void spin_for_news(kvf_team *team, unsigned seen)
{
    uint64_t until = kvf_now_ns() + SPIN_NS;
    do {
        for (unsigned i = 0; i < SPIN_TURNS; i++) {
            if (atomic_load_explicit(&team->announced, memory_order_relaxed) != seen)
                return;
            kvf_pause();
        }
    } while (kvf_now_ns() < until);
}

static void *helper_main(void *argument)
{
    kvf_team *team = ((helper *)argument)->team;
    bool has_spun = false;
    pthread_mutex_lock(&team->lock);
    while (!team->is_closing) {
        kvf_team_job *job = find_job(team);
        if (job) {
            join_job(team, job);
            has_spun = false;
        } else if (!has_spun) {
            unsigned seen = atomic_load_explicit(&team->announced, memory_order_relaxed);
            pthread_mutex_unlock(&team->lock);
            spin_for_news(team, seen);
            pthread_mutex_lock(&team->lock);
            has_spun = atomic_load_explicit(&team->announced, memory_order_relaxed) == seen;
        } else {
            team->sleepers++;
            pthread_cond_wait(&team->work, &team->lock);
            team->sleepers--;
            has_spun = false;
        }
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

/* EAGAIN does not say which limit it was. */
static kvf_status not_started(kvf_context *context, const char *name, int code)
{
    struct rlimit tasks = {.rlim_cur = RLIM_INFINITY};
    char most[32] = "unlimited";
    (void)getrlimit(RLIMIT_NPROC, &tasks);
    if (tasks.rlim_cur != RLIM_INFINITY)
        snprintf(most, sizeof most, "%llu", (unsigned long long)tasks.rlim_cur);
    return kvf_fail(
        context, KVF_SYSTEM, code,
        "thread '%s' could not be started: %s; lower threads, or raise the limit that was reached: "
        "the tasks of this user (`ulimit -u`, %s) or of the cgroup (pids.max), or the "
        "address space (`ulimit -v`)",
        name, kvf_errno_text(code), most);
}

/* A CPU that went away meanwhile only costs the pinning. */
static void pin(pthread_t thread, size_t cpu)
{
    cpu_set_t *set = CPU_ALLOC(cpu + 1);
    const size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
    if (!set)
        return;
    CPU_ZERO_S(bytes, set);
    CPU_SET_S(cpu, bytes, set);
    (void)pthread_setaffinity_np(thread, bytes, set);
    CPU_FREE(set);
}

/* A thread has the mask of the one that makes it, and SIGXFSZ in it: a write past RLIMIT_FSIZE is
 * an error of the call, as that on a full disk is, and does not end the process. */
static int create_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*fn)(void *),
                         void *argument)
{
    sigset_t limit, before;
    sigemptyset(&limit);
    sigaddset(&limit, SIGXFSZ);
    const int code = pthread_sigmask(SIG_BLOCK, &limit, &before);
    if (code != 0)
        return code;
    const int created = pthread_create(thread, attributes, fn, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return created;
}

kvf_status kvf_thread_start(kvf_context *context, pthread_t *thread, const char *name, int64_t cpu,
                            void *(*fn)(void *), void *argument)
{
    pthread_attr_t attributes;
    int code = kvf_context_refuses(context, "thread") ? EAGAIN : 0;
    if (code == 0)
        code = pthread_attr_init(&attributes);
    if (code != 0)
        return not_started(context, name, code);
    size_t stack = 0;
    if (pthread_attr_getstacksize(&attributes, &stack) == 0 && stack < KVF_THREAD_STACK_BYTES)
        (void)pthread_attr_setstacksize(&attributes, KVF_THREAD_STACK_BYTES);
    code = create_thread(thread, &attributes, fn, argument);
    pthread_attr_destroy(&attributes);
    if (code != 0)
        return not_started(context, name, code);
    if (cpu >= 0)
        pin(*thread, (size_t)cpu);
    (void)pthread_setname_np(*thread, name);
    return KVF_OK;
}

kvf_status kvf_team_create(kvf_context *context, const kvf_team_config *config, kvf_team **out)
{
    *out = NULL;
    KVF_ASSERT(config->threads >= 1);
    kvf_team *team = kvf_alloc(context, 1, sizeof *team);
    if (!team)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a team of threads");
    team->context = context;
    team->threads = config->threads;
    team->has_guests = config->has_guests;
    atomic_init(&team->announced, 0);
    if (pthread_mutex_init(&team->lock, NULL) != 0 || pthread_cond_init(&team->work, NULL) != 0) {
        kvf_free(context, team);
        KVF_FAIL(context, KVF_SYSTEM, "a lock for a team of threads could not be made");
    }
    kvf_status status = KVF_OK;
    uint32_t wanted = config->threads - 1;
    if (wanted > 0) {
        team->helpers = kvf_alloc(context, wanted, sizeof *team->helpers);
        if (!team->helpers)
            status = kvf_fail(context, KVF_OUT_OF_MEMORY, 0, "no memory for %u threads", wanted);
    }
    for (uint32_t i = 0; status == KVF_OK && i < wanted; i++) {
        team->helpers[i].team = team;
        int64_t cpu = config->cpus ? (int64_t)config->cpus[i + 1] : -1;
        status = kvf_thread_start(context, &team->helpers[i].thread, config->name, cpu, helper_main,
                                  &team->helpers[i]);
        if (status == KVF_OK)
            team->helper_count++;
    }
    if (status != KVF_OK) {
        kvf_team_destroy(team);
        return status;
    }
    *out = team;
    return KVF_OK;
}

void kvf_team_destroy(kvf_team *team)
{
    if (!team)
        return;
    pthread_mutex_lock(&team->lock);
    KVF_ASSERT(!team->jobs);
    team->is_closing = true;
    atomic_fetch_add_explicit(&team->announced, 1, memory_order_relaxed);
    pthread_cond_broadcast(&team->work);
    pthread_mutex_unlock(&team->lock);
    for (uint32_t i = 0; i < team->helper_count; i++)
        pthread_join(team->helpers[i].thread, NULL);
    pthread_cond_destroy(&team->work);
    pthread_mutex_destroy(&team->lock);
    kvf_free(team->context, team->helpers);
    kvf_free(team->context, team);
}

kvf_status kvf_team_job_init(kvf_team_job *job, int priority)
{
    memset(job, 0, sizeof *job);
    job->priority = priority;
    atomic_init(&job->next, 0);
    atomic_init(&job->helpers, 0);
    return pthread_cond_init(&job->done, NULL) == 0 ? KVF_OK : KVF_SYSTEM;
}

void kvf_team_job_fini(kvf_team_job *job)
{
    pthread_cond_destroy(&job->done);
}

static void announce(kvf_team *team, kvf_team_job *job)
{
    pthread_mutex_lock(&team->lock);
    kvf_team_job **link = &team->jobs;
    while (*link && (*link)->priority >= job->priority)
        link = &(*link)->below;
    job->below = *link;
    *link = job;
    atomic_fetch_add_explicit(&team->announced, 1, memory_order_relaxed);
    uint32_t wake = kvf_min_u32(team->sleepers, job->tasks - 1);
    if (wake > 0 && wake == team->sleepers)
        pthread_cond_broadcast(&team->work);
    else
        for (uint32_t i = 0; i < wake; i++)
            pthread_cond_signal(&team->work);
    pthread_mutex_unlock(&team->lock);
}

/* Take the job off the list and wait for the helpers that are on it. */
static void retire(kvf_team *team, kvf_team_job *job)
{
    pthread_mutex_lock(&team->lock);
    kvf_team_job **link = &team->jobs;
    while (*link != job)
        link = &(*link)->below;
    *link = job->below;
    if (atomic_load_explicit(&job->helpers, memory_order_relaxed) > 0) {
        pthread_mutex_unlock(&team->lock);
        uint64_t until = kvf_now_ns() + SPIN_NS;
        do {
            for (unsigned i = 0; i < SPIN_TURNS; i++) {
                if (atomic_load_explicit(&job->helpers, memory_order_relaxed) == 0)
                    break;
                kvf_pause();
            }
        } while (atomic_load_explicit(&job->helpers, memory_order_relaxed) > 0 &&
                 kvf_now_ns() < until);
        pthread_mutex_lock(&team->lock);
        job->is_waited = true;
        while (atomic_load_explicit(&job->helpers, memory_order_relaxed) > 0)
            pthread_cond_wait(&job->done, &team->lock);
        job->is_waited = false;
    }
    pthread_mutex_unlock(&team->lock);
}

void kvf_team_begin(kvf_team *team, kvf_team_job *job, kvf_task_fn fn, const void *args,
                    uint32_t tasks)
{
    job->fn = fn;
    job->args = args;
    job->tasks = tasks;
    atomic_store_explicit(&job->next, 0, memory_order_relaxed);
    job->is_announced = tasks > 1 && (team->helper_count > 0 || team->has_guests);
    if (job->is_announced)
        announce(team, job);
}

void kvf_team_end(kvf_team *team, kvf_team_job *job)
{
    work_on(job);
    if (job->is_announced)
        retire(team, job);
}

void kvf_team_run(kvf_team *team, kvf_team_job *job, kvf_task_fn fn, const void *args,
                  uint32_t tasks)
{
    kvf_team_begin(team, job, fn, args, tasks);
    kvf_team_end(team, job);
}

void kvf_team_help(kvf_team *team)
{
    pthread_mutex_lock(&team->lock);
    kvf_team_job *job = find_job(team);
    if (job)
        join_job(team, job);
    pthread_mutex_unlock(&team->lock);
}

uint32_t kvf_team_threads(const kvf_team *team)
{
    return team->threads;
}

/* ---- stacks ---- */

/* Bounds of the stack of a thread, written by it alone: a stack stays where it is. */
static _Thread_local struct {
    uintptr_t low, high; /* high = 0: not asked yet */
} bounds;

static void ask(void)
{
    pthread_attr_t attributes;
    void *low = NULL;
    size_t bytes = 0;
    bounds.high = 1; /* no address is inside */
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return;
    if (pthread_attr_getstack(&attributes, &low, &bytes) == 0) {
        bounds.low = (uintptr_t)low;
        bounds.high = (uintptr_t)low + bytes;
    }
    pthread_attr_destroy(&attributes);
}

size_t kvf_stack_left(void)
{
    const uintptr_t here = (uintptr_t)__builtin_frame_address(0);
    if (bounds.high == 0)
        ask();
    return here > bounds.low && here < bounds.high ? here - bounds.low : 0;
}
