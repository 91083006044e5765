/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Transfer: every method that moves bytes delivers the same ones, whatever the chunks, the ring,
 * the threads, the delays and the number of requests in flight, and touches nothing else.
 */

#include "transfer_rig.h"

#include <time.h>

/* The engine's counts must be those of the plan; `mapped` leaves counts to the device. */
static void check_counters(kvf_transfer_engine *engine, const kvf_transfer_config *config,
                           const plan *p)
{
    kvf_transfer_stats stats;
    kvf_transfer_shape shape;
    uint64_t pages = 0, copies = 0;
    kvf_transfer_stats_read(engine, &stats);
    kvf_transfer_shape_read(engine, &shape);
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
    kvf_transfer_engine *engine = transfer_run(r, config, p, &m);
    assert_int_equal(kvf_transfer_method(engine), config->method);
    check_counters(engine, config, p);
    kvf_transfer_close(engine);
    kvf_page_pool_destroy(&m.pool);
}

TEST(test_same_bytes)
{
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
        /* pages of one token */
        {KVF_TRANSFER_GATHER, 256, 0, 3, 2, 4, 14},
        {KVF_TRANSFER_GATHER, 512, 2048, 2, 1, 4, 0}, /* 4 pages */
        {KVF_TRANSFER_GATHER, 1024, 40000, 3, 3, 4, 15},
        {KVF_TRANSFER_MAPPED, 256, 0, 3, 1, 4, 16},
        {KVF_TRANSFER_MAPPED, 512, 0, 3, 1, 4, 0},
        {KVF_TRANSFER_MAPPED, 1024, 0, 3, 1, 4, 17},
        {KVF_TRANSFER_EACH, 256, 0, 3, 1, 4, 18},
        {KVF_TRANSFER_BATCH, 256, 0, 3, 1, 4, 19},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig_random random = rig_seed("transfer", 100 + i);
        plan_make(&p, &random, cases[i].page_bytes);
        kvf_transfer_config config = transfer_engine_config(cases[i].method, cases[i].page_bytes);
        config.chunk_bytes = cases[i].chunk_bytes;
        config.depth = cases[i].depth;
        config.gather_threads = cases[i].gather_threads;
        config.requests_max = cases[i].requests_max;
        config.first_ticket = i % 2 ? UINT32_MAX - 5 : 0; /* tickets wrap */
        config.blocks = 1 + (uint32_t)i % 5;
        rig r;
        rig_open(&r, &(rig_config){.delay_seed = cases[i].delay_seed});
        run_plan(&r, &config, &p);
        rig_close(&r);
    }
}

/* The count decides, and only the device knows it: every request finds exactly one method. */
TEST(test_choice)
{
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
        plan_make(&p, &random, 4096);
        for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
            choice.method[b] = cases[i].of[b < 7 ? b : 7];
        for (uint32_t q = 6; q < REQUESTS; q++) /* of every bucket one at least */
            p.count[q] = 1u << (q - 6);
        kvf_transfer_config config = transfer_engine_config(KVF_TRANSFER_AUTO, 4096);
        config.choice = &choice;
        config.chunk_bytes = 20480;
        rig r;
        rig_open(&r, &(rig_config){.delay_seed = cases[i].delay_seed});
        run_plan(&r, &config, &p);
        rig_close(&r);
    }
}

/* Without a measurement no thread of the host takes part, whatever the size. */
RIG_TEST(test_default)
{
    const kvf_transfer_choice usual = kvf_transfer_choice_default();
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        assert_int_equal(usual.method[b], KVF_TRANSFER_MAPPED);
    if (r->kind == KVF_DEVICE_CUDA) {
        kvf_transfer_engine *engine;
        const kvf_transfer_config config = transfer_engine_config(KVF_TRANSFER_AUTO, 4096);
        RIG_OK(kvf_transfer_open(r->device, &config, &engine));
        assert_int_equal(kvf_transfer_method(engine), KVF_TRANSFER_MAPPED);
        kvf_transfer_close(engine);
    }
}

static void hold(const void *raw, uint32_t task)
{
    atomic_int *is_open = *(atomic_int *const *)raw;
    while (!atomic_load(is_open)) {
        struct timespec time = {.tv_nsec = 100000};
        nanosleep(&time, NULL);
    }
}

/* The named limit: requests_max in flight, then busy with nothing queued, then room again. */
RIG_TEST(test_busy)
{
    static plan p;
    bench_memory m;
    kvf_transfer_engine *engine;
    rig_random random = rig_seed("busy", 3);
    plan_make(&p, &random, 4096);
    transfer_open_memory(r, &p, &m);
    kvf_transfer_config config = transfer_engine_config(KVF_TRANSFER_GATHER, 4096);
    config.requests_max = 2;
    config.pool = &m.pool.memory;
    RIG_OK(kvf_transfer_open(r->device, &config, &engine));
    kvf_stream *stream = rig_stream(r);
    atomic_int is_open;
    atomic_init(&is_open, 0);
    atomic_int *pointer = &is_open;
    uint32_t tickets[3];
    RIG_OK(kvf_transfer_wait_room(engine)); /* nothing to wait for yet */
    RIG_OK(r->ops->host_call(stream, hold, &pointer, sizeof pointer));
    transfer_enqueue(r, engine, &p, &m, 1, stream, &tickets[0]);
    transfer_enqueue(r, engine, &p, &m, 2, stream, &tickets[1]);
    kvf_transfer_request request = {
        .from = m.device->from[3], .to = m.device->to[3], .count = &m.device->count[3]};
    assert_int_equal(kvf_transfer_submit(engine, &request, stream, &tickets[2]), KVF_BUSY);
    kvf_transfer_stats stats;
    kvf_transfer_stats_read(engine, &stats);
    assert_int_equal(stats.pages, 0);
    atomic_store(&is_open, 1);
    RIG_OK(kvf_transfer_wait_room(engine));
    transfer_enqueue(r, engine, &p, &m, 3, stream, &tickets[2]);
    assert_int_equal(tickets[2], tickets[1] + 1);
    RIG_OK(kvf_transfer_join(engine, tickets[0], stream)); /* its place is taken: long done */
    RIG_OK(kvf_transfer_join(engine, tickets[1], stream));
    RIG_OK(kvf_transfer_join(engine, tickets[2], stream));
    RIG_OK(r->ops->stream_wait(stream));
    kvf_transfer_stats_read(engine, &stats);
    assert_int_equal(stats.pages, p.count[1] + p.count[2] + p.count[3]);
    kvf_transfer_close(engine);
    kvf_page_pool_destroy(&m.pool);
}

RIG_TEST(test_direct)
{
    kvf_transfer_engine *engine;
    kvf_device_properties properties;
    r->ops->properties(r->device, &properties);
    kvf_transfer_config config = transfer_engine_config(KVF_TRANSFER_DIRECT, 4096);
    if (!properties.shares_host_memory) {
        assert_int_equal(kvf_transfer_open(r->device, &config, &engine), KVF_UNSUPPORTED);
        assert_null(engine);
        return;
    }
    kvf_stream *stream = rig_stream(r);
    config.method = KVF_TRANSFER_AUTO;
    RIG_OK(kvf_transfer_open(r->device, &config, &engine));
    assert_int_equal(kvf_transfer_method(engine), KVF_TRANSFER_DIRECT);
    assert_string_equal(kvf_transfer_name(kvf_transfer_method(engine)), "direct");
    assert_string_equal(kvf_transfer_name(KVF_TRANSFER_AUTO), "auto");
    uint64_t host_bytes, device_bytes;
    kvf_transfer_needs(r->device, &config, &host_bytes, &device_bytes);
    assert_int_equal(host_bytes + device_bytes, 0);
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
    RIG_OK(r->ops->stream_wait(stream));
    assert_string_equal(slot, "untouched");
    kvf_transfer_close(engine);
}
