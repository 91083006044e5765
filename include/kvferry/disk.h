/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVFERRY_DISK_H
#define KVFERRY_DISK_H

/**
 * @file
 * kvferry/disk: how fast extents of a file reach host memory.
 *
 * A bench makes its own file in a folder, without a name, which is gone when the bench is closed. A
 * case is one pass over extents of that file: which ones, how large, how many at a time, by which
 * engine, and past the system's page cache or through it. Before a pass through the page cache, the
 * file is dropped from it. To compare cases, run them in turn, several times.
 *
 *     kvf_disk_open(runtime, "/data", (uint64_t)1 << 30, &disk);
 *     kvf_disk_case c;
 *     kvf_disk_case_init(&c);
 *     c.extent_bytes = 131072; c.depth = 64; c.extents = 512;
 *     kvf_disk_result r;
 *     kvf_disk_measure(disk, &c, &r);
 *     double bytes_per_second = 1e9 * (double)r.bytes / (double)r.ns;
 *     kvf_disk_close(disk);
 */

#include <kvferry/link.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_disk kvf_disk;

#define KVF_DISK_WHAT_LIST(X)                                                                      \
    X(KVF_DISK_RANDOM, 0, "random", "read distinct extents from anywhere in the file")             \
    X(KVF_DISK_SEQUENTIAL, 1, "sequential", "read extents in order")                               \
    X(KVF_DISK_WRITE, 2, "write", "write extents in order, then make them durable")

typedef enum kvf_disk_what { KVF_DISK_WHAT_LIST(KVF_ENUMERATOR) } kvf_disk_what;

#define KVF_DISK_ENGINE_LIST(X)                                                                    \
    X(KVF_DISK_URING, 0, "io_uring", "up to `depth` requests at a time")                           \
    X(KVF_DISK_PREADV, 1, "preadv", "one request after the other, by one thread")

typedef enum kvf_disk_engine { KVF_DISK_ENGINE_LIST(KVF_ENUMERATOR) } kvf_disk_engine;

typedef struct kvf_disk_case {
    size_t size;            /**< set by init */
    kvf_disk_what what;     /**< default RANDOM */
    kvf_disk_engine engine; /**< default URING */
    uint32_t direct;        /**< 1: past the page cache; default 1 */
    size_t extent_bytes;    /**< a multiple of 4096, 4096 … 16 MiB; default 131072 */
    uint32_t depth;         /**< requests at a time, 1 … 256; default 64 */
    uint32_t extents;       /**< of the pass, no more than are in the file; default 512 */
    uint64_t seed;          /**< of the extents chosen; default 1 */
} kvf_disk_case;

typedef struct kvf_disk_result {
    uint64_t ns;             /**< of the whole pass */
    uint64_t bytes;          /**< moved in it */
    kvf_link_times request;  /**< of each extent, from submission until it is there */
    uint64_t verified_bytes; /**< compared with what the file holds; none differed */
    uint32_t kept;           /**< registered with io_uring: memory (1) + file (2) */
    uint32_t align;          /**< alignment of memory and offsets that DIRECT needs; 1 without */
} kvf_disk_result;

KVF_API void kvf_disk_case_init_sized(kvf_disk_case *c, size_t size);
static inline void kvf_disk_case_init(kvf_disk_case *c)
{
    kvf_disk_case_init_sized(c, sizeof *c);
}

/**
 * Make a file of @p bytes in @p folder, and fill it.
 *
 * @param bytes   a multiple of 16 MiB
 * @return KVF_OK, KVF_INVALID, KVF_OUT_OF_MEMORY; KVF_SYSTEM if the folder or its disk refuses
 */
KVF_API KVF_CHECKED kvf_status kvf_disk_open(kvf_runtime *runtime, const char *folder,
                                             uint64_t bytes, kvf_disk **out);

/** Close it before its runtime; the file is gone. NULL is fine. */
KVF_API void kvf_disk_close(kvf_disk *disk);

/**
 * Measure one pass. The text of an error is kvf_runtime_error's.
 *
 * @return KVF_OK; KVF_INVALID naming the field; KVF_UNSUPPORTED where there is no io_uring, or the
 *         file system reads only through its cache; KVF_OUT_OF_MEMORY; KVF_SYSTEM; KVF_CORRUPT if a
 *         byte that arrived is not the one that was written
 *
 * Thread: one at a time per disk. Memory: depth * extent_bytes, kept for the next pass.
 */
KVF_API KVF_CHECKED kvf_status kvf_disk_measure_sized(kvf_disk *disk, const kvf_disk_case *c,
                                                      kvf_disk_result *result, size_t size);
static inline KVF_CHECKED kvf_status kvf_disk_measure(kvf_disk *disk, const kvf_disk_case *c,
                                                      kvf_disk_result *result)
{
    return kvf_disk_measure_sized(disk, c, result, sizeof *result);
}

#ifdef __cplusplus
}
#endif

#endif
