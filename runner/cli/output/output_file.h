/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_OUTPUT_FILE_H
#define KVF_CLI_OUTPUT_FILE_H

/*
 * A result file that is either complete or not there.
 *
 * It knows bytes, not what they mean. Invariant: until cli_output_commit has succeeded the path
 * holds what it held before; after a failure nothing partial is left. A file that is replaced keeps
 * owner, mode and the symbolic link to it. (A path that is no regular file, such as a pipe, is
 * written directly.)
 */

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/** Zero-initialise; a zero one accepts writes and commits, and does nothing. */
typedef struct cli_output {
    const char *path;
    FILE *file;
    char place[PATH_MAX];       /* after symbolic links */
    char partial[PATH_MAX + 8]; /* empty = path is written directly */
    bool failed;                /* a message was printed */
} cli_output;

/** @return false after a message naming the path */
bool cli_output_open(cli_output *output, const char *path);

/** Append. After the first failure, which is reported, nothing more is written. */
void cli_output_write(cli_output *output, const void *bytes, size_t size);

/** Put the file in its place. @return false if this or an earlier call failed */
bool cli_output_commit(cli_output *output);

/** Forget an output that was not committed. */
void cli_output_discard(cli_output *output);

#endif
