/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Saving and restoring a sequence against writing and reading as many bytes of the same folder in
 * order: MiB/s and ratios, taken in turn so that both meet the same machine.
 *
 * bench_save [--folder DIR] [--tokens N] [--rounds N] [--rest-ms N] [--json FILE]
 *
 * Writes end with fsync, as a save does. Files are read again at once, from memory where the
 * system keeps them. A rest before each case is for virtual disks that limit the mean rate.
 */

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <kvferry/save.h>

#include "bench_check.h"
#include "bench_report.h"
#include "common/clock.h"
#include "common/random.h"

#define CHUNK      512u
#define ROUNDS_MAX 101u
#define WRITE      ((size_t)1 << 20)

enum { PLAIN_WRITE, SAVE, PLAIN_READ, RESTORE, VERIFY, CASES };
static const char *const names[CASES] = {"write and fsync", "save", "read", "restore", "verify"};

typedef struct bench {
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_cache *cache;
    kvf_sequence *sequence;
    char saved[512], plain[512];
    char *memory; /* [bytes] of a plain file */
    size_t bytes;
    double mib[CASES][ROUNDS_MAX];
} bench;

static void check_call(const char *what, int is_right)
{
    if (is_right)
        return;
    perror(what);
    exit(1);
}

/* A geometry of 64 KiB per token and layer pair: 8 layers, 8 KV heads of 128 channels, bf16. */
static void open_bench(bench *b, uint32_t tokens, const char *folder)
{
    kvf_runtime_config rc;
    kvf_cache_config c;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST;
    rc.allow_unpinned = 1;
    bench_check(b->runtime, kvf_runtime_open(&rc, &b->runtime, NULL));
    kvf_cache_config_init(&c);
    c.layers = 8;
    c.query_heads = 32;
    c.kv_heads = 8;
    c.head_dim = 128;
    c.tokens_max = tokens;
    c.sequences_max = 2;
    bench_check(b->runtime, kvf_cache_open(b->runtime, &c, &b->cache, NULL));
    bench_check(b->runtime, kvf_stream_create(b->runtime, &b->stream));
    bench_check(b->runtime, kvf_sequence_create(b->cache, &b->sequence));
    const size_t values = (size_t)CHUNK * c.kv_heads * c.head_dim;
    uint16_t *rows = malloc(values * sizeof *rows);
    check_call("memory", rows != NULL);
    uint64_t state = 1;
    for (size_t i = 0; i < values; i++) /* finite bf16 of both signs */
        rows[i] = (uint16_t)((kvf_random_next(&state) & 0x80ff) | 0x3f00);
    for (uint32_t layer = 0; layer < c.layers; layer++)
        for (uint32_t first = 0; first < tokens; first += CHUNK)
            bench_check(b->runtime,
                        kvf_prefill(b->cache,
                                    &(kvf_prefill_args){
                                        .sequence = b->sequence,
                                        .layer = layer,
                                        .tokens = tokens - first < CHUNK ? tokens - first : CHUNK,
                                        .k = rows,
                                        .v = rows},
                                    b->stream));
    bench_check(b->runtime, kvf_stream_wait(b->stream));
    free(rows);
    snprintf(b->saved, sizeof b->saved, "%s/bench-save.kvs", folder);
    snprintf(b->plain, sizeof b->plain, "%s/bench-save.plain", folder);
}

static void save(bench *b)
{
    kvf_save_args args;
    kvf_save *save = NULL;
    kvf_save_args_init(&args);
    args.sequence = b->sequence;
    args.path = b->saved;
    bench_check(b->runtime, kvf_sequence_save(b->cache, &args, b->stream, &save));
    bench_check(b->runtime, kvf_save_finish(save, NULL));
}

static void restore(bench *b)
{
    kvf_restore_args args;
    kvf_sequence *s = NULL;
    kvf_restore_args_init(&args);
    args.path = b->saved;
    bench_check(b->runtime, kvf_sequence_restore(b->cache, &args, b->stream, &s));
    kvf_sequence_destroy(s);
}

static void write_plain(const bench *b)
{
    const int file = open(b->plain, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    check_call(b->plain, file >= 0);
    for (size_t at = 0; at < b->bytes; at += WRITE) {
        const size_t part = b->bytes - at < WRITE ? b->bytes - at : WRITE;
        check_call(b->plain, pwrite(file, b->memory + at, part, (off_t)at) == (ssize_t)part);
    }
    check_call(b->plain, fsync(file) == 0 && close(file) == 0);
}

static void read_plain(const bench *b)
{
    const int file = open(b->plain, O_RDONLY | O_CLOEXEC);
    check_call(b->plain, file >= 0);
    for (size_t at = 0; at < b->bytes; at += WRITE) {
        const size_t part = b->bytes - at < WRITE ? b->bytes - at : WRITE;
        check_call(b->plain, pread(file, b->memory + at, part, (off_t)at) == (ssize_t)part);
    }
    check_call(b->plain, close(file) == 0);
}

static double measure(bench *b, int id)
{
    kvf_saved saved;
    const uint64_t began = kvf_now_ns();
    switch (id) {
    case PLAIN_WRITE:
        write_plain(b);
        break;
    case SAVE:
        save(b);
        break;
    case PLAIN_READ:
        read_plain(b);
        break;
    case RESTORE:
        restore(b);
        break;
    default:
        bench_check(b->runtime, kvf_saved_read(b->runtime, b->saved, 1, &saved, NULL, 0, NULL));
        break;
    }
    return (double)b->bytes / 1048576.0 / ((double)(kvf_now_ns() - began) * 1e-9);
}

/* The bytes of a saved file, as a plain one. */
static void take_bytes(bench *b)
{
    kvf_saved saved;
    bench_check(b->runtime, kvf_saved_read(b->runtime, b->saved, 0, &saved, NULL, 0, NULL));
    b->bytes = (size_t)saved.bytes;
    b->memory = malloc(b->bytes);
    check_call("memory", b->memory != NULL);
    memset(b->memory, 0x5a, b->bytes);
}

static void report(bench *b, uint32_t tokens, uint32_t rounds, const bench_args *args)
{
    double p[CASES][3], ratios[ROUNDS_MAX], write_ratio[3], read_ratio[3];
    for (uint32_t i = 0; i < rounds; i++)
        ratios[i] = b->mib[SAVE][i] / b->mib[PLAIN_WRITE][i];
    bench_percentiles(ratios, rounds, write_ratio);
    for (uint32_t i = 0; i < rounds; i++)
        ratios[i] = b->mib[RESTORE][i] / b->mib[PLAIN_READ][i];
    bench_percentiles(ratios, rounds, read_ratio);
    printf("%u tokens, %.0f MiB, %u rounds, MiB/s\n\n%-22s %8s %8s %8s\n", tokens,
           (double)b->bytes / 1048576.0, rounds, "case", "p10", "median", "p90");
    FILE *json = bench_json_open(args);
    if (json)
        fprintf(json, "  \"tokens\": %u, \"bytes\": %zu, \"rounds\": %u,\n  \"mib_per_s\": {\n",
                tokens, b->bytes, rounds);
    for (int id = 0; id < CASES; id++) {
        bench_percentiles(b->mib[id], rounds, p[id]);
        printf("%-22s %8.0f %8.0f %8.0f\n", names[id], p[id][0], p[id][1], p[id][2]);
        if (json)
            bench_json_three(json, names[id], p[id], id + 1 < CASES ? ",\n" : "},\n");
    }
    printf("%-22s %8.2f %8.2f %8.2f\n%-22s %8.2f %8.2f %8.2f\n", "save / write", write_ratio[0],
           write_ratio[1], write_ratio[2], "restore / read", read_ratio[0], read_ratio[1],
           read_ratio[2]);
    if (json) {
        bench_json_three(json, "save / write", write_ratio, ",\n");
        bench_json_three(json, "restore / read", read_ratio, "\n");
    }
    bench_json_close(json);
}

int main(int argc, char **argv)
{
    static bench b;
    uint32_t tokens = 16384, rounds = 7, rest_ms = 0;
    const char *folder = ".";
    const bench_option options[] = {{"--tokens", &tokens, 64, 1u << 20, NULL},
                                    {"--rounds", &rounds, 1, ROUNDS_MAX, NULL},
                                    {"--rest-ms", &rest_ms, 0, 60000, NULL},
                                    {"--folder", NULL, 0, 0, &folder},
                                    {0}};
    const bench_args args = bench_args_read(argc, argv, options);
    open_bench(&b, tokens, folder);
    save(&b);
    take_bytes(&b);
    for (uint32_t round = 0; round < rounds; round++)
        for (int id = 0; id < CASES; id++) {
            const struct timespec rest = {rest_ms / 1000, rest_ms % 1000 * 1000000L};
            (void)nanosleep(&rest, NULL);
            b.mib[id][round] = measure(&b, id);
        }
    report(&b, tokens, rounds, &args);
    (void)unlink(b.saved);
    (void)unlink(b.plain);
    free(b.memory);
    kvf_sequence_destroy(b.sequence);
    kvf_cache_close(b.cache);
    kvf_stream_destroy(b.stream);
    kvf_runtime_close(b.runtime);
    return 0;
}
