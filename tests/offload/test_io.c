/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Engines for files: every engine moves the same bytes, in pieces of any size; a ring that is
 * refused, by the hook, by a sandbox or by the limit of locked memory, gives the other engine; a
 * new file is there whole or not at all.
 */

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "extents.h"
#include "offload_rig.h"
#include "plain_file.h"

#define BYTES  300000u
#define EXTENT 8192u
#define PIECES 1500u

static kvf_context *open_context(void)
{
    kvf_context *context = NULL;
    assert_int_equal(kvf_context_create(&(kvf_allocator){0}, NULL, NULL, &context), KVF_OK);
    return context;
}

static void close_context(kvf_context *context)
{
    assert_int_equal(context->live_bytes, 0);
    kvf_context_destroy(context);
}

static int temporary_file(void)
{
    char name[] = "/tmp/kvf-io-XXXXXX";
    const int file = mkstemp(name);
    assert_true(file >= 0);
    assert_int_equal(unlink(name), 0);
    return file;
}

/* Engine 0 is the plain one, engine 1 the best there is. */
static kvf_io *open_engine(kvf_context *context, int which, uint32_t depth)
{
    kvf_io *io = NULL;
    assert_int_equal(
        which ? kvf_io_open(context, depth, &io) : kvf_io_plain.open(context, depth, &io), KVF_OK);
    return io;
}

/* Random cuts of BYTES bytes: many pieces per extent, and pieces of many extents. */
static uint32_t cut(rig_random *r, char *memory, struct iovec *pieces)
{
    uint32_t count = 0;
    for (size_t at = 0; at < BYTES; count++) {
        const uint32_t most = rig_below(r, 8) ? 100 : 30000;
        size_t bytes = rig_below(r, most); /* nothing is a piece too */
        if (bytes > BYTES - at || count + 1 == PIECES)
            bytes = BYTES - at;
        pieces[count] = (struct iovec){memory + at, bytes};
        at += bytes;
    }
    return count;
}

TEST(engines_move_the_same_bytes)
{
    if (kvf_checksum_bytes() == 0)
        skip();
    kvf_context *context = open_context();
    rig_random r = rig_seed("engines", 31);
    static char from[BYTES], to[BYTES];
    static struct iovec pieces[PIECES];
    uint64_t sums[BYTES / EXTENT + 1];
    for (uint32_t i = 0; i < BYTES; i++)
        from[i] = (char)rig_next(&r);
    for (uint32_t depth = 1; depth <= 64; depth *= 4)
        for (int writer = 0; writer < 2; writer++) {
            const int file = temporary_file();
            kvf_io *io = open_engine(context, writer, depth);
            kvf_extents e = {.context = context,
                             .io = io,
                             .path = "test",
                             .file = file,
                             .extent_bytes = EXTENT,
                             .offset = 77,
                             .checksums = sums};
            assert_int_equal(kvf_extents_write(&e, pieces, cut(&r, from, pieces)), KVF_OK);
            kvf_io_close(io);
            e.io = io = open_engine(context, 1 - writer, depth);
            memset(to, 0, sizeof to);
            assert_int_equal(kvf_extents_read(&e, pieces, cut(&r, to, pieces)), KVF_OK);
            assert_memory_equal(from, to, BYTES);
            sums[3] ^= 1;
            assert_int_equal(kvf_extents_read(&e, pieces, cut(&r, to, pieces)), KVF_CORRUPT);
            sums[3] ^= 1;
            assert_int_equal(ftruncate(file, BYTES), 0);
            assert_int_equal(kvf_extents_read(&e, pieces, cut(&r, to, pieces)), KVF_CORRUPT);
            kvf_io_close(io);
            close(file);
        }
    close_context(context);
}

TEST(a_full_queue_takes_nothing)
{
    kvf_context *context = open_context();
    for (int which = 0; which < 2; which++) {
        const int file = temporary_file();
        kvf_io *io = open_engine(context, which, 4);
        char bytes[8] = "seven..";
        const struct iovec piece = {bytes, sizeof bytes};
        kvf_io_result result;
        for (uint32_t i = 0; i < 6; i++) {
            const kvf_io_request request = {.file = file,
                                            .is_write = 1,
                                            .offset = i * sizeof bytes,
                                            .pieces = &piece,
                                            .count = 1,
                                            .tag = i};
            assert_int_equal(io->ops->submit(io, &request), i < 4 ? 0 : -EBUSY);
        }
        uint32_t tags = 0;
        for (uint32_t i = 0; i < 4; i++) {
            io->ops->wait(io, &result);
            assert_int_equal(result.bytes, sizeof bytes);
            tags |= 1u << result.tag;
        }
        assert_int_equal(tags, 15);
        const kvf_io_request bad = {.file = -1, .pieces = &piece, .count = 1, .tag = 9};
        assert_int_equal(io->ops->submit(io, &bad), 0);
        io->ops->wait(io, &result);
        assert_int_equal(result.bytes, -EBADF);
        kvf_io_close(io);
        close(file);
    }
    close_context(context);
}

/* ---- a ring that is refused ---- */

static int refuse_ring(void *user, const char *what)
{
    return strcmp(what, "ring") == 0;
}

static void note(void *user, int level, const char *line)
{
    *(int *)user += strstr(line, "one request at a time") != NULL;
}

TEST(refused_by_the_hook)
{
    int notes = 0;
    kvf_context *context = NULL;
    assert_int_equal(kvf_context_create(&(kvf_allocator){0}, note, &notes, &context), KVF_OK);
    context->fault = refuse_ring;
    kvf_io *io = open_engine(context, 1, 8);
    assert_string_equal(io->ops->name, "preadv");
    assert_int_equal(notes, KVF_HAVE_URING);
    kvf_io_close(io);
    close_context(context);
}

/* A way to refuse a ring, and the engine that opens instead; NULL: any. */
typedef struct refused {
    void (*refuse)(void);
    const char *engine;
} refused;

/* 0 if it moves bytes. */
static int engine_works(const void *user)
{
    const refused *row = user;
    row->refuse();
    kvf_context *context = open_context();
    const int file = temporary_file();
    char bytes[16] = "bytes";
    const struct iovec piece = {bytes, sizeof bytes};
    uint64_t sum = 0;
    kvf_io *io = NULL;
    if (kvf_io_open(context, 64, &io) != KVF_OK ||
        (row->engine && strcmp(io->ops->name, row->engine) != 0))
        return 1;
    const kvf_extents e = {.context = context,
                           .io = io,
                           .path = "test",
                           .file = file,
                           .extent_bytes = EXTENT,
                           .checksums = &sum};
    const kvf_status status = kvf_checksum_bytes() ? kvf_extents_write(&e, &piece, 1) : KVF_OK;
    kvf_io_close(io);
    return status != KVF_OK;
}

static void refuse_making(void)
{
    rig_deny(SYS_io_uring_setup, UINT32_MAX, EPERM);
}

/* Made, and of no use. */
static void refuse_entering(void)
{
    rig_deny(SYS_io_uring_enter, UINT32_MAX, EPERM);
}

static void always_interrupted(void)
{
    rig_deny(SYS_io_uring_enter, UINT32_MAX, EINTR);
}

static void refuse_memory(void)
{
    (void)setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){0, 0});
}

TEST(refused_by_the_system)
{
    static const refused rows[] = {{refuse_making, "preadv"},
                                   {refuse_entering, "preadv"},
                                   {always_interrupted, "preadv"},
                                   {refuse_memory, NULL}}; /* newer kernels do not count rings */
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        rig_in_child(engine_works, &rows[i]);
}

/* ---- new files ---- */

TEST(whole_or_not_at_all)
{
    char folder[] = "/tmp/kvf-new-XXXXXX", path[64], before[] = "old", after[8] = "";
    kvf_context *context = open_context();
    kvf_new_file f;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/file", folder);
    FILE *old = fopen(path, "w");
    assert_int_equal(fwrite(before, 1, sizeof before, old), sizeof before);
    fclose(old);
    for (int commits = 0; commits < 2; commits++) {
        assert_int_equal(kvf_new_file_open(context, path, &f), KVF_OK);
        assert_int_equal(kvf_file_reserve(context, path, f.file, 4), KVF_OK);
        assert_int_equal(pwrite(f.file, "new", 4, 0), 4);
        if (commits)
            assert_int_equal(kvf_new_file_commit(&f), KVF_OK);
        kvf_new_file_close(&f);
        FILE *file = fopen(path, "r");
        assert_int_equal(fread(after, 1, sizeof after, file), 4);
        fclose(file);
        assert_string_equal(after, commits ? "new" : "old");
    }
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0); /* nothing but a file is replaced */
    assert_int_equal(kvf_new_file_open(context, path, &f), KVF_INVALID);
    kvf_new_file_close(&f);
    assert_int_equal(kvf_new_file_open(context, folder, &f), KVF_INVALID);
    kvf_new_file_close(&f);
    assert_int_equal(unlink(path), 0);  /* still there */
    assert_int_equal(rmdir(folder), 0); /* nothing else is there */
    assert_int_equal(kvf_new_file_open(context, path, &f), KVF_SYSTEM);
    kvf_new_file_close(&f);
    close_context(context);
}

/* Whoever could read or write the old file can do so with the new one, by the same names. */
TEST(stays_whose_it_was)
{
    char folder[] = "/tmp/kvf-owner-XXXXXX", path[64], link[64], other[64];
    kvf_context *context = open_context();
    kvf_new_file f;
    struct stat old, new;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/file", folder);
    snprintf(link, sizeof link, "%s/link", folder);
    snprintf(other, sizeof other, "%s/other", folder);
    fclose(fopen(path, "w"));
    assert_int_equal(chmod(path, 0664), 0);
    (void)!chown(path, 12, 34); /* as root */
    assert_int_equal(stat(path, &old), 0);
    assert_int_equal(symlink("other", link), 0);
    assert_int_equal(symlink("file", other), 0);
    for (uint32_t i = 0; i < 2; i++) { /* the second time the link leads nowhere */
        assert_int_equal(kvf_new_file_open(context, link, &f), KVF_OK);
        assert_int_equal(pwrite(f.file, "new", 4, 0), 4);
        assert_int_equal(kvf_new_file_commit(&f), KVF_OK);
        kvf_new_file_close(&f);
        assert_int_equal(lstat(path, &new), 0);
        assert_true(S_ISREG(new.st_mode) && new.st_size == 4);
        assert_int_equal(new.st_mode & 07777, i ? 0600 : 0664);
        assert_true(i || (new.st_uid == old.st_uid &&new.st_gid == old.st_gid));
        assert_int_equal(lstat(link, &new), 0);
        assert_true(S_ISLNK(new.st_mode));
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(unlink(link), 0);
    assert_int_equal(symlink("link", link), 0); /* a circle */
    assert_int_equal(kvf_new_file_open(context, link, &f), KVF_SYSTEM);
    kvf_new_file_close(&f);
    assert_true(unlink(link) == 0 && unlink(other) == 0 && rmdir(folder) == 0);
    close_context(context);
}

/* The name under which it is written is cut where it would be too long. */
TEST(names_of_any_length)
{
    char folder[] = "/tmp/kvf-names-XXXXXX", path[400];
    kvf_context *context = open_context();
    kvf_new_file f;
    assert_non_null(mkdtemp(folder));
    for (int length = 240; length <= 256; length++) {
        snprintf(path, sizeof path, "%s/%0*d", folder, length, 0);
        const kvf_status status = kvf_new_file_open(context, path, &f);
        assert_int_equal(status, length <= 255 ? KVF_OK : KVF_SYSTEM);
        if (status == KVF_OK) {
            assert_int_equal(kvf_new_file_commit(&f), KVF_OK);
            kvf_new_file_close(&f);
            assert_int_equal(unlink(path), 0);
            assert_int_equal(kvf_new_file_open(context, path, &f), KVF_OK);
        } else {
            assert_non_null(strstr(kvf_context_last(context)->text, "File name too long"));
        }
        kvf_new_file_close(&f);
    }
    assert_int_equal(rmdir(folder), 0);
    close_context(context);
}

/* In a process that RLIMIT_FSIZE holds, and that SIGXFSZ would end: 0 if it is told, and lives. */
static int limited(const void *user)
{
    kvf_context *context = open_context();
    int file;
    (void)signal(SIGXFSZ, SIG_DFL);
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){65536, 65536}) != 0)
        return 1;
    if (kvf_file_scratch(context, "/tmp", 65537, &file) != KVF_SYSTEM)
        return 2;
    if (!strstr(kvf_context_last(context)->text, "RLIMIT_FSIZE is the limit: raise `ulimit -f`"))
        return 3;
    if (kvf_file_scratch(context, "/tmp", 65536, &file) != KVF_OK)
        return 4;
    (void)close(file);
    close_context(context);
    return 0;
}

TEST(a_limit_of_file_sizes_is_named)
{
    rig_in_child(limited, NULL);
}

/* The access list of a shared folder's file; where the file system has such lists. */
TEST(keeps_access_lists)
{
    /* user::rw-, user:12:rw-, group::r--, mask::rw-, other::--- */
    static const uint32_t list[] = {2,          0x00060001, UINT32_MAX, 0x00060002,
                                    12,         0x00040004, UINT32_MAX, 0x00060010,
                                    UINT32_MAX, 0x00000020, UINT32_MAX};
    char path[] = "/tmp/kvf-list-XXXXXX", found[128];
    kvf_context *context = open_context();
    kvf_new_file f;
    const int file = mkstemp(path);
    const char *const name = "system.posix_acl_access";
    const bool has_lists = fsetxattr(file, name, list, sizeof list, 0) == 0;
    close(file);
    assert_int_equal(kvf_new_file_open(context, path, &f), KVF_OK);
    assert_int_equal(kvf_new_file_commit(&f), KVF_OK);
    kvf_new_file_close(&f);
    if (has_lists) {
        assert_int_equal(getxattr(path, name, found, sizeof found), sizeof list);
        assert_memory_equal(found, list, sizeof list);
    }
    assert_int_equal(unlink(path), 0);
    close_context(context);
    if (!has_lists)
        skip();
}
