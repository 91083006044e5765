/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_IO_ENGINE_H
#define KVF_OFFLOAD_IO_ENGINE_H

/*
 * Reading and writing pieces of files, several at a time: one const table of functions per engine.
 *
 * Knows files by their descriptors and memory by addresses, and nothing of what the bytes are. An
 * engine has one owner thread. A request may end with fewer bytes than it asked for, as pread may;
 * whoever asked asks for the rest (extents.c). An engine may hold requests back until it is asked
 * to begin or to wait, and then reads go first. Invariant: requests in flight <= depth, and each is
 * given back by exactly one wait.
 */

#include <sys/uio.h>

#include "common/files.h"
#include "context.h"

#define KVF_IO_PIECES_MAX 64u
#define KVF_IO_DEPTH_MAX  256u

typedef struct kvf_io kvf_io;

typedef struct kvf_io_request {
    int file;
    bool is_write;
    uint64_t offset;
    const struct iovec *pieces; /* [count] valid until the request is given back */
    uint32_t count;             /* 1 to KVF_IO_PIECES_MAX */
    uint32_t tag;               /* comes back */
} kvf_io_request;

typedef struct kvf_io_result {
    uint32_t tag;
    int64_t bytes; /* moved, or -errno */
} kvf_io_result;

/* Memory and files that many requests will name, so that the kernel looks at them only once. */
typedef struct kvf_io_kept {
    const struct iovec *buffers; /* each of 1 GiB at most; requests of one piece inside one gain */
    uint32_t buffer_count;
    const int *files; /* open until the engine is closed */
    uint32_t file_count;
} kvf_io_kept;

typedef struct kvf_io_ops {
    const char *name;
    kvf_status (*open)(kvf_context *context, uint32_t depth, kvf_io **out);
    void (*close)(kvf_io *io); /* nothing is in flight */
    /* 0; -EBUSY: `depth` requests are in flight, nothing was taken; else -errno, likewise. */
    int (*submit)(kvf_io *io, const kvf_io_request *request);
    /* One that ended; something is in flight. An engine that fails ends requests with its errno, so
     * whoever waits for all of them gets all of them. */
    void (*wait)(kvf_io *io, kvf_io_result *out);
    /* Likewise, or false if none has ended yet. NULL: requests end before submit returns, so
     * nothing goes on beside the caller's work. */
    bool (*poll)(kvf_io *io, kvf_io_result *out);

    /* NULL where an engine has nothing to do. */
    void (*begin)(kvf_io *io);
    void (*keep)(kvf_io *io, const kvf_io_kept *kept);
} kvf_io_ops;

/* First member of every engine. */
struct kvf_io {
    const kvf_io_ops *ops;
    kvf_context *context;
    uint32_t depth;
    uint32_t kept_buffers, kept_files; /* that the kernel has */
};

extern const kvf_io_ops kvf_io_plain; /* preadv and pwritev, one after the other */
extern const kvf_io_ops kvf_io_uring; /* where the build has liburing */

/* io_uring where build, kernel, sandbox and limits allow it and a request has come through, else
 * the plain engine, which always opens unless memory ends. A note says why. */
KVF_CHECKED kvf_status kvf_io_open(kvf_context *context, uint32_t depth, kvf_io **out);
/* The engine that it would take, and in `why` what speaks against io_uring: "allowed" if nothing
 * does. Leaves errors and notes of the context alone. */
const kvf_io_ops *kvf_io_probe(kvf_context *context, uint32_t depth, kvf_error *why);
void kvf_io_close(kvf_io *io); /* NULL is fine */

/* Once per engine, while nothing is in flight. A refusal is a note with its cause; requests
 * work without. */
void kvf_io_keep(kvf_io *io, const kvf_io_kept *kept);

/* Submitted requests begin now; else it does at the next wait. */
static inline void kvf_io_begin(kvf_io *io)
{
    if (io->ops->begin)
        io->ops->begin(io);
}

/* Whether the kernel would answer with SIGXFSZ, to the thread that calls. Engines end such a
 * request with EFBIG. A limit that falls between this and the call is not seen. */
static inline bool kvf_io_is_past_limit(const kvf_io_request *r)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; r->is_write && i < r->count; i++)
        bytes += r->pieces[i].iov_len;
    return kvf_is_past_file_limit(r->offset, bytes);
}

#endif
