/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The ring alone: every call on it and every completion fails once, in every way, or from some
 * moment on, and what was asked for arrives or an error has a name; requests go to the kernel in
 * bundles, reads first; what the kernel was to keep and refused is a note. And files past the page
 * cache.
 */

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "extents.h"
#include "offload_rig.h"
#include "plain_file.h"

#define BYTES  (1u << 20)
#define EXTENT 16384u
#define DEPTH  8u

/* The hook's answer to question `at` of this name; how often it was asked. */
typedef struct ring_fault {
    const char *name;
    int says;
    uint32_t at, asked;
    bool lasts; /* from there on */
    uint32_t notes;
} ring_fault;

static int answer(void *user, const char *what)
{
    ring_fault *f = user;
    if (!f->name || strcmp(what, f->name) != 0)
        return 0;
    const uint32_t n = f->asked++;
    return n == f->at || (f->lasts && n > f->at) ? f->says : 0;
}

static void count_notes(void *user, int level, const char *line)
{
    ring_fault *f = user;
    f->notes++;
}

typedef struct ring_rig {
    kvf_context *context;
    ring_fault fault;
    int file;
    char *from, *to; /* [BYTES] */
    kvf_io *io;
} ring_rig;

static char *pages(size_t bytes)
{
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

static void open_ring(ring_rig *r, uint32_t depth)
{
    *r = (ring_rig){.from = pages(BYTES), .to = pages(BYTES)};
    rig_random random = rig_seed("ring", 7);
    for (uint32_t i = 0; i < BYTES; i++)
        r->from[i] = (char)rig_next(&random);
    assert_int_equal(kvf_context_create(&(kvf_allocator){0}, count_notes, &r->fault, &r->context),
                     KVF_OK);
    r->context->fault = answer;
    r->context->fault_user = &r->fault;
    assert_int_equal(kvf_file_scratch(r->context, "/tmp", BYTES, &r->file), KVF_OK);
    assert_int_equal(kvf_io_open(r->context, depth, &r->io), KVF_OK);
}

static void close_ring(ring_rig *r)
{
    kvf_io_close(r->io);
    close(r->file);
    munmap(r->from, BYTES);
    munmap(r->to, BYTES);
    assert_int_equal(r->context->live_bytes, 0);
    kvf_context_destroy(r->context);
}

static int has_ring(const ring_rig *r)
{
    return strcmp(r->io->ops->name, "io_uring") == 0;
}

static void submit(ring_rig *r, int is_write, char *at, uint64_t offset, uint32_t tag)
{
    static struct iovec pieces[KVF_IO_DEPTH_MAX];
    pieces[tag] = (struct iovec){at, EXTENT};
    const kvf_io_request request = {.file = r->file,
                                    .is_write = is_write != 0,
                                    .offset = offset,
                                    .pieces = &pieces[tag],
                                    .count = 1,
                                    .tag = tag};
    assert_int_equal(r->io->ops->submit(r->io, &request), 0);
}

static uint32_t take(ring_rig *r)
{
    kvf_io_result result;
    r->io->ops->wait(r->io, &result);
    assert_int_equal(result.bytes, EXTENT);
    return result.tag;
}

static void keep_some(ring_rig *r)
{
    const struct iovec buffers[] = {
        {r->to, BYTES / 2 + 4096}, {r->from + 4 * EXTENT, 8 * EXTENT}, {r->from, 2 * EXTENT}};
    const int files[] = {STDERR_FILENO, r->file};
    kvf_io_keep(r->io, &(kvf_io_kept){
                           .buffers = buffers, .buffer_count = 3, .files = files, .file_count = 2});
}

/* ---- faults ---- */

static kvf_status move_extents(ring_rig *r, int is_write, uint64_t *sums)
{
    const kvf_extents e = {.context = r->context,
                           .io = r->io,
                           .path = "test",
                           .file = r->file,
                           .extent_bytes = EXTENT,
                           .checksums = sums};
    const struct iovec piece = {is_write ? r->from : r->to, BYTES};
    return is_write ? kvf_extents_write(&e, &piece, 1) : kvf_extents_read(&e, &piece, 1);
}

/* Question after question of one name gets the answer, until nobody asks so often. Whether the
 * answer may be a failure. */
static void fail_each(ring_rig *r, const char *name, int says, int may_fail)
{
    static uint64_t sums[BYTES / EXTENT];
    uint32_t failures = 0;
    for (int is_write = 1; is_write >= 0; is_write--)
        for (uint32_t at = 0;; at += at < 4 ? 1 : 13) {
            kvf_error error;
            r->fault = (ring_fault){.name = name, .says = says, .at = at};
            memset(r->to, 0, BYTES);
            const kvf_status status = move_extents(r, is_write, sums);
            const int was_asked = r->fault.asked > at;
            r->fault.name = NULL;
            kvf_context_error(r->context, &error);
            /* A request that the kernel has already does not fail because it may not be entered. */
            if (status != KVF_OK || strcmp(name, "ring wait") != 0)
                assert_int_equal(status, may_fail && was_asked ? KVF_SYSTEM : KVF_OK);
            failures += status != KVF_OK;
            if (status != KVF_OK)
                assert_true(error.foreign == EIO && strstr(error.text, strerror(EIO)));
            if (status != KVF_OK) /* the engine is as it was, nothing is in flight */
                assert_int_equal(move_extents(r, is_write, sums), KVF_OK);
            if (!is_write)
                assert_memory_equal(r->from, r->to, BYTES);
            if (!was_asked)
                break;
            assert_true(at < 2000);
        }
    assert_int_equal(failures > 0, may_fail);
}

static void each_call_fails_once(void **state)
{
    static const struct {
        const char *name;
        int says, may_fail;
    } rows[] = {
        {"ring entry", 1, 0},           {"ring wait", -EINTR, 0},   {"ring wait", -EAGAIN, 0},
        {"ring wait", -EBUSY, 0},       {"ring wait", 1, 1},        {"ring result", -EAGAIN, 0},
        {"ring result", -ECANCELED, 0}, {"ring result", -EINTR, 0}, {"ring result", 1, 1},
        {"ring result", 2, 0},          {"ring result", 4096, 0},
    };
    ring_rig r;
    open_ring(&r, DEPTH);
    if (!has_ring(&r) || kvf_checksum_bytes() == 0) {
        close_ring(&r);
        skip();
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        fail_each(&r, rows[i].name, rows[i].says, rows[i].may_fail);
    close_ring(&r);
}

/* A ring that is refused with any errno gives the other engine, and the note names it. */
static void each_refusal_of_a_ring(void **state)
{
    const int codes[] = {-EPERM, -ENOSYS, -ENOMEM, -EMFILE};
    ring_rig r;
    open_ring(&r, DEPTH);
    for (size_t i = 0; i < 2 * sizeof codes / sizeof *codes && has_ring(&r); i++) {
        kvf_io *io = NULL;
        r.fault = (ring_fault){.name = i % 2 ? "ring try" : "ring", .says = codes[i / 2]};
        assert_int_equal(kvf_io_open(r.context, DEPTH, &io), KVF_OK);
        assert_string_equal(io->ops->name, "preadv");
        assert_int_equal(r.fault.notes, 1);
        kvf_io_keep(io, &(kvf_io_kept){0}); /* nothing to do */
        kvf_io_begin(io);
        kvf_io_close(io);
    }
    close_ring(&r);
}

/* ---- a ring that works no more ---- */

static void deny_entering(void)
{
    rig_deny(SYS_io_uring_enter, UINT32_MAX, EPERM);
}

/* As daemons do: theirs and everybody else's. */
static void close_descriptors(void)
{
    for (int file = 3; file < 64; file++)
        (void)close(file);
}

/* Some requests are in the kernel, some in the queue, some held back. Each of them comes back, as
 * what was asked for or with the error, and so does what is asked for later. */
typedef struct blow {
    void (*strike)(void);
    int code;
} blow;

static int all_come_back(const void *user)
{
    const int code = ((const blow *)user)->code;
    ring_rig r;
    kvf_io_result result;
    uint32_t back = 0, failed = 0;
    open_ring(&r, DEPTH);
    if (!has_ring(&r))
        return 0;
    keep_some(&r);
    for (uint32_t tag = 0; tag < 2; tag++)
        submit(&r, 0, r.to + tag * EXTENT, tag * EXTENT, tag);
    kvf_io_begin(r.io);
    for (uint32_t tag = 2; tag < DEPTH; tag++)
        submit(&r, tag % 2, (tag % 2 ? r.from : r.to) + tag * EXTENT, tag * EXTENT, tag);
    ((const blow *)user)->strike();
    for (uint32_t i = 0; i < DEPTH; i++) {
        r.io->ops->wait(r.io, &result);
        back |= 1u << result.tag;
        failed += result.bytes == -code;
        if (result.bytes != EXTENT && result.bytes != -code)
            return 1;
    }
    if (back != (1u << DEPTH) - 1 || failed < DEPTH - 2)
        return 2;
    submit(&r, 0, r.to, 0, 0);
    r.io->ops->wait(r.io, &result);
    if (result.bytes != -code)
        return 3;
    kvf_io_close(r.io);
    return r.context->live_bytes != 0 ? 4 : 0;
}

static void works_no_more(void **state)
{
    static const blow rows[] = {{deny_entering, EPERM}, {close_descriptors, EBADF}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        rig_in_child(all_come_back, &rows[i]);
}

/* A kernel that always lags is given up, too. */
static void behind_for_good(void **state)
{
    ring_rig r;
    kvf_io_result result;
    open_ring(&r, DEPTH);
    r.fault = (ring_fault){.name = "ring wait", .says = -EAGAIN, .lasts = true};
    submit(&r, 1, r.from, 0, 0);
    r.io->ops->wait(r.io, &result);
    assert_true(result.bytes == (has_ring(&r) ? -EAGAIN : (int64_t)EXTENT));
    close_ring(&r);
}

/* ---- order ---- */

static void bundles_reads_first(void **state)
{
    ring_rig r;
    uint32_t at[DEPTH];
    open_ring(&r, DEPTH);
    assert_int_equal(pwrite(r.file, r.from, BYTES, 0), BYTES); /* the page cache has it */
    r.fault.name = "ring wait";
    for (uint32_t i = 0; i < DEPTH / 2; i++)
        submit(&r, 1, r.from + i * EXTENT, i * EXTENT, i);
    for (uint32_t i = DEPTH / 2; i < DEPTH; i++)
        submit(&r, 0, r.to + i * EXTENT, i * EXTENT, i);
    assert_int_equal(r.fault.asked, 0);
    for (uint32_t i = 0; i < DEPTH; i++) {
        at[i] = take(&r);
        if (has_ring(&r) && i == 0)
            assert_int_equal(r.fault.asked, 1);
    }
    /* Cached reads end in their order, before any write, if the kernel got them first. */
    for (uint32_t i = 0; i < DEPTH / 2 && has_ring(&r); i++)
        assert_int_equal(at[i], DEPTH / 2 + i);
    assert_memory_equal(r.from + DEPTH / 2 * EXTENT, r.to + DEPTH / 2 * EXTENT, DEPTH / 2 * EXTENT);
    close_ring(&r);
}

/* ---- what is kept ---- */

/* Pieces inside a kept buffer, across its end, and outside of all; a file that is kept, and not. */
static void move_all(ring_rig *r)
{
    memset(r->to, 0, BYTES);
    for (uint32_t i = 0; i < BYTES / EXTENT; i += DEPTH) {
        for (int is_write = 1; is_write >= 0; is_write--) {
            for (uint32_t k = 0; k < DEPTH; k++)
                submit(r, is_write, (is_write ? r->from : r->to) + (i + k) * EXTENT,
                       (uint64_t)(i + k) * EXTENT, k);
            kvf_io_begin(r->io);
            for (uint32_t k = 0; k < DEPTH; k++)
                (void)take(r);
        }
    }
    assert_memory_equal(r->from, r->to, BYTES);
}

static void kept_or_not_the_same_bytes(void **state)
{
    static const char *const refused[] = {NULL, "ring buffers", "ring files"};
    for (uint32_t i = 0; i < 3; i++) {
        ring_rig r;
        open_ring(&r, DEPTH);
        r.fault = (ring_fault){.name = refused[i], .says = 1};
        keep_some(&r);
        assert_int_equal(r.fault.notes, i > 0 && has_ring(&r));
        if (has_ring(&r) && i > 0) {
            assert_int_equal(r.io->kept_buffers > 0, i != 1);
            assert_int_equal(r.io->kept_files > 0, i != 2);
        }
        move_all(&r);
        close_ring(&r);
    }
}

static int keep_without_memlock(const void *user)
{
    ring_rig r;
    /* The kernel asks for the right to lock when a ring is made. */
    if (setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){0, 0}) != 0 ||
        (geteuid() == 0 && setuid(65534) != 0))
        return 0; /* this machine has no such limit */
    open_ring(&r, DEPTH);
    if (!has_ring(&r))
        return 0; /* older kernels count the ring itself */
    keep_some(&r);
    if (r.fault.notes != 1 || r.io->kept_buffers || !r.io->kept_files)
        return 1;
    move_all(&r);
    return 0;
}

static void kept_without_memlock(void **state)
{
    rig_in_child(keep_without_memlock, NULL);
}

/* ---- past the page cache ---- */

static void past_the_page_cache(void **state)
{
    ring_rig r;
    struct stat about;
    open_ring(&r, DEPTH);
    assert_int_equal(fstat(r.file, &about), 0);
    assert_int_equal(about.st_mode & 0777, 0600);
    assert_int_equal(about.st_nlink, 0);
    assert_int_equal(about.st_size, BYTES);
    r.fault.notes = 0;
    const uint32_t align = kvf_file_direct(r.context, "/tmp", r.file);
    assert_true(align >= 1 && EXTENT % align == 0);
    assert_int_equal((fcntl(r.file, F_GETFL) & O_DIRECT) != 0, align > 1);
    assert_int_equal(r.fault.notes, align == 1);
    keep_some(&r);
    move_all(&r);
    kvf_file_buffered(r.file);
    assert_int_equal(fcntl(r.file, F_GETFL) & O_DIRECT, 0);
    r.fault = (ring_fault){.name = "direct", .says = 1};
    assert_int_equal(kvf_file_direct(r.context, "/tmp", r.file), 1);
    assert_int_equal(r.fault.notes, 1);
    move_all(&r);
    close_ring(&r);
}

/* Where a file system has none without a name, one has a name for a moment. */
static void files_without_a_name(void **state)
{
    char folder[] = "/tmp/kvf-io-XXXXXX", bytes[] = "still here";
    ring_rig r;
    struct stat about;
    int file;
    assert_non_null(mkdtemp(folder));
    open_ring(&r, DEPTH);
    for (int says = 0; says < 2; says++) {
        r.fault = (ring_fault){.name = "file without a name", .says = says};
        assert_int_equal(kvf_file_scratch(r.context, folder, 8192, &file), KVF_OK);
        assert_int_equal(r.fault.asked, 1);
        assert_int_equal(fstat(file, &about), 0);
        assert_true((about.st_mode & 07777) == 0600 && about.st_nlink == 0 &&
                    about.st_size == 8192);
        assert_int_equal(rmdir(folder), 0); /* it is empty */
        assert_int_equal(pwrite(file, bytes, sizeof bytes, 100), sizeof bytes);
        assert_int_equal(mkdir(folder, 0700), 0);
        close(file);
    }
    assert_int_equal(rmdir(folder), 0);
    close_ring(&r);
}

static void files_that_cannot_be(void **state)
{
    ring_rig r;
    kvf_error error;
    int file = 3, pipes[2];
    open_ring(&r, DEPTH);
    assert_int_equal(kvf_file_scratch(r.context, "/tmp/no such folder", 4096, &file), KVF_SYSTEM);
    kvf_context_error(r.context, &error);
    assert_true(file == -1 && error.foreign == ENOENT && strstr(error.text, "no such folder"));
    static const char *const names[] = {"file open", "file reserve"};
    for (uint32_t i = 0; i < 2; i++) {
        r.fault = (ring_fault){.name = names[i], .says = 1};
        assert_int_equal(kvf_file_scratch(r.context, "/tmp", 4096, &file), KVF_SYSTEM);
        assert_int_equal(file, -1);
    }
    assert_int_equal(kvf_file_scratch(r.context, "/tmp", (uint64_t)1 << 62, &file), KVF_SYSTEM);
    assert_int_equal(pipe(pipes), 0); /* knows nothing of it */
    assert_int_equal(kvf_file_direct(r.context, "pipe", pipes[0]), 1);
    close(pipes[0]);
    close(pipes[1]);
    close_ring(&r);
}

int main(void)
{
    /* The first ones fork. */
    return unit_run(kept_without_memlock, works_no_more, behind_for_good, each_call_fails_once,
                    each_refusal_of_a_ring, bundles_reads_first, kept_or_not_the_same_bytes,
                    past_the_page_cache, files_without_a_name, files_that_cannot_be);
}
