/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_WATCHED_HEAP_H
#define KVF_TESTS_WATCHED_HEAP_H

/*
 * A heap that watches the allocations of runner/model, for one file of a program.
 * Invariant: what is allocated under a heap is freed under it.
 */

#include "heap.h"
#include "model_memory.h"

static heap *watching;

static inline void heap_watch(heap *h)
{
    watching = h;
}

/** No heap watches any more. @return blocks that were not freed */
static inline int64_t heap_left(void)
{
    const int64_t live = watching->live;
    watching = NULL;
    return live;
}

void *model_alloc(size_t bytes)
{
    return watching ? heap_alloc(watching, bytes, 16) : malloc(bytes ? bytes : 1);
}

void model_free(void *pointer)
{
    if (watching)
        heap_free(watching, pointer);
    else
        free(pointer);
}

#endif
