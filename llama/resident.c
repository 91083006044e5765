/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory of llama.cpp's cache that holds nothing. llama.cpp clears all of it, so that every page of
 * a context is in memory before a token is. Pages of zeros go back to the system here: they read as
 * they did, and take memory when they are written.
 *
 * Knows nothing of tensors. Nobody writes the memory meanwhile.
 */

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "plugin.h"

/* Bytes of the whole system pages of this memory, and before the first of them. */
static size_t whole_pages(const void *memory, size_t bytes, size_t *before)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    *before = (page - (uintptr_t)memory % page) % page;
    return *before < bytes ? (bytes - *before) / page * page : 0;
}

static int is_zero(const char *bytes, size_t count)
{
    return !*bytes && memcmp(bytes, bytes + 1, count - 1) == 0;
}

void kvl_give_back_zeros(void *memory, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t at, zeros = 0; /* before it */
    const size_t end = whole_pages(memory, bytes, &at) + at;
    for (;; at += page) {
        const int is_page = at + page <= end;
        if (is_page && is_zero((const char *)memory + at, page)) {
            zeros += page;
            continue;
        }
        if (zeros) /* where it is refused, as of locked memory, they stay */
            (void)madvise((char *)memory + at - zeros, zeros, MADV_DONTNEED);
        zeros = 0;
        if (!is_page)
            return;
    }
}

void kvl_clear(void *memory, size_t bytes)
{
    size_t before;
    const size_t whole = whole_pages(memory, bytes, &before);
    char *all = memory, *pages = all + before;
    if (!whole || madvise(pages, whole, MADV_DONTNEED) != 0) { /* as of locked memory */
        memset(all, 0, bytes);
        return;
    }
    memset(all, 0, before);
    memset(pages + whole, 0, bytes - before - whole);
}
