/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of saving.h. The file of a saved sequence, open for reading: its header, and its bytes into
 * memory.
 *
 * Knows no cache. A file may shrink or change while it is read: whatever was read was checked.
 */

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "common/files.h"
#include "common/text.h"
#include "extents.h"
#include "saving.h"

#define CHECK_BYTES ((size_t)8 << 20) /* memory of a check */

static kvf_status failed(const kvf_saved_file *f, const char *what, int code)
{
    return kvf_fail(f->context, KVF_SYSTEM, code, "%s: %s: %s%s", f->path, what,
                    kvf_errno_text(code), kvf_errno_fix(code));
}

static kvf_status read_at(const kvf_saved_file *f, char *to, size_t bytes, uint64_t offset)
{
    while (bytes) {
        const int is_refused = kvf_context_refuses(f->context, "file read");
        const ssize_t n = is_refused ? -1 : pread(f->file, to, bytes, (off_t)offset);
        if (n < 0 && !is_refused && errno == EINTR)
            continue;
        if (n < 0)
            return failed(f, "reading failed", is_refused ? EIO : errno);
        if (n == 0)
            KVF_FAIL(f->context, KVF_CORRUPT,
                     "%s ends at byte %llu, inside its header: it is no saved sequence, or was "
                     "cut short",
                     f->path, (unsigned long long)offset);
        to += n;
        offset += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return KVF_OK;
}

static kvf_status read_header(kvf_saved_file *f)
{
    char first[KVF_SAVED_HEAD_ALIGN];
    uint64_t bytes = 0;
    KVF_TRY(read_at(f, first, f->bytes < sizeof first ? (size_t)f->bytes : sizeof first, 0));
    KVF_TRY(kvf_saved_measure(f->context, f->path, first,
                              f->bytes < sizeof first ? (size_t)f->bytes : sizeof first, &bytes));
    if (bytes > f->bytes)
        KVF_FAIL(f->context, KVF_CORRUPT,
                 "%s has %llu bytes, and its header says that the header alone has %llu; it was "
                 "cut short",
                 f->path, (unsigned long long)f->bytes, (unsigned long long)bytes);
    f->buffer = kvf_alloc(f->context, 1, bytes);
    if (!f->buffer)
        KVF_FAIL(f->context, KVF_OUT_OF_MEMORY, "no memory for the header of %s (%llu bytes)",
                 f->path, (unsigned long long)bytes);
    KVF_TRY(read_at(f, f->buffer, bytes, 0));
    return kvf_saved_parse(f->context, f->path, f->buffer, bytes, f->bytes, &f->header);
}

kvf_status kvf_saved_engine(const kvf_runtime *runtime, kvf_context *context, kvf_io **out)
{
    const kvf_io_ops *engine = runtime->test_hooks.io_engine;
    *out = NULL;
    if (kvf_context_refuses(context, "engine"))
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory to read or write files");
    return engine ? engine->open(context, KVF_EXTENT_DEPTH, out)
                  : kvf_io_open(context, KVF_EXTENT_DEPTH, out);
}

kvf_status kvf_saved_open(const kvf_runtime *runtime, const char *path, kvf_saved_file *out)
{
    kvf_context *context = runtime->context;
    *out = (kvf_saved_file){.context = context, .runtime = runtime, .path = path, .file = -1};
    if (kvf_checksum_bytes() == 0)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "this build cannot save or restore sequences; install libxxhash-dev and build "
                 "with -Dxxhash=enabled");
    struct stat about;
    const int is_refused = kvf_context_refuses(context, "file open");
    out->file = is_refused ? -1 : kvf_open_regular(path, &about);
    if (out->file == KVF_NO_REGULAR_FILE)
        KVF_FAIL(context, KVF_INVALID, "path = %.300s: it is no regular file", path);
    if (out->file < 0)
        return failed(out, "it cannot be opened", is_refused ? EIO : errno);
    out->bytes = (uint64_t)about.st_size;
    return read_header(out);
}

void kvf_pieces_add(kvf_pieces *pieces, void *at, size_t bytes)
{
    struct iovec *last = pieces->count ? &pieces->of[pieces->count - 1] : NULL;
    if (last && last->iov_base && (char *)last->iov_base + last->iov_len == at)
        last->iov_len += bytes;
    else if (bytes)
        pieces->of[pieces->count++] = (struct iovec){at, bytes};
}

void kvf_pieces_add_block(kvf_pieces *pieces, kvf_page_pool *pool, kvf_block block, size_t bytes)
{
    void *at = kvf_page_pool_lasting(pool, block);
    if (at) {
        kvf_pieces_add(pieces, at, bytes);
        return;
    }
    pieces->has_blocks = true;
    pieces->blocks[pieces->count] = (kvf_piece_block){pool, block};
    pieces->of[pieces->count++] = (struct iovec){NULL, bytes};
}

static kvf_status put_block(void *user, size_t piece, size_t offset, size_t bytes, char *buffer)
{
    const kvf_piece_block *b = (const kvf_piece_block *)user + piece;
    return kvf_page_pool_copy_in(b->pool, b->block, offset, bytes, buffer);
}

kvf_status kvf_saved_fill(const kvf_saved_file *f, const kvf_pieces *pieces)
{
    kvf_io *io = NULL;
    KVF_TRY(kvf_saved_engine(f->runtime, f->context, &io));
    const kvf_extents e = {.context = f->context,
                           .io = io,
                           .path = f->path,
                           .file = f->file,
                           .extent_bytes = f->header.head->extent_bytes,
                           .offset = f->header.head->header_bytes,
                           .checksums = f->header.checksums,
                           .move = pieces->has_blocks ? put_block : NULL,
                           .user = pieces->blocks};
    const kvf_status status = kvf_extents_read(&e, pieces->of, pieces->count);
    kvf_io_close(io);
    return status;
}

kvf_status kvf_saved_check(const kvf_saved_file *f)
{
    const uint64_t bytes = f->header.head->data_bytes;
    const uint32_t extent = f->header.head->extent_bytes;
    /* Whole extents at a time, into the same memory again. */
    const uint64_t part = kvf_round_up(extent > CHECK_BYTES ? extent : CHECK_BYTES, extent);
    char *memory = kvf_alloc(f->context, 1, part < bytes ? part : bytes);
    kvf_io *io = NULL;
    if (!memory)
        KVF_FAIL(f->context, KVF_OUT_OF_MEMORY, "no memory to check %s", f->path);
    kvf_status status = kvf_saved_engine(f->runtime, f->context, &io);
    for (uint64_t at = 0; at < bytes && status == KVF_OK; at += part) {
        const struct iovec piece = {memory, bytes - at < part ? bytes - at : part};
        const kvf_extents e = {.context = f->context,
                               .io = io,
                               .path = f->path,
                               .file = f->file,
                               .extent_bytes = extent,
                               .offset = f->header.head->header_bytes + at,
                               .checksums = f->header.checksums + at / extent};
        status = kvf_extents_read(&e, &piece, 1);
    }
    kvf_io_close(io);
    kvf_free(f->context, memory);
    return status;
}

void kvf_saved_close(kvf_saved_file *f)
{
    if (f->file >= 0)
        (void)close(f->file);
    kvf_free(f->context, f->buffer);
    *f = (kvf_saved_file){.file = -1};
}
