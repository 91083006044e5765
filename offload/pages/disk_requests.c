/* SPDX-License-Identifier: Apache-2.0 */

/* Requests of the disk tier; see the header. */

#include "disk_requests.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "common/files.h"

#define TRIES_MAX 64u

kvf_status kvf_disk_failed(const kvf_disk_tier *t, bool is_write, int code)
{
    return kvf_fail(t->context, KVF_SYSTEM, code,
                    "disk_path: %s the tier's file failed: %s%s; the sequences are as they were, "
                    "and the call may be made again",
                    is_write ? "writing" : "reading", strerror(code), kvf_errno_fix(code));
}

static void pause_a_little(uint32_t tries)
{
    if (tries > TRIES_MAX / 8)
        (void)nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

/* ---- ends ---- */

static void end(kvf_disk_tier *t, uint32_t number, int code)
{
    const kvf_disk_request *r = &t->requests[number];
    t->idle[t->idle_count++] = number;
    if (r->is_write) {
        t->writes_in_flight--;
        if (code) {
            t->write_error = code;
            t->bundles[r->bundle].is_writing = false;
        } else {
            kvf_disk_written(t, r->bundle);
        }
    } else {
        t->reads_in_flight--;
        if (code)
            t->read_error = code;
        kvf_disk_arrived(t, r->bundle, r->berth, code == 0);
    }
}

static int submit(kvf_disk_tier *t, uint32_t number)
{
    kvf_disk_request *r = &t->requests[number];
    const kvf_io_request request = {.file = t->file.direct,
                                    .is_write = r->is_write,
                                    .offset = r->offset,
                                    .pieces = &r->piece,
                                    .count = 1,
                                    .tag = number};
    int code;
    if (!kvf_disk_file_has(&t->file, t->file.direct))
        return EBADF;
    do {
        code = -t->io->ops->submit(t->io, &request);
        if (code != EAGAIN && code != EBUSY && code != EINTR)
            return code;
        pause_a_little(r->tries);
    } while (++r->tries < TRIES_MAX);
    return code;
}

/* The rest once more, or the end. */
static void go_on(kvf_disk_tier *t, uint32_t number, size_t moved, int code)
{
    kvf_disk_request *r = &t->requests[number];
    const size_t done =
        moved == r->piece.iov_len ? moved : moved / KVF_DISK_ALIGNMENT * KVF_DISK_ALIGNMENT;
    r->tries = done ? 0 : r->tries + 1;
    r->piece.iov_base = (char *)r->piece.iov_base + done;
    r->piece.iov_len -= done;
    r->offset += done;
    if (r->piece.iov_len == 0) {
        end(t, number, 0);
        return;
    }
    pause_a_little(r->tries);
    code = r->tries < TRIES_MAX ? submit(t, number) : code;
    if (code)
        end(t, number, code);
}

static void take(kvf_disk_tier *t, const kvf_io_result *result)
{
    const int code = result->bytes < 0 ? (int)-result->bytes : 0;
    if (code && code != EAGAIN && code != EINTR && code != ECANCELED) {
        end(t, result->tag, code);
        return;
    }
    const kvf_disk_request *r = &t->requests[result->tag];
    const size_t moved = code ? 0 : (size_t)result->bytes;
    KVF_ASSERT(moved <= r->piece.iov_len);
    uint64_t *const sum = r->is_write ? &t->stats.bytes_written : &t->stats.bytes_read;
    *sum += moved;
    go_on(t, result->tag, moved, code ? code : EIO);
}

void kvf_disk_reap(kvf_disk_tier *t)
{
    kvf_io_result result;
    t->io->ops->wait(t->io, &result);
    take(t, &result);
}

void kvf_disk_poll(kvf_disk_tier *t)
{
    kvf_io_result result;
    while (t->reads_in_flight + t->writes_in_flight > 0 && t->io->ops->poll(t->io, &result))
        take(t, &result);
}

/* ---- begins ---- */

static kvf_status begin(kvf_disk_tier *t, uint32_t bundle, uint32_t berth, uint32_t is_write)
{
    const uint32_t number = t->idle[t->idle_count - 1];
    kvf_disk_request *r = &t->requests[number];
    *r = (kvf_disk_request){
        .piece = {kvf_disk_berth(t, berth, false), t->config.bundle_bytes},
        .offset = (uint64_t)bundle * t->config.bundle_bytes,
        .bundle = bundle,
        .berth = berth,
        .is_write = is_write,
    };
    const int code = submit(t, number);
    if (code)
        return kvf_disk_failed(t, is_write, code);
    t->idle_count--;
    return KVF_OK;
}

kvf_status kvf_disk_read(kvf_disk_tier *t, uint32_t bundle, uint32_t berth)
{
    while (t->reads_in_flight == KVF_DISK_READS)
        kvf_disk_reap(t);
    KVF_TRY(begin(t, bundle, berth, 0));
    t->berths[berth] = KVF_DISK_COMING;
    t->bundles[bundle].is_reading = true;
    t->reads_in_flight++;
    return KVF_OK;
}

kvf_status kvf_disk_write(kvf_disk_tier *t, uint32_t bundle, uint32_t berth)
{
    KVF_ASSERT(t->writes_in_flight < KVF_DISK_WRITES);
    KVF_TRY(begin(t, bundle, berth, 1));
    t->bundles[bundle].is_writing = true;
    t->writes_in_flight++;
    return KVF_OK;
}

/* The kernel looks at the berths and at the file once, where it may. */
static kvf_status keep(kvf_disk_tier *t)
{
    const kvf_host_memory *m = t->config.memory;
    struct iovec *arenas = kvf_alloc(t->context, m->arena_count, sizeof *arenas);
    if (!arenas)
        KVF_FAIL(t->context, KVF_OUT_OF_MEMORY, "no memory to list %u arenas", m->arena_count);
    for (uint32_t i = 0; i < m->arena_count; i++)
        arenas[i] = (struct iovec){m->arenas[i].host, m->arenas[i].bytes};
    kvf_io_keep(t->io, &(kvf_io_kept){.buffers = arenas,
                                      .buffer_count = m->arena_count,
                                      .files = &t->file.direct,
                                      .file_count = 1});
    kvf_free(t->context, arenas);
    return KVF_OK;
}

kvf_status kvf_disk_requests_open(kvf_disk_tier *t, const kvf_io_ops *engine)
{
    for (uint32_t i = 0; i < KVF_DISK_REQUESTS; i++)
        t->idle[t->idle_count++] = KVF_DISK_REQUESTS - 1 - i;
    if (kvf_context_refuses(t->context, "engine"))
        KVF_FAIL(t->context, KVF_OUT_OF_MEMORY, "no memory to read or write files");
    KVF_TRY(engine ? engine->open(t->context, KVF_DISK_REQUESTS, &t->io)
                   : kvf_io_open(t->context, KVF_DISK_REQUESTS, &t->io));
    return keep(t);
}

void kvf_disk_requests_close(kvf_disk_tier *t)
{
    while (t->io && t->reads_in_flight + t->writes_in_flight > 0)
        kvf_disk_reap(t);
    kvf_io_close(t->io);
}
