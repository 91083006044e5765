/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which engine, and the one that is always there: each request is done when it is submitted.
 *
 * Knows nothing of rings. Results wait in a queue as long as the depth.
 */

#include "io_engine.h"

#include <errno.h>

typedef struct plain_io {
    kvf_io base;
    uint32_t first, count;
    kvf_io_result results[KVF_IO_DEPTH_MAX];
} plain_io;

static kvf_status plain_open(kvf_context *context, uint32_t depth, kvf_io **out)
{
    plain_io *io = kvf_alloc(context, 1, sizeof *io);
    if (!io)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory to read or write files (%zu bytes)",
                 sizeof *io);
    io->base = (kvf_io){.ops = &kvf_io_plain, .context = context, .depth = depth};
    *out = &io->base;
    return KVF_OK;
}

static void plain_close(kvf_io *io)
{
    kvf_free(io->context, io);
}

/* Bytes, or -errno. */
static int64_t moved_by(const kvf_io_request *r)
{
    if (kvf_io_is_past_limit(r))
        return -EFBIG;
    const ssize_t bytes = r->is_write ? pwritev(r->file, r->pieces, (int)r->count, (off_t)r->offset)
                                      : preadv(r->file, r->pieces, (int)r->count, (off_t)r->offset);
    return bytes < 0 ? -errno : bytes;
}

static int plain_submit(kvf_io *base, const kvf_io_request *r)
{
    plain_io *io = (plain_io *)base;
    if (io->count == base->depth)
        return -EBUSY;
    io->results[(io->first + io->count++) % KVF_IO_DEPTH_MAX] =
        (kvf_io_result){.tag = r->tag, .bytes = moved_by(r)};
    return 0;
}

static void plain_wait(kvf_io *base, kvf_io_result *out)
{
    plain_io *io = (plain_io *)base;
    KVF_ASSERT(io->count > 0);
    *out = io->results[io->first];
    io->first = (io->first + 1) % KVF_IO_DEPTH_MAX;
    io->count--;
}

const kvf_io_ops kvf_io_plain = {.name = "preadv",
                                 .open = plain_open,
                                 .close = plain_close,
                                 .submit = plain_submit,
                                 .wait = plain_wait};

kvf_status kvf_io_open(kvf_context *context, uint32_t depth, kvf_io **out)
{
    KVF_ASSERT(depth > 0 && depth <= KVF_IO_DEPTH_MAX);
    *out = NULL;
#if KVF_HAVE_URING
    if (kvf_io_uring.open(context, depth, out) == KVF_OK)
        return KVF_OK;
    kvf_error why;
    kvf_context_error(context, &why);
    kvf_log(context, KVF_LOG_NOTE, "files are read and written one request at a time: %s",
            why.text);
#endif
    return kvf_io_plain.open(context, depth, out);
}

const kvf_io_ops *kvf_io_probe(kvf_context *context, uint32_t depth, kvf_error *why)
{
    const kvf_io_ops *ops = &kvf_io_plain;
    *why = (kvf_error){.text = "this build has no liburing"};
#if KVF_HAVE_URING
    kvf_context *own = NULL;
    kvf_io *io = NULL;
    const kvf_error before = *kvf_context_last(context);
    if (kvf_context_create(&context->allocator, NULL, NULL, &own) != KVF_OK)
        return ops;
    own->fault = context->fault;
    own->fault_user = context->fault_user;
    if (kvf_io_uring.open(own, depth, &io) == KVF_OK) {
        ops = io->ops;
        *why = (kvf_error){.text = "allowed"};
    } else {
        kvf_context_error(own, why);
    }
    kvf_io_close(io);
    kvf_context_destroy(own);
    (void)kvf_fail_again(context, before.status, &before); /* the probe leaves no error */
#else
    (void)context, (void)depth;
#endif
    return ops;
}

void kvf_io_keep(kvf_io *io, const kvf_io_kept *kept)
{
    if (io->ops->keep)
        io->ops->keep(io, kept);
}

void kvf_io_close(kvf_io *io)
{
    if (io)
        io->ops->close(io);
}
