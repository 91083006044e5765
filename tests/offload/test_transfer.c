/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Transfer: every method that moves bytes delivers the same ones, whatever the chunks, the ring,
 * the threads, the delays and the number of requests in flight, and touches nothing else. A request
 * that fails fails the stream that joins it, and nothing else.
 */

#include "transfer.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "offload_rig.h"
#include "page_pool.h"

#define SOURCES  200u
#define SLOTS    96u
#define REQUESTS 12u
#define GUARD    0xa5

/* Requests as the device sees them; filled by work on the stream, never by the caller. */
typedef struct tables {
    const void *from[REQUESTS][SLOTS];
    void *to[REQUESTS][SLOTS];
    uint32_t count[REQUESTS];
} tables;

typedef struct plan {
    size_t page_bytes;
    uint32_t count[REQUESTS];
    uint32_t source[REQUESTS][SLOTS];
    uint32_t slot[REQUESTS][SLOTS];
} plan;

typedef struct bench_memory {
    kvf_page_pool pool; /* [SOURCES] blocks of a page, in several arenas */
    char *slots;        /* [REQUESTS, region_bytes] */
    tables *device;
} bench_memory;

/* Guards between the slots of even requests; those of odd ones touch, as one copy needs them. */
static size_t slot_stride(const plan *p, uint32_t request)
{
    return p->page_bytes + (request % 2 == 0 ? 64 : 0);
}

/* Of one request; the slots of odd ones end before it does. */
static size_t region_bytes(const plan *p)
{
    return SLOTS * (p->page_bytes + 64);
}

static char *slot_at(const bench_memory *m, const plan *p, uint32_t request, uint32_t slot)
{
    return m->slots + request * region_bytes(p) + slot * slot_stride(p, request);
}

static char *source_host(const bench_memory *m, uint32_t source)
{
    return kvf_page_pool_host(&m->pool, (kvf_block){source});
}

static void open_memory(rig *r, const plan *p, bench_memory *m)
{
    void *memory;
    kvf_host_memory_config pool = {.node = -1,
                                   .huge_pages = KVF_HUGE_PAGES_OFF,
                                   .touch_threads = 1,
                                   .arena_bytes_max = 64 * p->page_bytes};
    RIG_OK(kvf_page_pool_create(r->context, r->device, &pool, p->page_bytes, SOURCES, &m->pool));
    RIG_OK(r->ops->memory_alloc(r->device, REQUESTS * region_bytes(p), &memory));
    m->slots = memory;
    RIG_OK(r->ops->memory_alloc(r->device, sizeof *m->device, &memory));
    m->device = memory;
    for (uint32_t s = 0; s < SOURCES; s++)
        for (size_t b = 0; b < p->page_bytes; b++)
            source_host(m, s)[b] = (char)(s * 131 + b * 7 + (b >> 8));
    memset(m->slots, GUARD, REQUESTS * region_bytes(p));
}

static void close_memory(rig *r, bench_memory *m)
{
    r->ops->memory_free(r->device, m->device);
    r->ops->memory_free(r->device, m->slots);
    kvf_page_pool_destroy(&m->pool);
}

static void make_plan(plan *p, rig_random *random, size_t page_bytes)
{
    const uint32_t special[] = {0, 1, SLOTS, 7, 16, 17};
    p->page_bytes = page_bytes;
    for (uint32_t q = 0; q < REQUESTS; q++) {
        p->count[q] = q < 6 ? special[q] : rig_below(random, SLOTS + 1);
        for (uint32_t i = 0; i < SLOTS; i++) {
            p->source[q][i] = rig_below(random, SOURCES);
            p->slot[q][i] = i;
        }
        if (q % 4 == 3) { /* in order but for two */
            p->slot[q][2] = 4;
            p->slot[q][4] = 2;
        }
        if (q % 2 == 0) /* odd requests keep their order */
            for (uint32_t i = SLOTS; i-- > 1;) {
                uint32_t j = rig_below(random, i + 1), other = p->slot[q][j];
                p->slot[q][j] = p->slot[q][i];
                p->slot[q][i] = other;
            }
    }
}

typedef struct write_args {
    const plan *plan;
    const bench_memory *memory;
    uint32_t request;
} write_args;

static void write_request(const void *raw, uint32_t task)
{
    (void)task;
    const write_args *a = raw;
    const plan *p = a->plan;
    uint32_t q = a->request;
    tables *t = a->memory->device;
    for (uint32_t i = 0; i < p->count[q]; i++) {
        t->from[q][i] = kvf_page_pool_device(&a->memory->pool, (kvf_block){p->source[q][i]});
        t->to[q][i] = slot_at(a->memory, p, q, p->slot[q][i]);
    }
    t->count[q] = p->count[q];
}

typedef struct check_args {
    const plan *plan;
    const bench_memory *memory;
    uint32_t request;
    atomic_uint *wrong;
} check_args;

/* In stream order after the join: every page is there, every guard is whole, every other slot
 * untouched. */
static void check_request(const void *raw, uint32_t task)
{
    (void)task;
    const check_args *a = raw;
    const plan *p = a->plan;
    uint32_t q = a->request;
    uint8_t is_taken[SLOTS] = {0};
    for (uint32_t i = 0; i < p->count[q]; i++) {
        const char *slot = slot_at(a->memory, p, q, p->slot[q][i]);
        is_taken[p->slot[q][i]] = 1;
        if (memcmp(slot, source_host(a->memory, p->source[q][i]), p->page_bytes) != 0)
            atomic_fetch_add(a->wrong, 1);
    }
    for (uint32_t s = 0; s < SLOTS; s++) {
        const unsigned char *slot = (const unsigned char *)slot_at(a->memory, p, q, s);
        for (size_t b = is_taken[s] ? p->page_bytes : 0; b < slot_stride(p, q); b++)
            if (slot[b] != GUARD)
                atomic_fetch_add(a->wrong, 1);
    }
    const unsigned char *rest = (const unsigned char *)slot_at(a->memory, p, q, SLOTS);
    const unsigned char *end = (const unsigned char *)a->memory->slots + (q + 1) * region_bytes(p);
    for (; rest < end; rest++)
        if (*rest != GUARD)
            atomic_fetch_add(a->wrong, 1);
}

static void enqueue(rig *r, kvf_transfer_engine *engine, const plan *p, const bench_memory *m,
                    uint32_t q, kvf_stream *stream, uint32_t *ticket)
{
    write_args write = {p, m, q};
    RIG_OK(r->ops->host_call(stream, write_request, &write, sizeof write));
    kvf_transfer_request request = {
        .from = m->device->from[q], .to = m->device->to[q], .count = &m->device->count[q]};
    kvf_status status = kvf_transfer_submit(engine, &request, stream, ticket);
    if (status == KVF_BUSY) {
        RIG_OK(kvf_transfer_wait_room(engine));
        status = kvf_transfer_submit(engine, &request, stream, ticket);
    }
    RIG_OK(status);
}

/* What the engine counted must be what the plan says; `mapped` leaves counts to the device. */
static void check_counters(rig *r, kvf_transfer_engine *engine, const kvf_transfer_config *config,
                           const plan *p)
{
    kvf_transfer_stats stats;
    kvf_transfer_shape shape;
    uint64_t host_bytes, device_bytes, pages = 0, copies = 0;
    kvf_transfer_stats_read(engine, &stats);
    kvf_transfer_shape_read(engine, &shape);
    kvf_transfer_needs(r->device, config, &host_bytes, &device_bytes);
    assert_int_equal(kvf_transfer_host_bytes(engine), host_bytes);
    assert_int_equal(kvf_transfer_device_bytes(engine), device_bytes);
    const uint64_t per_copy = config->method == KVF_TRANSFER_EACH ? 1
                              : config->method == KVF_TRANSFER_BATCH
                                  ? SLOTS
                                  : shape.chunk_bytes / p->page_bytes;
    for (uint32_t q = 0; q < REQUESTS; q++)
        pages += p->count[q];
    if (config->method == KVF_TRANSFER_MAPPED)
        assert_int_equal(stats.copies, REQUESTS);
    if (config->method != KVF_TRANSFER_AUTO && config->method != KVF_TRANSFER_MAPPED) {
        for (uint32_t q = 0; q < REQUESTS; q++)
            copies += (p->count[q] + per_copy - 1) / per_copy;
        assert_int_equal(stats.pages, pages);
        assert_int_equal(stats.bytes, pages * p->page_bytes);
        assert_int_equal(stats.copies, copies);
    }
    assert_true(stats.copy_ns > 0);
    kvf_transfer_stats_reset(engine);
    kvf_transfer_stats_read(engine, &stats);
    assert_int_equal(stats.pages + stats.bytes + stats.copies + stats.copy_ns, 0);
}

static void run_plan(rig *r, kvf_transfer_config *config, const plan *p)
{
    bench_memory m;
    kvf_transfer_engine *engine;
    kvf_stream *streams[2];
    atomic_uint wrong;
    atomic_init(&wrong, 0);
    open_memory(r, p, &m);
    config->pool = &m.pool.memory;
    RIG_OK(kvf_transfer_open(r->device, config, &engine));
    assert_int_equal(kvf_transfer_method(engine), config->method);
    for (uint32_t i = 0; i < 2; i++)
        RIG_OK(r->ops->stream_create(r->device, KVF_PRIORITY_NORMAL, &streams[i]));
    uint32_t tickets[REQUESTS];
    /* Join two requests later, so that several are in flight, on alternating streams. */
    for (uint32_t q = 0; q < REQUESTS + 2; q++) {
        if (q < REQUESTS)
            enqueue(r, engine, p, &m, q, streams[q % 2], &tickets[q]);
        if (q < 2)
            continue;
        check_args check = {p, &m, q - 2, &wrong};
        RIG_OK(kvf_transfer_join(engine, tickets[q - 2], streams[q % 2]));
        RIG_OK(r->ops->host_call(streams[q % 2], check_request, &check, sizeof check));
    }
    for (uint32_t i = 0; i < 2; i++)
        RIG_OK(r->ops->stream_wait(streams[i]));
    assert_int_equal(atomic_load(&wrong), 0);
    check_counters(r, engine, config, p);
    for (uint32_t i = 0; i < 2; i++)
        r->ops->stream_destroy(streams[i]);
    kvf_transfer_close(engine);
    close_memory(r, &m);
}

static kvf_transfer_config engine_config(kvf_transfer method, size_t page_bytes)
{
    return (kvf_transfer_config){.method = method,
                                 .page_bytes = page_bytes,
                                 .pages_max = SLOTS,
                                 .requests_max = 4,
                                 .depth = 3,
                                 .gather_threads = 1,
                                 .memory = {.node = -1, .touch_threads = 1}};
}

static void test_same_bytes(void **state)
{
    (void)state;
    static plan p;
    const struct {
        kvf_transfer method;
        size_t page_bytes, chunk_bytes;
        uint32_t depth, gather_threads, requests_max, delay_seed;
    } cases[] = {
        {KVF_TRANSFER_EACH, 2560, 0, 3, 1, 4, 0},
        {KVF_TRANSFER_EACH, 4096, 0, 3, 1, 1, 5},
        {KVF_TRANSFER_GATHER, 2560, 0, 3, 1, 4, 0},      /* everything in one chunk */
        {KVF_TRANSFER_GATHER, 4096, 65536, 3, 2, 4, 0},  /* 16 pages: full and part chunks */
        {KVF_TRANSFER_GATHER, 4096, 65536, 1, 2, 4, 6},  /* a ring of one */
        {KVF_TRANSFER_GATHER, 16384, 40000, 2, 3, 2, 7}, /* 2 pages, the rest unused */
        {KVF_TRANSFER_GATHER, 2560, 100, 3, 1, 1, 8},    /* a chunk of one page at least */
        {KVF_TRANSFER_GATHER, 4096, 20480, 3, 2, 12, 9},
        {KVF_TRANSFER_MAPPED, 2560, 0, 3, 1, 4, 0},
        {KVF_TRANSFER_MAPPED, 16384, 0, 3, 1, 1, 10},
        {KVF_TRANSFER_MAPPED, 64, 0, 3, 1, 3, 11},
        {KVF_TRANSFER_BATCH, 2560, 0, 3, 1, 3, 0},
        {KVF_TRANSFER_BATCH, 4096, 0, 3, 1, 12, 12},
        {KVF_TRANSFER_EACH, 20480, 0, 3, 1, 5, 13},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig_random random = rig_seed("transfer", 100 + i);
        make_plan(&p, &random, cases[i].page_bytes);
        kvf_transfer_config config = engine_config(cases[i].method, cases[i].page_bytes);
        config.chunk_bytes = cases[i].chunk_bytes;
        config.depth = cases[i].depth;
        config.gather_threads = cases[i].gather_threads;
        config.requests_max = cases[i].requests_max;
        config.first_ticket = i % 2 ? UINT32_MAX - 5 : 0; /* tickets wrap */
        config.blocks = 1 + (uint32_t)i % 5;
        config.loads_only = i % 4 == 0;
        rig r;
        rig_open(&r, &(rig_config){.delay_seed = cases[i].delay_seed});
        run_plan(&r, &config, &p);
        rig_close(&r);
    }
}

/* The count decides, and only the device knows it: every request finds exactly one method. */
static void test_choice(void **state)
{
    (void)state;
    static plan p;
    const struct {
        kvf_transfer of[8]; /* counts of 0 and 1, 2 .. 3, 4 .. 7, ..., 64 .. */
        uint32_t delay_seed;
    } cases[] = {
        {{4, 4, 4, 4, 4, 2, 2, 2}, 0},  {{4, 4, 4, 2, 2, 2, 2, 2}, 20},
        {{3, 2, 4, 4, 5, 5, 2, 2}, 0},  {{2, 2, 2, 2, 2, 2, 4, 4}, 21},
        {{3, 3, 5, 5, 2, 2, 5, 3}, 22},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig_random random = rig_seed("choice", 200 + i);
        kvf_transfer_choice choice;
        make_plan(&p, &random, 4096);
        for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
            choice.method[b] = cases[i].of[b < 7 ? b : 7];
        for (uint32_t q = 6; q < REQUESTS; q++) /* of every bucket one at least */
            p.count[q] = 1u << (q - 6);
        kvf_transfer_config config = engine_config(KVF_TRANSFER_AUTO, 4096);
        config.choice = &choice;
        config.chunk_bytes = 20480;
        rig r;
        rig_open(&r, &(rig_config){.delay_seed = cases[i].delay_seed});
        run_plan(&r, &config, &p);
        rig_close(&r);
    }
}

static void hold(const void *raw, uint32_t task)
{
    (void)task;
    atomic_int *is_open = *(atomic_int *const *)raw;
    while (!atomic_load(is_open)) {
        struct timespec time = {.tv_nsec = 100000};
        nanosleep(&time, NULL);
    }
}

/* The named limit: requests_max in flight, then busy with nothing queued, then room again. */
static void test_busy(void **state)
{
    (void)state;
    static plan p;
    rig r;
    bench_memory m;
    kvf_transfer_engine *engine;
    kvf_stream *stream;
    rig_open(&r, NULL);
    rig_random random = rig_seed("busy", 3);
    make_plan(&p, &random, 4096);
    open_memory(&r, &p, &m);
    kvf_transfer_config config = engine_config(KVF_TRANSFER_GATHER, 4096);
    config.requests_max = 2;
    config.pool = &m.pool.memory;
    RIG_OK(kvf_transfer_open(r.device, &config, &engine));
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &stream));
    atomic_int is_open;
    atomic_init(&is_open, 0);
    atomic_int *pointer = &is_open;
    uint32_t tickets[3];
    RIG_OK(kvf_transfer_wait_room(engine)); /* nothing to wait for yet */
    RIG_OK(r.ops->host_call(stream, hold, &pointer, sizeof pointer));
    enqueue(&r, engine, &p, &m, 1, stream, &tickets[0]);
    enqueue(&r, engine, &p, &m, 2, stream, &tickets[1]);
    kvf_transfer_request request = {
        .from = m.device->from[3], .to = m.device->to[3], .count = &m.device->count[3]};
    assert_int_equal(kvf_transfer_submit(engine, &request, stream, &tickets[2]), KVF_BUSY);
    kvf_transfer_stats stats;
    kvf_transfer_stats_read(engine, &stats);
    assert_int_equal(stats.pages, 0);
    atomic_store(&is_open, 1);
    RIG_OK(kvf_transfer_wait_room(engine));
    enqueue(&r, engine, &p, &m, 3, stream, &tickets[2]);
    assert_int_equal(tickets[2], tickets[1] + 1);
    RIG_OK(kvf_transfer_join(engine, tickets[0], stream)); /* its place is taken: long done */
    RIG_OK(kvf_transfer_join(engine, tickets[1], stream));
    RIG_OK(kvf_transfer_join(engine, tickets[2], stream));
    RIG_OK(r.ops->stream_wait(stream));
    kvf_transfer_stats_read(engine, &stats);
    assert_int_equal(stats.pages, p.count[1] + p.count[2] + p.count[3]);
    r.ops->stream_destroy(stream);
    kvf_transfer_close(engine);
    close_memory(&r, &m);
    rig_close(&r);
}

typedef struct failing {
    rig r;
    plan p;
    bench_memory m;
    kvf_transfer_engine *engine;
    kvf_stream *stream, *other;
    atomic_uint wrong;
} failing;

static void open_failing(failing *f, kvf_transfer method, uint32_t pages_max)
{
    rig_open(&f->r, &(rig_config){.delay_seed = 30});
    rig_random random = rig_seed("failing", 40 + (uint64_t)method);
    make_plan(&f->p, &random, 4096);
    open_memory(&f->r, &f->p, &f->m);
    kvf_transfer_config config = engine_config(method, 4096);
    config.pages_max = pages_max;
    config.requests_max = 2;
    config.pool = &f->m.pool.memory;
    atomic_init(&f->wrong, 0);
    RIG_OK(kvf_transfer_open(f->r.device, &config, &f->engine));
    RIG_OK(f->r.ops->stream_create(f->r.device, KVF_PRIORITY_NORMAL, &f->stream));
    RIG_OK(f->r.ops->stream_create(f->r.device, KVF_PRIORITY_NORMAL, &f->other));
}

static void close_failing(failing *f)
{
    f->r.ops->stream_destroy(f->other);
    f->r.ops->stream_destroy(f->stream);
    kvf_transfer_close(f->engine);
    close_memory(&f->r, &f->m);
    rig_close(&f->r);
}

/* Request q, joined and checked on `stream`. */
static kvf_status fetch(failing *f, uint32_t q, kvf_stream *stream)
{
    uint32_t ticket;
    check_args check = {&f->p, &f->m, q, &f->wrong};
    enqueue(&f->r, f->engine, &f->p, &f->m, q, stream, &ticket);
    RIG_OK(kvf_transfer_join(f->engine, ticket, stream));
    RIG_OK(f->r.ops->host_call(stream, check_request, &check, sizeof check));
    return f->r.ops->stream_wait(stream);
}

static void assert_untouched(const failing *f, uint32_t q)
{
    const unsigned char *slots = (const unsigned char *)f->m.slots + q * region_bytes(&f->p);
    for (size_t b = 0; b < region_bytes(&f->p); b++)
        assert_int_equal(slots[b], GUARD);
}

/* A count that lies is an error of the stream, not a write out of bounds; the engine goes on. */
static void test_count_too_large(void **state)
{
    (void)state;
    static failing f;
    const kvf_transfer all[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH, KVF_TRANSFER_BATCH};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        kvf_error error;
        open_failing(&f, all[i], 19);
        f.p.count[2] = 20;
        f.p.count[4] = 19;
        assert_int_equal(fetch(&f, 2, f.stream), KVF_CORRUPT);
        assert_non_null(strstr(rig_error(&f.r, &error), "20 pages"));
        assert_untouched(&f, 2);
        atomic_store(&f.wrong, 0);
        RIG_OK(fetch(&f, 4, f.other));
        assert_int_equal(atomic_load(&f.wrong), 0);
        close_failing(&f);
    }
}

/* With `mapped` the host learns of it when it uses the slot again: a later join fails. */
static void test_count_too_large_mapped(void **state)
{
    (void)state;
    static failing f;
    open_failing(&f, KVF_TRANSFER_MAPPED, 19);
    f.p.count[2] = 20;
    f.p.count[0] = f.p.count[1] = 0;
    RIG_OK(fetch(&f, 2, f.stream));
    assert_untouched(&f, 2);
    RIG_OK(fetch(&f, 1, f.stream));
    assert_int_equal(fetch(&f, 0, f.stream), KVF_CORRUPT);
    f.p.count[4] = 19;
    atomic_store(&f.wrong, 0);
    RIG_OK(fetch(&f, 4, f.other));
    assert_int_equal(atomic_load(&f.wrong), 0);
    close_failing(&f);
}

/* Workers that are gone in the middle of a request, at every chunk of it. */
static void test_gather_fails(void **state)
{
    (void)state;
    static failing f;
    for (uint64_t at = 1; at <= 3; at++) {
        rig_fault fault = {.at = at, .only = "gather"};
        open_failing(&f, KVF_TRANSFER_GATHER, SLOTS);
        kvf_transfer_close(f.engine);
        kvf_transfer_config config = engine_config(KVF_TRANSFER_GATHER, 4096);
        config.chunk_bytes = 8 * 4096;
        config.pool = &f.m.pool.memory;
        RIG_OK(kvf_transfer_open(f.r.device, &config, &f.engine));
        f.p.count[5] = 24;
        f.p.count[7] = 24;
        kvf_device_set_fault(f.r.device, rig_refuse, &fault);
        assert_int_equal(fetch(&f, 5, f.stream), KVF_SYSTEM);
        assert_string_equal(fault.refused, "gather");
        atomic_store(&f.wrong, 0);
        RIG_OK(fetch(&f, 7, f.other)); /* the same engine */
        assert_int_equal(atomic_load(&f.wrong), 0);
        close_failing(&f);
    }
}

/* A failure that nobody joined before its slot was used again is not forgotten. */
static void test_late_join(void **state)
{
    (void)state;
    static failing f;
    uint32_t ticket;
    rig_fault fault = {.at = 1, .only = "gather"};
    open_failing(&f, KVF_TRANSFER_GATHER, SLOTS);
    kvf_device_set_fault(f.r.device, rig_refuse, &fault);
    f.p.count[1] = f.p.count[2] = f.p.count[3] = 5;
    enqueue(&f.r, f.engine, &f.p, &f.m, 1, f.stream, &ticket);
    RIG_OK(f.r.ops->stream_wait(f.stream));
    RIG_OK(fetch(&f, 2, f.other));
    uint32_t late;
    enqueue(&f.r, f.engine, &f.p, &f.m, 3, f.other, &late); /* takes the slot of the first */
    RIG_OK(kvf_transfer_join(f.engine, ticket, f.stream));
    assert_int_equal(f.r.ops->stream_wait(f.stream), KVF_SYSTEM);
    RIG_OK(kvf_transfer_join(f.engine, late, f.other));
    RIG_OK(f.r.ops->stream_wait(f.other));
    close_failing(&f);
}

/* An address that is no page of the pool is never read. */
static void test_page_outside(void **state)
{
    (void)state;
    static failing f;
    static char stray[4096];
    kvf_error error;
    uint32_t ticket;
    open_failing(&f, KVF_TRANSFER_GATHER, SLOTS);
    f.m.device->from[0][0] = stray;
    f.m.device->to[0][0] = f.m.slots;
    f.m.device->count[0] = 1;
    kvf_transfer_request request = {
        .from = f.m.device->from[0], .to = f.m.device->to[0], .count = &f.m.device->count[0]};
    RIG_OK(kvf_transfer_submit(f.engine, &request, f.stream, &ticket));
    RIG_OK(kvf_transfer_join(f.engine, ticket, f.stream));
    assert_int_equal(f.r.ops->stream_wait(f.stream), KVF_CORRUPT);
    assert_non_null(strstr(rig_error(&f.r, &error), "not in the pool"));
    close_failing(&f);
}

/* Requests that nobody joins are finished before the engine goes. */
static void test_close_in_flight(void **state)
{
    (void)state;
    static failing f;
    const kvf_transfer all[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH, KVF_TRANSFER_MAPPED};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        uint32_t ticket;
        open_failing(&f, all[i], SLOTS);
        enqueue(&f.r, f.engine, &f.p, &f.m, 2, f.stream, &ticket);
        enqueue(&f.r, f.engine, &f.p, &f.m, 5, f.stream, &ticket);
        kvf_transfer_close(f.engine);
        f.engine = NULL;
        RIG_OK(f.r.ops->stream_wait(f.stream));
        for (uint32_t k = 0; k < 2; k++) {
            check_args check = {&f.p, &f.m, k ? 5 : 2, &f.wrong};
            check_request(&check, 0);
        }
        assert_int_equal(atomic_load(&f.wrong), 0);
        close_failing(&f);
    }
}

/* What only a recording device has: `mapped` goes into a graph, and each run moves what the lists
 * name then; the others are refused and leave the recording whole. */
static void test_recording(void **state)
{
    (void)state;
    static failing f;
    kvf_device_properties properties;
    kvf_graph *graph;
    uint32_t ticket;
    open_failing(&f, KVF_TRANSFER_MAPPED, SLOTS);
    f.r.ops->properties(f.r.device, &properties);
    if (!properties.can_capture) {
        assert_int_equal(f.r.ops->capture_begin(f.stream), KVF_UNSUPPORTED);
        close_failing(&f);
        return;
    }
    RIG_OK(fetch(&f, 4, f.stream)); /* tickets of both kinds side by side */
    kvf_transfer_request request = {
        .from = f.m.device->from[0], .to = f.m.device->to[0], .count = &f.m.device->count[0]};
    RIG_OK(f.r.ops->capture_begin(f.stream));
    RIG_OK(kvf_transfer_submit(f.engine, &request, f.stream, &ticket));
    RIG_OK(kvf_transfer_join(f.engine, ticket, f.stream));
    RIG_OK(f.r.ops->capture_end(f.stream, &graph));
    rig_random random = rig_seed("recording", 77);
    for (uint32_t run = 0; run < 5; run++) {
        make_plan(&f.p, &random, 4096);
        f.p.count[0] = run == 3 ? 0 : rig_below(&random, SLOTS + 1);
        memset(f.m.slots, GUARD, region_bytes(&f.p));
        write_args write = {&f.p, &f.m, 0};
        write_request(&write, 0);
        RIG_OK(f.r.ops->graph_launch(graph, f.stream));
        RIG_OK(f.r.ops->stream_wait(f.stream));
        check_args check = {&f.p, &f.m, 0, &f.wrong};
        check_request(&check, 0);
        RIG_OK(fetch(&f, 6 + run, f.stream));
    }
    assert_int_equal(atomic_load(&f.wrong), 0);
    f.r.ops->graph_destroy(graph);
    close_failing(&f);

    const kvf_transfer refused[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH, KVF_TRANSFER_BATCH};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        kvf_error error;
        open_failing(&f, refused[i], SLOTS);
        RIG_OK(f.r.ops->capture_begin(f.stream));
        assert_int_equal(kvf_transfer_submit(f.engine, &request, f.stream, &ticket),
                         KVF_UNSUPPORTED);
        assert_non_null(strstr(rig_error(&f.r, &error), "cannot be recorded"));
        RIG_OK(f.r.ops->fill(f.stream, f.m.slots, 1, 1));
        RIG_OK(f.r.ops->capture_end(f.stream, &graph));
        f.r.ops->graph_destroy(graph);
        RIG_OK(fetch(&f, 5, f.stream));
        assert_int_equal(atomic_load(&f.wrong), 0);
        close_failing(&f);
    }
}

static void test_direct(void **state)
{
    (void)state;
    rig r;
    kvf_transfer_engine *engine;
    kvf_stream *stream;
    kvf_device_properties properties;
    rig_open(&r, NULL);
    r.ops->properties(r.device, &properties);
    kvf_transfer_config config = engine_config(KVF_TRANSFER_DIRECT, 4096);
    if (!properties.shares_host_memory) {
        assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_UNSUPPORTED);
        assert_null(engine);
        rig_close(&r);
        return;
    }
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &stream));
    config.method = KVF_TRANSFER_AUTO;
    RIG_OK(kvf_transfer_open(r.device, &config, &engine));
    assert_int_equal(kvf_transfer_method(engine), KVF_TRANSFER_DIRECT);
    assert_string_equal(kvf_transfer_name(kvf_transfer_method(engine)), "direct");
    assert_string_equal(kvf_transfer_name(KVF_TRANSFER_AUTO), "auto");
    assert_int_equal(kvf_transfer_host_bytes(engine) + kvf_transfer_device_bytes(engine), 0);
    char page[64] = "there", slot[64] = "untouched";
    const void *from = page;
    void *to = slot;
    uint32_t count = 1, ticket;
    kvf_transfer_request request = {.from = &from, .to = &to, .count = &count};
    for (uint32_t i = 0; i < 10; i++) {
        RIG_OK(kvf_transfer_submit(engine, &request, stream, &ticket));
        RIG_OK(kvf_transfer_join(engine, ticket, stream));
    }
    RIG_OK(kvf_transfer_wait_room(engine));
    RIG_OK(r.ops->stream_wait(stream));
    assert_string_equal(slot, "untouched");
    kvf_transfer_close(engine);
    r.ops->stream_destroy(stream);
    rig_close(&r);
}

static void test_bad(void **state)
{
    (void)state;
    rig r;
    kvf_transfer_engine *engine;
    kvf_error error;
    rig_open(&r, NULL);
    kvf_transfer_config config = engine_config((kvf_transfer)77, 4096);
    assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_UNSUPPORTED);
    config = engine_config(KVF_TRANSFER_GATHER, 100);
    assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_INVALID);
    assert_non_null(strstr(rig_error(&r, &error), "100 bytes"));
    config = engine_config(KVF_TRANSFER_GATHER, 4096);
    config.gather_threads = 0;
    assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_INVALID);
    assert_non_null(strstr(rig_error(&r, &error), "gather_threads 0"));
    assert_null(engine);
    config = engine_config(KVF_TRANSFER_MAPPED, 4096);
    config.blocks = KVF_MOVE_BLOCKS_MAX + 1;
    assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_INVALID);
    kvf_transfer_choice choice = kvf_transfer_choice_default();
    choice.method[10] = KVF_TRANSFER_MAPPED; /* a second range */
    config = engine_config(KVF_TRANSFER_AUTO, 4096);
    config.choice = &choice;
    assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_INVALID);
    assert_non_null(strstr(rig_error(&r, &error), "2 ranges"));
    choice = kvf_transfer_choice_default();
    choice.method[0] = KVF_TRANSFER_DIRECT;
    assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_INVALID);
    assert_null(engine);
    kvf_transfer_close(NULL);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_count_too_large),
        cmocka_unit_test(test_count_too_large_mapped),
        cmocka_unit_test(test_gather_fails),
        cmocka_unit_test(test_late_join),
        cmocka_unit_test(test_page_outside),
        cmocka_unit_test(test_close_in_flight),
        cmocka_unit_test(test_recording),
        cmocka_unit_test(test_direct),
        cmocka_unit_test(test_bad),
    };
    return cmocka_run_group_tests_name("transfer", tests, NULL, NULL);
}
