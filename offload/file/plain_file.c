/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Files on the way to a disk: for engines, under a name that they get when they are whole, and
 * private ones; see the header. Knows nothing of contents.
 */

#include "plain_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/files.h"
#include "common/text.h"

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
                        "%s: a file cannot be made there: %s%s", folder, kvf_errno_text(code),
                        kvf_errno_fix(code));
    kvf_status status = kvf_file_reserve(context, folder, *out, bytes);
    if (status == KVF_OK && ftruncate(*out, (off_t)bytes) != 0)
        status = kvf_fail(context, KVF_SYSTEM, errno, "%s: a file of %llu bytes cannot be made: %s",
                          folder, (unsigned long long)bytes, kvf_errno_text(errno));
    if (status != KVF_OK) {
        (void)close(*out);
        *out = -1;
    }
    return status;
}

kvf_status kvf_file_reserve(kvf_context *context, const char *path, int file, uint64_t bytes)
{
    int code = kvf_context_refuses(context, "file reserve") ? ENOSPC : 0;
    if (!code && bytes > kvf_file_bytes_max())
        code = EFBIG; /* the call would bring a signal */
    else if (!code && fallocate(file, 0, 0, (off_t)bytes) != 0)
        code = errno;
    if (code == EFBIG)
        return kvf_fail(context, KVF_SYSTEM, code, "%s: a file of %llu bytes is too large: %s%s",
                        path, (unsigned long long)bytes, kvf_errno_text(code), kvf_errno_fix(code));
    if (code != ENOSPC && code != EDQUOT)
        return KVF_OK; /* this file system cannot say */
    return kvf_fail(context, KVF_SYSTEM, code,
                    "%s: there is no room for %llu bytes: %s; free some, or take another folder",
                    path, (unsigned long long)bytes, kvf_errno_text(code));
}

/* The kernel's rules for requests past its cache: their alignment, 0 = none are possible. */
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
            kvf_errno_text(code));
    return 1;
}

void kvf_file_buffered(int file)
{
    const int flags = fcntl(file, F_GETFL);
    if (flags >= 0)
        (void)fcntl(file, F_SETFL, flags & ~O_DIRECT);
}

/* ---- a file that is there whole or not at all ---- */

static kvf_status failed(const kvf_new_file *f, const char *what, int code)
{
    return kvf_fail(f->context, KVF_SYSTEM, code, "%s: %s: %s%s", f->path, what,
                    kvf_errno_text(code), kvf_errno_fix(code));
}

/* The test hook, by the name of the call; else what the call says. */
static bool refused(kvf_context *context, const char *what, int code)
{
    return kvf_context_refuses(context, what) && (errno = code, true);
}

/* A rename would take the place of a device or a pipe, for everybody. */
const char *kvf_new_file_obstacle(const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0 || S_ISREG(info.st_mode))
        return NULL;
    return S_ISDIR(info.st_mode) ? "a folder" : "no regular file";
}

kvf_status kvf_new_file_check(kvf_context *context, const char *path)
{
    const char *obstacle = kvf_new_file_obstacle(path);
    if (obstacle)
        KVF_FAIL(context, KVF_INVALID, "path = %.300s: it is %s; name a new file, or a regular one",
                 path, obstacle);
    return KVF_OK;
}

static void keep_owner(const kvf_new_file *f)
{
    struct stat old;
    if (stat(f->path, &old) == 0 && !kvf_keep_owner(f->file, f->path, &old))
        kvf_log(f->context, KVF_LOG_NOTE,
                "%s: the file that is replaced belongs to user %u, group %u, and this process may "
                "not give the new one all of its rights",
                f->path, (unsigned)old.st_uid, (unsigned)old.st_gid);
}

kvf_status kvf_new_file_open(kvf_context *context, const char *path, kvf_new_file *out)
{
    const char *what = "a file beside it cannot be made";
    *out = (kvf_new_file){.context = context, .file = -1};
    KVF_TRY(kvf_new_file_check(context, path));
    out->path = kvf_alloc(context, PATH_MAX, 1);
    out->temporary = kvf_alloc(context, KVF_BESIDE_BYTES, 1);
    if (!out->path || !out->temporary)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for the name of a file");
    if (!refused(context, "file open", EIO))
        out->file = kvf_open_beside(path, KVF_NEW_FILE_MARK, out->path, out->temporary, &what);
    if (out->file < 0)
        return kvf_fail(context, KVF_SYSTEM, errno, "path = %.300s: %s: %s%s", path, what,
                        kvf_errno_text(errno), kvf_errno_fix(errno));
    keep_owner(out);
    return KVF_OK;
}

/* The folder that a path lies in, open. */
static int open_folder(const kvf_new_file *f)
{
    const char *slash = strrchr(f->path, '/');
    if (!slash)
        return open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* The temporary name is not used any more. */
    const size_t length = slash == f->path ? 1 : (size_t)(slash - f->path);
    memcpy(f->temporary, f->path, length);
    f->temporary[length] = '\0';
    return open(f->temporary, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

kvf_status kvf_new_file_commit(kvf_new_file *f)
{
    if (refused(f->context, "file sync", EIO) || fsync(f->file) != 0)
        return failed(f, "its bytes cannot be made durable", errno);
    if (refused(f->context, "file rename", EIO) || rename(f->temporary, f->path) != 0)
        return failed(f, "the finished file cannot be given this name", errno);
    f->is_committed = true;
    const int folder = refused(f->context, "folder sync", EIO) ? -1 : open_folder(f);
    const int code = folder < 0 || fsync(folder) != 0 ? errno : 0;
    if (folder >= 0)
        (void)close(folder);
    /* Some file systems cannot sync a folder. */
    return code && code != EINVAL ? failed(f, "its name cannot be made durable", code) : KVF_OK;
}

void kvf_new_file_close(kvf_new_file *f)
{
    if (f->file >= 0) {
        (void)close(f->file);
        if (!f->is_committed)
            (void)unlink(f->temporary);
    }
    kvf_free(f->context, f->temporary);
    kvf_free(f->context, f->path);
    *f = (kvf_new_file){.file = -1};
}

/* ---- a private file ---- */

kvf_status kvf_disk_file_open(kvf_context *context, const char *folder, uint64_t bytes,
                              kvf_disk_file *out)
{
    char again[48];
    struct stat about;
    *out = (kvf_disk_file){.buffered = -1, .direct = -1};
    KVF_TRY(kvf_file_scratch(context, folder, bytes, &out->buffered));
    if (fstat(out->buffered, &about) != 0)
        return kvf_fail(context, KVF_SYSTEM, errno, "disk_path: its file cannot be looked at: %s",
                        kvf_errno_text(errno));
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

/* All bytes, to memory or from it; the other one is NULL. */
static kvf_status move_bytes(const kvf_disk_file *f, kvf_context *context, uint64_t offset,
                             size_t bytes, char *to, const char *from)
{
    while (bytes) {
        const bool is_refused =
            to ? refused(context, "tier read", EIO) : refused(context, "tier write", ENOSPC);
        const ssize_t moved = is_refused || is_lost(f) ? -1
                              : to ? pread(f->buffered, to, bytes, (off_t)offset)
                                   : kvf_pwrite(f->buffered, from, bytes, offset);
        const int code = moved < 0 ? errno : EIO;
        if (moved < 0 && code == EINTR)
            continue;
        if (moved <= 0)
            return kvf_fail(
                context, KVF_SYSTEM, code, "disk_path: %s %zu bytes of its file failed: %s%s",
                to ? "reading" : "writing", bytes, kvf_errno_text(code), kvf_errno_fix(code));
        to = to ? to + moved : NULL;
        from = from ? from + moved : NULL;
        offset += (uint64_t)moved;
        bytes -= (size_t)moved;
    }
    return KVF_OK;
}

kvf_status kvf_disk_file_read(const kvf_disk_file *f, kvf_context *context, uint64_t offset,
                              size_t bytes, char *to)
{
    return move_bytes(f, context, offset, bytes, to, NULL);
}

kvf_status kvf_disk_file_write(const kvf_disk_file *f, kvf_context *context, uint64_t offset,
                               size_t bytes, const char *from)
{
    return move_bytes(f, context, offset, bytes, NULL, from);
}
