/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Asynchronous copies, as late as the program allows.
 *
 * A copy into shared memory poisons its destination at once and brings the bytes when its thread
 * waits for the group, or, for a bulk load, when no thread of the block can run and one waits for
 * the barrier. A bulk store reads its source at the wait for reads and writes at the wait for
 * writes. So a missing wait, a buffer refilled too early and a source overwritten too early all
 * change results. What no wait asked for arrives when the thread exits, or is an error where the
 * hardware would still use the block's shared memory.
 *
 * An mbarrier's state lives in its 8 bytes of shared memory:
 *   pending arrivals [0,20) | arrivals of a phase [20,40) | bytes to come + 2^20 [40,61) |
 *   phase [61] | 2 [62,64)
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emu_machine.h"

static const uint32_t BYTES_ZERO = 1u << 20;

/* ---- lists ---- */

KVF_EMU_QUIET static void push(kvf_emu_copies *list, void *to, const void *from, uint32_t bytes)
{
    if (list->count == list->capacity) {
        list->capacity = list->capacity != 0 ? list->capacity * 2 : 16;
        list->items = (kvf_emu_copy *)realloc(list->items, list->capacity * sizeof(*list->items));
        if (list->items == NULL)
            abort();
    }
    list->items[list->count++] = kvf_emu_copy{to, from, bytes, list->group, NULL};
}

/* Copies at the head of the list that belong to groups before the last `groups` that were closed.
 */
KVF_EMU_QUIET static uint32_t due(const kvf_emu_copies *list, uint32_t groups)
{
    uint32_t n = 0;
    while (n < list->count && list->items[n].group + groups < list->group)
        n++;
    return n;
}

KVF_EMU_QUIET static void drop(kvf_emu_copies *list, uint32_t n)
{
    for (uint32_t i = n; i < list->count; i++)
        list->items[i - n] = list->items[i];
    list->count -= n;
}

KVF_EMU_QUIET static kvf_emu_thread *current(kvf_emu_machine *m)
{
    return &m->threads[m->current];
}

/* ---- 16 bytes per thread ---- */

void kvf_emu_async_copy16(void *shared, const void *global, uint32_t bytes)
{
    kvf_emu_machine *m = kvf_emu_machine_get();
    kvf_emu_check_shared("kvf_async_copy16", shared, 16, 16);
    kvf_emu_check_aligned("kvf_async_copy16", global, 16);
    if (bytes != 0)
        kvf_emu_check_global("kvf_async_copy16", global);
    if (bytes > 16)
        kvf_emu_fail("kvf_async_copy16 of %u bytes", bytes);
    kvf_emu_poison(shared, 16);
    push(&m->threads[m->current].async, shared, global, bytes);
}

KVF_EMU_QUIET void kvf_emu_async_commit(void)
{
    current(kvf_emu_machine_get())->async.group++;
}

static void arrive_async(kvf_emu_copies *list, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const kvf_emu_copy c = list->items[i];
        if (c.bytes != 0)
            memcpy(c.to, c.from, c.bytes);
        memset((char *)c.to + c.bytes, 0, 16 - c.bytes);
    }
    drop(list, n);
}

void kvf_emu_async_wait(uint32_t groups)
{
    kvf_emu_copies *list = &current(kvf_emu_machine_get())->async;
    arrive_async(list, due(list, groups));
}

/* ---- mbarriers ---- */

struct barrier_state {
    uint32_t pending, arrivals, phase;
    int32_t bytes;
};

static barrier_state barrier_read(const char *what, const uint64_t *barrier)
{
    kvf_emu_check_shared(what, barrier, 8, 8);
    const uint64_t word = __atomic_load_n(barrier, __ATOMIC_RELAXED);
    if (word >> 62 != 2)
        kvf_emu_fail("%s: no barrier at shared byte %td", what,
                     (const char *)barrier - kvf_emu_here.shared);
    barrier_state s;
    s.pending = (uint32_t)(word & 0xfffffu);
    s.arrivals = (uint32_t)(word >> 20 & 0xfffffu);
    s.bytes = (int32_t)(word >> 40 & 0x1fffffu) - (int32_t)BYTES_ZERO;
    s.phase = (uint32_t)(word >> 61 & 1u);
    return s;
}

static uint64_t barrier_word(barrier_state s)
{
    return s.pending | (uint64_t)s.arrivals << 20 |
           (uint64_t)((uint32_t)s.bytes + BYTES_ZERO) << 40 | (uint64_t)s.phase << 61 |
           (uint64_t)2 << 62;
}

KVF_EMU_QUIET static void wake_phase(kvf_emu_machine *m, const uint64_t *barrier, uint32_t parity)
{
    for (uint32_t w = 0; w < m->warps_count; w++) {
        uint32_t lanes = 0;
        for (uint32_t set = m->warps[w].at_mbarrier; set != 0; set &= set - 1) {
            const kvf_emu_thread *t = &m->threads[w * 32 + (uint32_t)__builtin_ctz(set)];
            if (t->barrier == barrier && t->parity == parity)
                lanes |= set & -set;
        }
        m->warps[w].at_mbarrier &= ~lanes;
        kvf_emu_wake(m, w, lanes);
    }
}

/* Write the state back; a phase that is complete ends. */
static void barrier_write(kvf_emu_machine *m, uint64_t *barrier, barrier_state s)
{
    if (s.bytes >= (int32_t)BYTES_ZERO || s.bytes <= -(int32_t)BYTES_ZERO)
        kvf_emu_fail("an mbarrier expects %d bytes", s.bytes);
    const bool complete = s.pending == 0 && s.bytes == 0;
    if (complete) {
        s.pending = s.arrivals;
        s.phase ^= 1;
    }
    __atomic_store_n(barrier, barrier_word(s), __ATOMIC_RELAXED);
    if (complete)
        wake_phase(m, barrier, s.phase ^ 1);
}

void kvf_emu_mbarrier_init(uint64_t *barrier, uint32_t arrivals)
{
    kvf_emu_check_shared("kvf_barrier_init", barrier, 8, 8);
    if (arrivals == 0 || arrivals >= 1u << 20)
        kvf_emu_fail("kvf_barrier_init with %u arrivals", arrivals);
    *barrier = barrier_word(barrier_state{arrivals, arrivals, 0, 0});
}

void kvf_emu_mbarrier_expect(uint64_t *barrier, uint32_t bytes)
{
    kvf_emu_machine *m = kvf_emu_machine_get();
    barrier_state s = barrier_read("kvf_barrier_expect", barrier);
    KVF_EMU_RELEASE(m, barrier);
    if (s.pending == 0)
        kvf_emu_fail("kvf_barrier_expect: more than %u arrivals in a phase", s.arrivals);
    if (bytes >= BYTES_ZERO)
        kvf_emu_fail("kvf_barrier_expect of %u bytes", bytes);
    s.pending--;
    s.bytes += (int32_t)bytes;
    barrier_write(m, barrier, s);
}

KVF_EMU_QUIET static void wait_for_phase(kvf_emu_machine *m, uint64_t *barrier, uint32_t parity)
{
    kvf_emu_thread *t = current(m);
    t->barrier = barrier;
    t->parity = parity;
    m->warps[m->current / 32].at_mbarrier |= 1u << m->current % 32;
    kvf_emu_suspend(m, "kvf_barrier_wait");
}

void kvf_emu_mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    kvf_emu_machine *m = kvf_emu_machine_get();
    if (parity > 1)
        kvf_emu_fail("kvf_barrier_wait for parity %u", parity);
    if (barrier_read("kvf_barrier_wait", barrier).phase == parity)
        wait_for_phase(m, barrier, parity);
    KVF_EMU_ACQUIRE(m, barrier);
}

/* ---- bulk loads ---- */

static void check_bulk(const char *what, const void *shared, const void *global, uint32_t bytes)
{
    if (bytes % 16 != 0)
        kvf_emu_fail("%s of %u bytes, not a multiple of 16", what, bytes);
    kvf_emu_check_shared(what, shared, bytes, 16);
    kvf_emu_check_aligned(what, global, 16);
    kvf_emu_check_global(what, global);
}

KVF_EMU_QUIET static void queue_load(kvf_emu_machine *m, kvf_emu_copy copy, uint64_t *barrier)
{
    if (m->loads_count == KVF_EMU_LOADS_MAX)
        kvf_emu_fail("more than %d bulk loads on their way", (int)KVF_EMU_LOADS_MAX);
    m->loads[m->loads_count++] = kvf_emu_load{copy, barrier};
}

void kvf_emu_bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier)
{
    kvf_emu_machine *m = kvf_emu_machine_get();
    check_bulk("kvf_bulk_load", shared, global, bytes);
    barrier_read("kvf_bulk_load", barrier);
    KVF_EMU_RELEASE(m, barrier);
    kvf_emu_poison(shared, bytes);
    queue_load(m, kvf_emu_copy{shared, global, bytes, 0, NULL}, barrier);
}

static void arrive_load(kvf_emu_machine *m, const kvf_emu_load *load)
{
    KVF_EMU_ACQUIRE(m, load->barrier);
    if (kvf_emu_bulk_brings(load->copy.from))
        memcpy(load->copy.to, load->copy.from, load->copy.bytes);
    else
        memset(load->copy.to, 0, load->copy.bytes);
    KVF_EMU_RELEASE(m, load->barrier);
    barrier_state s = barrier_read("kvf_bulk_load", load->barrier);
    s.bytes -= (int32_t)load->copy.bytes;
    barrier_write(m, load->barrier, s);
}

KVF_EMU_QUIET static bool awaited(const kvf_emu_machine *m, const uint64_t *barrier)
{
    for (uint32_t w = 0; w < m->warps_count; w++)
        for (uint32_t set = m->warps[w].at_mbarrier; set != 0; set &= set - 1)
            if (m->threads[w * 32 + (uint32_t)__builtin_ctz(set)].barrier == barrier)
                return true;
    return false;
}

KVF_EMU_QUIET bool kvf_emu_copies_progress(kvf_emu_machine *m)
{
    uint32_t left = 0;
    const uint32_t count = m->loads_count;
    for (uint32_t i = 0; i < count; i++) {
        const kvf_emu_load load = m->loads[i];
        if (awaited(m, load.barrier))
            arrive_load(m, &load);
        else
            m->loads[left++] = load;
    }
    m->loads_count = left;
    return left != count;
}

/* ---- bulk stores ---- */

void kvf_emu_bulk_store(void *global, const void *shared, uint32_t bytes)
{
    check_bulk("kvf_bulk_store", shared, global, bytes);
    push(&current(kvf_emu_machine_get())->stores, global, shared, bytes);
}

KVF_EMU_QUIET void kvf_emu_bulk_commit(void)
{
    current(kvf_emu_machine_get())->stores.group++;
}

void kvf_emu_bulk_wait_read(uint32_t groups)
{
    kvf_emu_copies *list = &current(kvf_emu_machine_get())->stores;
    for (uint32_t i = 0, n = due(list, groups); i < n; i++) {
        kvf_emu_copy *c = &list->items[i];
        if (c->snapshot != NULL)
            continue;
        c->snapshot = (char *)malloc(c->bytes + 1);
        if (c->snapshot == NULL)
            abort();
        memcpy(c->snapshot, c->from, c->bytes);
    }
}

static void arrive_stores(kvf_emu_copies *list, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const kvf_emu_copy c = list->items[i];
        memcpy(c.to, c.snapshot != NULL ? c.snapshot : c.from, c.bytes);
        free(c.snapshot);
    }
    drop(list, n);
}

void kvf_emu_bulk_wait(uint32_t groups)
{
    kvf_emu_copies *list = &current(kvf_emu_machine_get())->stores;
    arrive_stores(list, due(list, groups));
}

/* ---- the end ---- */

KVF_EMU_QUIET void kvf_emu_copies_thread_end(kvf_emu_machine *, kvf_emu_thread *t)
{
    if (t->async.count != 0)
        arrive_async(&t->async, t->async.count);
    for (uint32_t i = 0; i < t->stores.count; i++)
        if (t->stores.items[i].snapshot == NULL)
            kvf_emu_fail("exits while a bulk store may still read shared memory: "
                         "kvf_bulk_wait_read<0>() is missing");
    if (t->stores.count != 0)
        arrive_stores(&t->stores, t->stores.count);
    t->async.group = t->stores.group = 0;
}

KVF_EMU_QUIET void kvf_emu_copies_block_end(kvf_emu_machine *m)
{
    if (m->loads_count != 0)
        kvf_emu_fail("the block has ended, and %u bulk loads into it have not been waited for",
                     m->loads_count);
}
