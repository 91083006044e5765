/* SPDX-License-Identifier: Apache-2.0 */

/* Files for engines; see the header. Knows nothing of contents. */

#include "plain_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/files.h"

#define ALIGN_USUAL 4096u /* where the kernel does not say */
#define ALIGN_MOST  65536u

/* A file that had a name for a moment, where the file system has none without. */
static int open_and_unlink(kvf_context *context, const char *folder)
{
    static const char name[] = "/.kvferry-XXXXXX";
    const size_t length = strlen(folder);
    char *path = kvf_alloc(context, length + sizeof name, 1);
    if (!path)
        return errno = ENOMEM, -1;
    memcpy(path, folder, length);
    memcpy(path + length, name, sizeof name);
    const int file = mkostemp(path, O_CLOEXEC);
    const int code = errno;
    if (file >= 0)
        (void)unlink(path);
    kvf_free(context, path);
    errno = code; /* the caller's free may have set it */
    return file;
}

kvf_status kvf_file_scratch(kvf_context *context, const char *folder, uint64_t bytes, int *out)
{
    int code = kvf_context_refuses(context, "file open") ? EIO : 0;
    const bool has_none = kvf_context_refuses(context, "file without a name");
    *out = code || has_none ? -1 : open(folder, O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    if (!code && *out < 0 &&
        (has_none || errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL))
        *out = open_and_unlink(context, folder);
    code = *out >= 0 || code ? code : errno;
    if (code)
        return kvf_fail(context, code == ENOMEM ? KVF_OUT_OF_MEMORY : KVF_SYSTEM, code,
                        "%s: a file cannot be made there: %s%s", folder, strerror(code),
                        kvf_errno_fix(code));
    kvf_status status = kvf_file_reserve(context, folder, *out, bytes);
    if (status == KVF_OK && ftruncate(*out, (off_t)bytes) != 0)
        status = kvf_fail(context, KVF_SYSTEM, errno, "%s: a file of %llu bytes cannot be made: %s",
                          folder, (unsigned long long)bytes, strerror(errno));
    if (status != KVF_OK) {
        (void)close(*out);
        *out = -1;
    }
    return status;
}

kvf_status kvf_file_reserve(kvf_context *context, const char *path, int file, uint64_t bytes)
{
    int code = kvf_context_refuses(context, "file reserve") ? ENOSPC : 0;
    if (!code && fallocate(file, 0, 0, (off_t)bytes) != 0)
        code = errno;
    if (code != ENOSPC && code != EFBIG && code != EDQUOT)
        return KVF_OK; /* this file system cannot say */
    return kvf_fail(context, KVF_SYSTEM, code,
                    "%s: there is no room for %llu bytes: %s; free some, or take another folder",
                    path, (unsigned long long)bytes, strerror(code));
}

/* What the kernel says of requests past its cache: their alignment, 0 = none are possible. */
static uint32_t alignment_of(int file)
{
#ifdef STATX_DIOALIGN
    struct statx about;
    if (statx(file, "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) == 0 &&
        (about.stx_mask & STATX_DIOALIGN))
        return kvf_max_u32(about.stx_dio_mem_align, about.stx_dio_offset_align);
#else
    (void)file;
#endif
    return ALIGN_USUAL;
}

/* 0, or the errno of one request past the cache. Some file systems refuse only then. */
static int try_direct(kvf_context *context, int file, uint32_t align)
{
    const int flags = fcntl(file, F_GETFL);
    if (kvf_context_refuses(context, "direct"))
        return EINVAL;
    if (align == 0 || align > ALIGN_MOST)
        return EOPNOTSUPP;
    if (flags < 0 || fcntl(file, F_SETFL, flags | O_DIRECT) != 0)
        return errno;
    char *memory = kvf_alloc(context, 2, align);
    if (!memory)
        return ENOMEM;
    char *at = memory + (align - (uintptr_t)memory % align);
    const int code = pread(file, at, align, 0) < 0 ? errno : 0;
    kvf_free(context, memory);
    return code;
}

uint32_t kvf_file_direct(kvf_context *context, const char *path, int file)
{
    const uint32_t align = alignment_of(file);
    const int code = try_direct(context, file, align);
    if (!code)
        return align;
    kvf_file_buffered(file);
    kvf_log(context, KVF_LOG_NOTE, "%s: requests go through the page cache, not past it: %s", path,
            strerror(code));
    return 1;
}

void kvf_file_buffered(int file)
{
    const int flags = fcntl(file, F_GETFL);
    if (flags >= 0)
        (void)fcntl(file, F_SETFL, flags & ~O_DIRECT);
}
