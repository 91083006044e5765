/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bundles in page frames and in a file; see the header.
 *
 * Knows nothing of who selects what. The file is plain_file.c's. The lock guards which page frame a
 * bundle has, because a save reads blocks from a thread of its own.
 */

#include "disk_tier.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "common/carve.h"
#include "common/clock.h"
#include "common/files.h"
#include "common/text.h"

#define NONE      KVF_DISK_NONE
#define TRIES_MAX 64u
#define LATEST    0x8000u

/* ---- which page frame goes ---- */

/* As it is now, after calls for its group that did not use it. */
static uint32_t history(const kvf_disk_policy *p, const kvf_disk_use *u)
{
    const uint32_t age = p->groups[u->group].turns - u->turn;
    return age < 16 ? (uint32_t)u->history >> age : 0;
}

void kvf_disk_policy_use(kvf_disk_policy *p, uint32_t bundle, uint32_t group, uint64_t call)
{
    kvf_disk_turn *turn = &p->groups[group];
    kvf_disk_use *u = &p->uses[bundle];
    if (turn->call != call)
        turn->turns++;
    turn->call = call;
    const uint32_t before = history(p, u);
    *u = (kvf_disk_use){turn->turns, (uint16_t)group, (uint16_t)(before | LATEST)};
}

void kvf_disk_policy_drop(kvf_disk_policy *p, uint32_t bundle)
{
    p->uses[bundle].history = 0;
}

static uint32_t after(const kvf_disk_policy *p, uint32_t page_frame)
{
    return page_frame + 1 == p->page_frames ? 0 : page_frame + 1;
}

uint32_t kvf_disk_policy_victim(kvf_disk_policy *p, kvf_disk_may may, const void *user)
{
    uint32_t victim = NONE, least = 0, compared = 0;
    uint64_t latest = 0;
    for (uint32_t i = 0; i < p->page_frames && compared < KVF_DISK_COMPARED; i++) {
        const uint32_t page_frame = p->hand;
        p->hand = after(p, page_frame);
        if (!may(user, page_frame))
            continue;
        const kvf_disk_use *u = &p->uses[p->bundles[page_frame]];
        const uint32_t now = history(p, u);
        const uint64_t call = p->groups[u->group].call;
        compared++;
        if (victim != NONE && (now > least || (now == least && call <= latest)))
            continue;
        victim = page_frame;
        least = now;
        latest = call;
    }
    return victim;
}

uint32_t kvf_disk_policy_next(const kvf_disk_policy *p, uint32_t most, kvf_disk_may may,
                              const void *user)
{
    uint32_t page_frame = p->hand;
    for (uint32_t i = 0; i < most && i < p->page_frames; i++, page_frame = after(p, page_frame))
        if (may(user, page_frame))
            return page_frame;
    return NONE;
}

/* ---- what is where ---- */

static char *page_frame_at(const kvf_disk_tier *t, uint32_t page_frame, bool for_device)
{
    const kvf_host_memory *m = t->config.memory;
    const uint32_t per = (uint32_t)(m->arenas[0].bytes / t->config.bundle_bytes);
    const kvf_arena *arena = &m->arenas[page_frame / per];
    return (for_device ? arena->device : arena->host) +
           (size_t)(page_frame % per) * t->config.bundle_bytes;
}

char *kvf_disk_tier_host(const kvf_disk_tier *t, uint32_t bundle)
{
    const uint32_t page_frame = t->bundles[bundle].page_frame;
    return page_frame == NONE ? NULL : page_frame_at(t, page_frame, false);
}

char *kvf_disk_tier_device(const kvf_disk_tier *t, uint32_t bundle)
{
    return t->bundles[bundle].is_reading ? NULL : t->bundles[bundle].device;
}

char *kvf_disk_tier_place(const kvf_disk_tier *t, uint32_t bundle)
{
    return t->bundles[bundle].device;
}

bool kvf_disk_tier_is_coming(const kvf_disk_tier *t, uint32_t bundle)
{
    return t->bundles[bundle].is_reading;
}

uint64_t kvf_disk_tier_arrival(const kvf_disk_tier *t, uint32_t bundle)
{
    return t->bundles[bundle].arrival;
}

uint64_t kvf_disk_tier_arrivals(const kvf_disk_tier *t)
{
    return t->arrivals;
}

/* Where it will be, so that tables can say so before it is there. */
static void place(kvf_disk_tier *t, uint32_t bundle, uint32_t page_frame)
{
    t->bundles[bundle].device = page_frame_at(t, page_frame, true);
    t->bundles[bundle].arrival = ++t->arrivals;
}

static void put(kvf_disk_tier *t, uint32_t bundle, uint32_t page_frame)
{
    pthread_mutex_lock(&t->lock);
    t->bundles[bundle].page_frame = page_frame;
    pthread_mutex_unlock(&t->lock);
    t->page_frames[page_frame] = bundle;
}

static void give_up(kvf_disk_tier *t, uint32_t page_frame)
{
    kvf_bundle *b = &t->bundles[t->page_frames[page_frame]];
    KVF_ASSERT(!b->is_dirty && !b->is_writing && b->call < t->call);
    pthread_mutex_lock(&t->lock);
    b->page_frame = NONE;
    pthread_mutex_unlock(&t->lock);
    b->device = NULL;
    t->page_frames[page_frame] = NONE;
}

/* ---- what ended ---- */

static void free_page_frame(kvf_disk_tier *t, uint32_t page_frame)
{
    KVF_ASSERT(t->page_frames[page_frame] == NONE);
    t->free_page_frames++;
    t->free_from = page_frame;
}

/* A read ended. */
static void arrived(kvf_disk_tier *t, uint32_t bundle, uint32_t page_frame, bool is_whole)
{
    kvf_bundle *b = &t->bundles[bundle];
    b->is_reading = false;
    t->page_frames[page_frame] = NONE;
    if (!is_whole) {
        b->device = NULL;
        free_page_frame(t, page_frame);
        return;
    }
    put(t, bundle, page_frame);
    t->stats.read++;
    t->has_read = true;
}

static void make_dirty(kvf_disk_tier *t, kvf_bundle *b, uint64_t call)
{
    t->dirty += !b->is_dirty;
    b->is_dirty = true;
    b->written_call = call;
}

static void make_clean(kvf_disk_tier *t, kvf_bundle *b)
{
    t->dirty -= b->is_dirty;
    b->is_dirty = false;
}

/* A write did. */
static void written(kvf_disk_tier *t, uint32_t bundle)
{
    kvf_bundle *b = &t->bundles[bundle];
    b->is_writing = false;
    if (!b->is_dirty) /* emptied meanwhile */
        return;
    make_clean(t, b);
    b->is_in_file = true;
}

/* ---- requests: bundles on their way between page frames and the file ----
 * A piece that an engine moved in part is asked for again from the last multiple of
 * KVF_DISK_ALIGNMENT on; what makes no progress several times has failed. A request in flight has
 * its page frame for itself, but for readers of what is written. */

static kvf_status failed(const kvf_disk_tier *t, bool is_write, int code)
{
    return kvf_fail(t->context, KVF_SYSTEM, code,
                    "disk_path: %s the tier's file failed: %s%s; the sequences are as they were, "
                    "and the call may be made again",
                    is_write ? "writing" : "reading", kvf_errno_text(code), kvf_errno_fix(code));
}

static void pause_a_little(uint32_t tries)
{
    if (tries > TRIES_MAX / 8)
        (void)nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

static void end_request(kvf_disk_tier *t, uint32_t number, int code)
{
    const kvf_disk_request *r = &t->requests[number];
    t->idle[t->idle_count++] = number;
    if (r->is_write) {
        t->writes_in_flight--;
        if (code) {
            t->write_error = code;
            t->bundles[r->bundle].is_writing = false;
        } else {
            written(t, r->bundle);
        }
    } else {
        t->reads_in_flight--;
        if (code)
            t->read_error = code;
        arrived(t, r->bundle, r->page_frame, code == 0);
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
        end_request(t, number, 0);
        return;
    }
    pause_a_little(r->tries);
    code = r->tries < TRIES_MAX ? submit(t, number) : code;
    if (code)
        end_request(t, number, code);
}

static void take_result(kvf_disk_tier *t, const kvf_io_result *result)
{
    const int code = result->bytes < 0 ? (int)-result->bytes : 0;
    if (code && code != EAGAIN && code != EINTR && code != ECANCELED) {
        end_request(t, result->tag, code);
        return;
    }
    const kvf_disk_request *r = &t->requests[result->tag];
    const size_t moved = code ? 0 : (size_t)result->bytes;
    KVF_ASSERT(moved <= r->piece.iov_len);
    uint64_t *const sum = r->is_write ? &t->stats.bytes_written : &t->stats.bytes_read;
    *sum += moved;
    go_on(t, result->tag, moved, code ? code : EIO);
}

/* Waits for one that is in flight. */
static void reap(kvf_disk_tier *t)
{
    kvf_io_result result;
    t->io->ops->wait(t->io, &result);
    take_result(t, &result);
}

/* Takes requests that have ended, without waiting. */
static void poll(kvf_disk_tier *t)
{
    kvf_io_result result;
    while (t->reads_in_flight + t->writes_in_flight > 0 && t->io->ops->poll(t->io, &result))
        take_result(t, &result);
}

static kvf_status begin_request(kvf_disk_tier *t, uint32_t bundle, uint32_t page_frame,
                                uint32_t is_write)
{
    const uint32_t number = t->idle[t->idle_count - 1];
    kvf_disk_request *r = &t->requests[number];
    *r = (kvf_disk_request){
        .piece = {page_frame_at(t, page_frame, false), t->config.bundle_bytes},
        .offset = (uint64_t)bundle * t->config.bundle_bytes,
        .bundle = bundle,
        .page_frame = page_frame,
        .is_write = is_write,
    };
    const int code = submit(t, number);
    if (code)
        return failed(t, is_write, code);
    t->idle_count--;
    return KVF_OK;
}

/* A bundle on its way; waits for a request to be free. */
static kvf_status submit_read(kvf_disk_tier *t, uint32_t bundle, uint32_t page_frame)
{
    while (t->reads_in_flight == KVF_DISK_READS)
        reap(t);
    KVF_TRY(begin_request(t, bundle, page_frame, 0));
    t->page_frames[page_frame] = KVF_DISK_COMING;
    t->bundles[bundle].is_reading = true;
    t->reads_in_flight++;
    return KVF_OK;
}

static kvf_status submit_write(kvf_disk_tier *t, uint32_t bundle, uint32_t page_frame)
{
    KVF_ASSERT(t->writes_in_flight < KVF_DISK_WRITES);
    KVF_TRY(begin_request(t, bundle, page_frame, 1));
    t->bundles[bundle].is_writing = true;
    t->writes_in_flight++;
    return KVF_OK;
}

/* The kernel looks at the page frames and at the file once, where it may. */
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

static kvf_status open_requests(kvf_disk_tier *t, const kvf_io_ops *engine)
{
    for (uint32_t i = 0; i < KVF_DISK_REQUESTS; i++)
        t->idle[t->idle_count++] = KVF_DISK_REQUESTS - 1 - i;
    if (kvf_context_refuses(t->context, "engine"))
        KVF_FAIL(t->context, KVF_OUT_OF_MEMORY, "no memory to read or write files");
    KVF_TRY(engine ? engine->open(t->context, KVF_DISK_REQUESTS, &t->io)
                   : kvf_io_open(t->context, KVF_DISK_REQUESTS, &t->io));
    return keep(t);
}

/* Waits for what is in flight. */
static void close_requests(kvf_disk_tier *t)
{
    while (t->io && t->reads_in_flight + t->writes_in_flight > 0)
        reap(t);
    kvf_io_close(t->io);
}

/* ---- opening ---- */

static void carve(kvf_disk_tier *t, kvf_carver *k)
{
    KVF_CARVE(k, t->bundles, t->config.bundles);
    KVF_CARVE(k, t->page_frames, t->config.page_frames);
    KVF_CARVE(k, t->wanted, t->config.page_frames);
    KVF_CARVE(k, t->policy.uses, t->config.bundles);
    KVF_CARVE(k, t->policy.groups, t->config.groups);
}

uint64_t kvf_disk_tier_table_bytes(uint32_t bundles, uint32_t page_frames, uint32_t groups)
{
    kvf_disk_tier tier = {
        .config = {.bundles = bundles, .page_frames = page_frames, .groups = groups}};
    kvf_carver carver = {0};
    carve(&tier, &carver);
    return carver.bytes;
}

static kvf_status take_tables(kvf_disk_tier *t)
{
    const kvf_disk_tier_config *c = &t->config;
    t->tables =
        kvf_alloc(t->context, 1, kvf_disk_tier_table_bytes(c->bundles, c->page_frames, c->groups));
    if (!t->tables)
        KVF_FAIL(t->context, KVF_OUT_OF_MEMORY, "no memory for the tables of %u bundles on disk",
                 c->bundles);
    carve(t, &(kvf_carver){.base = t->tables});
    for (uint32_t i = 0; i < c->bundles; i++)
        t->bundles[i].page_frame = NONE;
    for (uint32_t i = 0; i < c->page_frames; i++)
        t->page_frames[i] = NONE;
    t->policy.page_frames = c->page_frames;
    t->policy.bundles = t->page_frames;
    t->free_page_frames = c->page_frames;
    return KVF_OK;
}

kvf_status kvf_disk_tier_open(kvf_context *context, const kvf_disk_tier_config *config,
                              kvf_disk_tier **out)
{
    kvf_disk_tier *t = *out = kvf_alloc(context, 1, sizeof *t);
    if (!t)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a tier on disk (%zu bytes)", sizeof *t);
    KVF_ASSERT(config->bundle_bytes % KVF_DISK_ALIGNMENT == 0 && config->groups > 0);
    t->context = context;
    t->config = *config;
    t->config.folder = NULL; /* the caller's */
    t->call = 1;
    t->file = (kvf_disk_file){.buffered = -1, .direct = -1};
    t->has_lock = pthread_mutex_init(&t->lock, NULL) == 0;
    kvf_status status =
        t->has_lock ? take_tables(t) : kvf_fail(context, KVF_SYSTEM, 0, "a lock could not be made");
    if (status == KVF_OK)
        status = kvf_disk_file_open(context, config->folder,
                                    (uint64_t)config->bundle_bytes * config->bundles, &t->file);
    if (status == KVF_OK)
        status = open_requests(t, config->engine);
    if (status != KVF_OK) {
        kvf_disk_tier_close(t);
        *out = NULL;
    }
    return status;
}

void kvf_disk_tier_close(kvf_disk_tier *t)
{
    if (!t)
        return;
    close_requests(t);
    kvf_disk_file_close(&t->file);
    kvf_free(t->context, t->tables);
    if (t->has_lock)
        (void)pthread_mutex_destroy(&t->lock);
    kvf_free(t->context, t);
}

/* ---- page frames ---- */

static bool is_taken(const kvf_disk_tier *t, uint32_t page_frame)
{
    return t->page_frames[page_frame] != NONE && t->page_frames[page_frame] != KVF_DISK_COMING;
}

static bool may_go(const void *user, uint32_t page_frame)
{
    const kvf_disk_tier *t = user;
    if (!is_taken(t, page_frame))
        return false;
    const kvf_bundle *b = &t->bundles[t->page_frames[page_frame]];
    return b->call < t->call && !b->is_dirty && !b->is_writing;
}

/* Whatever was enqueued to write into it is done. */
static bool may_write(const void *user, uint32_t page_frame)
{
    const kvf_disk_tier *t = user;
    if (!is_taken(t, page_frame))
        return false;
    const kvf_bundle *b = &t->bundles[t->page_frames[page_frame]];
    return b->call < t->call && b->is_dirty && !b->is_writing && b->written_call < t->drained;
}

static kvf_status drain(kvf_disk_tier *t)
{
    if (t->drained == t->call)
        return KVF_OK;
    KVF_TRY(t->config.drain(t->config.user));
    t->drained = t->call;
    return KVF_OK;
}

/* As many writes as may be in flight, of what the hand meets next. */
static kvf_status begin_writes(kvf_disk_tier *t, uint32_t look)
{
    while (t->writes_in_flight < KVF_DISK_WRITES) {
        const uint32_t page_frame = kvf_disk_policy_next(&t->policy, look, may_write, t);
        if (page_frame == NONE)
            return KVF_OK;
        KVF_TRY(submit_write(t, t->page_frames[page_frame], page_frame));
    }
    return KVF_OK;
}

/* A page frame that may be given up, after writes, if need be. The first that fails may have been
 * begun by an earlier call, when the disk was full or the like. */
static kvf_status make_room(kvf_disk_tier *t, uint32_t *out)
{
    uint32_t failures = 0;
    t->write_error = 0;
    while ((*out = kvf_disk_policy_victim(&t->policy, may_go, t)) == NONE) {
        if (t->write_error && ++failures > 1)
            return failed(t, true, t->write_error);
        while (t->write_error && t->writes_in_flight)
            reap(t);
        t->write_error = 0;
        KVF_TRY(begin_writes(t, t->config.page_frames));
        if (t->writes_in_flight == 0)
            return KVF_FULL;
        reap(t);
    }
    return KVF_OK;
}

/* One that nobody has, if there is any. */
static bool take_free(kvf_disk_tier *t, uint32_t *out)
{
    for (uint32_t i = 0; t->free_page_frames && i < t->config.page_frames; i++) {
        const uint32_t page_frame = (t->free_from + i) % t->config.page_frames;
        if (t->page_frames[page_frame] != NONE)
            continue;
        t->free_from = page_frame + 1;
        t->free_page_frames--;
        *out = page_frame;
        return true;
    }
    return false;
}

/* A page frame that nobody has any more. */
static kvf_status take_page_frame(kvf_disk_tier *t, uint32_t *out)
{
    if (take_free(t, out))
        return KVF_OK;
    KVF_TRY(drain(t));
    const kvf_status status = make_room(t, out);
    if (status == KVF_FULL && take_free(t, out)) /* what was to come there failed */
        return KVF_OK;
    KVF_TRY(status);
    give_up(t, *out);
    return KVF_OK;
}

/* ---- a call ---- */

void kvf_disk_tier_call(kvf_disk_tier *t)
{
    t->call++;
    t->wanted_count = 0;
    t->is_crowded = false;
    t->has_read = false;
}

void kvf_disk_tier_want(kvf_disk_tier *t, uint32_t bundle, uint32_t group)
{
    kvf_bundle *b = &t->bundles[bundle];
    if (b->call == t->call)
        return;
    if (b->page_frame == NONE && t->wanted_count == t->config.page_frames) {
        t->is_crowded = true;
        return;
    }
    b->call = t->call;
    t->stats.wanted++;
    kvf_disk_policy_use(&t->policy, bundle, group, t->call);
    if (b->page_frame == NONE)
        t->wanted[t->wanted_count++] = bundle;
}

static kvf_status begin_read(kvf_disk_tier *t, uint32_t bundle, uint32_t page_frame)
{
    const kvf_status status = submit_read(t, bundle, page_frame);
    if (status == KVF_OK)
        place(t, bundle, page_frame);
    else
        free_page_frame(t, page_frame);
    return status;
}

/* Its page frame, and a read if the file has anything of it. */
static kvf_status begin(kvf_disk_tier *t, uint32_t bundle)
{
    uint32_t page_frame;
    KVF_TRY(take_page_frame(t, &page_frame));
    if (t->bundles[bundle].is_in_file)
        return begin_read(t, bundle, page_frame);
    place(t, bundle, page_frame);
    put(t, bundle, page_frame);
    return KVF_OK;
}

bool kvf_disk_tier_ask(kvf_disk_tier *t)
{
    KVF_ASSERT(!t->is_asked);
    t->is_asked = true;
    t->asked_ns = t->wanted_count ? kvf_now_ns() : 0;
    t->asked = t->is_crowded ? KVF_FULL : KVF_OK;
    t->read_error = 0;
    for (uint32_t i = 0; i < t->wanted_count && t->asked == KVF_OK && !t->read_error; i++)
        t->asked = begin(t, t->wanted[i]);
    /* An engine without poll has ended them all. */
    if (t->reads_in_flight == 0 || t->asked != KVF_OK || !t->io->ops->poll)
        return false;
    kvf_io_begin(t->io);
    poll(t);
    return t->reads_in_flight > 0 && !t->read_error;
}

kvf_status kvf_disk_tier_bring(kvf_disk_tier *t)
{
    if (!t->is_asked)
        (void)kvf_disk_tier_ask(t);
    const uint64_t start = t->asked_ns;
    kvf_status status = t->asked;
    t->is_asked = false;
    while (t->reads_in_flight > 0)
        reap(t);
    if (status == KVF_OK && t->read_error)
        status = failed(t, false, t->read_error);
    for (uint32_t i = 0; i < t->wanted_count; i++)
        if (t->bundles[t->wanted[i]].page_frame == NONE)
            t->bundles[t->wanted[i]].call = 0; /* it may be wanted again */
    if (start)
        t->stats.wait_ns += kvf_now_ns() - start;
    t->wanted_count = 0;
    t->is_crowded = false;
    return status;
}

/* Until no request moves its bytes any more. */
static void await(kvf_disk_tier *t, const kvf_bundle *b)
{
    while (b->is_writing)
        reap(t);
}

void kvf_disk_tier_write(kvf_disk_tier *t, uint32_t bundle)
{
    kvf_bundle *b = &t->bundles[bundle];
    KVF_ASSERT(b->page_frame != NONE && b->call == t->call);
    await(t, b);
    make_dirty(t, b, t->call);
}

void kvf_disk_tier_empty(kvf_disk_tier *t, uint32_t bundle)
{
    kvf_bundle *b = &t->bundles[bundle];
    make_clean(t, b);
    b->is_in_file = false;
    kvf_disk_policy_drop(&t->policy, bundle);
}

void kvf_disk_tier_start_writes(kvf_disk_tier *t)
{
    /* Where calls read, what is dirty holds page frames that the policy would give to others. A
     * failure shows where a page frame is needed. */
    const uint32_t few = t->config.page_frames / 8;
    if (t->free_page_frames == 0 && (t->has_read || t->dirty > t->config.page_frames - few))
        if (begin_writes(t, t->has_read ? t->config.page_frames : few) == KVF_OK)
            kvf_io_begin(t->io);
}

/* ---- bytes, wherever they are ---- */

kvf_status kvf_disk_tier_copy_out(kvf_disk_tier *t, kvf_context *context, uint32_t bundle,
                                  size_t offset, size_t bytes, char *to)
{
    pthread_mutex_lock(&t->lock);
    const char *from = kvf_disk_tier_host(t, bundle);
    if (from)
        memcpy(to, from + offset, bytes);
    pthread_mutex_unlock(&t->lock);
    if (from)
        return KVF_OK;
    return kvf_disk_file_read(&t->file, context, (uint64_t)bundle * t->config.bundle_bytes + offset,
                              bytes, to);
}

kvf_status kvf_disk_tier_copy_in(kvf_disk_tier *t, uint32_t bundle, size_t offset, size_t bytes,
                                 const char *from)
{
    kvf_bundle *b = &t->bundles[bundle];
    await(t, b);
    if (b->page_frame != NONE) {
        memcpy(page_frame_at(t, b->page_frame, false) + offset, from, bytes);
        make_dirty(t, b, 0);
        return KVF_OK;
    }
    KVF_TRY(kvf_disk_file_write(&t->file, t->context,
                                (uint64_t)bundle * t->config.bundle_bytes + offset, bytes, from));
    b->is_in_file = true;
    t->stats.bytes_written += bytes;
    return KVF_OK;
}

/* ---- figures ---- */

void kvf_disk_tier_stats(const kvf_disk_tier *t, kvf_disk_stats *out)
{
    *out = t->stats;
}

void kvf_disk_tier_stats_reset(kvf_disk_tier *t)
{
    t->stats = (kvf_disk_stats){0};
}

bool kvf_disk_tier_is_valid(const kvf_disk_tier *t)
{
    uint32_t free_page_frames = 0, coming = 0, dirty = 0, writing = 0, reading = 0;
    for (uint32_t i = 0; i < t->config.page_frames; i++) {
        free_page_frames += t->page_frames[i] == NONE;
        coming += t->page_frames[i] == KVF_DISK_COMING;
        if (is_taken(t, i) && t->bundles[t->page_frames[i]].page_frame != i)
            return false;
    }
    for (uint32_t i = 0; i < t->config.bundles; i++) {
        const kvf_bundle *b = &t->bundles[i];
        dirty += b->is_dirty;
        writing += b->is_writing;
        reading += b->is_reading;
        if (b->is_reading && b->page_frame != NONE)
            return false;
        if ((b->device != NULL) != (b->is_reading || b->page_frame != NONE))
            return false;
        if ((b->is_dirty || b->is_writing) && b->page_frame == NONE)
            return false;
        if (b->page_frame != NONE && t->page_frames[b->page_frame] != i)
            return false;
    }
    return free_page_frames == t->free_page_frames && dirty == t->dirty &&
           writing == t->writes_in_flight && t->reads_in_flight == 0 && reading == 0 && coming == 0;
}
