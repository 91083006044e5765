/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Extents to and from a file, and checksums; see the header.
 *
 * Knows nothing of engines beyond their table. Requests are kept in a ring: the oldest is retired
 * first, so that checksums see bytes in their order though requests may end in any.
 */

#include "extents.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>

#include "common/files.h"
#include "common/text.h"

#if KVF_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

#define TRIES_MAX 64u
#define UNMOVED   SIZE_MAX

typedef struct transfer {
    struct iovec pieces[KVF_IO_PIECES_MAX]; /* all of it */
    struct iovec left[KVF_IO_PIECES_MAX];   /* still to be moved: first .. count - 1 */
    size_t number[KVF_IO_PIECES_MAX];       /* of a piece that is in the buffer; else UNMOVED */
    size_t within[KVF_IO_PIECES_MAX];       /* where in that piece */
    uint32_t first, count;
    uint32_t tries; /* without progress */
    bool is_submitted, is_done;
    uint64_t offset; /* in the file, of what is left */
    size_t bytes;    /* left */
    uint64_t end;    /* in the data */
} transfer;

typedef struct mover {
    const kvf_extents *e;
    const struct iovec *pieces;
    size_t count;
    bool is_write;
    size_t piece, used;  /* cursor: the next piece, and how much of it is in requests already */
    uint64_t at, bytes;  /* the same in the data, and its end */
    uint64_t head, tail; /* requests retired, and begun */
    uint32_t in_flight, depth;
    kvf_checksum *sum;
    transfer *ring; /* [depth] */
    char *buffers;  /* [depth, extent_bytes] of pieces that are not in memory, or NULL */
} mover;

/* ---- requests from pieces ---- */

static void add_sum(mover *m, const transfer *t)
{
    const uint32_t extent = m->e->extent_bytes;
    for (uint32_t i = 0; i < t->count; i++)
        kvf_checksum_add(m->sum, t->pieces[i].iov_base, t->pieces[i].iov_len);
    if (t->end % extent != 0 && t->end != m->bytes)
        return;
    if (m->is_write)
        m->e->checksums[(t->end - 1) / extent] = kvf_checksum_end(m->sum);
}

/* Pieces of a request that are not in memory, to or from its buffer. */
static kvf_status move_pieces(const mover *m, const transfer *t)
{
    for (uint32_t i = 0; m->buffers && i < t->count; i++)
        if (t->number[i] != UNMOVED)
            KVF_TRY(m->e->move(m->e->user, t->number[i], t->within[i], t->pieces[i].iov_len,
                               t->pieces[i].iov_base));
    return KVF_OK;
}

/* The next request: to the end of its extent at most. */
static void build(mover *m, transfer *t)
{
    char *const buffer =
        m->buffers ? m->buffers + (size_t)(t - m->ring) * m->e->extent_bytes : NULL;
    const uint32_t extent = m->e->extent_bytes;
    const uint64_t room = extent - m->at % extent;
    size_t wanted = (size_t)(m->bytes - m->at < room ? m->bytes - m->at : room);
    *t = (transfer){.offset = m->e->offset + m->at};
    while (wanted && t->count < KVF_IO_PIECES_MAX) {
        const struct iovec *from = &m->pieces[m->piece];
        const size_t rest = from->iov_len - m->used, part = rest < wanted ? rest : wanted;
        if (part) {
            const bool is_there = from->iov_base != NULL;
            t->number[t->count] = is_there ? UNMOVED : m->piece;
            t->within[t->count] = m->used;
            t->pieces[t->count++] = (struct iovec){
                is_there ? (char *)from->iov_base + m->used : buffer + t->bytes, part};
        }
        t->bytes += part;
        wanted -= part;
        m->used += part;
        if (m->used == from->iov_len) {
            m->piece++;
            m->used = 0;
        }
    }
    memcpy(t->left, t->pieces, t->count * sizeof *t->left);
    m->at += t->bytes;
    t->end = m->at;
}

/* ---- moving ---- */

static kvf_status failed(const mover *m, int code)
{
    if (m->is_write)
        return kvf_fail(m->e->context, KVF_SYSTEM, code,
                        "%s: writing %llu bytes failed: %s%s; nothing was saved, the sequence is "
                        "as it was",
                        m->e->path, (unsigned long long)m->bytes, kvf_errno_text(code),
                        kvf_errno_fix(code));
    return kvf_fail(m->e->context, KVF_SYSTEM, code, "%s: reading failed: %s%s", m->e->path,
                    kvf_errno_text(code), kvf_errno_fix(code));
}

static kvf_status try_again(const mover *m, transfer *t, int code)
{
    t->is_submitted = false;
    if (++t->tries == TRIES_MAX)
        return failed(m, code);
    if (t->tries > TRIES_MAX / 8)
        (void)nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    return KVF_OK;
}

static kvf_status submit(mover *m, uint64_t number)
{
    transfer *t = &m->ring[number % m->depth];
    const kvf_io_request request = {.file = m->e->file,
                                    .is_write = m->is_write ? 1u : 0u,
                                    .offset = t->offset,
                                    .pieces = t->left + t->first,
                                    .count = t->count - t->first,
                                    .tag = (uint32_t)(number % m->depth)};
    const int code = m->e->io->ops->submit(m->e->io, &request);
    if (code == 0) {
        t->is_submitted = true;
        m->in_flight++;
        if (m->is_write) /* while its checksum has left it in the processor's cache */
            kvf_io_begin(m->e->io);
        return KVF_OK;
    }
    /* A full queue has room again once something in it has ended. */
    if (code == -EBUSY && m->in_flight)
        return KVF_OK;
    return code == -EBUSY || code == -EAGAIN ? try_again(m, t, -code) : failed(m, -code);
}

static void advance(transfer *t, size_t bytes)
{
    t->offset += bytes;
    t->bytes -= bytes;
    t->tries = 0;
    while (bytes) {
        struct iovec *piece = &t->left[t->first];
        const size_t part = bytes < piece->iov_len ? bytes : piece->iov_len;
        piece->iov_base = (char *)piece->iov_base + part;
        piece->iov_len -= part;
        bytes -= part;
        t->first += piece->iov_len == 0;
    }
}

static kvf_status ended(mover *m, const kvf_io_result *r)
{
    transfer *t = &m->ring[r->tag];
    const int code = r->bytes < 0 ? (int)-r->bytes : 0;
    if (code == EAGAIN || code == EINTR || code == ECANCELED)
        return try_again(m, t, code);
    if (code)
        return failed(m, code);
    if (r->bytes == 0 && !m->is_write)
        KVF_FAIL(m->e->context, KVF_CORRUPT,
                 "%s ends at byte %llu, before its data does: it was cut short; save it again",
                 m->e->path, (unsigned long long)t->offset);
    if (r->bytes == 0)
        return try_again(m, t, EIO);
    KVF_ASSERT((uint64_t)r->bytes <= t->bytes);
    advance(t, (size_t)r->bytes);
    t->is_submitted = false;
    t->is_done = t->bytes == 0;
    return KVF_OK;
}

/* The medium may begin with an extent, so that it works while later ones are checksummed, and has
 * little left when the file is made durable. */
static void begin_writing(const mover *m, uint64_t at)
{
    (void)sync_file_range(m->e->file, (off64_t)(m->e->offset + at), m->e->extent_bytes,
                          SYNC_FILE_RANGE_WRITE);
}

static kvf_status retire(mover *m)
{
    while (m->head < m->tail && m->ring[m->head % m->depth].is_done) {
        const transfer *t = &m->ring[m->head++ % m->depth];
        const uint32_t extent = m->e->extent_bytes;
        if (m->is_write) {
            if (t->end % extent == 0)
                begin_writing(m, t->end - extent);
            continue;
        }
        add_sum(m, t);
        KVF_TRY(move_pieces(m, t));
        if (t->end % extent != 0 && t->end != m->bytes)
            continue;
        if (kvf_checksum_end(m->sum) != m->e->checksums[(t->end - 1) / extent])
            KVF_FAIL(m->e->context, KVF_CORRUPT,
                     "%s: bytes %llu to %llu are not those that were saved; the file is damaged",
                     m->e->path,
                     (unsigned long long)(m->e->offset + (t->end - 1) / extent * extent),
                     (unsigned long long)(m->e->offset + t->end - 1));
        kvf_checksum_begin(m->sum);
    }
    return KVF_OK;
}

static kvf_status begin_more(mover *m)
{
    for (uint64_t i = m->head; i < m->tail; i++) {
        const transfer *t = &m->ring[i % m->depth];
        if (!t->is_done && !t->is_submitted)
            KVF_TRY(submit(m, i));
    }
    while (m->at < m->bytes && m->tail - m->head < m->depth) {
        transfer *t = &m->ring[m->tail % m->depth];
        build(m, t);
        if (m->is_write) {
            KVF_TRY(move_pieces(m, t));
            add_sum(m, t);
            if (t->end % m->e->extent_bytes == 0)
                kvf_checksum_begin(m->sum);
        }
        KVF_TRY(submit(m, m->tail++));
    }
    return KVF_OK;
}

static kvf_status wait_one(mover *m)
{
    kvf_io_result result;
    if (m->in_flight == 0)
        return KVF_OK;
    m->e->io->ops->wait(m->e->io, &result);
    m->in_flight--;
    return ended(m, &result);
}

/* After a failure: what is in flight still uses the caller's memory. */
static void drain(mover *m)
{
    kvf_io_result unused;
    for (; m->in_flight; m->in_flight--)
        m->e->io->ops->wait(m->e->io, &unused);
}

static kvf_status run(mover *m)
{
    kvf_checksum_begin(m->sum);
    while (m->at < m->bytes || m->head < m->tail) {
        KVF_TRY(begin_more(m));
        KVF_TRY(wait_one(m));
        KVF_TRY(retire(m));
    }
    return KVF_OK;
}

static kvf_status move_all(const kvf_extents *e, const struct iovec *pieces, size_t count,
                           bool is_write)
{
    const uint32_t depth = kvf_min_u32(e->io->depth, KVF_EXTENT_DEPTH);
    mover m = {.e = e, .pieces = pieces, .count = count, .is_write = is_write, .depth = depth};
    for (size_t i = 0; i < count; i++)
        m.bytes += pieces[i].iov_len;
    m.sum = kvf_alloc(e->context, 1, kvf_checksum_bytes());
    m.ring = kvf_alloc(e->context, depth, sizeof *m.ring);
    m.buffers = e->move ? kvf_alloc(e->context, depth, e->extent_bytes) : NULL;
    kvf_status status = m.sum && m.ring && (m.buffers || !e->move)
                            ? run(&m)
                            : kvf_fail(e->context, KVF_OUT_OF_MEMORY, 0,
                                       "no memory for %u requests of a file", depth);
    drain(&m);
    kvf_free(e->context, m.buffers);
    kvf_free(e->context, m.ring);
    kvf_free(e->context, m.sum);
    return status;
}

kvf_status kvf_extents_write(const kvf_extents *e, const struct iovec *pieces, size_t count)
{
    return move_all(e, pieces, count, true);
}

kvf_status kvf_extents_read(const kvf_extents *e, const struct iovec *pieces, size_t count)
{
    return move_all(e, pieces, count, false);
}

/* ---- checksums ---- */

#if KVF_HAVE_XXHASH

static XXH3_state_t *state_of(kvf_checksum *sum)
{
    return (XXH3_state_t *)(void *)sum;
}

size_t kvf_checksum_bytes(void)
{
    return sizeof(XXH3_state_t);
}

void kvf_checksum_begin(kvf_checksum *sum)
{
    (void)XXH3_64bits_reset(state_of(sum));
}

void kvf_checksum_add(kvf_checksum *sum, const void *data, size_t bytes)
{
    (void)XXH3_64bits_update(state_of(sum), data, bytes);
}

uint64_t kvf_checksum_end(const kvf_checksum *sum)
{
    return XXH3_64bits_digest((const XXH3_state_t *)(const void *)sum);
}

uint64_t kvf_checksum_of(const void *data, size_t bytes)
{
    return XXH3_64bits(data, bytes);
}

#else

size_t kvf_checksum_bytes(void)
{
    return 0;
}

void kvf_checksum_begin(kvf_checksum *sum)
{
    (void)sum;
}

void kvf_checksum_add(kvf_checksum *sum, const void *data, size_t bytes)
{
    (void)sum, (void)data, (void)bytes;
}

uint64_t kvf_checksum_end(const kvf_checksum *sum)
{
    (void)sum;
    return 0;
}

uint64_t kvf_checksum_of(const void *data, size_t bytes)
{
    (void)data, (void)bytes;
    return 0;
}

#endif
