/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Power loss while a sequence is saved: the writes, syncs and the rename of a save are recorded,
 * and replayed on a model of a disk that keeps any part of what was not made durable, in any order.
 * After every one of them the power goes, and what is left is opened.
 *
 * The model: the page cache has all writes; the medium has what was synced, and of the rest
 * whatever sectors it took meanwhile. A name is that of the old file until the rename, of the new
 * one from the sync of the folder on, and between them of either.
 */

#include "save_faults.h"

#include <unistd.h>

#define POWER_EXTENT 512u
#define SECTOR       512u
#define EVENTS_MAX   2048u
#define POINTS_LEAST 200u
#define SEEDS        4u

/* ---- what a save does ---- */

typedef enum event_kind { OPEN, RESERVE, WRITE, SYNC, RENAME, SYNC_FOLDER, KINDS } event_kind;

static const char *const calls[KINDS] = {"file open", "file reserve", NULL,
                                         "file sync", "file rename",  "folder sync"};

typedef struct event {
    event_kind kind;
    uint64_t offset;
    size_t bytes;
    char *data; /* of a write */
} event;

static event events[EVENTS_MAX];
static uint32_t event_count;

static event *add_event(event_kind kind)
{
    assert_true(event_count < EVENTS_MAX);
    events[event_count] = (event){.kind = kind};
    return &events[event_count++];
}

static void record_write(const kvf_io_request *request)
{
    assert_true(request->is_write);
    event *e = add_event(WRITE);
    e->offset = request->offset;
    for (uint32_t i = 0; i < request->count; i++)
        e->bytes += request->pieces[i].iov_len;
    e->data = malloc(e->bytes);
    assert_non_null(e->data);
    for (uint32_t i = 0, at = 0; i < request->count; i++) {
        memcpy(e->data + at, request->pieces[i].iov_base, request->pieces[i].iov_len);
        at += (uint32_t)request->pieces[i].iov_len;
    }
}

static int record_call(void *user, const char *what)
{
    for (uint32_t kind = 0; kind < KINDS; kind++)
        if (calls[kind] && strcmp(what, calls[kind]) == 0)
            (void)add_event((event_kind)kind);
    return 0;
}

/* A save over an old file; the events, and the bytes of the file that it gave. */
static char *record(fail_world *f, const char *path, size_t *bytes)
{
    event_count = 0;
    fail_plan.record = record_write;
    kvf_device_set_fault(f->w.runtime->device, record_call, NULL);
    test_ok(&f->w, kvf_save_finish(save_begin(&f->w, f->s, path, "new"), NULL));
    kvf_device_set_fault(f->w.runtime->device, NULL, NULL);
    fail_plan.record = NULL;
    return save_read(path, bytes);
}

static void forget_events(void)
{
    for (uint32_t i = 0; i < event_count; i++)
        free(events[i].data);
    event_count = 0;
}

/* ---- the disk ---- */

/* How the medium takes sectors before it must. */
typedef enum disk_habit { NEVER, AT_ONCE, SOME, LAST_FIRST, HABITS } disk_habit;

typedef struct disk {
    disk_habit habit;
    test_random random;
    size_t bytes; /* of the whole file */
    char *cache, *medium;
    char *is_dirty;      /* [sectors] */
    size_t on_medium;    /* the length that the medium knows */
    uint32_t is_named;   /* the rename was done */
    uint32_t is_certain; /* ... and is durable */
} disk;

static size_t sectors_of(const disk *d)
{
    return (d->bytes + SECTOR - 1) / SECTOR;
}

static void take_sector(disk *d, size_t sector)
{
    const size_t at = sector * SECTOR, left = d->bytes - at;
    const size_t part = left < SECTOR ? left : SECTOR;
    memcpy(d->medium + at, d->cache + at, part);
    d->is_dirty[sector] = 0;
    if (at + part > d->on_medium)
        d->on_medium = at + part;
}

static void take_some(disk *d)
{
    for (size_t i = 0; i < sectors_of(d); i++)
        if (d->is_dirty[i] &&
            (d->habit == AT_ONCE || (d->habit == SOME && test_random_below(&d->random, 8) == 0)))
            take_sector(d, i);
    for (size_t i = sectors_of(d); i-- > 0 && d->habit == LAST_FIRST;)
        if (d->is_dirty[i]) { /* the newest in the file first, and one of three is passed over */
            if (test_random_below(&d->random, 3))
                take_sector(d, i);
            break;
        }
}

static void happen(disk *d, const event *e)
{
    if (e->kind == WRITE) {
        assert_true(e->offset + e->bytes <= d->bytes);
        memcpy(d->cache + e->offset, e->data, e->bytes);
        for (size_t i = e->offset / SECTOR; i <= (e->offset + e->bytes - 1) / SECTOR; i++)
            d->is_dirty[i] = 1;
    }
    if (e->kind == RESERVE && d->habit == AT_ONCE)
        d->on_medium = d->bytes; /* of zeros */
    if (e->kind == SYNC)
        for (size_t i = 0; i < sectors_of(d); i++)
            if (d->is_dirty[i])
                take_sector(d, i);
    d->is_named |= e->kind == RENAME;
    d->is_certain |= e->kind == SYNC_FOLDER && d->is_named;
    take_some(d);
}

static void open_disk(disk *d, disk_habit habit, uint64_t seed, size_t bytes)
{
    *d = (disk){.habit = habit, .random = {seed}, .bytes = bytes};
    d->cache = calloc(1, bytes);
    d->medium = calloc(1, bytes);
    d->is_dirty = calloc(1, sectors_of(d));
    assert_true(d->cache && d->medium && d->is_dirty);
}

static void close_disk(disk *d)
{
    free(d->cache);
    free(d->medium);
    free(d->is_dirty);
}

/* ---- after the power came back ---- */

static kvf_status read_left(fail_world *f, const disk *d, kvf_saved *saved)
{
    const char *path = save_path("left");
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(d->medium, 1, d->on_medium, file), d->on_medium);
    fclose(file);
    return kvf_saved_read(f->w.runtime, path, 1, saved, NULL, 0, NULL);
}

/* The power goes after every event. Returns how often a name led to a file that is not whole. */
static uint32_t lose_power(fail_world *f, disk_habit habit, uint64_t seed, const char *whole,
                           size_t bytes, uint32_t step)
{
    disk d;
    uint32_t broken = 0;
    open_disk(&d, habit, seed, bytes);
    for (uint32_t i = 0; i < event_count; i++) {
        kvf_saved saved;
        happen(&d, &events[i]);
        if (events[i].kind == WRITE && i % step)
            continue;
        const kvf_status status = read_left(f, &d, &saved);
        const int is_whole = d.on_medium == bytes && memcmp(d.medium, whole, bytes) == 0;
        /* A file that opens is whole, under whatever name: torn bytes are found. */
        assert_true(status == KVF_OK || status == KVF_CORRUPT);
        assert_int_equal(status == KVF_OK, is_whole);
        if (status == KVF_OK)
            assert_string_equal(saved.model, "new");
        /* From the rename on the name may lead here, and to nothing else once that is durable. */
        broken += d.is_named && !is_whole;
    }
    assert_true(d.is_certain);
    close_disk(&d);
    return broken;
}

TEST(power_goes_at_every_event)
{
    fail_world f;
    kvf_saved saved;
    size_t bytes;
    fail_world_open(&f, POWER_EXTENT);
    const char *path = save_path("power");
    test_ok(&f.w, kvf_save_finish(save_begin(&f.w, f.s, path, "old"), NULL));
    test_ok(&f.w, kvf_saved_read(f.w.runtime, path, 1, &saved, NULL, 0, NULL));
    assert_string_equal(saved.model, "old");
    char *whole = record(&f, path, &bytes);
    assert_true(event_count >= POINTS_LEAST);
    const uint32_t step = test_afford(2) == 2 && !test_on_cuda() ? 1 : 8;
    for (uint32_t habit = 0; habit < HABITS; habit++)
        for (uint64_t seed = 1; seed <= SEEDS; seed++)
            assert_int_equal(lose_power(&f, (disk_habit)habit, seed, whole, bytes, step), 0);

    /* The test itself: were the name given before the bytes are durable, it would be found. */
    uint32_t at = 0;
    while (at < event_count && events[at].kind != SYNC)
        at++;
    assert_true(at + 1 < event_count && events[at + 1].kind == RENAME);
    events[at].kind = RENAME;
    events[at + 1].kind = SYNC;
    assert_true(lose_power(&f, NEVER, 1, whole, bytes, step) > 0);
    assert_true(lose_power(&f, SOME, 1, whole, bytes, step) > 0);
    free(whole);
    forget_events();
    fail_world_close(&f);
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
