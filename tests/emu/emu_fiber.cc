/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fibers in a few instructions: the callee-saved registers go on the stack, the stack pointer
 * changes hands. Where the architecture is not known, ucontext does it at two system calls a
 * switch.
 *
 * Knows nothing of CUDA. Stacks are mapped lazily, so a deep limit costs nothing; below each lies a
 * page that nobody may touch.
 */

#include "emu_fiber.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#if KVF_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

enum { STACK_BYTES = 256 * 1024 };

#if !KVF_EMU_UCONTEXT

#if defined(__x86_64__)
asm(".text\n"
    ".p2align 4\n"
    ".globl kvf_emu_stack_switch\n"
    ".hidden kvf_emu_stack_switch\n"
    ".type kvf_emu_stack_switch,@function\n"
    "kvf_emu_stack_switch:\n"
    ".cfi_startproc\n"
    "endbr64\n"
    "pushq %rbp\n"
    "pushq %rbx\n"
    "pushq %r12\n"
    "pushq %r13\n"
    "pushq %r14\n"
    "pushq %r15\n"
    "movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp\n"
    "popq %r15\n"
    "popq %r14\n"
    "popq %r13\n"
    "popq %r12\n"
    "popq %rbx\n"
    "popq %rbp\n"
    "ret\n"
    ".cfi_endproc\n"
    ".size kvf_emu_stack_switch,.-kvf_emu_stack_switch\n");

enum { SAVED_WORDS = 8, RETURN_WORD = 6 };
#else
asm(".text\n"
    ".p2align 4\n"
    ".globl kvf_emu_stack_switch\n"
    ".hidden kvf_emu_stack_switch\n"
    ".type kvf_emu_stack_switch,%function\n"
    "kvf_emu_stack_switch:\n"
    "hint #34\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\n"
    "stp x21, x22, [sp, #16]\n"
    "stp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n"
    "stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n"
    "stp d10, d11, [sp, #112]\n"
    "stp d12, d13, [sp, #128]\n"
    "stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n"
    "str x9, [x0]\n"
    "mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\n"
    "ldp x21, x22, [sp, #16]\n"
    "ldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n"
    "ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n"
    "ldp d10, d11, [sp, #112]\n"
    "ldp d12, d13, [sp, #128]\n"
    "ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n"
    "ret\n"
    ".size kvf_emu_stack_switch,.-kvf_emu_stack_switch\n");

enum { SAVED_WORDS = 20, RETURN_WORD = 11 };
#endif

/* What a switch expects to find on a stack that has not run: zeros, and where to go. */
static void prepare(kvf_emu_fiber *fiber, char *, char *top, void (*entry)(void))
{
    uint64_t *saved = (uint64_t *)(void *)top - SAVED_WORDS;
    for (int i = 0; i < SAVED_WORDS; i++)
        saved[i] = 0;
    saved[RETURN_WORD] = (uint64_t)(uintptr_t)entry;
    fiber->stack_pointer = saved;
}

#else

static void prepare(kvf_emu_fiber *fiber, char *bottom, char *top, void (*entry)(void))
{
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = bottom;
    fiber->context.uc_stack.ss_size = (size_t)(top - bottom);
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, entry, 0);
}

#endif

static void fail(const char *what)
{
    perror(what);
    abort();
}

KVF_EMU_QUIET static size_t stack_stride(void)
{
    return STACK_BYTES + (size_t)sysconf(_SC_PAGESIZE);
}

void kvf_emu_stacks_open(kvf_emu_stacks *stacks, unsigned fibers)
{
    void *memory = mmap(NULL, fibers * stack_stride(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        fail("kvferry emulator: stacks of fibers");
    (void)madvise(memory, fibers * stack_stride(), MADV_NOHUGEPAGE);
    stacks->memory = (char *)memory;
    stacks->fibers = (kvf_emu_fiber *)calloc(fibers, sizeof(*stacks->fibers));
    if (stacks->fibers == NULL)
        fail("kvferry emulator: fibers");
    stacks->limit = fibers;
}

void kvf_emu_stacks_adopt(kvf_emu_stacks *stacks)
{
#if KVF_ASAN
    pthread_attr_t attributes;
    void *bottom = NULL;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0 ||
        pthread_attr_getstack(&attributes, &bottom, &stacks->own_bytes) != 0)
        fail("kvferry emulator: stack of a thread");
    stacks->own_bottom = bottom;
    pthread_attr_destroy(&attributes);
#else
    (void)stacks;
#endif
}

/* Stacks do not begin at the same place of their pages, lest all share the same cache sets. */
KVF_EMU_QUIET kvf_emu_fiber *kvf_emu_fiber_create(kvf_emu_stacks *stacks, void (*entry)(void),
                                                  bool is_thread)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const unsigned number = stacks->made++;
    char *guard = stacks->memory + number * stack_stride();
    if (number >= stacks->limit || mprotect(guard, page, PROT_NONE) != 0)
        fail("kvferry emulator: stack of a fiber");
    kvf_emu_fiber *fiber = &stacks->fibers[number];
    char *bottom = guard + page;
    prepare(fiber, bottom, bottom + STACK_BYTES - number % 32 * 128, entry);
#if KVF_TSAN
    if (is_thread)
        fiber->race_state = __tsan_create_fiber(0);
#else
    (void)is_thread;
#endif
    return fiber;
}

/* ASan hears of the way there and back, once each, and not of switches between fibers: their stacks
 * are one to it. */
KVF_EMU_QUIET void kvf_emu_fibers_run(kvf_emu_stacks *stacks, kvf_emu_fiber *home,
                                      kvf_emu_fiber *first)
{
#if KVF_ASAN
    __sanitizer_start_switch_fiber(&stacks->own_fake, stacks->memory,
                                   stacks->limit * stack_stride());
    __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#else
    (void)stacks;
#endif
#if KVF_TSAN
    home->race_state = first->race_state != NULL ? __tsan_get_current_fiber() : NULL;
#endif
    kvf_emu_fiber_switch(home, first);
#if KVF_ASAN
    __sanitizer_start_switch_fiber(NULL, stacks->own_bottom, stacks->own_bytes);
    __sanitizer_finish_switch_fiber(stacks->own_fake, NULL, NULL);
#endif
}
