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

/* Memory that a clear has at a time. */
enum { SLICE = 1 << 20 };

static int is_zero(const char *bytes, size_t count)
{
    return !*bytes && memcmp(bytes, bytes + 1, count - 1) == 0;
}

void kvl_give_back_zeros(void *memory, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t at = (page - (uintptr_t)memory % page) % page, zeros = 0; /* before it */
    for (;; at += page) {
        const int is_page = at + page <= bytes;
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
    for (size_t at = 0; at < bytes; at += SLICE) {
        const size_t count = bytes - at < SLICE ? bytes - at : SLICE;
        memset((char *)memory + at, 0, count);
        kvl_give_back_zeros((char *)memory + at, count);
    }
}
