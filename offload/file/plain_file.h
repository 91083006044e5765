/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_PLAIN_FILE_H
#define KVF_OFFLOAD_PLAIN_FILE_H

/*
 * Files for engines: one that nobody else sees, room for its bytes, and requests that go past the
 * page cache.
 *
 * Knows nothing of contents. A file system that cannot do something says so at the call, and what
 * it can do instead is told.
 */

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

#endif
