/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A token of a layer written under block tables, attended to and waited for, as an engine does that
 * computes between two layers on its own thread: time and CPU time of a layer, less that of the
 * computing, of the host device.
 *
 * bench_wait [CONTEXT [MICROSECONDS [THREADS]]]: of what is between two layers, and of the device;
 * 1024, 500 and 1 by default. SmolLM2's shape, 512 of the tokens attended.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <kvferry/blocks.h>

#include "bench_check.h"
#include "common/clock.h"

enum { LAYERS = 30, QUERY_HEADS = 9, KV_HEADS = 3, HEAD_DIM = 64, BLOCK = 32, STEPS = 101 };

typedef struct bench {
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_blocks *blocks;
    uint32_t context, blocks_max;
    uint16_t *q, *kv, *out;
    int64_t *slots;
    int32_t *table, *lengths;
    char *codes;
    double between_ns;
} bench;

static void *take(const bench *b, size_t bytes)
{
    void *memory;
    bench_check(b->runtime, kvf_memory_alloc(b->runtime, bytes, &memory));
    return memory;
}

static void open_bench(bench *b, uint32_t threads)
{
    kvf_runtime_config machine;
    kvf_blocks_config config;
    kvf_runtime_config_init(&machine);
    machine.device = KVF_DEVICE_HOST;
    machine.threads = threads;
    bench_check(b->runtime, kvf_runtime_open(&machine, &b->runtime, NULL));
    bench_check(b->runtime, kvf_stream_create(b->runtime, &b->stream));
    kvf_blocks_config_init(&config);
    config.cache.layers = LAYERS;
    config.cache.query_heads = QUERY_HEADS;
    config.cache.kv_heads = KV_HEADS;
    config.cache.head_dim = HEAD_DIM;
    config.cache.dtype = KVF_BF16;
    config.cache.sequences_max = 1;
    config.cache.tokens_max = b->context + STEPS;
    b->blocks_max = (b->context + STEPS) / BLOCK + 1;
    config.block_count = b->blocks_max;
    config.block_tokens = BLOCK;
    bench_check(b->runtime, kvf_blocks_open(b->runtime, &config, &b->blocks, NULL));
    const size_t stride = kvf_blocks_memory(b->blocks)->code_bytes, each = b->blocks_max * stride;
    b->codes = take(b, LAYERS * each);
    for (uint32_t i = 0; i < LAYERS; i++)
        bench_check(b->runtime, kvf_blocks_bind(b->blocks, i, b->codes + i * each, stride));
    b->q = take(b, QUERY_HEADS * HEAD_DIM * sizeof *b->q);
    b->out = take(b, QUERY_HEADS * HEAD_DIM * sizeof *b->out);
    b->kv = take(b, (size_t)b->context * KV_HEADS * HEAD_DIM * sizeof *b->kv);
    b->slots = take(b, b->context * sizeof *b->slots);
    b->table = take(b, b->blocks_max * sizeof *b->table);
    b->lengths = take(b, sizeof *b->lengths);
}

static void close_bench(bench *b)
{
    void *const all[] = {b->q, b->out, b->kv, b->slots, b->table, b->lengths, b->codes};
    kvf_blocks_close(b->blocks);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        kvf_memory_free(b->runtime, all[i]);
    kvf_stream_destroy(b->stream);
    kvf_runtime_close(b->runtime);
}

/* Numbers between -2 and 2 in bf16. */
static void fill(uint16_t *to, size_t count)
{
    uint32_t state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        to[i] = (uint16_t)((state >> 16 & 0x80ffu) | 0x3f00u);
    }
}

static void write_prompt(bench *b)
{
    fill(b->kv, (size_t)b->context * KV_HEADS * HEAD_DIM);
    fill(b->q, QUERY_HEADS * HEAD_DIM);
    for (uint32_t i = 0; i < b->context; i++)
        b->slots[i] = i;
    for (uint32_t i = 0; i < b->blocks_max; i++)
        b->table[i] = (int32_t)i;
    kvf_put_args put = {.tokens = b->context, .k = b->kv, .v = b->kv, .slots = b->slots};
    for (put.layer = 0; put.layer < LAYERS; put.layer++)
        bench_check(b->runtime, kvf_blocks_put(b->blocks, &put, b->stream));
    bench_check(b->runtime, kvf_stream_wait(b->stream));
}

static double cpu_ns(clockid_t of)
{
    struct timespec time;
    clock_gettime(of, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

/* CPU time of the caller alone. */
static double compute(double ns)
{
    const double begin = cpu_ns(CLOCK_THREAD_CPUTIME_ID);
    double now = begin;
    while (now - begin < ns)
        now = cpu_ns(CLOCK_THREAD_CPUTIME_ID);
    return now - begin;
}

/* Microseconds per layer. */
static void step(bench *b, uint32_t n, double *clock_us, double *cpu_us)
{
    const kvf_block_rows rows = {
        .rows = 1, .table_stride = b->blocks_max, .table = b->table, .lengths = b->lengths};
    kvf_put_args put = {.tokens = 1, .k = b->kv, .v = b->kv, .slots = b->slots};
    double spent = 0, computed = 0;
    const double begin = cpu_ns(CLOCK_PROCESS_CPUTIME_ID);
    b->slots[0] = b->context + n;
    b->lengths[0] = (int32_t)(b->context + n + 1);
    for (put.layer = 0; put.layer < LAYERS; put.layer++) {
        computed += compute(b->between_ns);
        const uint64_t start = kvf_now_ns();
        bench_check(b->runtime, kvf_blocks_put(b->blocks, &put, b->stream));
        const kvf_blocks_decode_args step = {
            .layer = put.layer, .rows = &rows, .q = b->q, .out = b->out};
        bench_check(b->runtime, kvf_blocks_decode(b->blocks, &step, b->stream));
        bench_check(b->runtime, kvf_stream_wait(b->stream));
        spent += (double)(kvf_now_ns() - start);
    }
    *clock_us = spent / LAYERS / 1e3;
    *cpu_us = (cpu_ns(CLOCK_PROCESS_CPUTIME_ID) - begin - computed) / LAYERS / 1e3;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void tell(const char *name, double *us)
{
    qsort(us, STEPS, sizeof *us, compare);
    printf("%s %.1f us of a layer (%.1f to %.1f)\n", name, us[STEPS / 2], us[STEPS / 10],
           us[STEPS - 1 - STEPS / 10]);
}

int main(int argc, char **argv)
{
    static double clock_us[STEPS], cpu_us[STEPS];
    bench b = {.context = argc > 1 ? (uint32_t)atoi(argv[1]) : 1024,
               .between_ns = argc > 2 ? 1e3 * atof(argv[2]) : 5e5};
    if (b.context < 1 || b.context > 1u << 20) {
        fprintf(stderr, "usage: bench_wait [CONTEXT [MICROSECONDS [THREADS]]]\n");
        return 2;
    }
    open_bench(&b, argc > 3 ? (uint32_t)atoi(argv[3]) : 1);
    write_prompt(&b);
    for (uint32_t n = 0; n < STEPS; n++)
        step(&b, n, &clock_us[n], &cpu_us[n]);
    tell("clock", clock_us);
    tell("CPU  ", cpu_us);
    close_bench(&b);
    return 0;
}
