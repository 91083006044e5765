/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_PLAIN_FILE_H
#define KVF_OFFLOAD_PLAIN_FILE_H

/*
 * Files for engines: one that nobody else sees, room for its bytes, and requests that go past the
 * page cache. Below: files that are there whole or not at all, and private ones.
 *
 * Knows nothing of contents. A file system that cannot do something says so at the call, and what
 * it can do instead is told.
 */

#include <sys/types.h>

#include "context.h"

/* A file of `bytes` in `folder` that has no name: mode 0600, gone when it is closed. KVF_SYSTEM
 * with errno, KVF_OUT_OF_MEMORY; *out is -1 then. */
KVF_CHECKED kvf_status kvf_file_scratch(kvf_context *context, const char *folder, uint64_t bytes,
                                        int *out);

/* Room for so many bytes, where the file system can say. `path` is for messages. */
KVF_CHECKED kvf_status kvf_file_reserve(kvf_context *context, const char *path, int file,
                                        uint64_t bytes);

/* From now on requests go past the page cache (O_DIRECT). Returns the alignment that their memory,
 * offset and bytes then need; 1 where the file system refuses: a note says so, and any will do. */
uint32_t kvf_file_direct(kvf_context *context, const char *path, int file);
/* ... through the page cache again. */
void kvf_file_buffered(int file);

/*
 * A file that is there whole or not at all: written under another name in the same folder, then
 * given its name.
 *
 * Knows nothing of its contents. Invariant: `path` names the old file, or nothing, until commit has
 * made every byte durable; afterwards it names the new one. A file that is not committed is removed
 * by close; of a process that was killed a file PATH.tmp-XXXXXX stays, which no reader takes.
 */

#define KVF_NEW_FILE_MARK ".tmp-"

typedef struct kvf_new_file {
    kvf_context *context;
    char *path; /* after symbolic links */
    char *temporary;
    int file; /* -1 = none */
    bool is_committed;
} kvf_new_file;

/* The kind of a file there that is not a regular one and would be replaced; NULL = nothing such. */
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

/*
 * A private file that nobody else can open: mode 0600, without a name from the beginning or as soon
 * as it is there, gone with the process. A file that an earlier process left is never read.
 *
 * Knows nothing of what is in it. Two descriptors of one file: with O_DIRECT, where the file system
 * has it, for requests at multiples of KVF_DISK_ALIGNMENT, and without for all others. Where
 * something else in the process closed them and their numbers are those of other files now, these
 * are neither read nor written nor closed.
 */

#define KVF_DISK_ALIGNMENT 4096u

typedef struct kvf_disk_file {
    int buffered; /* -1 = none */
    int direct;   /* the same number as `buffered` where there is no O_DIRECT */
    dev_t device; /* and `inode`: whose descriptors they are */
    ino_t inode;
} kvf_disk_file;

/* *out is to be closed even on failure. KVF_INVALID, KVF_SYSTEM with errno. */
KVF_CHECKED kvf_status kvf_disk_file_open(kvf_context *context, const char *folder, uint64_t bytes,
                                          kvf_disk_file *out);
/* Whether one could be made there: a folder that is not needed yet is wrong all the same. */
KVF_CHECKED kvf_status kvf_disk_folder_check(kvf_context *context, const char *folder);
void kvf_disk_file_close(kvf_disk_file *file);

/* Whether a descriptor, `direct` or `buffered`, is still of this file. */
bool kvf_disk_file_has(const kvf_disk_file *file, int descriptor);

/* Whole, one request at a time. Thread: any. */
KVF_CHECKED kvf_status kvf_disk_file_read(const kvf_disk_file *file, kvf_context *context,
                                          uint64_t offset, size_t bytes, char *to);
KVF_CHECKED kvf_status kvf_disk_file_write(const kvf_disk_file *file, kvf_context *context,
                                           uint64_t offset, size_t bytes, const char *from);

#endif
