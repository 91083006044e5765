/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory that holds nothing, or what is elsewhere. Pages of zeros go back to the system: they read
 * as they did, and take memory when they are written. Hidden pages go back, too, and are a fault to
 * touch. Nobody writes the memory meanwhile.
 */

#include <fcntl.h>
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

/* ---- hidden pages ---- */

int kvl_pages_guard(void *pages, size_t bytes)
{
    return mprotect(pages, bytes, PROT_READ) == 0;
}

int kvl_pages_hide(void *pages, size_t bytes)
{
    if (mprotect(pages, bytes, PROT_NONE) == 0 && madvise(pages, bytes, MADV_DONTNEED) == 0)
        return 1;
    (void)mprotect(pages, bytes, PROT_READ | PROT_WRITE); /* as of locked memory */
    return 0;
}

/* By the file of the process's memory, for which protection does not count: no thread reads a page
 * before all of it is there. */
static int write_hidden(char *pages, size_t bytes, const char *content)
{
    const int memory = open("/proc/self/mem", O_WRONLY | O_CLOEXEC);
    ssize_t done = memory < 0 ? -1 : 0;
    for (size_t at = 0; done >= 0 && at < bytes; at += (size_t)done)
        if ((done = pwrite(memory, content + at, bytes - at, (off_t)(uintptr_t)(pages + at))) == 0)
            done = -1;
    if (memory >= 0)
        close(memory);
    return done >= 0;
}

int kvl_pages_show(void *pages, size_t bytes, const void *content)
{
    return (!content || write_hidden(pages, bytes, content)) &&
           mprotect(pages, bytes, PROT_READ | PROT_WRITE) == 0;
}

int kvl_can_hide(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *trial = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (trial == MAP_FAILED)
        return 0;
    const int can = kvl_pages_hide(trial, page) && kvl_pages_show(trial, sizeof "1", "1") &&
                    trial[0] == '1' && trial[page - 1] == 0;
    munmap(trial, page);
    return can;
}
