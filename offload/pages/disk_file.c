/* SPDX-License-Identifier: Apache-2.0 */

/* The file of the disk tier; see the header. Keeps no state besides the descriptors. */

#include "disk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "plain_file.h"

/* The test hook, by the name of the call; else what the call says. */
static bool refused(kvf_context *context, const char *what, int code)
{
    return kvf_context_refuses(context, what) && (errno = code, true);
}

kvf_status kvf_disk_file_open(kvf_context *context, const char *folder, uint64_t bytes,
                              kvf_disk_file *out)
{
    char again[48];
    struct stat about;
    *out = (kvf_disk_file){.buffered = -1, .direct = -1};
    KVF_TRY(kvf_file_scratch(context, folder, bytes, &out->buffered));
    if (fstat(out->buffered, &about) != 0)
        return kvf_fail(context, KVF_SYSTEM, errno, "disk_path: its file cannot be looked at: %s",
                        strerror(errno));
    out->device = about.st_dev;
    out->inode = about.st_ino;
    snprintf(again, sizeof again, "/proc/self/fd/%d", out->buffered);
    out->direct = open(again, O_RDWR | O_CLOEXEC);
    if (out->direct < 0)
        out->direct = out->buffered; /* nothing is mounted at /proc */
    else if (kvf_file_direct(context, folder, out->direct) > KVF_DISK_ALIGNMENT)
        kvf_file_buffered(out->direct);
    return KVF_OK;
}

kvf_status kvf_disk_folder_check(kvf_context *context, const char *folder)
{
    int file;
    KVF_TRY(kvf_file_scratch(context, folder, 0, &file));
    (void)close(file);
    return KVF_OK;
}

bool kvf_disk_file_has(const kvf_disk_file *f, int descriptor)
{
    struct stat about;
    return descriptor >= 0 && fstat(descriptor, &about) == 0 && about.st_dev == f->device &&
           about.st_ino == f->inode;
}

static bool is_lost(const kvf_disk_file *f)
{
    return !kvf_disk_file_has(f, f->buffered) && (errno = EBADF, true);
}

void kvf_disk_file_close(kvf_disk_file *f)
{
    if (f->direct != f->buffered && kvf_disk_file_has(f, f->direct))
        (void)close(f->direct);
    if (kvf_disk_file_has(f, f->buffered))
        (void)close(f->buffered);
    *f = (kvf_disk_file){.buffered = -1, .direct = -1};
}

kvf_status kvf_disk_file_read(const kvf_disk_file *f, kvf_context *context, uint64_t offset,
                              size_t bytes, char *to)
{
    while (bytes) {
        const ssize_t moved = refused(context, "tier read", EIO) || is_lost(f)
                                  ? -1
                                  : pread(f->buffered, to, bytes, (off_t)offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved <= 0)
            return kvf_fail(context, KVF_SYSTEM, moved ? errno : EIO,
                            "disk_path: reading %zu bytes of its file failed: %s", bytes,
                            strerror(moved ? errno : EIO));
        to += moved;
        offset += (uint64_t)moved;
        bytes -= (size_t)moved;
    }
    return KVF_OK;
}

kvf_status kvf_disk_file_write(const kvf_disk_file *f, kvf_context *context, uint64_t offset,
                               size_t bytes, const char *from)
{
    while (bytes) {
        const ssize_t moved = refused(context, "tier write", ENOSPC) || is_lost(f)
                                  ? -1
                                  : pwrite(f->buffered, from, bytes, (off_t)offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved <= 0)
            return kvf_fail(context, KVF_SYSTEM, moved ? errno : EIO,
                            "disk_path: writing %zu bytes of its file failed: %s", bytes,
                            strerror(moved ? errno : EIO));
        from += moved;
        offset += (uint64_t)moved;
        bytes -= (size_t)moved;
    }
    return KVF_OK;
}
