/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes next to the path and renames.
 *
 * It knows files. Invariant: as in output.h; a full disk shows at fclose at the latest, and is
 * checked there.
 */

#include "output.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/files.h"
#include "common/text.h"

_Static_assert(sizeof((cli_output *)0)->partial >= KVF_BESIDE_BYTES, "a name beside any has room");

static void fail(cli_output *output, const char *what)
{
    if (!output->failed)
        fprintf(stderr, "kvferry: %s: %s: %s%s; nothing was left there\n", output->path, what,
                kvf_errno_text(errno), kvf_errno_fix(errno));
    output->failed = true;
}

/* A temporary file has mode 0600; a result file has what the user's mask leaves, or what the file
 * has that it replaces. */
static void set_mode(int descriptor, const char *place)
{
    struct stat old;
    if (stat(place, &old) == 0) {
        (void)kvf_keep_owner(descriptor, place, &old);
        return;
    }
    mode_t mask = umask(0);
    umask(mask);
    (void)!fchmod(descriptor, 0666 & ~mask);
}

/* The number of the standard stream that goes to this file, such as /dev/stdout, or -1. If the file
 * were replaced, what goes there would be lost. */
static int stream_of(const struct stat *info)
{
    for (int i = STDOUT_FILENO; i <= STDERR_FILENO; i++) {
        struct stat stream;
        if (fstat(i, &stream) == 0 && stream.st_dev == info->st_dev &&
            stream.st_ino == info->st_ino)
            return i;
    }
    return -1;
}

bool cli_output_open(cli_output *output, const char *path)
{
    *output = (cli_output){.path = path};
    struct stat info;
    const bool is_there = stat(path, &info) == 0;
    const int stream = is_there && S_ISREG(info.st_mode) ? stream_of(&info) : -1;
    if (stream >= 0) {
        const int descriptor = dup(stream);
        output->file = descriptor >= 0 ? fdopen(descriptor, "wb") : NULL;
    } else if (is_there && !S_ISREG(info.st_mode)) {
        output->file = fopen(path, "wb");
    } else {
        const char *what;
        const int descriptor = kvf_open_beside(path, ".", output->place, output->partial, &what);
        if (descriptor >= 0)
            set_mode(descriptor, output->place);
        else
            output->partial[0] = '\0';
        output->file = descriptor >= 0 ? fdopen(descriptor, "wb") : NULL;
    }
    if (!output->file) {
        fail(output, "cannot be created");
        cli_output_discard(output);
    }
    return !output->failed;
}

void cli_output_write(cli_output *output, const void *bytes, size_t size)
{
    if (!output->file || output->failed)
        return;
    if (fwrite(bytes, 1, size, output->file) != size) {
        fail(output, "cannot be written");
        cli_output_discard(output);
    }
}

bool cli_output_commit(cli_output *output)
{
    if (!output->file)
        return !output->failed;
    FILE *file = output->file;
    output->file = NULL;
    if (fclose(file) != 0)
        fail(output, "cannot be written");
    else if (output->partial[0] && rename(output->partial, output->place) != 0)
        fail(output, "cannot be put in place");
    else
        output->partial[0] = '\0';
    cli_output_discard(output);
    return !output->failed;
}

void cli_output_discard(cli_output *output)
{
    if (output->file)
        fclose(output->file);
    output->file = NULL;
    if (output->partial[0])
        unlink(output->partial);
    output->partial[0] = '\0';
}
