/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_NEW_FILE_H
#define KVF_OFFLOAD_NEW_FILE_H

/*
 * A file that is there whole or not at all: written under another name in the same folder, then
 * given its name.
 *
 * Knows nothing of its contents. Invariant: `path` names the old file, or nothing, until commit has
 * made every byte durable; afterwards it names the new one. What is not committed is removed by
 * close; of a process that was killed a file PATH.tmp-XXXXXX stays, which no reader takes.
 */

#include "context.h"

#define KVF_NEW_FILE_MARK ".tmp-"

typedef struct kvf_new_file {
    kvf_context *context;
    char *path; /* after symbolic links */
    char *temporary;
    int file; /* -1 = none */
    bool is_committed;
} kvf_new_file;

/* What is there that is no regular file and would be replaced; NULL = nothing such. */
const char *kvf_new_file_obstacle(const char *path);
/* KVF_INVALID if something is there that is no regular file: it would be replaced. */
KVF_CHECKED kvf_status kvf_new_file_check(kvf_context *context, const char *path);
/* Mode 0600, or owner, group, mode and access list of the file that it will replace; a note says
 * where this process may not give them. A symbolic link stays, what it names is replaced. *out is
 * to be closed even on failure. KVF_INVALID as above, KVF_SYSTEM with errno, KVF_OUT_OF_MEMORY. */
KVF_CHECKED kvf_status kvf_new_file_open(kvf_context *context, const char *path, kvf_new_file *out);
/* The file is made durable, gets its name, and then the folder is made durable. If the last fails,
 * the new file is there and whole. */
KVF_CHECKED kvf_status kvf_new_file_commit(kvf_new_file *f);
void kvf_new_file_close(kvf_new_file *f);

#endif
