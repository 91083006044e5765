/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Files through io_uring: up to `depth` requests in flight, one system call to submit or to wait.
 *
 * Knows nothing of what is read. A ring that the kernel, a sandbox or the limit of locked memory
 * refuses is an error of open; kvf_io_open then takes the other engine. Both queues have room for
 * `depth`, so neither overflows.
 */

#include <errno.h>
#include <liburing.h>
#include <string.h>

#include "io_engine.h"

typedef struct uring_io {
    kvf_io base;
    struct io_uring ring;
    uint32_t in_flight;
} uring_io;

static kvf_status uring_open(kvf_context *context, uint32_t depth, kvf_io **out)
{
    uring_io *io = kvf_alloc(context, 1, sizeof *io);
    if (!io)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a ring (%zu bytes)", sizeof *io);
    io->base = (kvf_io){.ops = &kvf_io_uring, .context = context, .depth = depth};
    const int code =
        kvf_context_refuses(context, "ring") ? -ENOMEM : io_uring_queue_init(depth, &io->ring, 0);
    if (code < 0) {
        kvf_free(context, io);
        return kvf_fail(context, KVF_SYSTEM, -code,
                        "io_uring with %u entries was refused: %s; see `ulimit -l` and "
                        "kernel.io_uring_disabled",
                        depth, strerror(-code));
    }
    *out = &io->base;
    return KVF_OK;
}

static void uring_close(kvf_io *base)
{
    uring_io *io = (uring_io *)base;
    KVF_ASSERT(io->in_flight == 0);
    io_uring_queue_exit(&io->ring);
    kvf_free(base->context, io);
}

static int uring_submit(kvf_io *base, const kvf_io_request *r)
{
    uring_io *io = (uring_io *)base;
    struct io_uring_sqe *sqe = io->in_flight < base->depth ? io_uring_get_sqe(&io->ring) : NULL;
    if (!sqe)
        return -EBUSY;
    if (r->is_write)
        io_uring_prep_writev(sqe, r->file, r->pieces, r->count, r->offset);
    else
        io_uring_prep_readv(sqe, r->file, r->pieces, r->count, r->offset);
    io_uring_sqe_set_data(sqe, (void *)(uintptr_t)r->tag);
    io->in_flight++;
    /* What the kernel does not take now stays in the queue, and waiting submits it. */
    (void)io_uring_submit(&io->ring);
    return 0;
}

static int uring_wait(kvf_io *base, kvf_io_result *out)
{
    uring_io *io = (uring_io *)base;
    struct io_uring_cqe *cqe = NULL;
    int code;
    KVF_ASSERT(io->in_flight > 0);
    do {
        code = io_uring_submit_and_wait(&io->ring, 1);
        if (code >= 0)
            code = io_uring_peek_cqe(&io->ring, &cqe);
    } while (code == -EINTR || code == -EAGAIN || code == -EBUSY);
    if (code < 0)
        return code;
    *out =
        (kvf_io_result){.tag = (uint32_t)(uintptr_t)io_uring_cqe_get_data(cqe), .bytes = cqe->res};
    io_uring_cqe_seen(&io->ring, cqe);
    io->in_flight--;
    return 0;
}

const kvf_io_ops kvf_io_uring = {.name = "io_uring",
                                 .open = uring_open,
                                 .close = uring_close,
                                 .submit = uring_submit,
                                 .wait = uring_wait};
