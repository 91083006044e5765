/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_HOST_TEAM_H
#define KVF_OFFLOAD_HOST_TEAM_H

/*
 * A team of compute threads that several callers share.
 *
 * The caller of a job always works on it, helpers join as they are free, tasks are claimed by an
 * atomic counter. So a job never waits for a helper that is busy elsewhere, and a team of one has
 * no thread. Knows nothing of streams.
 */

#include <stdatomic.h>
#include <stddef.h>

#include "context.h"

typedef struct kvf_team kvf_team;

/* One launch; lives at its caller, who may use it again after kvf_team_run. Init by
 * kvf_team_job_init. */
typedef struct kvf_team_job {
    kvf_task_fn fn;
    const void *args;
    uint32_t tasks;
    int priority;              /* higher is served first */
    atomic_uint_fast64_t next; /* task to claim; >= tasks when none is left */
    atomic_uint helpers;       /* changed under the team's lock */
    pthread_cond_t done;
    bool is_announced;          /* caller only */
    bool is_waited;             /* guarded by the team's lock */
    struct kvf_team_job *below; /* next in the list, lower or equal priority; guarded */
} kvf_team_job;

typedef struct kvf_team_config {
    uint32_t threads;     /* with the caller, >= 1 */
    bool has_guests;      /* others come by through kvf_team_help */
    const uint32_t *cpus; /* OS indices, [threads]; helper i takes cpus[i + 1]; NULL = unpinned */
    const char *name;     /* of the helpers, at most 15 characters */
} kvf_team_config;

KVF_CHECKED kvf_status kvf_team_create(kvf_context *context, const kvf_team_config *config,
                                       kvf_team **out);
void kvf_team_destroy(kvf_team *team); /* NULL is fine; no job may run */

KVF_CHECKED kvf_status kvf_team_job_init(kvf_team_job *job, int priority);
void kvf_team_job_fini(kvf_team_job *job);

/* fn(args, 0 .. tasks-1), all done on return. */
void kvf_team_run(kvf_team *team, kvf_team_job *job, kvf_task_fn fn, const void *args,
                  uint32_t tasks);
/* The same in two steps: between them helpers and guests work on it already. */
void kvf_team_begin(kvf_team *team, kvf_team_job *job, kvf_task_fn fn, const void *args,
                    uint32_t tasks);
void kvf_team_end(kvf_team *team, kvf_team_job *job);

/* Work on a job of somebody else, if one has tasks left; returns when it has none. */
void kvf_team_help(kvf_team *team);

uint32_t kvf_team_threads(const kvf_team *team);

/* Start a thread, named, pinned to one CPU if cpu >= 0. KVF_SYSTEM with a message on failure. */
KVF_CHECKED kvf_status kvf_thread_start(kvf_context *context, pthread_t *thread, const char *name,
                                        int64_t cpu, void *(*fn)(void *), void *argument);

/* One polite turn of a spin. */
static inline void kvf_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/*
 * How much stack there is, so that nobody runs off its end.
 *
 * Kernels keep what they work on in their frames. They run on threads of the library, which have
 * stacks of some size whatever libc and limits say, and on a caller's thread only where enough is
 * left of its stack. `tools/check_stack.py` holds frames below what is promised here.
 */

#define KVF_THREAD_STACK_BYTES ((size_t)2 << 20)   /* of threads of the library, at least */
#define KVF_KERNEL_STACK_BYTES ((size_t)512 << 10) /* that a kernel and who calls it may take */

/* Bytes left on the stack of this thread; 0 where that is not known, as on a fibre. */
size_t kvf_stack_left(void);

#endif
