/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Transfer: every method that moves bytes delivers the same ones, whatever the chunks, the ring,
 * the threads, the delays and the number of requests in flight, and touches nothing else.
 */

#include "transfer.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "offload_rig.h"

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
    char *sources; /* [SOURCES, page_bytes] */
    char *slots;   /* [REQUESTS, region_bytes] */
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

static void open_memory(rig *r, const plan *p, bench_memory *m)
{
    void *memory;
    RIG_OK(r->ops->memory_alloc(r->device, SOURCES * p->page_bytes, &memory));
    m->sources = memory;
    RIG_OK(r->ops->memory_alloc(r->device, REQUESTS * region_bytes(p), &memory));
    m->slots = memory;
    RIG_OK(r->ops->memory_alloc(r->device, sizeof *m->device, &memory));
    m->device = memory;
    for (uint32_t s = 0; s < SOURCES; s++)
        for (size_t b = 0; b < p->page_bytes; b++)
            m->sources[s * p->page_bytes + b] = (char)(s * 131 + b * 7 + (b >> 8));
    memset(m->slots, GUARD, REQUESTS * region_bytes(p));
}

static void close_memory(rig *r, bench_memory *m)
{
    r->ops->memory_free(r->device, m->device);
    r->ops->memory_free(r->device, m->slots);
    r->ops->memory_free(r->device, m->sources);
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
        t->from[q][i] = a->memory->sources + p->source[q][i] * p->page_bytes;
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
        if (memcmp(slot, a->memory->sources + p->source[q][i] * p->page_bytes, p->page_bytes) != 0)
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

static void run_plan(rig *r, const kvf_transfer_config *config, const plan *p)
{
    bench_memory m;
    kvf_transfer_engine *engine;
    kvf_stream *streams[2];
    atomic_uint wrong;
    atomic_init(&wrong, 0);
    open_memory(r, p, &m);
    RIG_OK(kvf_transfer_open(r->device, config, &engine));
    assert_int_equal(kvf_transfer_method(engine), config->method);
    for (uint32_t i = 0; i < 2; i++)
        RIG_OK(r->ops->stream_create(r->device, KVF_PRIORITY_NORMAL, &streams[i]));
    uint32_t tickets[REQUESTS];
    uint64_t pages = 0;
    /* Join two requests later, so that several are in flight, on alternating streams. */
    for (uint32_t q = 0; q < REQUESTS + 2; q++) {
        if (q < REQUESTS) {
            enqueue(r, engine, p, &m, q, streams[q % 2], &tickets[q]);
            pages += p->count[q];
        }
        if (q < 2)
            continue;
        check_args check = {p, &m, q - 2, &wrong};
        RIG_OK(kvf_transfer_join(engine, tickets[q - 2], streams[q % 2]));
        RIG_OK(r->ops->host_call(streams[q % 2], check_request, &check, sizeof check));
    }
    for (uint32_t i = 0; i < 2; i++)
        RIG_OK(r->ops->stream_wait(streams[i]));
    assert_int_equal(atomic_load(&wrong), 0);

    kvf_transfer_stats stats;
    kvf_transfer_stats_read(engine, &stats);
    assert_int_equal(stats.pages, pages);
    assert_int_equal(stats.bytes, pages * p->page_bytes);
    uint64_t host_bytes, device_bytes, copies = 0;
    kvf_transfer_needs(r->device, config, &host_bytes, &device_bytes);
    assert_int_equal(kvf_transfer_host_bytes(engine), host_bytes);
    assert_int_equal(kvf_transfer_device_bytes(engine), device_bytes);
    uint64_t per_copy =
        config->method == KVF_TRANSFER_EACH ? 1 : host_bytes / config->depth / p->page_bytes;
    for (uint32_t q = 0; q < REQUESTS; q++)
        copies += (p->count[q] + per_copy - 1) / per_copy;
    assert_int_equal(stats.copies, copies);
    assert_true(stats.copy_ns > 0);
    kvf_transfer_stats_reset(engine);
    kvf_transfer_stats_read(engine, &stats);
    assert_int_equal(stats.pages + stats.bytes + stats.copies + stats.copy_ns, 0);

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
        {KVF_TRANSFER_EACH, 2560, 0, 3, 1, 4, 0},        {KVF_TRANSFER_EACH, 4096, 0, 3, 1, 1, 5},
        {KVF_TRANSFER_GATHER, 2560, 0, 3, 1, 4, 0},      /* everything in one chunk */
        {KVF_TRANSFER_GATHER, 4096, 65536, 3, 2, 4, 0},  /* 16 pages: full and part chunks */
        {KVF_TRANSFER_GATHER, 4096, 65536, 1, 2, 4, 6},  /* a ring of one */
        {KVF_TRANSFER_GATHER, 16384, 40000, 2, 3, 2, 7}, /* 2 pages, the rest unused */
        {KVF_TRANSFER_GATHER, 2560, 100, 3, 1, 1, 8},    /* a chunk of one page at least */
        {KVF_TRANSFER_GATHER, 4096, 20480, 3, 2, 12, 9},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig_random random = rig_seed("transfer", 100 + i);
        make_plan(&p, &random, cases[i].page_bytes);
        kvf_transfer_config config = engine_config(cases[i].method, cases[i].page_bytes);
        config.chunk_bytes = cases[i].chunk_bytes;
        config.depth = cases[i].depth;
        config.gather_threads = cases[i].gather_threads;
        config.requests_max = cases[i].requests_max;
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

/* A count that lies is an error of the stream, not a write out of bounds. */
static void test_count_too_large(void **state)
{
    (void)state;
    static plan p;
    rig r;
    bench_memory m;
    kvf_transfer_engine *engine;
    kvf_stream *stream;
    rig_open(&r, NULL);
    rig_random random = rig_seed("count too large", 4);
    make_plan(&p, &random, 4096);
    p.count[2] = 20;
    open_memory(&r, &p, &m);
    kvf_transfer_config config = engine_config(KVF_TRANSFER_GATHER, 4096);
    config.pages_max = 19;
    RIG_OK(kvf_transfer_open(r.device, &config, &engine));
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &stream));
    uint32_t ticket;
    enqueue(&r, engine, &p, &m, 2, stream, &ticket);
    RIG_OK(kvf_transfer_join(engine, ticket, stream));
    assert_int_equal(r.ops->stream_wait(stream), KVF_CORRUPT);
    kvf_error error;
    assert_non_null(strstr(rig_error(&r, &error), "20 pages"));
    for (size_t b = 0; b < REQUESTS * region_bytes(&p); b++)
        assert_int_equal((unsigned char)m.slots[b], GUARD);
    r.ops->stream_destroy(stream);
    kvf_transfer_close(engine);
    close_memory(&r, &m);
    rig_close(&r);
}

static void test_direct_and_bad(void **state)
{
    (void)state;
    rig r;
    kvf_transfer_engine *engine;
    kvf_stream *stream;
    kvf_error error;
    rig_open(&r, NULL);
    RIG_OK(r.ops->stream_create(r.device, KVF_PRIORITY_NORMAL, &stream));
    kvf_transfer_config config = engine_config(KVF_TRANSFER_AUTO, 4096);
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

    config.method = (kvf_transfer)77;
    assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_UNSUPPORTED);
    config = engine_config(KVF_TRANSFER_GATHER, 100);
    assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_INVALID);
    assert_non_null(strstr(rig_error(&r, &error), "100 bytes"));
    config = engine_config(KVF_TRANSFER_GATHER, 4096);
    config.gather_threads = 0;
    assert_int_equal(kvf_transfer_open(r.device, &config, &engine), KVF_INVALID);
    assert_non_null(strstr(rig_error(&r, &error), "gather_threads 0"));
    assert_null(engine);
    kvf_transfer_close(NULL);
    r.ops->stream_destroy(stream);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_count_too_large),
        cmocka_unit_test(test_direct_and_bad),
    };
    return cmocka_run_group_tests_name("transfer", tests, NULL, NULL);
}
