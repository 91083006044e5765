/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What it costs to bring scattered pages over: gather alone, copy alone, both at once through the
 * ring, and the baselines (a memcpy loop on one core; one copy per page). Every case is measured in
 * every round, so that whatever else the machine does falls on all of them; figures are medians
 * with 10th and 90th percentile.
 *
 * usage: bench_transfer [--json FILE] [--rounds N] [--pool MIB] [--page BYTES]
 *
 * The pool is host memory of the library, pages are drawn at random anew for every measurement.
 * Copy alone moves the same bytes from the ring to device memory, one copy per chunk, on a stream.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "page_pool.h"
#include "transfer.h"

#define MIB ((size_t)1 << 20)
#define MOVED_BYTES                                                                                \
    (64 * MIB) /* by one measurement: long against a wake-up, short against a round */
#define ROUNDS_MAX 101u
#define DEPTH      3u

typedef enum case_id {
    READ_ALL,
    MEMCPY_LOOP,
    GATHER_CACHED,
    GATHER_STREAM,
    GATHER_TWO,
    BESIDE,
    EACH,
    SCATTER,
    PLAIN_1M,
    POOL_1M,
    FIRST_SIZED,
    COPY_512K = FIRST_SIZED,
    PIPE_512K,
    COPY_1M,
    PIPE_1M,
    COPY_2M,
    PIPE_2M,
    COPY_4M,
    PIPE_4M,
    CASE_COUNT
} case_id;

static const char *const case_names[CASE_COUNT] = {
    [READ_ALL] = "read only, one core",
    [MEMCPY_LOOP] = "memcpy loop to ring, one core",
    [GATHER_CACHED] = "gather to ring, cached stores",
    [GATHER_STREAM] = "gather to ring, streaming stores",
    [GATHER_TWO] = "gather to ring, cached, two cores",
    [BESIDE] = "gather beside copy, not linked, 1 MiB",
    [EACH] = "each: one copy per page",
    [SCATTER] = "gather: 1 MiB chunks, scattered slots",
    [PLAIN_1M] = "copy alone, 1 MiB, through the cache",
    [POOL_1M] = "copy alone, 1 MiB, from the pool",
    [COPY_512K] = "copy alone, 512 KiB chunks",
    [PIPE_512K] = "gather + copy, 512 KiB chunks",
    [COPY_1M] = "copy alone, 1 MiB chunks",
    [PIPE_1M] = "gather + copy, 1 MiB chunks",
    [COPY_2M] = "copy alone, 2 MiB chunks",
    [PIPE_2M] = "gather + copy, 2 MiB chunks",
    [COPY_4M] = "copy alone, 4 MiB chunks",
    [PIPE_4M] = "gather + copy, 4 MiB chunks",
};

typedef struct options {
    const char *json;
    uint32_t rounds;
    size_t pool_bytes;
    size_t page_bytes;
    int argc;
    char **argv;
} options;

typedef struct bench {
    options options;
    kvf_context *context;
    kvf_device *device;
    kvf_page_pool pool;
    kvf_stream *stream;
    kvf_gather *gather, *gather_two;
    kvf_host_memory ring; /* of 4 MiB chunks, DEPTH of them */
    char *target;         /* device [MOVED_BYTES] */
    const void **from;    /* device [pages] */
    void **in_order;      /* device [pages] into target */
    void **scattered;     /* device [pages] into target */
    void **to_ring;       /* device [pages], round and round a ring of 1 MiB chunks */
    uint32_t *count;      /* device [1] */
    uint32_t pages;
    kvf_transfer_engine *each, *scatter, *sized[4];
    uint64_t random;
    double gbps[CASE_COUNT][ROUNDS_MAX];
    uint64_t sink;
} bench;

static void check(const bench *b, kvf_status status)
{
    if (status == KVF_OK)
        return;
    fprintf(stderr, "bench_transfer: %d: %s\n", (int)status,
            b->context != NULL ? b->context->error.text : "no context");
    exit(1);
}

static uint32_t below(bench *b, uint32_t limit)
{
    b->random = b->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((b->random >> 32) * limit >> 32);
}

static void *device_memory(bench *b, size_t bytes)
{
    void *memory = NULL;
    check(b, b->device->ops->memory_alloc(b->device, bytes, &memory));
    return memory;
}

static kvf_transfer_engine *open_engine(bench *b, kvf_transfer method, size_t chunk_bytes)
{
    kvf_transfer_config config = {.method = method,
                                  .page_bytes = b->options.page_bytes,
                                  .pages_max = b->pages,
                                  .requests_max = 1,
                                  .chunk_bytes = chunk_bytes,
                                  .depth = DEPTH,
                                  .gather_threads = 1,
                                  .memory = {.node = -1, .touch_threads = 1}};
    kvf_transfer_engine *engine = NULL;
    check(b, kvf_transfer_open(b->device, &config, &engine));
    return engine;
}

static void open_bench(bench *b)
{
    kvf_device_config device = {.threads = 1, .isa_mask = KVF_ISA_ALL};
    kvf_host_memory_config memory = {.node = -1, .touch_threads = 2};
    check(b, kvf_context_create(NULL, NULL, NULL, &b->context));
    check(b, kvf_device_open(b->context, KVF_DEVICE_HOST, &device, &b->device));
    size_t page = b->options.page_bytes;
    b->pages = (uint32_t)(MOVED_BYTES / page);
    check(b, kvf_page_pool_create(b->context, b->device, &memory, page,
                                  (uint32_t)(b->options.pool_bytes / page), &b->pool));
    memory.bytes = 4 * MIB * DEPTH;
    memory.granule = 4 * MIB;
    check(b, kvf_host_memory_create(b->context, b->device, &memory, &b->ring));
    check(b, b->device->ops->stream_create(b->device, KVF_PRIORITY_NORMAL, &b->stream));
    check(b, kvf_gather_create(b->device, 1, NULL, &b->gather));
    check(b, kvf_gather_create(b->device, 2, NULL, &b->gather_two));
    b->target = device_memory(b, MOVED_BYTES);
    b->from = device_memory(b, b->pages * sizeof(void *));
    b->in_order = device_memory(b, b->pages * sizeof(void *));
    b->scattered = device_memory(b, b->pages * sizeof(void *));
    b->to_ring = device_memory(b, b->pages * sizeof(void *));
    b->count = device_memory(b, sizeof *b->count);
    *b->count = b->pages;
    for (uint32_t i = 0; i < b->pages; i++) {
        b->in_order[i] = b->scattered[i] = b->target + i * page;
        b->to_ring[i] = b->ring.arenas[0].host + i * page % (DEPTH * MIB);
    }
    for (uint32_t i = b->pages; i-- > 1;) {
        uint32_t j = below(b, i + 1);
        void *other = b->scattered[j];
        b->scattered[j] = b->scattered[i];
        b->scattered[i] = other;
    }
    for (uint32_t i = 0; i < b->pool.block_count; i++)
        memset(kvf_page_pool_host(&b->pool, (kvf_block){i}), (int)i, page);
    b->each = open_engine(b, KVF_TRANSFER_EACH, 0);
    b->scatter = open_engine(b, KVF_TRANSFER_GATHER, MIB);
    for (uint32_t i = 0; i < 4; i++)
        b->sized[i] = open_engine(b, KVF_TRANSFER_GATHER, (MIB / 2) << i);
}

static void close_bench(bench *b)
{
    const kvf_device_ops *ops = b->device->ops;
    for (uint32_t i = 0; i < 4; i++)
        kvf_transfer_close(b->sized[i]);
    kvf_transfer_close(b->scatter);
    kvf_transfer_close(b->each);
    ops->memory_free(b->device, b->count);
    ops->memory_free(b->device, b->to_ring);
    ops->memory_free(b->device, b->scattered);
    ops->memory_free(b->device, b->in_order);
    ops->memory_free(b->device, b->from);
    ops->memory_free(b->device, b->target);
    kvf_gather_destroy(b->gather_two);
    kvf_gather_destroy(b->gather);
    ops->stream_destroy(b->stream);
    kvf_host_memory_destroy(b->context, &b->ring);
    kvf_page_pool_destroy(&b->pool);
    kvf_device_close(b->device);
    kvf_context_destroy(b->context);
}

/* ---- the cases ---- */

static void read_all(bench *b)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < b->pages; i++) {
        const uint64_t *words = b->from[i];
        for (size_t w = 0; w < b->options.page_bytes / 8; w += 8)
            sum += words[w];
    }
    b->sink += sum;
}

static void memcpy_loop(bench *b)
{
    for (uint32_t i = 0; i < b->pages; i++)
        memcpy(b->to_ring[i], b->from[i], b->options.page_bytes);
}

static void gather(bench *b, kvf_gather *workers, uint32_t stream)
{
    uint32_t per_chunk = (uint32_t)(MIB / b->options.page_bytes);
    for (uint32_t first = 0; first < b->pages; first += per_chunk) {
        kvf_copy_args args = {.bytes = b->options.page_bytes,
                              .count = kvf_min_u32(per_chunk, b->pages - first),
                              .per_task = 8,
                              .stream = stream,
                              .from = b->from + first,
                              .to = b->to_ring + first};
        kvf_gather_run(workers, &args);
    }
}

static void enqueue_copies(bench *b, size_t chunk_bytes)
{
    for (size_t at = 0, n = 0; at < MOVED_BYTES; at += chunk_bytes, n++)
        check(b, b->device->ops->copy_through(b->stream, b->target + at,
                                              b->ring.arenas[0].host + n % DEPTH * chunk_bytes,
                                              chunk_bytes));
}

static void copy_alone(bench *b, size_t chunk_bytes)
{
    enqueue_copies(b, chunk_bytes);
    check(b, b->device->ops->stream_wait(b->stream));
}

/* Both at the same time, neither waiting for the other. */
static void beside(bench *b)
{
    enqueue_copies(b, MIB);
    gather(b, b->gather, 0);
    check(b, b->device->ops->stream_wait(b->stream));
}

/* The same with the device's plain copy, whose destination passes through the cache. */
static void copy_plain(bench *b)
{
    for (size_t at = 0, n = 0; at < MOVED_BYTES; at += MIB, n++)
        check(b, b->device->ops->copy(b->stream, b->target + at,
                                      b->ring.arenas[0].host + n % DEPTH * MIB, MIB));
    check(b, b->device->ops->stream_wait(b->stream));
}

/* What it would cost if the pages lay together: whole MiBs of the pool, no ring, no gather. */
static void copy_from_pool(bench *b)
{
    uint32_t per_copy = (uint32_t)(MIB / b->options.page_bytes);
    for (size_t at = 0; at < MOVED_BYTES; at += MIB) {
        uint32_t block = below(b, b->pool.block_count / per_copy) * per_copy;
        check(b, b->device->ops->copy_through(b->stream, b->target + at,
                                              kvf_page_pool_device(&b->pool, (kvf_block){block}),
                                              MIB));
    }
    check(b, b->device->ops->stream_wait(b->stream));
}

static void move(bench *b, kvf_transfer_engine *engine, void *const *to)
{
    kvf_transfer_request request = {.from = b->from, .to = to, .count = b->count};
    uint32_t ticket;
    check(b, kvf_transfer_submit(engine, &request, b->stream, &ticket));
    check(b, kvf_transfer_join(engine, ticket, b->stream));
    check(b, b->device->ops->stream_wait(b->stream));
}

static void run_case(bench *b, case_id id)
{
    switch (id) {
    case READ_ALL:
        read_all(b);
        break;
    case MEMCPY_LOOP:
        memcpy_loop(b);
        break;
    case GATHER_CACHED:
        gather(b, b->gather, 0);
        break;
    case GATHER_STREAM:
        gather(b, b->gather, 1);
        break;
    case GATHER_TWO:
        gather(b, b->gather_two, 0);
        break;
    case BESIDE:
        beside(b);
        break;
    case EACH:
        move(b, b->each, b->scattered);
        break;
    case SCATTER:
        move(b, b->scatter, b->scattered);
        break;
    case PLAIN_1M:
        copy_plain(b);
        break;
    case POOL_1M:
        copy_from_pool(b);
        break;
    default: {
        uint32_t size = (uint32_t)(id - FIRST_SIZED) / 2;
        if ((id - FIRST_SIZED) % 2 == 0)
            copy_alone(b, (MIB / 2) << size);
        else
            move(b, b->sized[size], b->in_order);
        break;
    }
    }
}

static void run_round(bench *b, uint32_t round)
{
    for (int id = 0; id < CASE_COUNT; id++) {
        for (uint32_t i = 0; i < b->pages; i++)
            b->from[i] = kvf_page_pool_device(&b->pool, (kvf_block){below(b, b->pool.block_count)});
        uint64_t began = kvf_now_ns();
        run_case(b, (case_id)id);
        b->gbps[id][round] = (double)MOVED_BYTES / (double)(kvf_now_ns() - began);
    }
}

/* ---- the report
 * ---------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct figures {
    double p10, median, p90;
} figures;

static figures sum_up(const double *values, uint32_t count)
{
    double sorted[ROUNDS_MAX];
    memcpy(sorted, values, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, by_value);
    return (figures){sorted[count / 10], sorted[count / 2], sorted[count - 1 - count / 10]};
}

typedef struct ratio {
    const char *name;
    case_id over, under;
    double target; /* 0 = for information */
} ratio;

static const ratio ratios[] = {
    {"gather to ring / memcpy loop", GATHER_STREAM, MEMCPY_LOOP, 1.2},
    {"gather + copy / copy alone, 512 KiB", PIPE_512K, COPY_512K, 0},
    {"gather + copy / copy alone, 1 MiB", PIPE_1M, COPY_1M, 0.75},
    {"gather + copy / copy alone, 2 MiB", PIPE_2M, COPY_2M, 0.75},
    {"gather + copy / copy alone, 4 MiB", PIPE_4M, COPY_4M, 0.75},
    {"gather + copy / both not linked, 1 MiB", PIPE_1M, BESIDE, 0},
    {"gather + copy / copy through cache, 1 MiB", PIPE_1M, PLAIN_1M, 0},
    {"gather + copy / copy from pool, 1 MiB", PIPE_1M, POOL_1M, 0},
    {"gather, scattered slots / each", SCATTER, EACH, 0},
    {"gather, slots in order / each", PIPE_1M, EACH, 0},
};

#define RATIO_COUNT (sizeof ratios / sizeof *ratios)

/* Of each round, so that both sides met the same machine. */
static figures ratio_figures(const bench *b, const ratio *r)
{
    double values[ROUNDS_MAX];
    for (uint32_t i = 0; i < b->options.rounds; i++)
        values[i] = b->gbps[r->over][i] / b->gbps[r->under][i];
    return sum_up(values, b->options.rounds);
}

static void print_table(const bench *b)
{
    printf("%zu MiB of random pages of %zu bytes from a pool of %zu MiB (%s), %u rounds, GB/s\n\n",
           MOVED_BYTES / MIB, b->options.page_bytes, b->options.pool_bytes / MIB,
           kvf_page_tier_name(b->pool.memory.arenas[0].tier), b->options.rounds);
    printf("%-42s %7s %7s %7s\n", "case", "p10", "median", "p90");
    for (int id = 0; id < CASE_COUNT; id++) {
        figures f = sum_up(b->gbps[id], b->options.rounds);
        printf("%-42s %7.2f %7.2f %7.2f\n", case_names[id], f.p10, f.median, f.p90);
    }
    printf("\n%-42s %7s %7s %7s %7s\n", "ratio within a round", "p10", "median", "p90", "target");
    for (size_t i = 0; i < RATIO_COUNT; i++) {
        figures f = ratio_figures(b, &ratios[i]);
        printf("%-42s %7.2f %7.2f %7.2f", ratios[i].name, f.p10, f.median, f.p90);
        if (ratios[i].target > 0)
            printf(" %7.2f %s", ratios[i].target, f.median >= ratios[i].target ? "met" : "not met");
        printf("\n");
    }
}

static int write_json(const bench *b)
{
    FILE *file = fopen(b->options.json, "w");
    if (file == NULL) {
        fprintf(stderr, "bench_transfer: %s cannot be written\n", b->options.json);
        return 1;
    }
    kvf_device_properties properties;
    b->device->ops->properties(b->device, &properties);
    fprintf(file, "{\"machine\": \"%s, %ld cores\", \"command\": \"", properties.name,
            sysconf(_SC_NPROCESSORS_ONLN));
    for (int i = 0; i < b->options.argc; i++)
        fprintf(file, "%s%s", i > 0 ? " " : "", b->options.argv[i]);
    fprintf(file,
            "\",\n \"moved_bytes\": %zu, \"page_bytes\": %zu, \"pool_bytes\": %zu, "
            "\"pool_tier\": \"%s\", \"rounds\": %u,\n \"gb_per_s\": {",
            MOVED_BYTES, b->options.page_bytes, b->options.pool_bytes,
            kvf_page_tier_name(b->pool.memory.arenas[0].tier), b->options.rounds);
    for (int id = 0; id < CASE_COUNT; id++) {
        figures f = sum_up(b->gbps[id], b->options.rounds);
        fprintf(file, "%s\n  \"%s\": {\"p10\": %.3f, \"median\": %.3f, \"p90\": %.3f}",
                id > 0 ? "," : "", case_names[id], f.p10, f.median, f.p90);
    }
    fprintf(file, "},\n \"ratios\": {");
    for (size_t i = 0; i < RATIO_COUNT; i++) {
        figures f = ratio_figures(b, &ratios[i]);
        fprintf(file, "%s\n  \"%s\": {\"p10\": %.3f, \"median\": %.3f, \"p90\": %.3f",
                i > 0 ? "," : "", ratios[i].name, f.p10, f.median, f.p90);
        if (ratios[i].target > 0)
            fprintf(file, ", \"target\": %.2f", ratios[i].target);
        fprintf(file, "}");
    }
    fprintf(file, "}}\n");
    return fclose(file) != 0;
}

static int parse(int argc, char **argv, options *out)
{
    *out = (options){.rounds = 21, .pool_bytes = 1024 * MIB, .page_bytes = 16384};
    out->argc = argc;
    out->argv = argv;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--json") == 0)
            out->json = argv[i + 1];
        else if (strcmp(argv[i], "--rounds") == 0)
            out->rounds = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--pool") == 0)
            out->pool_bytes = strtoul(argv[i + 1], NULL, 10) * MIB;
        else if (strcmp(argv[i], "--page") == 0)
            out->page_bytes = strtoul(argv[i + 1], NULL, 10);
        else
            return 0;
    }
    return argc % 2 == 1 && out->rounds >= 1 && out->rounds <= ROUNDS_MAX &&
           out->page_bytes >= 64 && out->page_bytes % 64 == 0 && MIB / 2 % out->page_bytes == 0 &&
           out->pool_bytes >= MIB;
}

int main(int argc, char **argv)
{
    static bench b;
    if (!parse(argc, argv, &b.options)) {
        fprintf(stderr,
                "usage: bench_transfer [--json FILE] [--rounds 1-%u] [--pool MIB] [--page BYTES]\n",
                ROUNDS_MAX);
        return 2;
    }
    b.random = 1;
    open_bench(&b);
    for (int warm = 1; warm >= 0; warm--)
        for (uint32_t round = 0; round < (warm ? 1 : b.options.rounds); round++)
            run_round(&b, round);
    print_table(&b);
    int failed = b.options.json != NULL && write_json(&b);
    close_bench(&b);
    return failed;
}
