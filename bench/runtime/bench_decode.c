/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decode steps at length, measured as ratios within one run: sparse against the
 * library's dense attention, transfer methods against `direct`, batch 4 against batch 1, and how
 * much of a step is neither attention nor scoring.
 *
 * A step runs several layers, enqueued together and waited for once, as a model does; figures are
 * per layer. Layers have keys of their own, so digests come from memory and not from a cache that
 * only one layer would fit into. Keys and values are random; queries drift slowly, so that a step
 * chooses mostly the pages of the step before, as real ones do. The prompt is appended without
 * queries. Every figure is a median of wall-clock steps (submit, then wait) with the 10th and 90th
 * percentile beside it. The floor is the time that the bytes of a step take at the read bandwidth
 * measured in the same run.
 *
 * Knows the public API only.
 */

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <kvferry/kvferry.h>

#include "bench_report.h"
#include "common/random.h"

typedef struct options {
    uint32_t tokens, layers, kv_heads, group, head_dim, page_size, budget, steps, dense_steps,
        threads, batch;
    const char *json;
} options;

typedef struct bench {
    options o;
    kvf_runtime *runtime;
    kvf_stream *stream;
    uint16_t *k, *v; /* [chunk, kv_heads, head_dim] bf16 */
    uint16_t *q;     /* [batch, query_heads, head_dim] */
    float *q_state;
    void *out;
    double bandwidth; /* bytes per second, read */
    uint64_t random;
} bench;

typedef struct row {
    char name[64];
    kvf_cache_config config;
    uint32_t batch;
    uint32_t steps;
    double layer_steps; /* steps x layers: what the totals in stats are divided by */
    double ns[3];       /* 10th percentile, median, 90th */
    double mean_ns;     /* all steps, refreshes included */
    double read_bytes;  /* per step: what attention and scoring must read */
    double moved_bytes;
    double hit_rate;
    double tokens; /* attended per KV head */
    kvf_stats stats;
} row;

#define CHUNK      512u
#define WARM_STEPS 8u

static uint16_t bf16_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((u + 0x8000u) >> 16);
}

/* Roughly normal, deviation about 1: the sum of four uniform numbers. */
static float normal_of(uint64_t bits)
{
    const float sum = (float)(bits & 0xffff) + (float)(bits >> 16 & 0xffff) +
                      (float)(bits >> 32 & 0xffff) + (float)(bits >> 48);
    return (sum / 65536.0f - 2.0f) * 1.73f;
}

static void fill(bench *b, uint16_t *to, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = bf16_of(normal_of(kvf_random_next(&b->random)));
}

static void drift_queries(bench *b)
{
    const size_t count = (size_t)b->o.batch * b->o.kv_heads * b->o.group * b->o.head_dim;
    for (size_t i = 0; i < count; i++) {
        b->q_state[i] = 0.95f * b->q_state[i] + 0.31f * normal_of(kvf_random_next(&b->random));
        b->q[i] = bf16_of(2.0f * b->q_state[i]);
    }
}

static void stop_if(const bench *b, kvf_status status, const char *what)
{
    if (status == KVF_OK)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status),
            b->runtime ? kvf_runtime_error(b->runtime)->text : kvf_status_text(status));
    exit(1);
}

/* ---- bandwidth ---- */

typedef struct reading {
    const uint64_t *words;
    size_t words_per_task;
    uint64_t *sums;
} reading;

static void read_words(const void *args, uint32_t task)
{
    const reading *r = args;
    const uint64_t *w = r->words + task * r->words_per_task;
    uint64_t s[8] = {0};
    for (size_t i = 0; i < r->words_per_task; i += 8)
        for (int j = 0; j < 8; j++)
            s[j] += w[i + (size_t)j];
    r->sums[task] = s[0] ^ s[1] ^ s[2] ^ s[3] ^ s[4] ^ s[5] ^ s[6] ^ s[7];
}

/* Best of several passes over 512 MiB by all compute threads. */
static void measure_bandwidth(bench *b)
{
    enum { TASKS = 64, PASSES = 7 };
    const size_t bytes = (size_t)512 << 20;
    void *memory = NULL;
    uint64_t sums[TASKS];
    stop_if(b, kvf_memory_alloc(b->runtime, bytes, &memory), "kvf_memory_alloc");
    memset(memory, 1, bytes);
    const reading r = {memory, bytes / 8 / TASKS, sums};
    double best = INFINITY;
    for (int i = 0; i < PASSES; i++) {
        const double start = bench_seconds();
        stop_if(b, kvf_stream_launch(b->stream, read_words, &r, sizeof r, TASKS), "launch");
        stop_if(b, kvf_stream_wait(b->stream), "wait");
        best = fmin(best, bench_seconds() - start);
    }
    b->bandwidth = (double)bytes / best;
    kvf_memory_free(b->runtime, memory);
}

/* ---- steps ---- */

static void append_prompt(bench *b, kvf_cache *cache, kvf_sequence *s)
{
    const size_t count = (size_t)CHUNK * b->o.kv_heads * b->o.head_dim;
    for (uint32_t at = 0; at < b->o.tokens; at += CHUNK)
        for (uint32_t layer = 0; layer < b->o.layers; layer++) {
            fill(b, b->k, count);
            fill(b, b->v, count);
            const kvf_prefill_args a = {
                .sequence = s, .layer = layer, .tokens = CHUNK, .k = b->k, .v = b->v};
            stop_if(b, kvf_prefill(cache, &a, b->stream), "kvf_prefill");
            stop_if(b, kvf_stream_wait(b->stream), "wait"); /* the buffers are reused */
        }
}

/* Seconds per layer. */
static double one_step(bench *b, kvf_cache *cache, kvf_sequence *const *s, uint32_t batch)
{
    drift_queries(b);
    fill(b, b->k, (size_t)batch * b->o.kv_heads * b->o.head_dim);
    kvf_decode_args a = {
        .batch = batch, .sequences = s, .q = b->q, .k = b->k, .v = b->k, .out = b->out};
    const double start = bench_seconds();
    for (a.layer = 0; a.layer < b->o.layers; a.layer++)
        stop_if(b, kvf_decode(cache, &a, b->stream), "kvf_decode");
    stop_if(b, kvf_stream_wait(b->stream), "wait");
    return (bench_seconds() - start) / b->o.layers;
}

/* What a step must read: attended K and V, and the digests of the sealed pages. */
static double bytes_to_read(const bench *b, const row *r)
{
    const double per_token = 2.0 * b->o.head_dim * 2.0;
    const double attended = (double)r->stats.tokens_attended / r->layer_steps * per_token;
    const double pages = (double)b->o.tokens / b->o.page_size * b->o.kv_heads * r->batch;
    return attended + (r->config.select == KVF_SELECT_FULL ? 0.0 : pages * per_token);
}

static void run_row(bench *b, row *r)
{
    kvf_cache *cache = NULL;
    kvf_sequence *s[64];
    kvf_error error;
    if (kvf_cache_open(b->runtime, &r->config, &cache, &error) != KVF_OK) {
        fprintf(stderr, "%s: %s\n", r->name, error.text);
        exit(1);
    }
    b->random = 20260101;
    memset(b->q_state, 0,
           sizeof *b->q_state * b->o.batch * b->o.kv_heads * b->o.group * b->o.head_dim);
    for (uint32_t i = 0; i < r->batch; i++) {
        stop_if(b, kvf_sequence_create(cache, &s[i]), "kvf_sequence_create");
        append_prompt(b, cache, s[i]);
    }
    for (uint32_t i = 0; i < WARM_STEPS; i++)
        one_step(b, cache, s, r->batch);
    kvf_cache_stats_reset(cache);
    double *ns = calloc(r->steps, sizeof *ns);
    if (!ns)
        exit(1);
    for (uint32_t i = 0; i < r->steps; i++) {
        ns[i] = 1e9 * one_step(b, cache, s, r->batch);
        r->mean_ns += ns[i] / r->steps;
    }
    kvf_cache_stats(cache, &r->stats);
    r->layer_steps = (double)r->steps * b->o.layers;
    bench_percentiles(ns, r->steps, r->ns);
    free(ns);
    r->read_bytes = bytes_to_read(b, r);
    r->moved_bytes = (double)r->stats.bytes_to_device / r->layer_steps;
    r->hit_rate = (double)r->stats.hits / fmax(1.0, (double)r->stats.pages_selected);
    r->tokens = (double)r->stats.tokens_attended / r->layer_steps / r->batch / b->o.kv_heads;
    kvf_cache_close(cache);
}

/* Share of a step that is none of attention, scoring and the renewal of static sets: append, select
 * and whatever the wall clock has beyond the sum of the parts. */
static double overhead_of(const row *r)
{
    const kvf_stats *s = &r->stats;
    const double work = (double)(s->attend_ns + s->score_ns + s->refresh_ns) / r->layer_steps;
    return 1.0 - fmin(1.0, work / r->mean_ns);
}

static double refresh_of(const row *r)
{
    return (double)r->stats.refresh_ns / r->layer_steps / r->mean_ns;
}

static kvf_cache_config config_of(const bench *b, kvf_select select, kvf_transfer transfer,
                                  uint32_t batch)
{
    kvf_cache_config c;
    kvf_cache_config_init(&c);
    c.layers = b->o.layers;
    c.kv_heads = b->o.kv_heads;
    c.query_heads = b->o.kv_heads * b->o.group;
    c.head_dim = b->o.head_dim;
    c.tokens_max = b->o.tokens + b->o.steps + 1024;
    c.sequences_max = batch;
    c.page_size = b->o.page_size;
    c.budget_tokens = b->o.budget;
    c.prefill_chunk_max = CHUNK;
    c.select = select;
    c.transfer = transfer;
    return c;
}

/* ---- results ---- */

static void print_row(const bench *b, const row *r, const row *dense, const row *direct)
{
    char ratio[32];
    snprintf(ratio, sizeof ratio, "%.1fx", dense->ns[1] / r->ns[1] * r->batch);
    printf(
        "%-16s %5u %9.3f %8.3f %8.3f %8.3f %8.0f %9.2f %9.2f %6.1f%% %8s %8.2f %7.1f%% %7.1f%%\n",
        r->name, r->batch, r->ns[1] / 1e6, r->ns[0] / 1e6, r->ns[2] / 1e6,
        1e3 * r->read_bytes / b->bandwidth, r->tokens, r->read_bytes / 1048576.0,
        r->moved_bytes / 1048576.0, 100.0 * r->hit_rate, ratio, r->ns[1] / direct->ns[1],
        100.0 * overhead_of(r), 100.0 * refresh_of(r));
}

static void print_parts(const row *r)
{
    const kvf_stats *s = &r->stats;
    const double n = 1e3 * r->layer_steps;
    printf("%-16s %5u %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f\n", r->name, r->batch,
           (double)s->append_ns / n, (double)s->score_ns / n, (double)s->select_ns / n,
           (double)s->gather_ns / n, (double)s->copy_ns / n, (double)s->attend_ns / n,
           (double)s->refresh_ns / n, r->mean_ns / 1e3,
           r->mean_ns / 1e3 -
               (double)(s->append_ns + s->score_ns + s->select_ns + s->attend_ns + s->refresh_ns) /
                   n);
}

static void write_json(const bench *b, const row *rows, uint32_t count, int argc, char **argv)
{
    FILE *f = fopen(b->o.json, "w");
    if (!f) {
        fprintf(stderr, "%s: %s\n", b->o.json, strerror(errno));
        exit(1);
    }
    fprintf(f, "{\n  \"bench\": \"decode\",\n");
    bench_json_machine(f, argc, argv);
    fprintf(f,
            "  \"tokens\": %u, \"layers\": %u, \"kv_heads\": %u, \"group\": %u, \"head_dim\": %u, "
            "\"dtype\": "
            "\"bf16\",\n"
            "  \"page_size\": %u, \"budget\": %u, \"threads\": %u, \"read_bytes_per_s\": %.4g,\n"
            "  \"rows\": [\n",
            b->o.tokens, b->o.layers, b->o.kv_heads, b->o.group, b->o.head_dim, b->o.page_size,
            b->o.budget, kvf_runtime_threads(b->runtime), b->bandwidth);
    for (uint32_t i = 0; i < count; i++) {
        const row *r = &rows[i];
        const kvf_stats *s = &r->stats;
        fprintf(
            f,
            "    {\"name\": \"%s\", \"batch\": %u, \"steps\": %u, \"p10_ns\": %.0f, "
            "\"median_ns\": %.0f, \"p90_ns\": %.0f, \"mean_ns\": %.0f, \"floor_ns\": %.0f, "
            "\"read_bytes\": %.0f, \"moved_bytes\": %.0f, \"hit_rate\": %.4f, "
            "\"tokens_attended\": %.1f, \"faster_than_dense\": %.3f, \"overhead\": %.4f, "
            "\"refresh\": %.4f, "
            "\"append_ns\": %.0f, \"score_ns\": %.0f, \"select_ns\": %.0f, \"gather_ns\": %.0f, "
            "\"copy_ns\": %.0f, \"attend_ns\": %.0f, \"refresh_ns\": %.0f}%s\n",
            r->name, r->batch, r->steps, r->ns[0], r->ns[1], r->ns[2], r->mean_ns,
            1e9 * r->read_bytes / b->bandwidth, r->read_bytes, r->moved_bytes, r->hit_rate,
            r->tokens, rows[0].ns[1] / r->ns[1] * r->batch, overhead_of(r), refresh_of(r),
            (double)s->append_ns / r->layer_steps, (double)s->score_ns / r->layer_steps,
            (double)s->select_ns / r->layer_steps, (double)s->gather_ns / r->layer_steps,
            (double)s->copy_ns / r->layer_steps, (double)s->attend_ns / r->layer_steps,
            (double)s->refresh_ns / r->layer_steps, i + 1 < count ? "," : "");
    }
    fprintf(f, "  ]\n}\n");
    if (fclose(f) != 0) {
        fprintf(stderr, "%s: %s\n", b->o.json, strerror(errno));
        exit(1);
    }
}

static void print_tables(const bench *b, const row *rows, uint32_t count)
{
    printf(
        "per layer of %u; %u tokens, %u KV heads, group %u, head_dim %u, bf16, page %u, budget %u; "
        "%u threads; read bandwidth %.2f GB/s\n\n",
        b->o.layers, b->o.tokens, b->o.kv_heads, b->o.group, b->o.head_dim, b->o.page_size,
        b->o.budget, kvf_runtime_threads(b->runtime), b->bandwidth / 1e9);
    printf("%-16s %5s %9s %8s %8s %8s %8s %9s %9s %7s %8s %8s %8s %8s\n", "method", "batch",
           "ms/layer", "p10", "p90", "floor", "tokens", "MiB read", "MiB moved", "hits", "vs dense",
           "/direct", "overhead", "refresh");
    const row *direct = &rows[1];
    for (uint32_t i = 0; i < count; i++)
        print_row(b, &rows[i], &rows[0], direct);
    printf("\nmicroseconds per layer and step\n%-16s %5s %9s %9s %9s %9s %9s %9s %9s %9s %9s\n",
           "method", "batch", "append", "score", "select", "gather", "copy", "attend", "refresh",
           "mean", "other");
    for (uint32_t i = 0; i < count; i++)
        print_parts(&rows[i]);
    printf("\nsparse against dense: %.1fx (wanted: 20x at 128K); overhead beside attention and "
           "scoring: "
           "%.1f%% (wanted: 5%% at 128K), renewal of static sets: %.1f%%\n",
           rows[0].ns[1] / direct->ns[1], 100.0 * overhead_of(direct), 100.0 * refresh_of(direct));
}

static uint32_t number(const char *name, const char *text, uint32_t least, uint32_t most)
{
    char *end = NULL;
    errno = 0;
    const unsigned long x = text ? strtoul(text, &end, 10) : 0;
    if (!text || end == text || *end || errno || x < least || x > most) {
        fprintf(stderr, "%s: %s is not a number from %u to %u\n", name, text ? text : "nothing",
                least, most);
        exit(2);
    }
    return (uint32_t)x;
}

static options parse(int argc, char **argv)
{
    options o = {.tokens = 131072,
                 .layers = 4,
                 .kv_heads = 8,
                 .group = 4,
                 .head_dim = 128,
                 .page_size = 32,
                 .budget = 1024,
                 .steps = 300,
                 .dense_steps = 15,
                 .batch = 4};
    const struct {
        const char *name;
        uint32_t *value, least, most;
    } table[] = {{"--tokens", &o.tokens, 1024, 1u << 22},
                 {"--layers", &o.layers, 1, 64},
                 {"--kv-heads", &o.kv_heads, 1, 64},
                 {"--group", &o.group, 1, 16},
                 {"--head-dim", &o.head_dim, 64, 256},
                 {"--page-size", &o.page_size, 8, 64},
                 {"--budget", &o.budget, 128, 1u << 20},
                 {"--steps", &o.steps, 3, 100000},
                 {"--dense-steps", &o.dense_steps, 3, 10000},
                 {"--threads", &o.threads, 1, 1024},
                 {"--batch", &o.batch, 1, 64}};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        size_t j = 0;
        if (strcmp(argv[i], "--json") == 0 && value) {
            o.json = value;
            continue;
        }
        while (j < sizeof table / sizeof *table && strcmp(argv[i], table[j].name) != 0)
            j++;
        if (j == sizeof table / sizeof *table) {
            fprintf(stderr,
                    "usage: bench_decode [--tokens N] [--layers N] [--budget N] [--kv-heads N] "
                    "[--group N] "
                    "[--head-dim N] [--page-size N] [--steps N] [--dense-steps N] [--batch N] "
                    "[--threads N] [--json FILE]\n");
            exit(2);
        }
        *table[j].value = number(table[j].name, value, table[j].least, table[j].most);
    }
    o.tokens = (o.tokens + CHUNK - 1) / CHUNK * CHUNK;
    return o;
}

static void *must_alloc(size_t count, size_t size)
{
    void *p = calloc(count, size);
    if (!p) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

int main(int argc, char **argv)
{
    bench b = {.o = parse(argc, argv)};
    kvf_runtime_config rc;
    kvf_error error;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST; /* buffers below are host memory */
    rc.threads = b.o.threads;
    rc.allow_unpinned = 1;
    if (kvf_runtime_open(&rc, &b.runtime, &error) != KVF_OK) {
        fprintf(stderr, "kvf_runtime_open: %s\n", error.text);
        return 1;
    }
    stop_if(&b, kvf_stream_create(b.runtime, &b.stream), "kvf_stream_create");
    const size_t heads = (size_t)b.o.kv_heads * b.o.group, d = b.o.head_dim;
    const size_t kv_rows = b.o.batch > CHUNK ? b.o.batch : CHUNK;
    b.k = must_alloc(kv_rows * b.o.kv_heads * d, 2);
    b.v = must_alloc(kv_rows * b.o.kv_heads * d, 2);
    b.q = must_alloc(b.o.batch * heads * d, 2);
    b.q_state = must_alloc(b.o.batch * heads * d, sizeof(float));
    b.out = must_alloc(b.o.batch * heads * d, 2);
    measure_bandwidth(&b);

    row rows[] = {
        {.name = "dense",
         .config = config_of(&b, KVF_SELECT_FULL, KVF_TRANSFER_DIRECT, 1),
         .batch = 1},
        {.name = "hybrid direct",
         .config = config_of(&b, KVF_SELECT_HYBRID, KVF_TRANSFER_DIRECT, 1),
         .batch = 1},
        {.name = "hybrid gather",
         .config = config_of(&b, KVF_SELECT_HYBRID, KVF_TRANSFER_GATHER, 1),
         .batch = 1},
        {.name = "hybrid each",
         .config = config_of(&b, KVF_SELECT_HYBRID, KVF_TRANSFER_EACH, 1),
         .batch = 1},
        {.name = "dynamic direct",
         .config = config_of(&b, KVF_SELECT_DYNAMIC, KVF_TRANSFER_DIRECT, 1),
         .batch = 1},
        {.name = "hybrid direct",
         .config = config_of(&b, KVF_SELECT_HYBRID, KVF_TRANSFER_DIRECT, b.o.batch),
         .batch = b.o.batch},
    };
    uint32_t count = sizeof rows / sizeof *rows;
    count -= b.o.batch == 1;
    for (uint32_t i = 0; i < count; i++) {
        rows[i].steps = i == 0 ? b.o.dense_steps : b.o.steps;
        fprintf(stderr, "%s, batch %u …\n", rows[i].name, rows[i].batch);
        run_row(&b, &rows[i]);
    }
    print_tables(&b, rows, count);
    if (b.o.json)
        write_json(&b, rows, count, argc, argv);
    free(b.k);
    free(b.v);
    free(b.q);
    free(b.q_state);
    free(b.out);
    kvf_stream_destroy(b.stream);
    kvf_runtime_close(b.runtime);
    return 0;
}
