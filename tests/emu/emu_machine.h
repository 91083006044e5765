/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_MACHINE_H
#define KVF_TESTS_EMU_EMU_MACHINE_H

/*
 * The state of one block, shared by the files of the emulator and by nobody else: who can run, who
 * waits for what, which copies are under way.
 *
 * Invariants: a thread is in `ready` of its warp, or it runs, or it has exited, or waits_for says
 * why not; warps_ready has the bit of every warp with a ready lane; a fiber belongs to at most one
 * thread that has started and not exited.
 */

#include <functional>

#include "emu_block.h"
#include "emu_fiber.h"
#include "emu_launch.h"

enum { KVF_EMU_WARPS_MAX = 32 };

/* The order of the threads of a block, where they are threads to TSan. */
#if KVF_TSAN
#define KVF_EMU_ACQUIRE(m, key) ((m)->has_races ? __tsan_acquire((void *)(key)) : (void)0)
#define KVF_EMU_RELEASE(m, key) ((m)->has_races ? __tsan_release((void *)(key)) : (void)0)
#else
#define KVF_EMU_ACQUIRE(m, key) ((void)(key))
#define KVF_EMU_RELEASE(m, key) ((void)(key))
#endif

struct kvf_emu_copy {
    void *to;
    const void *from;
    uint32_t bytes; /* of `size`, the rest of which become zeros */
    uint32_t size;
    uint32_t group;
};

/* Copies of one thread, oldest first; items is allocated once needed and kept. */
struct kvf_emu_copies {
    kvf_emu_copy *items;
    uint32_t count, capacity;
    uint32_t group; /* the one that is open */
};

/* A switch looks at one line of the cache. */
struct alignas(64) kvf_emu_thread {
    kvf_emu_fiber *fiber;
    const char *waits_for; /* NULL: it can run, runs, or has exited */
    uint32_t mask;         /* of the warp operation it waits in */
    uint3 index;
    bool has_waited; /* for what the stream has before the grid */
    kvf_emu_copies async;
};

struct kvf_emu_warp {
    uint32_t ready;    /* lanes that can run and do not, started or not */
    uint32_t exited;   /* and lanes beyond the end of the block */
    uint32_t at_sync;  /* lanes in __syncthreads */
    uint32_t meetings; /* bit i: a meeting whose lowest lane is i */
    uint32_t meeting_mask[32], meeting_arrived[32];
    const kvf_emu_warp_op *meeting_op[32];
    void *operands[32];
    char order; /* its address is what __syncwarp synchronises on */
};

struct kvf_emu_machine {
    kvf_emu_fiber home; /* the OS thread's own stack */
    kvf_emu_stacks stacks;
    kvf_emu_place *place; /* kvf_emu_here of the OS thread */
    kvf_emu_fiber *free_fibers;
    kvf_emu_machine *next_idle;
    char *shared; /* KVF_EMU_SHARED_BYTES_MAX, of which a grid has the first */
    bool backwards;
    bool has_races; /* TSan takes each CUDA thread for a thread */

    const char *kernel;
    const std::function<void()> *body; /* NULL: no grid runs */
    bool starts_early;
    const std::function<void()> *earlier; /* still to be done before the grid goes on, or NULL */
    char earlier_order;                   /* an address to synchronise on */
    uint32_t threads_count, warps_count;
    uint32_t current; /* linear index of the thread that runs */
    uint32_t alive;
    uint32_t warps_ready;

    kvf_emu_barrier_kind barrier_kind;
    uint32_t barrier_arrived, barrier_count, barrier_phase;
    int barrier_answer;
    char barrier_order[2], block_begin, block_end; /* addresses to synchronise on */

    kvf_emu_warp warps[KVF_EMU_WARPS_MAX];
    kvf_emu_thread threads[KVF_EMU_BLOCK_THREADS_MAX];
    kvf_emu_fiber *fiber_of[KVF_EMU_BLOCK_THREADS_MAX]; /* with has_races: always the same */
};

/* That of this OS thread, or NULL. */
extern __thread kvf_emu_machine *kvf_emu_machine_here
    __attribute__((tls_model("initial-exec"), visibility("hidden")));
[[noreturn]] void kvf_emu_fail_outside(void);

/* That of the block whose kernel is running. */
KVF_EMU_QUIET static inline kvf_emu_machine *kvf_emu_machine_get(void)
{
    kvf_emu_machine *m = kvf_emu_machine_here;
    if (m == NULL || m->body == NULL)
        kvf_emu_fail_outside();
    return m;
}

/* Let the running thread wait; somebody has written down what for. Returns once another made it
 * ready. */
void kvf_emu_suspend(kvf_emu_machine *m, const char *waits_for);
void kvf_emu_wake(kvf_emu_machine *m, uint32_t warp, uint32_t lanes);

/* The running thread ends: its copies do too. */
void kvf_emu_copies_end(kvf_emu_thread *t);

#endif
