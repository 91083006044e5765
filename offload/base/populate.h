/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_POPULATE_H
#define KVF_OFFLOAD_POPULATE_H

/*
 * Pages of a private map, there before somebody needs them.
 *
 * Knows nothing of what lies in them. The kernel is asked by madvise; where that is refused (a
 * filter of system calls, a kernel before 5.14), every page is written to instead.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Whether an errno of madvise is about the memory, and not about the call. */
static inline bool kvf_populate_lacks_memory(int code)
{
    return code == ENOMEM || code == EFAULT || code == EHWPOISON;
}

/* A byte of every page is written; by the kernel where a page may be missing, so that the process
 * gets an errno and no SIGBUS. */
static inline int kvf_populate_by_touch(char *from, size_t bytes, size_t page_bytes, bool may_miss)
{
    const int zeros = may_miss ? open("/dev/zero", O_RDONLY | O_CLOEXEC) : -1;
    int code = 0;
    for (size_t i = 0; i < bytes && code == 0; i += page_bytes)
        if (zeros < 0)
            *(volatile char *)(from + i) = 0;
        else if (read(zeros, from + i, 1) != 1)
            code = ENOMEM;
    if (zeros >= 0)
        (void)close(zeros);
    return code;
}

/* Memory that is zeroed, `from` at a page's begin. @param reserved pages are of hugetlb: a NUMA
 * node may lack them though they were mapped. @return 0, or why not */
static inline int kvf_populate(char *from, size_t bytes, size_t page_bytes, bool reserved)
{
    if (madvise(from, bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (kvf_populate_lacks_memory(errno))
        return errno;
    return kvf_populate_by_touch(from, bytes, page_bytes, reserved);
}

#endif
