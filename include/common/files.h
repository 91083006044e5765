/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_FILES_H
#define KVF_COMMON_FILES_H

/*
 * Opening what must be a regular file, and replacing one so that it stays whose it was.
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
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#define KVF_NO_REGULAR_FILE (-2)
#define KVF_LINKS_MAX       40

/* The fix for an errno, after its text; "" where that says it. */
static inline const char *kvf_errno_fix(int code)
{
    return code == EMFILE   ? "; this process may open no more: raise `ulimit -n`"
           : code == ENFILE ? "; the machine may open no more: raise fs.file-max"
           : code == EBADF  ? "; something in this process closed a descriptor that is not its own"
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

#endif
