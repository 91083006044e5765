/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_DISK_FILE_H
#define KVF_OFFLOAD_DISK_FILE_H

/*
 * A private file that nobody else can open: mode 0600, without a name from the beginning or as soon
 * as it is there, gone with the process. What an earlier process left is never read.
 *
 * Knows nothing of what is in it. Two descriptors of one file: with O_DIRECT, where the file system
 * has it, for requests at multiples of KVF_DISK_ALIGNMENT, and without for all others. Where
 * something else in the process closed them and their numbers are those of other files now, these
 * are neither read nor written nor closed.
 */

#include <sys/types.h>

#include "context.h"

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
