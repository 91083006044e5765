/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_HEAP_H
#define KVF_TESTS_HEAP_H

/*
 * An allocator for the library: it fails when it is told to, counts what is alive, and gives out
 * nothing that is zero. Any thread may call it.
 */

#include <kvferry/kvferry.h>
#include <stdlib.h>
#include <string.h>

typedef struct heap {
    int64_t asked;   /* allocations so far */
    int64_t fail_at; /* this one, counted from 1, returns NULL; 0 = none */
    int64_t failed;
    int64_t live; /* blocks */
} heap;

static inline void *heap_alloc(void *user, size_t bytes, size_t alignment)
{
    heap *h = (heap *)user;
    void *p = NULL;
    if (__atomic_add_fetch(&h->asked, 1, __ATOMIC_RELAXED) ==
        __atomic_load_n(&h->fail_at, __ATOMIC_RELAXED)) {
        __atomic_fetch_add(&h->failed, 1, __ATOMIC_RELAXED);
        return NULL;
    }
    if (posix_memalign(&p, alignment < sizeof p ? sizeof p : alignment, bytes ? bytes : 1) != 0)
        return NULL;
    memset(p, 0xa5, bytes < 65536 ? bytes : 65536);
    __atomic_fetch_add(&h->live, 1, __ATOMIC_RELAXED);
    return p;
}

static inline void heap_free(void *user, void *p)
{
    if (p && __atomic_fetch_sub(&((heap *)user)->live, 1, __ATOMIC_RELAXED) == 0)
        abort(); /* not from here */
    free(p);
}

static inline kvf_allocator heap_allocator(heap *h)
{
    return (kvf_allocator){.alloc = heap_alloc, .free = heap_free, .user = h};
}

#endif
