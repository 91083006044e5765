/* SPDX-License-Identifier: Apache-2.0 */

/* A file that is there whole or not at all; see the header. Knows nothing of its contents. */

#include "new_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/files.h"

static kvf_status failed(const kvf_new_file *f, const char *what, int code)
{
    return kvf_fail(f->context, KVF_SYSTEM, code, "%s: %s: %s%s", f->path, what, strerror(code),
                    kvf_errno_fix(code));
}

/* The test hook, by the name of the call; else what the call says. */
static bool refused(const kvf_new_file *f, const char *what)
{
    return kvf_context_refuses(f->context, what) && (errno = EIO, true);
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
    char place[PATH_MAX];
    *out = (kvf_new_file){.context = context, .file = -1};
    KVF_TRY(kvf_new_file_check(context, path));
    if (!kvf_path_of_link(path, place))
        return kvf_fail(context, KVF_SYSTEM, errno, "path = %.300s: %s", path, strerror(errno));
    const size_t length = strlen(place);
    out->path = kvf_alloc(context, length + 1, 1);
    out->temporary = kvf_alloc(context, length + sizeof KVF_NEW_FILE_MARK "XXXXXX", 1);
    if (!out->path || !out->temporary)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for the name of a file");
    memcpy(out->path, place, length + 1);
    snprintf(out->temporary, length + sizeof KVF_NEW_FILE_MARK "XXXXXX",
             "%s" KVF_NEW_FILE_MARK "XXXXXX", place);
    if (!refused(out, "file open"))
        out->file = mkostemp(out->temporary, O_CLOEXEC);
    if (out->file < 0)
        return failed(out, "a file beside it cannot be made", errno);
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
    if (refused(f, "file sync") || fsync(f->file) != 0)
        return failed(f, "its bytes cannot be made durable", errno);
    if (refused(f, "file rename") || rename(f->temporary, f->path) != 0)
        return failed(f, "the finished file cannot be given this name", errno);
    f->is_committed = true;
    const int folder = refused(f, "folder sync") ? -1 : open_folder(f);
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
