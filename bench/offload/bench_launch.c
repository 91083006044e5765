/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the host device costs around a kernel: enqueue and run of an empty launch, of a launch that
 * is spread over the team, the gain of spreading, a round trip to a waiting caller, a hop between
 * streams by an event.
 *
 * A decode step issues about ten launches per layer. Figures are nanoseconds, medians with 10th and
 * 90th percentile; every case is measured in every round.
 */

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench_report.h"
#include "common/clock.h"
#include "device.h"

#define REPEATS    500u
#define ROUNDS_MAX 201u
#define WORK_TASKS 16u

typedef enum case_id { EMPTY, TINY, WORK_ALONE, WORK_SPREAD, ROUND_TRIP, HOP, CASE_COUNT } case_id;

static const char *const case_names[CASE_COUNT] = {
    [EMPTY] = "launch of one empty task",
    [TINY] = "launch of 8 empty tasks",
    [WORK_ALONE] = "launch of 16 tasks of work, one thread",
    [WORK_SPREAD] = "launch of 16 tasks of work, the team",
    [ROUND_TRIP] = "launch and wait",
    [HOP] = "hop to another stream by an event",
};

typedef struct bench {
    kvf_context *context;
    kvf_device *devices[2]; /* of one thread; of one per core */
    kvf_stream *alone, *stream, *other;
    kvf_event *event, *back;
    double ns[CASE_COUNT][ROUNDS_MAX];
} bench;

static void check(const bench *b, kvf_status status)
{
    if (status == KVF_OK)
        return;
    fprintf(stderr, "bench_launch: %d: %s\n", (int)status,
            b->context ? b->context->error.text : "no context");
    exit(1);
}

static void empty(const void *args, uint32_t task)
{
    (void)args;
    (void)task;
}

/* About two microseconds of dependent arithmetic. */
static void work(const void *args, uint32_t task)
{
    volatile uint64_t sink;
    uint64_t x = task + 1;
    (void)args;
    for (uint32_t i = 0; i < 1500; i++)
        x = x * 6364136223846793005u + 1442695040888963407u;
    sink = x;
    (void)sink;
}

static void open_bench(bench *b)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    check(b, kvf_context_create(NULL, NULL, NULL, &b->context));
    for (uint32_t i = 0; i < 2; i++) {
        kvf_device_config config = {.threads = i == 0 || cores < 1 ? 1 : (uint32_t)cores,
                                    .isa_mask = KVF_ISA_ALL};
        check(b, kvf_device_open(b->context, KVF_DEVICE_HOST, &config, &b->devices[i]));
    }
    const kvf_device_ops *ops = b->devices[0]->ops;
    check(b, ops->stream_create(b->devices[0], KVF_PRIORITY_NORMAL, &b->alone));
    check(b, ops->stream_create(b->devices[1], KVF_PRIORITY_NORMAL, &b->stream));
    check(b, ops->stream_create(b->devices[1], KVF_PRIORITY_NORMAL, &b->other));
    check(b, ops->event_create(b->devices[1], &b->event));
    check(b, ops->event_create(b->devices[1], &b->back));
}

static void close_bench(bench *b)
{
    const kvf_device_ops *ops = b->devices[0]->ops;
    ops->stream_destroy(b->alone);
    ops->stream_destroy(b->stream);
    ops->stream_destroy(b->other);
    ops->event_destroy(b->event);
    ops->event_destroy(b->back);
    kvf_device_close(b->devices[0]);
    kvf_device_close(b->devices[1]);
    kvf_context_destroy(b->context);
}

static void run_once(bench *b, case_id id)
{
    const kvf_device_ops *ops = b->devices[0]->ops;
    switch (id) {
    case EMPTY:
        check(b, ops->launch(b->stream, empty, NULL, 0, 1));
        break;
    case TINY:
        check(b, ops->launch(b->stream, empty, NULL, 0, 8));
        break;
    case WORK_ALONE:
        check(b, ops->launch(b->alone, work, NULL, 0, WORK_TASKS));
        break;
    case WORK_SPREAD:
        check(b, ops->launch(b->stream, work, NULL, 0, WORK_TASKS));
        break;
    case ROUND_TRIP:
        check(b, ops->launch(b->stream, empty, NULL, 0, 1));
        check(b, ops->stream_wait(b->stream));
        break;
    default: /* there and back: two hops */
        check(b, ops->event_record(b->event, b->stream));
        check(b, ops->stream_wait_event(b->other, b->event));
        check(b, ops->event_record(b->back, b->other));
        check(b, ops->stream_wait_event(b->stream, b->back));
        break;
    }
}

static double measure(bench *b, case_id id)
{
    const kvf_device_ops *ops = b->devices[0]->ops;
    kvf_stream *stream = id == WORK_ALONE ? b->alone : b->stream;
    uint64_t began = kvf_now_ns();
    for (uint32_t i = 0; i < REPEATS; i++)
        run_once(b, id);
    check(b, ops->stream_wait(stream));
    double ns = (double)(kvf_now_ns() - began) / REPEATS;
    return id == HOP ? ns / 2 : ns;
}

static void report(bench *b, uint32_t rounds, const bench_args *args)
{
    kvf_device_properties properties;
    b->devices[1]->ops->properties(b->devices[1], &properties);
    printf("%u compute threads, %u rounds of %u, nanoseconds each\n\n%-42s %8s %8s %8s\n",
           properties.compute_threads, rounds, REPEATS, "case", "p10", "median", "p90");
    FILE *json = bench_json_open(args);
    if (json)
        fprintf(json, "  \"threads\": %u, \"rounds\": %u,\n  \"ns\": {\n",
                properties.compute_threads, rounds);
    for (int id = 0; id < CASE_COUNT; id++) {
        double p[3];
        bench_percentiles(b->ns[id], rounds, p);
        printf("%-42s %8.0f %8.0f %8.0f\n", case_names[id], p[0], p[1], p[2]);
        if (json)
            bench_json_three(json, case_names[id], p, id + 1 < CASE_COUNT ? ",\n" : "}\n");
    }
    bench_json_close(json);
}

int main(int argc, char **argv)
{
    static bench b;
    uint32_t rounds = 41;
    const bench_option options[] = {{"--rounds", &rounds, 1, ROUNDS_MAX, NULL}, {0}};
    const bench_args args = bench_args_read(argc, argv, options);
    open_bench(&b);
    for (int id = 0; id < CASE_COUNT; id++)
        (void)measure(&b, (case_id)id);
    for (uint32_t round = 0; round < rounds; round++)
        for (int id = 0; id < CASE_COUNT; id++)
            b.ns[id][round] = measure(&b, (case_id)id);
    report(&b, rounds, &args);
    close_bench(&b);
    return 0;
}
