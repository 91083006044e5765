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

#if KVF_EMU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

enum { STACK_BYTES = 256 * 1024 };

#if !KVF_EMU_UCONTEXT

/* Save into *from, continue at `to`. */
extern "C" void kvf_emu_stack_switch(void **from, void *to);

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
static void prepare(kvf_emu_fiber *fiber, char *top, void (*entry)(void))
{
    uint64_t *saved = (uint64_t *)(void *)top - SAVED_WORDS;
    for (int i = 0; i < SAVED_WORDS; i++)
        saved[i] = 0;
    saved[RETURN_WORD] = (uint64_t)(uintptr_t)entry;
    fiber->stack_pointer = saved;
}

KVF_EMU_QUIET static inline void switch_stack(kvf_emu_fiber *from, kvf_emu_fiber *to)
{
    kvf_emu_stack_switch(&from->stack_pointer, to->stack_pointer);
}

#else

static void prepare(kvf_emu_fiber *fiber, char *top, void (*entry)(void))
{
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = const_cast<void *>(fiber->bottom);
    fiber->context.uc_stack.ss_size = (size_t)(top - (char *)fiber->context.uc_stack.ss_sp);
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, entry, 0);
}

KVF_EMU_QUIET static inline void switch_stack(kvf_emu_fiber *from, kvf_emu_fiber *to)
{
    swapcontext(&from->context, &to->context);
}

#endif

static void fail(const char *what)
{
    perror(what);
    abort();
}

void kvf_emu_fiber_adopt(kvf_emu_fiber *fiber)
{
    *fiber = kvf_emu_fiber();
#if KVF_EMU_ASAN
    pthread_attr_t attributes;
    void *bottom = NULL;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0 ||
        pthread_attr_getstack(&attributes, &bottom, &fiber->bytes) != 0)
        fail("kvferry emulator: stack of a thread");
    fiber->bottom = bottom;
    pthread_attr_destroy(&attributes);
#endif
#if KVF_EMU_TSAN
    fiber->race_state = __tsan_get_current_fiber();
#endif
}

kvf_emu_fiber *kvf_emu_fiber_create(void (*entry)(void), unsigned number)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    kvf_emu_fiber *fiber = (kvf_emu_fiber *)calloc(1, sizeof(*fiber));
    if (fiber == NULL)
        fail("kvferry emulator: fiber");
    void *memory = mmap(NULL, STACK_BYTES + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0)
        fail("kvferry emulator: stack of a fiber");
    fiber->memory = (char *)memory;
    fiber->bottom = fiber->memory + page;
    fiber->bytes = STACK_BYTES;
    prepare(fiber, fiber->memory + page + STACK_BYTES - number % 32 * 128, entry);
#if KVF_EMU_TSAN
    fiber->race_state = __tsan_create_fiber(0);
#endif
    return fiber;
}

KVF_EMU_QUIET void kvf_emu_fiber_switch(kvf_emu_fiber *from, kvf_emu_fiber *to)
{
#if KVF_EMU_ASAN
    __sanitizer_start_switch_fiber(&from->fake_stack, to->bottom, to->bytes);
#endif
#if KVF_EMU_TSAN
    __tsan_switch_to_fiber(to->race_state, __tsan_switch_to_fiber_no_sync);
#endif
    switch_stack(from, to);
#if KVF_EMU_ASAN
    __sanitizer_finish_switch_fiber(from->fake_stack, NULL, NULL);
#endif
}

void kvf_emu_fiber_begin(void)
{
#if KVF_EMU_ASAN
    __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#endif
}
