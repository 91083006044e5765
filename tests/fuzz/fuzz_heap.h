/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_FUZZ_HEAP_H
#define KVF_TESTS_FUZZ_HEAP_H

/*
 * An allocator for fuzz targets: it fails once, at a call that the input chooses, and knows what is
 * alive. A target calls fuzz_heap_check when it has closed everything.
 */

#include <kvferry/kvferry.h>
#include <stdlib.h>

typedef struct fuzz_heap {
    size_t calls, fail_at, live; /* fail_at 0 = never */
} fuzz_heap;

static inline void *fuzz_heap_alloc(void *user, size_t bytes, size_t alignment)
{
    fuzz_heap *heap = (fuzz_heap *)user;
    void *pointer = NULL;
    if (++heap->calls == heap->fail_at || posix_memalign(&pointer, alignment, bytes) != 0)
        return NULL;
    heap->live++;
    return pointer;
}

static inline void fuzz_heap_free(void *user, void *pointer)
{
    fuzz_heap *heap = (fuzz_heap *)user;
    if (heap->live-- == 0)
        abort();
    free(pointer);
}

static inline kvf_allocator fuzz_heap_allocator(fuzz_heap *heap)
{
    return (kvf_allocator){.alloc = fuzz_heap_alloc, .free = fuzz_heap_free, .user = heap};
}

/** Half of the inputs never see a failure. */
static inline size_t fuzz_heap_choose(const uint8_t *data, size_t size)
{
    size_t sum = size;
    for (size_t i = 0; i < size; i++)
        sum = sum * 31 + data[i];
    return sum % 2 == 0 ? 0 : sum / 2 % 96;
}

static inline void fuzz_heap_check(const fuzz_heap *heap)
{
    if (heap->live != 0)
        abort();
}

/** A condition that must hold whatever the input. */
static inline void fuzz_require(int condition)
{
    if (!condition)
        abort();
}

#endif
