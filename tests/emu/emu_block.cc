/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A block on one OS thread: its CUDA threads run one after another until each waits for others.
 *
 * A fiber runs thread after thread; only when a thread waits does the next get a fiber of its own,
 * so a kernel whose threads never meet costs no switch. Lanes of a warp are preferred, so a warp
 * operation is 31 switches and no search. KVF_EMU_ORDER=backwards runs blocks, warps and lanes from
 * the last to the first: a kernel whose results change forgot a barrier, or reads what another
 * block of its grid writes.
 *
 * Under TSan each CUDA thread has its own fiber and only barriers order them; blocks of a grid are
 * ordered, as they run. With KVF_EMU_RACES=streams a grid is one thread to TSan, which then sees
 * races between streams and with the host only, in a third of the time.
 */

#include <cxxabi.h>
#include <mutex>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>

#include <sched.h>
#include <vector_functions.h>

#include "emu_machine.h"
#if KVF_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(pointer, bytes)   ((void)(pointer), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(pointer, bytes) ((void)(pointer), (void)(bytes))
#endif

__thread kvf_emu_place kvf_emu_here;
uint32_t kvf_emu_fence_word;

static void fiber_main(void);

/* ---- the machine of an OS thread ---- */

__thread kvf_emu_machine *kvf_emu_machine_here;

/* Machines of threads that have ended, for those that come: fibers are costly under TSan. Kept
 * until the process ends. */
static std::mutex idle_lock;
static kvf_emu_machine *idle_machines;

namespace
{
struct machine_owner {
    ~machine_owner()
    {
        std::lock_guard<std::mutex> guard(idle_lock);
        kvf_emu_machine_here->next_idle = idle_machines;
        idle_machines = kvf_emu_machine_here;
        kvf_emu_machine_here = NULL;
    }
};
} // namespace

/* Its shared memory is kept, out of bounds but for what a grid has of it: memory that came and
 * went with every grid would be new pages each time. */
static kvf_emu_machine *machine_create(void)
{
    void *memory = NULL, *shared = NULL;
    if (posix_memalign(&memory, alignof(kvf_emu_machine), sizeof(kvf_emu_machine)) != 0 ||
        posix_memalign(&shared, 128, KVF_EMU_SHARED_BYTES_MAX) != 0)
        abort();
    memset(memory, 0, sizeof(kvf_emu_machine));
    kvf_emu_machine *m = (kvf_emu_machine *)memory;
    m->shared = (char *)shared;
    ASAN_POISON_MEMORY_REGION(m->shared, KVF_EMU_SHARED_BYTES_MAX);
    return m;
}

static kvf_emu_machine *machine_take(void)
{
    std::lock_guard<std::mutex> guard(idle_lock);
    kvf_emu_machine *m = idle_machines;
    if (m == NULL)
        return machine_create();
    idle_machines = m->next_idle;
    return m;
}

static bool asked_for(const char *variable, const char *value)
{
    const char *text = getenv(variable);
    return text != NULL && strcmp(text, value) == 0;
}

static kvf_emu_machine *machine_open(void)
{
    kvf_emu_machine *m = kvf_emu_machine_here;
    if (m == NULL) {
        m = kvf_emu_machine_here = machine_take();
        static thread_local machine_owner owner;
        (void)owner;
        if (m->stacks.memory == NULL)
            kvf_emu_stacks_open(&m->stacks, KVF_EMU_BLOCK_THREADS_MAX);
        kvf_emu_stacks_adopt(&m->stacks);
        m->place = &kvf_emu_here;
        m->backwards = asked_for("KVF_EMU_ORDER", "backwards");
        m->has_races = KVF_TSAN && !asked_for("KVF_EMU_RACES", "streams");
    }
    return m;
}

void kvf_emu_fail_outside(void)
{
    fputs("kvferry emulator: device code called outside a kernel\n", stderr);
    abort();
}

/* ---- names ---- */

/* "tag<&(void name<arguments>(parameters))>", without "void" where there is no template. */
const char *kvf_emu_name_of(const std::type_info &tag)
{
    int status, depth = 0;
    char *whole = abi::__cxa_demangle(tag.name(), NULL, NULL, &status);
    const char *begin = whole != NULL ? strstr(whole, "&(") : NULL;
    if (begin == NULL) {
        free(whole);
        return tag.name();
    }
    begin += strncmp(begin + 2, "void ", 5) == 0 ? 7 : 2;
    size_t n = 0;
    for (; begin[n] != '\0' && (begin[n] != '(' || depth > 0); n++)
        depth += (begin[n] == '<') - (begin[n] == '>');
    char *const name = strndup(begin, n);
    free(whole);
    return name;
}

/* ---- errors ---- */

KVF_EMU_QUIET static void print_place(const char *kernel, const char *what)
{
    const kvf_emu_place *p = &kvf_emu_here;
    fprintf(stderr, "kvferry emulator: %s: %sblock (%u,%u,%u)", kernel, what, p->block_index.x,
            p->block_index.y, p->block_index.z);
}

KVF_EMU_QUIET void kvf_emu_fail(const char *format, ...)
{
    kvf_emu_machine *m = kvf_emu_machine_get();
    const uint3 t = kvf_emu_here.thread_index;
    print_place(m->kernel, "");
    fprintf(stderr, " thread (%u,%u,%u): ", t.x, t.y, t.z);
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    abort();
}

KVF_EMU_QUIET static bool waits_alike(const kvf_emu_thread *a, const kvf_emu_thread *b)
{
    return a->waits_for == b->waits_for && a->mask == b->mask;
}

[[noreturn]] KVF_EMU_QUIET static void fail_deadlock(kvf_emu_machine *m)
{
    print_place(m->kernel, "deadlock in ");
    fputs(", every thread waits:\n", stderr);
    for (uint32_t i = 0, end; i < m->threads_count; i = end) {
        const kvf_emu_thread *t = &m->threads[i];
        for (end = i + 1; end < m->threads_count && waits_alike(t, &m->threads[end]); end++)
            ;
        const kvf_emu_thread *last = &m->threads[end - 1];
        fprintf(stderr, "  thread (%u,%u,%u)", t->index.x, t->index.y, t->index.z);
        if (end - i > 1)
            fprintf(stderr, " .. (%u,%u,%u)", last->index.x, last->index.y, last->index.z);
        if (t->waits_for == NULL) {
            fputs(" exited\n", stderr);
            continue;
        }
        fprintf(stderr, " waits in %s", t->waits_for);
        if (t->mask != 0)
            fprintf(stderr, " of lanes 0x%08x", t->mask);
        fputc('\n', stderr);
    }
    abort();
}

KVF_EMU_QUIET void kvf_emu_poison(void *memory, size_t bytes)
{
    const uint64_t word = KVF_EMU_POISON * 0x0001000100010001u;
    char *p = (char *)memory;
    size_t i = 0;
    for (; i + sizeof(word) <= bytes; i += sizeof(word))
        __builtin_memcpy(p + i, &word, sizeof(word));
    for (; i < bytes; i++)
        p[i] = (char)(i % 2 == 0 ? KVF_EMU_POISON & 0xffu : KVF_EMU_POISON >> 8);
}

KVF_EMU_QUIET void kvf_emu_check_aligned(const char *what, const void *pointer, size_t alignment)
{
    if ((uintptr_t)pointer % alignment != 0)
        kvf_emu_fail("%s: address %p is not a multiple of %zu", what, pointer, alignment);
}

/* Pieces of memory that this grid has touched and may. */
static __thread uintptr_t known_global[64];

KVF_EMU_QUIET void kvf_emu_check_global(const char *what, const void *pointer)
{
    const uintptr_t piece = (uintptr_t)pointer / 512;
    uintptr_t *known = &known_global[piece % 64];
    if (*known == piece)
        return;
    const char *wrong = kvf_emu_refuses(pointer);
    if (wrong != NULL)
        kvf_emu_fail("%s: address %p is %s", what, pointer, wrong);
    *known = piece;
}

KVF_EMU_QUIET void kvf_emu_check_shared(const char *what, const void *pointer, size_t bytes,
                                        size_t alignment)
{
    kvf_emu_check_aligned(what, pointer, alignment);
    const uintptr_t base = (uintptr_t)kvf_emu_here.shared, at = (uintptr_t)pointer;
    if (at < base || at - base > kvf_emu_here.shared_bytes ||
        kvf_emu_here.shared_bytes - (at - base) < bytes)
        kvf_emu_fail("%s: %zu bytes at %p are not in the %zu bytes of shared memory", what, bytes,
                     pointer, kvf_emu_here.shared_bytes);
}

/* ---- who runs next ---- */

/* The bit of `set` that follows `after` in the order of the machine, around the end. set != 0. */
KVF_EMU_QUIET static inline uint32_t next_bit(uint32_t set, uint32_t after, bool backwards)
{
    if (backwards) {
        const uint32_t below = set & ((1u << after) - 1u);
        return 31u - (uint32_t)__builtin_clz(below != 0 ? below : set);
    }
    const uint32_t above = set & ~((2u << after) - 1u);
    return (uint32_t)__builtin_ctz(above != 0 ? above : set);
}

KVF_EMU_QUIET static inline uint32_t next_in_warp(const kvf_emu_machine *m, uint32_t warp)
{
    const uint32_t lane = warp == m->current / 32 ? m->current % 32 : m->backwards ? 0 : 31;
    return warp * 32 + next_bit(m->warps[warp].ready, lane, m->backwards);
}

/* A ready thread, or threads_count. */
KVF_EMU_QUIET static uint32_t next_ready(const kvf_emu_machine *m)
{
    const uint32_t warp = m->current / 32;
    if (m->warps[warp].ready != 0)
        return next_in_warp(m, warp);
    if (m->warps_ready == 0)
        return m->threads_count;
    return next_in_warp(m, next_bit(m->warps_ready, warp, m->backwards));
}

/* The same; somebody must. */
KVF_EMU_QUIET static uint32_t next_thread(kvf_emu_machine *m)
{
    const uint32_t next = next_ready(m);
    if (next == m->threads_count)
        fail_deadlock(m);
    return next;
}

/* Not by kvf_emu_here: a fiber may end a thread and begin its next on another OS thread, where that
 * is elsewhere. */
KVF_EMU_QUIET static inline void set_current(kvf_emu_machine *m, uint32_t thread)
{
    kvf_emu_warp *warp = &m->warps[thread / 32];
    warp->ready &= ~(1u << thread % 32);
    if (warp->ready == 0)
        m->warps_ready &= ~(1u << thread / 32);
    m->current = thread;
    m->place->thread_index = m->threads[thread].index;
}

KVF_EMU_QUIET void kvf_emu_wake(kvf_emu_machine *m, uint32_t warp, uint32_t lanes)
{
    if (lanes == 0)
        return;
    m->warps[warp].ready |= lanes;
    m->warps_ready |= 1u << warp;
}

KVF_EMU_QUIET static kvf_emu_fiber *take_fiber(kvf_emu_machine *m, uint32_t thread)
{
    if (m->has_races) {
        if (m->fiber_of[thread] == NULL)
            m->fiber_of[thread] = kvf_emu_fiber_create(&m->stacks, fiber_main, true);
        return m->fiber_of[thread];
    }
    kvf_emu_fiber *fiber = m->free_fibers;
    if (fiber == NULL)
        return kvf_emu_fiber_create(&m->stacks, fiber_main, false);
    m->free_fibers = fiber->next_free;
    return fiber;
}

KVF_EMU_QUIET static inline kvf_emu_fiber *choose_thread(kvf_emu_machine *m, uint32_t thread)
{
    set_current(m, thread);
    if (m->threads[thread].fiber == NULL)
        m->threads[thread].fiber = take_fiber(m, thread);
    return m->threads[thread].fiber;
}

KVF_EMU_QUIET void kvf_emu_suspend(kvf_emu_machine *m, const char *waits_for)
{
    const uint32_t self = m->current;
    kvf_emu_thread *t = &m->threads[self];
    t->waits_for = waits_for;
    const uint32_t warp = self / 32;
    const uint32_t next = m->warps[warp].ready != 0 ? next_in_warp(m, warp) : next_thread(m);
    if (next == self)
        set_current(m, self);
    else
        kvf_emu_fiber_switch(t->fiber, choose_thread(m, next));
    t->waits_for = NULL;
    t->mask = 0;
}

KVF_EMU_QUIET void kvf_emu_yield(void)
{
    kvf_emu_machine *m = kvf_emu_machine_get();
    const uint32_t self = m->current;
    uint32_t next = m->threads_count;
    const uint32_t others = m->warps_ready & ~(1u << self / 32);
    const uint32_t later = m->backwards ? m->warps[self / 32].ready & ((1u << self % 32) - 1u)
                                        : m->warps[self / 32].ready & ~((2u << self % 32) - 1u);
    if (later != 0 || (others == 0 && m->warps[self / 32].ready != 0))
        next = next_in_warp(m, self / 32);
    else if (others != 0)
        next = next_in_warp(m, next_bit(others, self / 32, m->backwards));
    if (next == m->threads_count) {
        sched_yield();
        return;
    }
    kvf_emu_wake(m, self / 32, 1u << self % 32);
    kvf_emu_fiber *fiber = m->threads[self].fiber;
    kvf_emu_fiber_switch(fiber, choose_thread(m, next));
}

/* ---- a block ---- */

KVF_EMU_QUIET static void barrier_complete(kvf_emu_machine *m)
{
    switch (m->barrier_kind) {
    case KVF_EMU_BARRIER_PLAIN:
        m->barrier_answer = 0;
        break;
    case KVF_EMU_BARRIER_OR:
        m->barrier_answer = m->barrier_count != 0;
        break;
    }
    m->barrier_arrived = m->barrier_count = 0;
    m->barrier_phase ^= 1;
    for (uint32_t w = 0; w < m->warps_count; w++) {
        kvf_emu_wake(m, w, m->warps[w].at_sync);
        m->warps[w].at_sync = 0;
    }
}

KVF_EMU_QUIET int kvf_emu_barrier(kvf_emu_barrier_kind kind, int predicate)
{
    static const char *const names[] = {"__syncthreads", "__syncthreads_or", "__syncthreads_and",
                                        "__syncthreads_count"};
    kvf_emu_machine *m = kvf_emu_machine_get();
    if (m->barrier_arrived == 0)
        m->barrier_kind = kind;
    else if (m->barrier_kind != kind)
        kvf_emu_fail("%s, while other threads of the block wait in %s", names[kind],
                     names[m->barrier_kind]);
    const char *order = &m->barrier_order[m->barrier_phase];
    KVF_EMU_RELEASE(m, order);
    m->barrier_arrived++;
    m->barrier_count += predicate != 0;
    if (m->barrier_arrived == m->alive) {
        barrier_complete(m);
    } else {
        m->warps[m->current / 32].at_sync |= 1u << m->current % 32;
        kvf_emu_suspend(m, names[kind]);
    }
    KVF_EMU_ACQUIRE(m, order);
    return m->barrier_answer;
}

/* Threads of the block that have not waited are in no order with it. */
KVF_EMU_QUIET void kvf_emu_wait_for_earlier(void)
{
    kvf_emu_machine *m = kvf_emu_machine_get();
    m->threads[m->current].has_waited = true;
    if (m->earlier != NULL) {
        const std::function<void()> *earlier = m->earlier;
        m->earlier = NULL;
        std::thread(*earlier).join();
        KVF_EMU_RELEASE(m, &m->earlier_order);
    }
    KVF_EMU_ACQUIRE(m, &m->earlier_order);
}

KVF_EMU_QUIET __attribute__((noinline)) static void thread_end(kvf_emu_machine *m)
{
    kvf_emu_thread *t = &m->threads[m->current];
    kvf_emu_warp *warp = &m->warps[m->current / 32];
    const uint32_t bit = 1u << m->current % 32;
    kvf_emu_copies_end(t);
    if (m->starts_early && !t->has_waited)
        kvf_emu_fail("starts early, and ends without kvf_wait_for_earlier()");
    t->has_waited = false;
    KVF_EMU_RELEASE(m, &m->block_end);
    for (uint32_t set = warp->meetings; set != 0; set &= set - 1) {
        const int i = __builtin_ctz(set);
        if (warp->meeting_mask[i] & bit)
            kvf_emu_fail("exits, while lanes 0x%08x wait for it in %s of lanes 0x%08x",
                         warp->meeting_arrived[i], warp->meeting_op[i]->name,
                         warp->meeting_mask[i]);
    }
    warp->exited |= bit;
    t->fiber = NULL;
    m->alive--;
    if (m->barrier_arrived != 0 && m->barrier_arrived == m->alive)
        barrier_complete(m);
}

/* Called when the fiber's thread has exited: give the fiber another, or put it aside until somebody
 * takes it. */
KVF_EMU_QUIET static void next_for_fiber(kvf_emu_machine *m, kvf_emu_fiber *self)
{
    const uint32_t next = m->alive != 0 ? next_thread(m) : m->threads_count;
    if (m->alive != 0 && !m->has_races && m->threads[next].fiber == NULL) {
        set_current(m, next);
        m->threads[next].fiber = self;
        return;
    }
    if (!m->has_races) {
        self->next_free = m->free_fibers;
        m->free_fibers = self;
    }
    kvf_emu_fiber_switch(self, m->alive != 0 ? choose_thread(m, next) : &m->home);
}

KVF_EMU_QUIET static void fiber_main(void)
{
    kvf_emu_machine *m = kvf_emu_machine_here;
    kvf_emu_fiber *self = m->threads[m->current].fiber;
    for (;;) {
        KVF_EMU_ACQUIRE(m, &m->block_begin);
        (*m->body)();
        thread_end(m);
        next_for_fiber(m, self);
    }
}

KVF_EMU_QUIET static void run_block(kvf_emu_machine *m)
{
    for (uint32_t w = 0; w < m->warps_count; w++) {
        const uint32_t left = m->threads_count - w * 32;
        m->warps[w].ready = left >= 32 ? ~0u : (1u << left) - 1u;
        m->warps[w].exited = ~m->warps[w].ready;
    }
    m->warps_ready = m->warps_count == 32 ? ~0u : (1u << m->warps_count) - 1u;
    m->alive = m->threads_count;
    KVF_EMU_RELEASE(m, &m->block_begin);
    kvf_emu_fibers_run(&m->stacks, &m->home,
                       choose_thread(m, m->backwards ? m->threads_count - 1 : 0));
    KVF_EMU_ACQUIRE(m, &m->block_end);
}

KVF_EMU_QUIET static void grid_begin(kvf_emu_machine *m, dim3 grid, dim3 block,
                                     const std::function<void()> *body,
                                     const kvf_emu_kernel &kernel)
{
    if (m->body != NULL)
        kvf_emu_fail("starts a grid from a kernel");
    m->kernel = kernel.name != NULL ? kernel.name : "kernel";
    m->body = body;
    m->starts_early = kernel.starts_early;
    m->threads_count = block.x * block.y * block.z;
    m->warps_count = (m->threads_count + 31) / 32;
    for (uint32_t i = 0; i < m->threads_count; i++)
        m->threads[i].index = make_uint3(i % block.x, i / block.x % block.y, i / block.x / block.y);
    kvf_emu_here.block_dim = block;
    kvf_emu_here.grid_dim = grid;
}

cudaError_t kvf_emu_check_launch(dim3 grid, dim3 block, size_t shared_bytes)
{
    const uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
        grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (threads == 0 || threads > KVF_EMU_BLOCK_THREADS_MAX || block.x > 1024 || block.y > 1024 ||
        block.z > 64)
        return cudaErrorInvalidConfiguration;
    if (shared_bytes > KVF_EMU_SHARED_BYTES_MAX)
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

KVF_EMU_QUIET static uint3 place_of(uint64_t block, dim3 grid)
{
    const uint64_t row = block / grid.x;
    return make_uint3((uint32_t)(block % grid.x), (uint32_t)(row % grid.y),
                      (uint32_t)(row / grid.y));
}

KVF_EMU_QUIET void kvf_emu_run_grid(dim3 grid, dim3 block, size_t shared_bytes,
                                    const std::function<void()> &body, const kvf_emu_kernel &kernel,
                                    const std::function<void()> *earlier)
{
    kvf_emu_machine *m = machine_open();
    grid_begin(m, grid, block, &body, kernel);
    m->earlier = earlier;
    memset(known_global, 0, sizeof(known_global));
    ASAN_UNPOISON_MEMORY_REGION(m->shared, shared_bytes);
    kvf_emu_here.shared = m->shared;
    kvf_emu_here.shared_bytes = shared_bytes;
    const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    for (uint64_t i = 0; i < blocks; i++) {
        kvf_emu_here.block_index = place_of(m->backwards ? blocks - 1 - i : i, grid);
        kvf_emu_poison(m->shared, shared_bytes);
        run_block(m);
    }
    ASAN_POISON_MEMORY_REGION(m->shared, shared_bytes);
    kvf_emu_here.shared = NULL;
    m->body = NULL;
}
