/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_FIBER_H
#define KVF_TESTS_EMU_EMU_FIBER_H

/*
 * Fibers: stacks that one OS thread switches between without a system call.
 *
 * Knows nothing of blocks and warps. The sanitizers are told of every switch; under TSan a fiber is
 * a thread of its own, and a switch orders nothing, so that two CUDA threads which touch the same
 * memory without a barrier between them are reported as the race that they are.
 */

#include <stddef.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#define KVF_EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVF_EMU_ASAN 1
#endif
#endif
#ifndef KVF_EMU_ASAN
#define KVF_EMU_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__)
#define KVF_EMU_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVF_EMU_TSAN 1
#endif
#endif
#ifndef KVF_EMU_TSAN
#define KVF_EMU_TSAN 0
#endif

/* For the emulator's own state, which all fibers of an OS thread share by design, and which is
 * looked at with every switch: checks of it would take most of a kernel's time. Clang's
 * no_sanitize("thread") still tells of every call. */
#if KVF_EMU_TSAN && defined(__clang__)
#define KVF_EMU_QUIET __attribute__((no_sanitize("thread"), disable_sanitizer_instrumentation))
#elif KVF_EMU_TSAN
#define KVF_EMU_QUIET __attribute__((no_sanitize("thread")))
#elif KVF_EMU_ASAN
#define KVF_EMU_QUIET __attribute__((no_sanitize("address"), no_sanitize("undefined")))
#else
#define KVF_EMU_QUIET
#endif

#if KVF_EMU_TSAN
#include <sanitizer/tsan_interface.h>
#define KVF_EMU_ACQUIRE(key) __tsan_acquire((void *)(key))
#define KVF_EMU_RELEASE(key) __tsan_release((void *)(key))
#else
#define KVF_EMU_ACQUIRE(key) ((void)(key))
#define KVF_EMU_RELEASE(key) ((void)(key))
#endif

#if !defined(KVF_EMU_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define KVF_EMU_UCONTEXT 1
#endif
#ifndef KVF_EMU_UCONTEXT
#define KVF_EMU_UCONTEXT 0
#endif

struct kvf_emu_fiber {
    void *stack_pointer; /* while it does not run */
    char *memory;        /* guard page, then the stack; NULL for an OS thread's own stack */
    const void *bottom;  /* of the stack, lowest address */
    size_t bytes;
    void *fake_stack; /* ASan's */
    void *race_state; /* TSan's */
    kvf_emu_fiber *next_free;
#if KVF_EMU_UCONTEXT
    ucontext_t context;
#endif
};

/* Make `fiber` stand for the calling OS thread. */
void kvf_emu_fiber_adopt(kvf_emu_fiber *fiber);

/* A fiber that calls entry() when it is first switched to; entry must not return. `number` shifts
 * where the stack begins, lest all stacks share the same cache sets. Aborts without memory. Fibers
 * stay until the process ends. */
kvf_emu_fiber *kvf_emu_fiber_create(void (*entry)(void), unsigned number);

/* Leave `from`, which runs, and go on in `to`. Returns when somebody switches back. */
void kvf_emu_fiber_switch(kvf_emu_fiber *from, kvf_emu_fiber *to);

/* The first call in entry(). */
void kvf_emu_fiber_begin(void);

#endif
