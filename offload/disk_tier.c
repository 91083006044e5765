/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bundles in berths and in a file; see the header.
 *
 * Knows nothing of who selects what; which berth goes is the policy's. The file is disk_file.c's,
 * requests are disk_requests.c's. The lock guards which berth a bundle has, because a save reads
 * blocks from a thread of its own.
 */

#include "disk_tier.h"

#include <errno.h>
#include <string.h>

#include "common/carve.h"
#include "disk_requests.h"

#define NONE UINT32_MAX

static void carve(kvf_disk_tier *t, kvf_carver *k)
{
    KVF_CARVE(k, t->bundles, t->config.bundles);
    KVF_CARVE(k, t->berths, t->config.berths);
    KVF_CARVE(k, t->wanted, t->config.berths);
    KVF_CARVE(k, t->policy.uses, t->config.berths);
}

uint64_t kvf_disk_tier_table_bytes(uint32_t bundles, uint32_t berths)
{
    kvf_disk_tier tier = {.config = {.bundles = bundles, .berths = berths}};
    kvf_carver carver = {0};
    carve(&tier, &carver);
    return carver.bytes;
}

static kvf_status take_tables(kvf_disk_tier *t)
{
    t->tables =
        kvf_alloc(t->context, 1, kvf_disk_tier_table_bytes(t->config.bundles, t->config.berths));
    if (!t->tables)
        KVF_FAIL(t->context, KVF_OUT_OF_MEMORY, "no memory for the tables of %u bundles on disk",
                 t->config.bundles);
    carve(t, &(kvf_carver){.base = t->tables});
    for (uint32_t i = 0; i < t->config.bundles; i++)
        t->bundles[i].berth = NONE;
    for (uint32_t i = 0; i < t->config.berths; i++)
        t->berths[i] = NONE;
    t->policy.berths = t->config.berths;
    t->free_berths = t->config.berths;
    return KVF_OK;
}

kvf_status kvf_disk_tier_open(kvf_context *context, const kvf_disk_tier_config *config,
                              kvf_disk_tier **out)
{
    kvf_disk_tier *t = *out = kvf_alloc(context, 1, sizeof *t);
    if (!t)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a tier on disk (%zu bytes)", sizeof *t);
    KVF_ASSERT(config->bundle_bytes % KVF_DISK_ALIGNMENT == 0);
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
        status = kvf_disk_requests_open(t, config->engine);
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
    kvf_disk_requests_close(t);
    kvf_disk_file_close(&t->file);
    kvf_free(t->context, t->tables);
    if (t->has_lock)
        (void)pthread_mutex_destroy(&t->lock);
    kvf_free(t->context, t);
}

/* ---- what is where ---- */

char *kvf_disk_berth(const kvf_disk_tier *t, uint32_t berth, bool for_device)
{
    const kvf_host_memory *m = t->config.memory;
    const uint32_t per = (uint32_t)(m->arenas[0].bytes / t->config.bundle_bytes);
    const kvf_arena *arena = &m->arenas[berth / per];
    return (for_device ? arena->device : arena->host) +
           (size_t)(berth % per) * t->config.bundle_bytes;
}

char *kvf_disk_tier_host(const kvf_disk_tier *t, uint32_t bundle)
{
    const uint32_t berth = t->bundles[bundle].berth;
    return berth == NONE ? NULL : kvf_disk_berth(t, berth, false);
}

char *kvf_disk_tier_device(const kvf_disk_tier *t, uint32_t bundle)
{
    const uint32_t berth = t->bundles[bundle].berth;
    return berth == NONE ? NULL : kvf_disk_berth(t, berth, true);
}

uint64_t kvf_disk_tier_arrival(const kvf_disk_tier *t, uint32_t bundle)
{
    return t->bundles[bundle].arrival;
}

uint64_t kvf_disk_tier_arrivals(const kvf_disk_tier *t)
{
    return t->arrivals;
}

static void put(kvf_disk_tier *t, uint32_t bundle, uint32_t berth)
{
    kvf_bundle *b = &t->bundles[bundle];
    pthread_mutex_lock(&t->lock);
    b->berth = berth;
    pthread_mutex_unlock(&t->lock);
    t->berths[berth] = bundle;
    b->arrival = ++t->arrivals;
    b->call = t->call;
    kvf_disk_policy_enter(&t->policy, berth);
}

static void give_up(kvf_disk_tier *t, uint32_t berth)
{
    kvf_bundle *b = &t->bundles[t->berths[berth]];
    KVF_ASSERT(!b->is_dirty && !b->is_writing && b->call < t->call);
    pthread_mutex_lock(&t->lock);
    b->berth = NONE;
    pthread_mutex_unlock(&t->lock);
    t->berths[berth] = NONE;
}

/* ---- berths ---- */

static bool may_go(const void *user, uint32_t berth)
{
    const kvf_disk_tier *t = user;
    if (t->berths[berth] == NONE)
        return false;
    const kvf_bundle *b = &t->bundles[t->berths[berth]];
    return b->call < t->call && !b->is_dirty && !b->is_writing;
}

/* Whatever was enqueued to write into it is done. */
static bool may_write(const void *user, uint32_t berth)
{
    const kvf_disk_tier *t = user;
    if (t->berths[berth] == NONE)
        return false;
    const kvf_bundle *b = &t->bundles[t->berths[berth]];
    return b->call < t->call && b->is_dirty && !b->is_writing && b->written_call < t->settled;
}

kvf_status kvf_disk_tier_settle(kvf_disk_tier *t)
{
    if (t->settled == t->call)
        return KVF_OK;
    KVF_TRY(t->config.settle(t->config.user));
    t->settled = t->call;
    return KVF_OK;
}

/* As many writes as may be in flight, of what the hand meets next. */
static kvf_status begin_writes(kvf_disk_tier *t, uint32_t look)
{
    while (t->writes_in_flight < KVF_DISK_WRITES) {
        const uint32_t berth = kvf_disk_policy_next(&t->policy, look, may_write, t);
        if (berth == NONE)
            return KVF_OK;
        KVF_TRY(kvf_disk_write(t, t->berths[berth], berth));
        kvf_disk_policy_drop(&t->policy, berth);
    }
    return KVF_OK;
}

/* A berth that may be given up, after writes if need be. What fails first may have been begun by an
 * earlier call, when the disk was full or the like. */
static kvf_status make_room(kvf_disk_tier *t, uint32_t *out)
{
    uint32_t failures = 0;
    t->write_error = 0;
    while ((*out = kvf_disk_policy_victim(&t->policy, may_go, t)) == NONE) {
        if (t->write_error && ++failures > 1)
            return kvf_disk_failed(t, true, t->write_error);
        while (t->write_error && t->writes_in_flight)
            KVF_TRY(kvf_disk_reap(t));
        t->write_error = 0;
        KVF_TRY(begin_writes(t, t->config.berths));
        if (t->writes_in_flight == 0)
            return KVF_FULL;
        KVF_TRY(kvf_disk_reap(t));
    }
    return KVF_OK;
}

/* A berth that nobody has. */
static kvf_status take_berth(kvf_disk_tier *t, uint32_t *out)
{
    if (t->free_berths) {
        for (uint32_t i = 0; i < t->config.berths; i++) {
            const uint32_t berth = (t->free_from + i) % t->config.berths;
            if (t->berths[berth] != NONE)
                continue;
            t->free_from = berth + 1;
            t->free_berths--;
            *out = berth;
            return KVF_OK;
        }
    }
    KVF_TRY(kvf_disk_tier_settle(t));
    KVF_TRY(make_room(t, out));
    give_up(t, *out);
    return KVF_OK;
}

static void free_berth(kvf_disk_tier *t, uint32_t berth)
{
    KVF_ASSERT(t->berths[berth] == NONE);
    t->free_berths++;
    t->free_from = berth;
}

/* ---- a call ---- */

void kvf_disk_tier_call(kvf_disk_tier *t)
{
    t->call++;
    t->wanted_count = 0;
    t->is_crowded = 0;
}

void kvf_disk_tier_want(kvf_disk_tier *t, uint32_t bundle)
{
    kvf_bundle *b = &t->bundles[bundle];
    if (b->call == t->call)
        return;
    if (b->berth == NONE && t->wanted_count == t->config.berths) {
        t->is_crowded = 1;
        return;
    }
    b->call = t->call;
    t->stats.wanted++;
    if (b->berth != NONE)
        kvf_disk_policy_use(&t->policy, b->berth);
    else
        t->wanted[t->wanted_count++] = bundle;
}

/* Its berth, and a read if the file has anything of it. */
static kvf_status begin(kvf_disk_tier *t, uint32_t bundle)
{
    uint32_t berth;
    KVF_TRY(take_berth(t, &berth));
    if (!t->bundles[bundle].is_in_file) {
        put(t, bundle, berth);
        return KVF_OK;
    }
    const kvf_status status = kvf_disk_read(t, bundle, berth);
    if (status != KVF_OK)
        free_berth(t, berth);
    return status;
}

/* A read ended. */
void kvf_disk_arrived(kvf_disk_tier *t, uint32_t bundle, uint32_t berth, bool is_whole)
{
    if (!is_whole) {
        free_berth(t, berth);
        return;
    }
    put(t, bundle, berth);
    t->stats.read++;
}

kvf_status kvf_disk_tier_bring(kvf_disk_tier *t)
{
    kvf_status status = t->is_crowded ? KVF_FULL : KVF_OK;
    t->read_error = 0;
    for (uint32_t i = 0; i < t->wanted_count && status == KVF_OK && !t->read_error; i++)
        status = begin(t, t->wanted[i]);
    while (t->reads_in_flight) {
        const kvf_status reaped = kvf_disk_reap(t);
        if (reaped != KVF_OK) {
            status = reaped;
            break;
        }
    }
    if (status == KVF_OK && t->read_error)
        status = kvf_disk_failed(t, false, t->read_error);
    for (uint32_t i = 0; i < t->wanted_count; i++)
        if (t->bundles[t->wanted[i]].berth == NONE)
            t->bundles[t->wanted[i]].call = 0; /* it may be wanted again */
    t->wanted_count = 0;
    t->is_crowded = 0;
    return status;
}

/* Until nothing reads the berth any more. */
static kvf_status await_write(kvf_disk_tier *t, const kvf_bundle *b)
{
    while (b->is_writing)
        KVF_TRY(kvf_disk_reap(t));
    return KVF_OK;
}

static void make_dirty(kvf_disk_tier *t, kvf_bundle *b, uint64_t call)
{
    t->dirty += !b->is_dirty;
    b->is_dirty = 1;
    b->written_call = call;
}

static void make_clean(kvf_disk_tier *t, kvf_bundle *b)
{
    t->dirty -= b->is_dirty;
    b->is_dirty = 0;
}

kvf_status kvf_disk_tier_write(kvf_disk_tier *t, uint32_t bundle)
{
    kvf_bundle *b = &t->bundles[bundle];
    KVF_ASSERT(b->berth != NONE && b->call == t->call);
    KVF_TRY(await_write(t, b));
    make_dirty(t, b, t->call);
    return KVF_OK;
}

void kvf_disk_tier_empty(kvf_disk_tier *t, uint32_t bundle)
{
    kvf_bundle *b = &t->bundles[bundle];
    make_clean(t, b);
    b->is_in_file = 0;
    if (b->berth != NONE)
        kvf_disk_policy_drop(&t->policy, b->berth);
}

void kvf_disk_written(kvf_disk_tier *t, uint32_t bundle)
{
    kvf_bundle *b = &t->bundles[bundle];
    b->is_writing = 0;
    if (!b->is_dirty) /* emptied meanwhile */
        return;
    make_clean(t, b);
    b->is_in_file = 1;
}

void kvf_disk_tier_tend(kvf_disk_tier *t)
{
    /* A failure shows where a berth is needed. */
    if (t->free_berths == 0 && t->dirty > t->config.berths - t->config.berths / 8)
        if (begin_writes(t, t->config.berths / 8) == KVF_OK)
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
    KVF_TRY(await_write(t, b));
    if (b->berth != NONE) {
        memcpy(kvf_disk_berth(t, b->berth, false) + offset, from, bytes);
        make_dirty(t, b, 0);
        return KVF_OK;
    }
    KVF_TRY(kvf_disk_file_write(&t->file, t->context,
                                (uint64_t)bundle * t->config.bundle_bytes + offset, bytes, from));
    b->is_in_file = 1;
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

int kvf_disk_tier_file(const kvf_disk_tier *t)
{
    return t->file.buffered;
}

int kvf_disk_tier_is_valid(const kvf_disk_tier *t)
{
    uint32_t free_berths = 0, dirty = 0, writing = 0;
    for (uint32_t i = 0; i < t->config.berths; i++) {
        free_berths += t->berths[i] == NONE;
        if (t->berths[i] != NONE && t->bundles[t->berths[i]].berth != i)
            return 0;
    }
    for (uint32_t i = 0; i < t->config.bundles; i++) {
        const kvf_bundle *b = &t->bundles[i];
        dirty += b->is_dirty;
        writing += b->is_writing;
        if ((b->is_dirty || b->is_writing) && b->berth == NONE)
            return 0;
        if (b->berth != NONE && t->berths[b->berth] != i)
            return 0;
    }
    return free_berths == t->free_berths && dirty == t->dirty && writing == t->writes_in_flight &&
           t->reads_in_flight == 0;
}
