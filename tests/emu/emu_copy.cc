/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Asynchronous copies, as late as the program allows.
 *
 * A copy into shared memory poisons its destination at once and brings the bytes when its thread
 * waits for the group. So a missing wait, a buffer refilled too early and a source overwritten too
 * early all change results. What no wait asked for arrives when the thread exits.
 */

#include <stdlib.h>
#include <string.h>

#include "emu_machine.h"

/* ---- lists ---- */

KVF_EMU_QUIET static void push(kvf_emu_copies *list, void *to, const void *from, uint32_t bytes,
                               uint32_t size)
{
    if (list->count == list->capacity) {
        list->capacity = list->capacity != 0 ? list->capacity * 2 : 16;
        list->items = (kvf_emu_copy *)realloc(list->items, list->capacity * sizeof(*list->items));
        if (list->items == NULL)
            abort();
    }
    list->items[list->count++] = kvf_emu_copy{to, from, bytes, size, list->group};
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

/* ---- 16 or 8 bytes per thread ---- */

void kvf_emu_async_copy(void *shared, const void *global, uint32_t bytes, uint32_t size)
{
    const char *name = size == 16 ? "kvf_async_copy16" : "kvf_async_copy8";
    kvf_emu_machine *m = kvf_emu_machine_get();
    kvf_emu_check_shared(name, shared, size, size);
    kvf_emu_check_aligned(name, global, size);
    if (bytes != 0)
        kvf_emu_check_global(name, global);
    if (bytes > size)
        kvf_emu_fail("%s of %u bytes", name, bytes);
    kvf_emu_poison(shared, size);
    push(&m->threads[m->current].async, shared, global, bytes, size);
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
        memset((char *)c.to + c.bytes, 0, c.size - c.bytes);
    }
    drop(list, n);
}

void kvf_emu_async_wait(uint32_t groups)
{
    kvf_emu_copies *list = &current(kvf_emu_machine_get())->async;
    arrive_async(list, due(list, groups));
}

/* ---- the end ---- */

KVF_EMU_QUIET void kvf_emu_copies_end(kvf_emu_thread *t)
{
    if (t->async.count != 0)
        arrive_async(&t->async, t->async.count);
    t->async.group = 0;
}
