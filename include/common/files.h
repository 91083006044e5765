/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_FILES_H
#define KVF_COMMON_FILES_H

/*
 * Opening what must be a regular file, and replacing one so that it stays whose it was: a new file
 * is made beside it under another name, and then takes its place.
 *
 * Knows nothing of contents. Nobody waits here: a pipe that nobody writes to is refused like a
 * folder.
 */

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#define KVF_NO_REGULAR_FILE (-2)
#define KVF_LINKS_MAX       40

/* The largest file that this process may write (RLIMIT_FSIZE); UINT64_MAX = any. Whoever writes
 * past it gets SIGXFSZ, which ends the process unless it is ignored or blocked. */
static inline uint64_t kvf_file_bytes_max(void)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY
               ? UINT64_MAX
               : (uint64_t)limit.rlim_cur;
}

static inline bool kvf_is_past_file_limit(uint64_t offset, uint64_t bytes)
{
    return bytes > 0 && offset + bytes > kvf_file_bytes_max();
}

/* pwrite, to which that limit is an error and no signal. One that falls meanwhile is not seen. */
static inline ssize_t kvf_pwrite(int file, const void *from, size_t bytes, uint64_t offset)
{
    if (kvf_is_past_file_limit(offset, bytes))
        return errno = EFBIG, -1;
    return pwrite(file, from, bytes, (off_t)offset);
}

/* The fix for an errno, after its text; "" where that says it. */
static inline const char *kvf_errno_fix(int code)
{
    return code == EMFILE   ? "; this process may open no more: raise `ulimit -n`"
           : code == ENFILE ? "; the machine may open no more: raise fs.file-max"
           : code == EBADF  ? "; something in this process closed a descriptor that is not its own"
           : code == EFBIG && kvf_file_bytes_max() != UINT64_MAX
               ? "; RLIMIT_FSIZE is the limit: raise `ulimit -f`"
               : "";
}

/* For reading; -1 with errno, or KVF_NO_REGULAR_FILE. */
static inline int kvf_open_regular(const char *path, struct stat *about)
{
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0)
        return errno == ENXIO ? KVF_NO_REGULAR_FILE : -1; /* a socket */
    const bool is_known = fstat(file, about) == 0;
    if (is_known && S_ISREG(about->st_mode))
        return file;
    const int code = errno;
    (void)close(file);
    errno = code;
    return is_known ? KVF_NO_REGULAR_FILE : -1;
}

/* Where a new file goes so that a symbolic link at `path` stays one: what it names in the end,
 * which need not be there. False with errno. */
static inline bool kvf_path_of_link(const char *path, char out[PATH_MAX])
{
    if (snprintf(out, PATH_MAX, "%s", path) >= PATH_MAX)
        return errno = ENAMETOOLONG, false;
    for (uint32_t links = 0; links < KVF_LINKS_MAX; links++) {
        char link[PATH_MAX];
        const ssize_t length = readlink(out, link, sizeof link - 1);
        if (length < 0)
            return true;
        link[length] = '\0';
        const char *slash = strrchr(out, '/');
        const size_t folder = link[0] == '/' || !slash ? 0 : (size_t)(slash - out) + 1;
        if (folder + (size_t)length >= PATH_MAX)
            return errno = ENAMETOOLONG, false;
        memcpy(out + folder, link, (size_t)length + 1);
    }
    return errno = ELOOP, false;
}

/* Owner, group, mode and access list of the file at `path` for the one that will replace it. False
 * if this process may not give all of them; then a group that is not the file's gets no more than
 * others. */
static inline bool kvf_keep_owner(int file, const char *path, const struct stat *about)
{
    static const char list[] = "system.posix_acl_access";
    char entries[4096];
    mode_t mode = about->st_mode & 0777;
    const bool has_owner = fchown(file, about->st_uid, about->st_gid) == 0;
    const bool has_group = has_owner || fchown(file, (uid_t)-1, about->st_gid) == 0;
    if (!has_group)
        mode &= ~(mode_t)070 | (mode & 07) << 3;
    const ssize_t bytes = has_group ? getxattr(path, list, entries, sizeof entries) : -1;
    const bool has_list = bytes <= 0 || fsetxattr(file, list, entries, (size_t)bytes, 0) == 0;
    return fchmod(file, mode) == 0 && has_owner && has_list;
}

/* ---- a new file beside the one whose place it takes ---- */

#define KVF_BESIDE_BYTES (PATH_MAX + 16)

/* The most bytes of a name in the folder of `path`. */
static inline size_t kvf_name_bytes_max(const char *path, size_t folder_bytes)
{
    char folder[PATH_MAX];
    if (folder_bytes >= sizeof folder)
        return NAME_MAX;
    memcpy(folder, path, folder_bytes);
    folder[folder_bytes] = '\0';
    const long most = pathconf(folder_bytes ? folder : ".", _PC_NAME_MAX);
    return most > 0 ? (size_t)most : NAME_MAX;
}

/* The template of a name for mkstemp: that of `path`, cut where it would be too long, and `mark`.
 * False with errno if `path` itself is too long. */
static inline bool kvf_name_beside(const char *path, const char *mark, char out[KVF_BESIDE_BYTES])
{
    const char *slash = strrchr(path, '/');
    const size_t folder = slash ? (size_t)(slash - path) + 1 : 0, name = strlen(path + folder);
    const size_t most = kvf_name_bytes_max(path, folder), end = strlen(mark) + 6;
    const size_t kept = name + end <= most ? name : most - end;
    if (name > most || most < end || folder + kept + end >= KVF_BESIDE_BYTES)
        return errno = ENAMETOOLONG, false;
    memcpy(out, path, folder + kept);
    snprintf(out + folder + kept, KVF_BESIDE_BYTES - folder - kept, "%sXXXXXX", mark);
    return true;
}

/* 0, or the errno with which the kernel will refuse to put another file in the place of this one:
 * it is a mount of its own, or may not be changed, or belongs to another user in a folder such as
 * /tmp. */
static inline int kvf_replace_refusal(const char *path)
{
    const char *slash = strrchr(path, '/');
    struct stat folder, file;
    char name[PATH_MAX] = ".";
    if (slash)
        snprintf(name, sizeof name, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    if (lstat(path, &file) != 0 || stat(name, &folder) != 0)
        return 0;
    const uid_t user = geteuid();
    if ((folder.st_mode & S_ISVTX) && user != 0 && user != folder.st_uid && user != file.st_uid)
        return EPERM;
#ifdef STATX_ATTR_MOUNT_ROOT
    struct statx about;
    if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, 0, &about) == 0)
        return about.stx_attributes & STATX_ATTR_MOUNT_ROOT                        ? EBUSY
               : about.stx_attributes & (STATX_ATTR_IMMUTABLE | STATX_ATTR_APPEND) ? EPERM
                                                                                   : 0;
#endif
    return 0;
}

/* A new file for the place of `path`, mode 0600: `place` receives what links lead to, `beside` the
 * file's name until it is renamed. @return -1 with errno, and *failed says what could not be done
 */
static inline int kvf_open_beside(const char *path, const char *mark, char place[PATH_MAX],
                                  char beside[KVF_BESIDE_BYTES], const char **failed)
{
    *failed = "its name cannot be used";
    if (!kvf_path_of_link(path, place) || !kvf_name_beside(place, mark, beside))
        return -1;
    *failed = "the file there cannot be replaced";
    errno = kvf_replace_refusal(place);
    if (errno)
        return -1;
    *failed = "a file beside it cannot be made";
    return mkostemp(beside, O_CLOEXEC);
}

#endif
