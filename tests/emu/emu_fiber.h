/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_FIBER_H
#define KVF_TESTS_EMU_EMU_FIBER_H

/*
 * Fibers: stacks that one OS thread switches between without a system call.
 *
 * Knows nothing of blocks and warps. ASan is told that a thread leaves its own stack for those of
 * fibers, which it sees as one. Under TSan a fiber can be a thread of its own; a switch orders
 * nothing, so that two CUDA threads which touch the same memory without a barrier between them are
 * reported as the race that they are.
 */

#include <stddef.h>
#include <ucontext.h>

#include "sanitizers.h"

/* For the emulator's own state, which all fibers of an OS thread share by design, and which is
 * looked at with every switch: checks of it would take most of a kernel's time. Clang's
 * no_sanitize("thread") still tells of every call. */
#if KVF_TSAN && defined(__clang__)
#define KVF_EMU_QUIET __attribute__((no_sanitize("thread"), disable_sanitizer_instrumentation))
#elif KVF_TSAN
#define KVF_EMU_QUIET __attribute__((no_sanitize("thread")))
#elif KVF_ASAN
#define KVF_EMU_QUIET __attribute__((no_sanitize("address"), no_sanitize("undefined")))
#else
#define KVF_EMU_QUIET
#endif

#if KVF_TSAN
#include <sanitizer/tsan_interface.h>
#endif

#if !defined(KVF_EMU_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define KVF_EMU_UCONTEXT 1
#endif
#ifndef KVF_EMU_UCONTEXT
#define KVF_EMU_UCONTEXT 0
#endif

struct kvf_emu_fiber {
    void *stack_pointer; /* while it does not run */
    void *race_state;    /* TSan's; NULL: it counts as the OS thread that runs it */
    kvf_emu_fiber *next_free;
#if KVF_EMU_UCONTEXT
    ucontext_t context;
#endif
};

/* Where the fibers of one OS thread have their stacks, below each a page that nobody may touch. */
struct kvf_emu_stacks {
    char *memory;
    kvf_emu_fiber *fibers; /* [limit] */
    unsigned made, limit;
    const void *own_bottom; /* of the OS thread's own stack, for ASan */
    size_t own_bytes;
    void *own_fake;
};

/* Room for the stacks of `fibers` fibers; the calling OS thread runs them. Aborts without memory.
 */
void kvf_emu_stacks_open(kvf_emu_stacks *stacks, unsigned fibers);

/* Another OS thread runs them now. */
void kvf_emu_stacks_adopt(kvf_emu_stacks *stacks);

/* A fiber that calls entry() when it is first switched to; entry must not return. `is_thread`: TSan
 * takes it for a thread of its own. Aborts without memory. Fibers stay until the process ends. */
kvf_emu_fiber *kvf_emu_fiber_create(kvf_emu_stacks *stacks, void (*entry)(void), bool is_thread);

/* `home` stands for the calling OS thread. Leave it for `first`, and come back once a fiber
 * switches to it. */
void kvf_emu_fibers_run(kvf_emu_stacks *stacks, kvf_emu_fiber *home, kvf_emu_fiber *first);

#if !KVF_EMU_UCONTEXT
/* Save into *from, continue at `to`. */
extern "C" void kvf_emu_stack_switch(void **from, void *to);
#endif

/* Leave `from`, which runs, and go on in `to`. Returns when somebody switches back. */
KVF_EMU_QUIET static inline void kvf_emu_fiber_switch(kvf_emu_fiber *from, kvf_emu_fiber *to)
{
#if KVF_TSAN
    if (to->race_state != NULL)
        __tsan_switch_to_fiber(to->race_state, __tsan_switch_to_fiber_no_sync);
#endif
#if KVF_EMU_UCONTEXT
    swapcontext(&from->context, &to->context);
#else
    kvf_emu_stack_switch(&from->stack_pointer, to->stack_pointer);
#endif
}

#endif
