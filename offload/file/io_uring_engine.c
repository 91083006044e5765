/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Files through io_uring: up to `depth` requests in flight, one system call for many.
 *
 * Knows nothing of what is read. A ring that the kernel, a sandbox or the limit of locked memory
 * refuses, or that gives no request back, is an error of open; kvf_io_open then takes the other
 * engine. Both queues have room for `depth`, so neither overflows. The kernel is entered only where
 * nothing has ended yet, and then gets all that was submitted: reads first. It has a few writes
 * at a time, so that a read that comes later finds a short queue.
 *
 * A kernel that may not be entered any more (a filter, a descriptor that somebody closed) ends what
 * it has by itself; what it has not taken is taken back, and ends with the error.
 */

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/text.h"
#include "io_engine.h"

#define IS_WRITE    ((uint64_t)1 << 32) /* in the data of a request, above its tag */
#define WRITE_SHARE 4u                  /* writes take so much of the depth: 1 / this */
#define PAUSE_NS    100000
#define TRIES_MAX   1000u

typedef struct uring_io {
    kvf_io base;
    struct io_uring ring;
    uint32_t in_flight; /* taken and not given back */
    uint32_t writes;    /* of these, writes that are in the ring */
    uint32_t held_first, held_count;
    kvf_io_request held[KVF_IO_DEPTH_MAX]; /* writes that are not */
    uint32_t failed_count;
    kvf_io_result failed[KVF_IO_DEPTH_MAX]; /* never taken, or taken back from the ring */
    struct iovec *buffers;                  /* [base.kept_buffers] by address */
    int *files;                             /* [base.kept_files] */
} uring_io;

/* The test hook at a call: 0; -code; or, where the hook says a negative number, that. */
static int refusal(const kvf_context *context, const char *what, int code)
{
    const int said = context->fault ? context->fault(context->fault_user, what) : 0;
    return said < 0 ? said : said ? -code : 0;
}

/* A request that does nothing, there and back: some sandboxes let a ring be made and not used. */
static int try_ring(const kvf_context *context, struct io_uring *ring)
{
    struct io_uring_cqe *cqe = NULL;
    int code = refusal(context, "ring try", EPERM);
    if (code)
        return code;
    io_uring_prep_nop(io_uring_get_sqe(ring));
    uint32_t tries = 0;
    do
        code = io_uring_submit_and_wait(ring, 1);
    while (code == -EINTR && ++tries < TRIES_MAX);
    if (code < 0)
        return code;
    code = io_uring_peek_cqe(ring, &cqe);
    if (code)
        return code;
    code = cqe->res;
    io_uring_cqe_seen(ring, cqe);
    return code;
}

static const char *refusal_fix(int code)
{
    switch (code) {
    case EPERM:
    case EACCES:
        return "a sandbox (seccomp) or kernel.io_uring_disabled forbids it";
    case ENOMEM:
        return "raise `ulimit -l`";
    case ENOSYS:
        return "this kernel, or a sandbox, has none";
    case EMFILE:
        return "raise `ulimit -n`";
    default:
        return "see kernel.io_uring_disabled and the sandbox";
    }
}

static kvf_status uring_open(kvf_context *context, uint32_t depth, kvf_io **out)
{
    uring_io *io = kvf_alloc(context, 1, sizeof *io);
    if (!io)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a ring (%zu bytes)", sizeof *io);
    io->base = (kvf_io){.ops = &kvf_io_uring, .context = context, .depth = depth};
    int code = refusal(context, "ring", ENOMEM);
    if (!code)
        code = io_uring_queue_init(depth, &io->ring, 0);
    if (!code) {
        code = try_ring(context, &io->ring);
        if (code)
            io_uring_queue_exit(&io->ring);
    }
    if (code) {
        kvf_free(context, io);
        return kvf_fail(context, KVF_SYSTEM, -code, "io_uring with %u entries was refused: %s; %s",
                        depth, kvf_errno_text(-code), refusal_fix(-code));
    }
    *out = &io->base;
    return KVF_OK;
}

static void uring_close(kvf_io *base)
{
    uring_io *io = (uring_io *)base;
    KVF_ASSERT(io->in_flight == 0);
    io_uring_queue_exit(&io->ring);
    kvf_free(base->context, io->buffers);
    kvf_free(base->context, io->files);
    kvf_free(base->context, io);
}

/* ---- what the kernel looks at once ---- */

static int by_address(const void *a, const void *b)
{
    const uintptr_t x = (uintptr_t)((const struct iovec *)a)->iov_base;
    const uintptr_t y = (uintptr_t)((const struct iovec *)b)->iov_base;
    return (x > y) - (x < y);
}

static int keep_buffers(uring_io *io, const kvf_io_kept *kept)
{
    kvf_context *context = io->base.context;
    int code = refusal(context, "ring buffers", ENOMEM);
    io->buffers = code ? NULL : kvf_alloc(context, kept->buffer_count, sizeof *io->buffers);
    if (!io->buffers)
        return code ? code : -ENOMEM;
    memcpy(io->buffers, kept->buffers, kept->buffer_count * sizeof *io->buffers);
    qsort(io->buffers, kept->buffer_count, sizeof *io->buffers, by_address);
    code = io_uring_register_buffers(&io->ring, io->buffers, kept->buffer_count);
    io->base.kept_buffers = code ? 0 : kept->buffer_count;
    return code;
}

static int keep_files(uring_io *io, const kvf_io_kept *kept)
{
    kvf_context *context = io->base.context;
    int code = refusal(context, "ring files", EMFILE);
    io->files = code ? NULL : kvf_alloc(context, kept->file_count, sizeof *io->files);
    if (!io->files)
        return code ? code : -ENOMEM;
    memcpy(io->files, kept->files, kept->file_count * sizeof *io->files);
    code = io_uring_register_files(&io->ring, io->files, kept->file_count);
    io->base.kept_files = code ? 0 : kept->file_count;
    return code;
}

static void note_buffers(const kvf_io *io, const kvf_io_kept *kept, int code)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < kept->buffer_count; i++)
        bytes += kept->buffers[i].iov_len;
    kvf_log(io->context, KVF_LOG_NOTE,
            "io_uring could not register %llu KiB of memory (%s)%s; requests work without, each "
            "for a little more of a CPU",
            (unsigned long long)(bytes / 1024), kvf_errno_text(-code),
            code == -ENOMEM ? ": raise `ulimit -l` to that, or give CAP_IPC_LOCK" : "");
}

static void note_files(const kvf_io *io, const kvf_io_kept *kept, int code)
{
    kvf_log(io->context, KVF_LOG_NOTE,
            "io_uring could not register %u files (%s)%s; requests work without, each for a "
            "little more of a CPU",
            kept->file_count, kvf_errno_text(-code), code == -EMFILE ? ": raise `ulimit -n`" : "");
}

static void uring_keep(kvf_io *base, const kvf_io_kept *kept)
{
    uring_io *io = (uring_io *)base;
    KVF_ASSERT(io->in_flight == 0 && !io->buffers && !io->files);
    const int buffers = kept->buffer_count ? keep_buffers(io, kept) : 0;
    const int files = kept->file_count ? keep_files(io, kept) : 0;
    if (buffers)
        note_buffers(base, kept, buffers);
    if (files)
        note_files(base, kept, files);
}

/* The kept buffer that a piece lies in, or -1. */
static int buffer_of(const uring_io *io, const struct iovec *piece)
{
    const uintptr_t at = (uintptr_t)piece->iov_base;
    uint32_t low = 0, high = io->base.kept_buffers;
    while (low < high) { /* the last that begins at or before the piece is low - 1 */
        const uint32_t middle = (low + high) / 2;
        if ((uintptr_t)io->buffers[middle].iov_base <= at)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0)
        return -1;
    const struct iovec *buffer = &io->buffers[low - 1];
    const size_t before = at - (uintptr_t)buffer->iov_base;
    const bool is_inside = before <= buffer->iov_len && piece->iov_len <= buffer->iov_len - before;
    return is_inside ? (int)low - 1 : -1;
}

static int file_of(const uring_io *io, int file)
{
    for (uint32_t i = 0; i < io->base.kept_files; i++)
        if (io->files[i] == file)
            return (int)i;
    return -1;
}

/* ---- requests ---- */

static void put(uring_io *io, struct io_uring_sqe *sqe, const kvf_io_request *r)
{
    const struct iovec *piece = r->pieces;
    const int kept = file_of(io, r->file), file = kept < 0 ? r->file : kept;
    const int buffer = r->count == 1 ? buffer_of(io, piece) : -1;
    if (buffer >= 0 && r->is_write)
        io_uring_prep_write_fixed(sqe, file, piece->iov_base, (unsigned)piece->iov_len, r->offset,
                                  buffer);
    else if (buffer >= 0)
        io_uring_prep_read_fixed(sqe, file, piece->iov_base, (unsigned)piece->iov_len, r->offset,
                                 buffer);
    else if (r->is_write)
        io_uring_prep_writev(sqe, file, piece, r->count, r->offset);
    else
        io_uring_prep_readv(sqe, file, piece, r->count, r->offset);
    if (kept >= 0)
        io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, r->tag | (r->is_write ? IS_WRITE : 0));
}

static int uring_submit(kvf_io *base, const kvf_io_request *r)
{
    uring_io *io = (uring_io *)base;
    if (io->in_flight == base->depth || refusal(base->context, "ring entry", EBUSY))
        return -EBUSY;
    if (r->is_write) {
        io->held[(io->held_first + io->held_count++) % KVF_IO_DEPTH_MAX] = *r;
    } else {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);
        KVF_ASSERT(sqe);
        put(io, sqe, r);
    }
    io->in_flight++;
    return 0;
}

/* A request that the kernel never takes. */
static void end_here(uring_io *io, uint32_t tag, int code)
{
    io->failed[io->failed_count++] = (kvf_io_result){.tag = tag, .bytes = code};
}

/* Writes go after the reads that are in the queue. */
static void put_writes(uring_io *io)
{
    const uint32_t most = (io->base.depth + WRITE_SHARE - 1) / WRITE_SHARE;
    while (io->held_count && io->writes < most) {
        const kvf_io_request *r = &io->held[io->held_first];
        io->held_first = (io->held_first + 1) % KVF_IO_DEPTH_MAX;
        io->held_count--;
        if (kvf_io_is_past_limit(r)) {
            end_here(io, r->tag, -EFBIG);
            continue;
        }
        struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);
        KVF_ASSERT(sqe);
        put(io, sqe, r);
        io->writes++;
    }
}

static void uring_begin(kvf_io *base)
{
    uring_io *io = (uring_io *)base;
    put_writes(io);
    /* Requests that the kernel does not take now stay in the queue for the next wait. */
    (void)io_uring_submit(&io->ring);
}

/* Hands over all that was submitted, and sleeps until something has ended. */
static int enter(uring_io *io)
{
    put_writes(io);
    int code = refusal(io->base.context, "ring wait", EIO);
    if (!code && !io->failed_count)
        code = io_uring_submit_and_wait(&io->ring, 1);
    return code;
}

/* Whatever the kernel has not taken ends with `code`. Without a thread of its own the kernel looks
 * at the queue only when it is entered. */
static void take_back(uring_io *io, int code)
{
    struct io_uring_sq *sq = &io->ring.sq;
    const unsigned head = *(volatile const unsigned *)sq->khead;
    for (unsigned at = head; at != sq->sqe_tail; at++) {
        const uint64_t data = sq->sqes[at & *sq->kring_mask].user_data;
        end_here(io, (uint32_t)data, code);
        io->writes -= (data & IS_WRITE) != 0;
    }
    sq->sqe_head = sq->sqe_tail = head;
    io_uring_smp_store_release(sq->ktail, head);
}

/* The test hook at a result: it may be an error, or above 1 a part of the bytes. */
static int64_t result_of(const uring_io *io, int64_t bytes)
{
    const kvf_context *context = io->base.context;
    const int said = context->fault ? context->fault(context->fault_user, "ring result") : 0;
    if (said == 0 || bytes < 0)
        return bytes;
    return said == 1 ? -EIO : said < bytes ? said : bytes;
}

static bool uring_poll(kvf_io *base, kvf_io_result *out)
{
    uring_io *io = (uring_io *)base;
    struct io_uring_cqe *cqe = NULL;
    KVF_ASSERT(io->in_flight > 0);
    if (io->failed_count) {
        *out = io->failed[--io->failed_count];
        io->in_flight--;
        return true;
    }
    if (io_uring_peek_cqe(&io->ring, &cqe) != 0)
        return false;
    const uint64_t data = io_uring_cqe_get_data64(cqe);
    *out = (kvf_io_result){.tag = (uint32_t)data, .bytes = result_of(io, cqe->res)};
    io_uring_cqe_seen(&io->ring, cqe);
    io->in_flight--;
    io->writes -= (data & IS_WRITE) != 0;
    return true;
}

static void uring_wait(kvf_io *base, kvf_io_result *out)
{
    uring_io *io = (uring_io *)base;
    for (uint32_t tries = 0; !uring_poll(base, out); tries++) {
        const int code = enter(io);
        if (code >= 0)
            continue;
        /* Interrupted, short of memory, or behind: that passes. */
        const bool may_pass = code == -EINTR || code == -EAGAIN || code == -EBUSY;
        if (!may_pass || tries >= TRIES_MAX)
            take_back(io, code);
        if (io->failed_count == 0 && code != -EINTR)
            (void)nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
}

const kvf_io_ops kvf_io_uring = {.name = "io_uring",
                                 .open = uring_open,
                                 .close = uring_close,
                                 .submit = uring_submit,
                                 .wait = uring_wait,
                                 .poll = uring_poll,
                                 .begin = uring_begin,
                                 .keep = uring_keep};
