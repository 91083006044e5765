/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A transfer that fails fails the stream that joins it, and nothing else: counts that lie, workers
 * that are gone, addresses outside the pool, engines that close in flight; and what a recording
 * takes.
 */

#include "transfer_rig.h"

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
    plan_make(&f->p, &random, 4096);
    transfer_open_memory(&f->r, &f->p, &f->m);
    kvf_transfer_config config = transfer_engine_config(method, 4096);
    config.pages_max = pages_max;
    config.requests_max = 2;
    config.pool = &f->m.pool.memory;
    atomic_init(&f->wrong, 0);
    RIG_OK(kvf_transfer_open(f->r.device, &config, &f->engine));
    f->stream = rig_stream(&f->r);
    f->other = rig_stream(&f->r);
}

static void close_failing(failing *f)
{
    kvf_transfer_close(f->engine);
    kvf_page_pool_destroy(&f->m.pool);
    rig_close(&f->r);
}

/* Request q, joined and checked on `stream`. */
static kvf_status fetch(failing *f, uint32_t q, kvf_stream *stream)
{
    uint32_t ticket;
    check_args check = {&f->p, &f->m, q, &f->wrong};
    transfer_enqueue(&f->r, f->engine, &f->p, &f->m, q, stream, &ticket);
    RIG_OK(kvf_transfer_join(f->engine, ticket, stream));
    transfer_check(&f->r, &check, stream);
    return f->r.ops->stream_wait(stream);
}

static void assert_untouched(failing *f, uint32_t q)
{
    const size_t bytes = plan_region_bytes(&f->p), at = q * bytes;
    const unsigned char *seen = (const unsigned char *)f->m.mirror + at;
    rig_put(&f->r, f->m.mirror + at, f->m.slots + at, bytes);
    for (size_t b = 0; b < bytes; b++)
        assert_int_equal(seen[b], GUARD);
}

/* A count that lies is an error of the stream, not a write out of bounds; the engine goes on. */
TEST(test_count_too_large)
{
    static failing f;
    const kvf_transfer all[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH, KVF_TRANSFER_BATCH};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        open_failing(&f, all[i], 19);
        f.p.count[2] = 20;
        f.p.count[4] = 19;
        assert_int_equal(fetch(&f, 2, f.stream), KVF_CORRUPT);
        RIG_TELLS(&f.r, "20 pages");
        assert_untouched(&f, 2);
        atomic_store(&f.wrong, 0);
        RIG_OK(fetch(&f, 4, f.other));
        assert_int_equal(atomic_load(&f.wrong), 0);
        close_failing(&f);
    }
}

/* With `mapped` the host learns of it when it uses the slot again: a later join fails. */
TEST(test_count_too_large_mapped)
{
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
TEST(test_gather_fails)
{
    static failing f;
    for (uint64_t at = 1; at <= 3; at++) {
        rig_fault fault = {.at = at, .only = "gather"};
        open_failing(&f, KVF_TRANSFER_GATHER, SLOTS);
        kvf_transfer_close(f.engine);
        kvf_transfer_config config = transfer_engine_config(KVF_TRANSFER_GATHER, 4096);
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
TEST(test_late_join)
{
    static failing f;
    uint32_t ticket;
    rig_fault fault = {.at = 1, .only = "gather"};
    open_failing(&f, KVF_TRANSFER_GATHER, SLOTS);
    kvf_device_set_fault(f.r.device, rig_refuse, &fault);
    f.p.count[1] = f.p.count[2] = f.p.count[3] = 5;
    transfer_enqueue(&f.r, f.engine, &f.p, &f.m, 1, f.stream, &ticket);
    RIG_OK(f.r.ops->stream_wait(f.stream));
    RIG_OK(fetch(&f, 2, f.other));
    uint32_t late;
    transfer_enqueue(&f.r, f.engine, &f.p, &f.m, 3, f.other,
                     &late); /* takes the slot of the first */
    RIG_OK(kvf_transfer_join(f.engine, ticket, f.stream));
    assert_int_equal(f.r.ops->stream_wait(f.stream), KVF_SYSTEM);
    RIG_OK(kvf_transfer_join(f.engine, late, f.other));
    RIG_OK(f.r.ops->stream_wait(f.other));
    close_failing(&f);
}

/* An address that is no page of the pool is never read. */
TEST(test_page_outside)
{
    static failing f;
    static char stray[4096];
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
    RIG_TELLS(&f.r, "not in the pool");
    close_failing(&f);
}

/* Requests that nobody joins are finished before the engine goes. */
TEST(test_close_in_flight)
{
    static failing f;
    const kvf_transfer all[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH, KVF_TRANSFER_MAPPED};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        uint32_t ticket;
        open_failing(&f, all[i], SLOTS);
        transfer_enqueue(&f.r, f.engine, &f.p, &f.m, 2, f.stream, &ticket);
        transfer_enqueue(&f.r, f.engine, &f.p, &f.m, 5, f.stream, &ticket);
        kvf_transfer_close(f.engine);
        f.engine = NULL;
        RIG_OK(f.r.ops->stream_wait(f.stream));
        for (uint32_t k = 0; k < 2; k++) {
            check_args check = {&f.p, &f.m, k ? 5 : 2, &f.wrong};
            transfer_check(&f.r, &check, f.stream);
        }
        RIG_OK(f.r.ops->stream_wait(f.stream));
        assert_int_equal(atomic_load(&f.wrong), 0);
        close_failing(&f);
    }
}

/* Functions that only a recording device has: `mapped` goes into a graph, and each run moves what
 * the lists name then; the others are refused and leave the recording whole. */
TEST(test_recording)
{
    static failing f;
    kvf_device_properties properties;
    kvf_graph *graph;
    uint32_t ticket;
    open_failing(&f, KVF_TRANSFER_MAPPED, SLOTS);
    f.r.ops->properties(f.r.device, &properties);
    if (!properties.can_capture) {
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
        plan_make(&f.p, &random, 4096);
        f.p.count[0] = run == 3 ? 0 : rig_below(&random, SLOTS + 1);
        rig_set(&f.r, f.m.slots, GUARD, plan_region_bytes(&f.p));
        write_args write = {&f.p, &f.m, 0};
        transfer_write_request(&write, 0);
        RIG_OK(f.r.ops->graph_launch(graph, f.stream));
        check_args check = {&f.p, &f.m, 0, &f.wrong};
        transfer_check(&f.r, &check, f.stream);
        RIG_OK(f.r.ops->stream_wait(f.stream));
        RIG_OK(fetch(&f, 6 + run, f.stream));
    }
    assert_int_equal(atomic_load(&f.wrong), 0);
    f.r.ops->graph_destroy(graph);
    close_failing(&f);

    const kvf_transfer refused[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH, KVF_TRANSFER_BATCH};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        open_failing(&f, refused[i], SLOTS);
        RIG_OK(f.r.ops->capture_begin(f.stream));
        assert_int_equal(kvf_transfer_submit(f.engine, &request, f.stream, &ticket),
                         KVF_UNSUPPORTED);
        RIG_TELLS(&f.r, "cannot be recorded");
        RIG_OK(f.r.ops->fill(f.stream, f.m.slots, 1, 1));
        RIG_OK(f.r.ops->capture_end(f.stream, &graph));
        f.r.ops->graph_destroy(graph);
        RIG_OK(fetch(&f, 5, f.stream));
        assert_int_equal(atomic_load(&f.wrong), 0);
        close_failing(&f);
    }
}
