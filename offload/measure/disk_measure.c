/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The disk bench: makes the file, checks a case, runs the pass, compares.
 *
 * Knows nothing of sweeps or medians. Invariant: whatever a pass reserved but its memory is free
 * again when it ends, nothing is in flight then, and the file holds what it held.
 */

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/random.h"
#include "common/text.h"
#include "io_engine.h"
#include "link_measure.h"
#include "plain_file.h"
#include "settings.h"

#define ALIGN      4096u
#define PART       ((size_t)16 << 20) /* of the file, written at once when it is made */
#define FILE_MOST  ((uint64_t)64 << 30)
#define TRIES_MAX  64u
#define KEPT_PAGES 1u
#define KEPT_FILE  2u

struct kvf_disk {
    kvf_context *context;
    char *path; /* of the folder, for messages */
    int file;   /* -1 = none */
    uint64_t bytes;
    char *raw; /* what `memory` was cut from */
    char *memory;
    size_t memory_bytes;
};

static const kvf_disk_case defaults = {.what = KVF_DISK_RANDOM,
                                       .engine = KVF_DISK_URING,
                                       .direct = 1,
                                       .extent_bytes = 131072,
                                       .depth = 64,
                                       .extents = 512,
                                       .seed = 1};

void kvf_disk_case_init_sized(kvf_disk_case *c, size_t size)
{
    kvf_sized_init(c, size, &defaults, sizeof defaults);
}

#define FIELD(field)       KVF_FIELD(kvf_disk_case, field)
#define COUNT(least, most) .kind = KVF_SETTING_WHOLE, .low = (double)(least), .high = (double)(most)

static const kvf_setting rows[] = {
    {FIELD(what), KVF_NAMED(KVF_DISK_WHAT_LIST), .meaning = "what is measured"},
    {FIELD(engine), KVF_NAMED(KVF_DISK_ENGINE_LIST), .meaning = "how requests are made"},
    {FIELD(direct), .kind = KVF_SETTING_SWITCH,
     .meaning = "past the system's page cache; off = through it, when it has dropped the file"},
    {FIELD(extent_bytes), COUNT(ALIGN, PART), .meaning = "bytes of an extent, a multiple of 4096"},
    {FIELD(depth), COUNT(1, KVF_IO_DEPTH_MAX), .meaning = "requests at a time"},
    {FIELD(extents), COUNT(1, 1 << 20), .meaning = "extents of a pass"},
    {FIELD(seed), COUNT(0, UINT64_MAX), .meaning = "seed of the extents chosen"},
};

#define ROWS (sizeof rows / sizeof *rows)

const kvf_setting *kvf_disk_setting(uint32_t index)
{
    return index < ROWS ? &rows[index] : NULL;
}

static kvf_status check(const kvf_disk *disk, const kvf_disk_case *c)
{
    kvf_context *context = disk->context;
    char text[384];
    if (kvf_settings_wrong(rows, ROWS, c, text, sizeof text))
        KVF_FAIL(context, KVF_INVALID, "%s", text);
    if (c->extent_bytes % ALIGN != 0)
        KVF_FAIL(context, KVF_INVALID, "extent_bytes = %zu: must be a multiple of %u",
                 c->extent_bytes, ALIGN);
    if (c->extents > disk->bytes / c->extent_bytes)
        KVF_FAIL(
            context, KVF_INVALID,
            "extents = %u: the file has %llu of %zu bytes; lower extents, or make a larger file",
            c->extents, (unsigned long long)(disk->bytes / c->extent_bytes), c->extent_bytes);
    return KVF_OK;
}

static kvf_status failed(const kvf_disk *disk, const char *what, int code)
{
    return kvf_fail(disk->context, KVF_SYSTEM, code, "%s: %s: %s", disk->path, what,
                    kvf_errno_text(code));
}

/* ---- memory and file ---- */

static kvf_status reserve(kvf_disk *disk, size_t bytes)
{
    if (bytes <= disk->memory_bytes)
        return KVF_OK;
    kvf_free(disk->context, disk->raw);
    disk->memory_bytes = 0;
    disk->raw = kvf_alloc(disk->context, 1, bytes + ALIGN);
    if (!disk->raw)
        KVF_FAIL(disk->context, KVF_OUT_OF_MEMORY,
                 "no memory for %zu bytes in flight; lower depth or extent_bytes", bytes);
    disk->memory = disk->raw + (ALIGN - (uintptr_t)disk->raw % ALIGN);
    disk->memory_bytes = bytes;
    return KVF_OK;
}

static void fill(char *memory, uint64_t offset, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 8) {
        const uint64_t word = kvf_link_word(offset + i);
        memcpy(memory + i, &word, sizeof word);
    }
}

static kvf_status fill_file(kvf_disk *disk)
{
    for (uint64_t at = 0; at < disk->bytes; at += PART) {
        fill(disk->memory, at, PART);
        for (size_t done = 0; done < PART;) {
            const ssize_t n = kvf_pwrite(disk->file, disk->memory + done, PART - done, at + done);
            if (n <= 0 && errno != EINTR)
                return failed(disk, "its file cannot be written", n == 0 ? EIO : errno);
            done += n > 0 ? (size_t)n : 0;
        }
        if (kvf_context_refuses(disk->context, "file write"))
            return failed(disk, "its file cannot be written", EIO);
    }
    return fdatasync(disk->file) == 0 ? KVF_OK : failed(disk, "its file is not durable", errno);
}

static kvf_status make(kvf_disk *disk, const char *folder)
{
    const size_t length = strlen(folder) + 1;
    disk->path = kvf_alloc(disk->context, length, 1);
    if (!disk->path)
        KVF_FAIL(disk->context, KVF_OUT_OF_MEMORY, "no memory for the name of a folder");
    memcpy(disk->path, folder, length);
    KVF_TRY(reserve(disk, PART));
    KVF_TRY(kvf_file_scratch(disk->context, folder, disk->bytes, &disk->file));
    return fill_file(disk);
}

kvf_status kvf_disk_bench_open(kvf_context *context, const char *folder, uint64_t bytes,
                               kvf_disk **out)
{
    *out = NULL;
    if (!folder)
        KVF_FAIL(context, KVF_INVALID, "folder is NULL; name one, such as \".\"");
    if (bytes == 0 || bytes % PART != 0 || bytes > FILE_MOST)
        KVF_FAIL(context, KVF_INVALID,
                 "bytes = %llu: must be a multiple of %zu, at most %llu (bytes of the file)",
                 (unsigned long long)bytes, PART, (unsigned long long)FILE_MOST);
    kvf_disk *disk = kvf_alloc(context, 1, sizeof *disk);
    if (!disk)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a disk bench");
    *disk = (kvf_disk){.context = context, .file = -1, .bytes = bytes};
    kvf_context_hold(context);
    const kvf_status status = make(disk, folder);
    if (status == KVF_OK)
        *out = disk;
    else
        kvf_disk_close(disk);
    return status;
}

void kvf_disk_close(kvf_disk *disk)
{
    kvf_context *context = disk ? disk->context : NULL;
    if (!kvf_handle_is_alive(context))
        return;
    if (disk->file >= 0)
        (void)close(disk->file);
    kvf_free(context, disk->raw);
    kvf_free(context, disk->path);
    kvf_free(context, disk);
    kvf_context_release(context);
}

/* ---- a pass ---- */

typedef struct request {
    struct iovec left;
    uint64_t offset; /* of what is left */
    uint64_t extent; /* which of the file */
    uint64_t began_ns;
    uint32_t tries; /* without progress */
} request;

typedef struct pass {
    kvf_disk *disk;
    const kvf_disk_case *c;
    kvf_io *io;
    uint32_t depth; /* that there are extents for */
    uint32_t next, done, in_flight;
    uint32_t *order;   /* [extents] of the file, in the order of the pass */
    uint64_t *ns;      /* [extents] */
    request *requests; /* [depth] */
} pass;

/* Where extent `n` of the pass is in memory: a write has memory of its own, a read that of its tag.
 */
static char *memory_of(const pass *p, uint32_t n, uint32_t tag)
{
    const uint32_t at = p->c->what == KVF_DISK_WRITE ? n : tag;
    return p->disk->memory + (size_t)at * p->c->extent_bytes;
}

static kvf_status submit(pass *p, uint32_t tag)
{
    request *r = &p->requests[tag];
    const kvf_io_request asked = {.file = p->disk->file,
                                  .is_write = p->c->what == KVF_DISK_WRITE,
                                  .offset = r->offset,
                                  .pieces = &r->left,
                                  .count = 1,
                                  .tag = tag};
    int code = p->io->ops->submit(p->io, &asked);
    for (; code == -EBUSY && r->tries < TRIES_MAX;
         r->tries++) /* the queue has room: only a fault */
        code = p->io->ops->submit(p->io, &asked);
    if (code)
        return failed(p->disk, "a request was refused", -code);
    p->in_flight++;
    return KVF_OK;
}

static kvf_status begin_next(pass *p, uint32_t tag)
{
    const uint32_t n = p->next++;
    p->requests[tag] = (request){
        .left = {memory_of(p, n, tag), p->c->extent_bytes},
        .offset = (uint64_t)p->order[n] * p->c->extent_bytes,
        .extent = p->order[n],
        .began_ns = kvf_now_ns(),
    };
    return submit(p, tag);
}

static kvf_status end_one(pass *p)
{
    kvf_io_result result;
    p->io->ops->wait(p->io, &result);
    p->in_flight--;
    request *r = &p->requests[result.tag];
    const int passes =
        result.bytes == -EAGAIN || result.bytes == -EINTR || result.bytes == -ECANCELED;
    if (result.bytes < 0 && (!passes || ++r->tries == TRIES_MAX))
        return failed(p->disk, "a request failed", (int)-result.bytes);
    if (result.bytes == 0)
        return failed(p->disk, "its file ends too early", EIO);
    if (result.bytes > 0) {
        r->left.iov_base = (char *)r->left.iov_base + result.bytes;
        r->left.iov_len -= (size_t)result.bytes;
        r->offset += (uint64_t)result.bytes;
    }
    if (r->left.iov_len > 0)
        return submit(p, result.tag);
    p->ns[p->done++] = kvf_now_ns() - r->began_ns;
    return p->next < p->c->extents ? begin_next(p, result.tag) : KVF_OK;
}

static kvf_status run(pass *p)
{
    for (uint32_t tag = 0; tag < p->depth; tag++)
        KVF_TRY(begin_next(p, tag));
    while (p->in_flight)
        KVF_TRY(end_one(p));
    if (p->c->what == KVF_DISK_WRITE && fdatasync(p->disk->file) != 0)
        return failed(p->disk, "its file is not durable", errno);
    return KVF_OK;
}

/* After a failure: what is in flight still uses the memory. */
static void drain(pass *p)
{
    kvf_io_result unused;
    for (; p->in_flight; p->in_flight--)
        p->io->ops->wait(p->io, &unused);
}

/* ---- around it ---- */

static kvf_status open_engine(const kvf_disk *disk, const kvf_disk_case *c, kvf_io **out)
{
    if (c->engine == KVF_DISK_PREADV)
        return kvf_io_plain.open(disk->context, c->depth, out);
#if KVF_HAVE_URING
    const kvf_status status = kvf_io_uring.open(disk->context, c->depth, out);
    if (status != KVF_SYSTEM)
        return status;
    kvf_error why;
    kvf_context_error(disk->context, &why);
    return kvf_fail(disk->context, KVF_UNSUPPORTED, why.foreign, "engine = io_uring: %s", why.text);
#else
    KVF_FAIL(disk->context, KVF_UNSUPPORTED,
             "engine = io_uring: this build has no liburing; install liburing-dev and build again");
#endif
}

static kvf_status set_direct(const kvf_disk *disk, const kvf_disk_case *c, kvf_disk_result *result)
{
    result->align = 1;
    kvf_file_buffered(disk->file);
    /* Whatever was read or written before: nothing may come from memory. */
    (void)posix_fadvise(disk->file, 0, 0, POSIX_FADV_DONTNEED);
    if (!c->direct)
        return KVF_OK;
    result->align = kvf_file_direct(disk->context, disk->path, disk->file);
    if (result->align == 1 || result->align > ALIGN)
        KVF_FAIL(disk->context, KVF_UNSUPPORTED,
                 "direct = on: %s is on a file system that cannot read past its cache", disk->path);
    return KVF_OK;
}

static kvf_status open_pass(pass *p, kvf_disk_result *result)
{
    kvf_disk *disk = p->disk;
    const kvf_disk_case *c = p->c;
    const uint32_t all = (uint32_t)(disk->bytes / c->extent_bytes);
    const uint32_t pieces = c->what == KVF_DISK_WRITE ? c->extents : p->depth;
    KVF_TRY(reserve(disk, (size_t)pieces * c->extent_bytes));
    KVF_TRY(set_direct(disk, c, result));
    KVF_TRY(open_engine(disk, c, &p->io));
    p->order = kvf_alloc(disk->context, all, sizeof *p->order);
    p->ns = kvf_alloc(disk->context, c->extents, sizeof *p->ns);
    p->requests = kvf_alloc(disk->context, p->depth, sizeof *p->requests);
    if (!p->order || !p->ns || !p->requests)
        KVF_FAIL(disk->context, KVF_OUT_OF_MEMORY, "no memory to choose %u of %u extents",
                 c->extents, all);
    for (uint32_t i = 0; i < all; i++)
        p->order[i] = i;
    uint64_t random = c->seed;
    for (uint32_t i = 0; i < c->extents && c->what == KVF_DISK_RANDOM; i++) {
        const uint32_t k = i + kvf_random_below(&random, all - i), other = p->order[k];
        p->order[k] = p->order[i];
        p->order[i] = other;
    }
    if (c->what == KVF_DISK_WRITE)
        fill(disk->memory, 0, (size_t)c->extents * c->extent_bytes);
    else /* what is right afterwards was read */
        memset(disk->memory, 0, (size_t)p->depth * c->extent_bytes);
    const struct iovec buffer = {disk->memory, (size_t)pieces * c->extent_bytes};
    if (buffer.iov_len <= (size_t)1 << 30)
        kvf_io_keep(p->io, &(kvf_io_kept){&buffer, 1, &disk->file, 1});
    result->kept = (p->io->kept_buffers ? KEPT_PAGES : 0) | (p->io->kept_files ? KEPT_FILE : 0);
    return KVF_OK;
}

/* The bytes that every tag read last. */
static kvf_status compare(const pass *p, kvf_disk_result *result)
{
    const size_t bytes = p->c->extent_bytes;
    for (uint32_t tag = 0; tag < p->depth && p->c->what != KVF_DISK_WRITE; tag++) {
        const uint64_t offset = p->requests[tag].extent * bytes;
        if (!kvf_link_is_right(memory_of(p, 0, tag), offset, bytes))
            KVF_FAIL(p->disk->context, KVF_CORRUPT,
                     "%s: bytes %llu to %llu of its file are not those that were written",
                     p->disk->path, (unsigned long long)offset,
                     (unsigned long long)(offset + bytes - 1));
        result->verified_bytes += bytes;
    }
    return KVF_OK;
}

static kvf_status measure(kvf_disk *disk, const kvf_disk_case *c, kvf_disk_result *result)
{
    kvf_disk_case own = defaults;
    KVF_CHECK_HANDLE(disk, disk);
    KVF_TRY(KVF_SIZED_READ(disk->context, kvf_disk_case, c, &own));
    KVF_TRY(check(disk, &own));
    pass p = {.disk = disk, .c = &own, .depth = kvf_min_u32(own.depth, own.extents)};
    kvf_status status = open_pass(&p, result);
    if (status == KVF_OK) {
        const uint64_t began = kvf_now_ns();
        status = run(&p);
        result->ns = kvf_now_ns() - began;
        drain(&p);
    }
    if (status == KVF_OK)
        status = compare(&p, result);
    if (status == KVF_OK) {
        result->bytes = (uint64_t)own.extents * own.extent_bytes;
        kvf_link_times_sum_up(p.ns, own.extents, &result->request);
    }
    kvf_io_close(p.io);
    kvf_free(disk->context, p.order);
    kvf_free(disk->context, p.ns);
    kvf_free(disk->context, p.requests);
    return status;
}

kvf_status kvf_disk_measure_sized(kvf_disk *disk, const kvf_disk_case *c, kvf_disk_result *result,
                                  size_t size)
{
    kvf_disk_result own = {0};
    KVF_CHECK_HANDLE(disk, disk);
    KVF_CHECK_POINTER(disk->context, result);
    const kvf_status status = measure(disk, c, &own);
    KVF_SIZED_GIVE(result, size, &own);
    return status;
}
