/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention recall by method and budget on synthetic keys: the share of dense attention that falls
 * on what a method attends to, mean over query heads and steps.
 *
 * The keys have what real ones have: a few tokens that nearly every query looks at, stretches that
 * only queries on their topic look at (topics come and go), a drift, and noise. It says how methods
 * compare on such keys, not how a model answers. The time is not measured here.
 */

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/kvferry.h>

#include "bench_report.h"
#include "common/convert.h"
#include "common/random.h"

#define KV_HEADS 4u
#define GROUP    4u
#define DIM      64u
#define HEADS    (KV_HEADS * GROUP)
#define CHUNK    512u
#define TOPICS   24u

static const uint32_t budgets[] = {256, 512, 1024, 2048, 4096};
static const struct {
    const char *name;
    kvf_select select;
} methods[] = {
    {"hybrid", KVF_SELECT_HYBRID}, {"dynamic", KVF_SELECT_DYNAMIC},
    {"static", KVF_SELECT_STATIC}, {"streaming", KVF_SELECT_STREAMING},
    {"quest", KVF_SELECT_QUEST},   {"arkvale", KVF_SELECT_ARKVALE},
    {"oracle", KVF_SELECT_ORACLE},
};
#define BUDGETS (sizeof budgets / sizeof *budgets)
#define METHODS (sizeof methods / sizeof *methods)

typedef struct landscape {
    uint32_t tokens; /* prompt and steps */
    uint16_t *q;     /* [tokens, HEADS, DIM] bf16 */
    uint16_t *k, *v; /* [tokens, KV_HEADS, DIM] */
} landscape;

static float normal(uint64_t *state)
{
    float sum = -6.0f;
    for (int i = 0; i < 3; i++) {
        const uint64_t x = kvf_random_next(state);
        for (int j = 0; j < 4; j++)
            sum += (float)(x >> (16 * j) & 0xffff) / 65536.0f;
    }
    return sum;
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

/* Weight of direction `topic` in the key of `token`: stretches of 24 tokens, one in eight. */
static uint32_t topic_of_key(uint32_t token)
{
    const uint32_t stretch = token / 24;
    return stretch * 2654435761u >> 29 ? TOPICS : (stretch * 40503u >> 4) % TOPICS;
}

static void make_landscape(landscape *l, uint32_t prompt, uint32_t steps, uint64_t seed)
{
    uint64_t state = seed;
    l->tokens = prompt + steps;
    l->q = must_alloc((size_t)l->tokens * HEADS * DIM, 2);
    l->k = must_alloc((size_t)l->tokens * KV_HEADS * DIM, 2);
    l->v = must_alloc((size_t)l->tokens * KV_HEADS * DIM, 2);
    float(*topics)[KV_HEADS][DIM] = must_alloc(TOPICS, sizeof *topics);
    float heavy[KV_HEADS][DIM];
    for (uint32_t h = 0; h < KV_HEADS; h++)
        for (uint32_t d = 0; d < DIM; d++) {
            heavy[h][d] = normal(&state);
            for (uint32_t i = 0; i < TOPICS; i++)
                topics[i][h][d] = normal(&state);
        }
    for (uint32_t t = 0; t < l->tokens; t++) {
        const uint32_t topic = topic_of_key(t), asked = (t / 12 * 7) % TOPICS;
        for (uint32_t h = 0; h < KV_HEADS; h++) {
            const int is_heavy = (t * 2654435761u + h * 40503u) >> 25 == 0; /* 1 in 128 */
            for (uint32_t d = 0; d < DIM; d++) {
                const size_t at = ((size_t)t * KV_HEADS + h) * DIM + d;
                float k = 0.6f * normal(&state) + (is_heavy ? heavy[h][d] : 0.0f);
                k += topic < TOPICS ? 0.8f * topics[topic][h][d] : 0.0f;
                l->k[at] = kvf_bf16_from_float(k);
                l->v[at] = kvf_bf16_from_float(normal(&state));
                for (uint32_t g = 0; g < GROUP; g++)
                    l->q[(((size_t)t * KV_HEADS + h) * GROUP + g) * DIM + d] = kvf_bf16_from_float(
                        0.5f * normal(&state) + 0.6f * heavy[h][d] + 0.7f * topics[asked][h][d]);
            }
        }
    }
    free(topics);
}

static void stop_if(kvf_runtime *runtime, kvf_status status, const char *what)
{
    if (status == KVF_OK)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status),
            kvf_runtime_error(runtime)->text);
    exit(1);
}

typedef struct cell {
    double recall, tokens;
} cell;

/* Append the prompt (queries only with its last chunk, for the first static set), then step. */
static cell run_cell(kvf_runtime *runtime, kvf_stream *stream, const landscape *l,
                     const kvf_cache_config *c, uint32_t prompt)
{
    kvf_cache *cache = NULL;
    kvf_sequence *s = NULL;
    stop_if(runtime, kvf_cache_open(runtime, c, &cache, NULL), "kvf_cache_open");
    stop_if(runtime, kvf_sequence_create(cache, &s), "kvf_sequence_create");
    uint16_t *out = must_alloc((size_t)CHUNK * HEADS * DIM, 2);
    for (uint32_t at = 0; at < prompt; at += CHUNK) {
        const uint32_t n = prompt - at < CHUNK ? prompt - at : CHUNK;
        const kvf_prefill_args a = {.sequence = s,
                                    .tokens = n,
                                    .q = at + n == prompt ? l->q + (size_t)at * HEADS * DIM : NULL,
                                    .k = l->k + (size_t)at * KV_HEADS * DIM,
                                    .v = l->v + (size_t)at * KV_HEADS * DIM,
                                    .out = out};
        stop_if(runtime, kvf_prefill(cache, &a, stream), "kvf_prefill");
    }
    for (uint32_t t = prompt; t < l->tokens; t++) {
        const kvf_decode_args a = {.batch = 1,
                                   .sequences = &s,
                                   .q = l->q + (size_t)t * HEADS * DIM,
                                   .k = l->k + (size_t)t * KV_HEADS * DIM,
                                   .v = l->v + (size_t)t * KV_HEADS * DIM,
                                   .out = out};
        stop_if(runtime, kvf_decode(cache, &a, stream), "kvf_decode");
    }
    stop_if(runtime, kvf_stream_wait(stream), "kvf_stream_wait");
    kvf_stats stats;
    kvf_cache_stats(cache, &stats);
    kvf_cache_close(cache);
    free(out);
    return (cell){stats.recall_sum / fmax(1.0, (double)stats.verified),
                  (double)stats.tokens_attended / fmax(1.0, (double)stats.steps) / KV_HEADS};
}

static kvf_cache_config config_of(kvf_select select, uint32_t budget, uint32_t tokens)
{
    kvf_cache_config c;
    kvf_cache_config_init(&c);
    c.layers = 1;
    c.kv_heads = KV_HEADS;
    c.query_heads = HEADS;
    c.head_dim = DIM;
    c.tokens_max = tokens;
    c.budget_tokens = budget;
    c.prefill_chunk_max = CHUNK;
    c.select = select;
    c.verify_interval = 1;
    if (select == KVF_SELECT_ARKVALE)
        c.digest = KVF_DIGEST_CUBOID_MEAN;
    return c;
}

static void write_json(const char *path, cell cells[METHODS][BUDGETS], uint32_t prompt,
                       uint32_t steps, int argc, char **argv)
{
    FILE *f = fopen(path, "w");
    if (!f) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(1);
    }
    fprintf(f, "{\n  \"bench\": \"recall\",\n");
    bench_json_machine(f, argc, argv);
    fprintf(f, "  \"tokens\": %u, \"steps\": %u,\n  \"rows\": [\n", prompt, steps);
    for (size_t m = 0; m < METHODS; m++)
        for (size_t i = 0; i < BUDGETS; i++)
            fprintf(
                f,
                "    {\"method\": \"%s\", \"budget\": %u, \"recall\": %.5f, \"tokens\": %.1f}%s\n",
                methods[m].name, budgets[i], cells[m][i].recall, cells[m][i].tokens,
                m + 1 == METHODS && i + 1 == BUDGETS ? "" : ",");
    fprintf(f, "  ]\n}\n");
    if (fclose(f) != 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(1);
    }
}

int main(int argc, char **argv)
{
    uint32_t prompt = 16384, steps = 256;
    uint64_t seed = 7;
    const char *json = NULL;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value && strcmp(argv[i], "--tokens") == 0)
            prompt = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (value && strcmp(argv[i], "--steps") == 0)
            steps = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (value && strcmp(argv[i], "--seed") == 0)
            seed = strtoull(argv[++i], NULL, 10);
        else if (value && strcmp(argv[i], "--json") == 0)
            json = argv[++i];
        else
            prompt = 0;
    }
    if (prompt < 1024 || prompt > 1u << 20 || steps < 1 || steps > 1u << 16) {
        fprintf(stderr, "usage: bench_recall [--tokens N] [--steps N] [--seed N] [--json FILE]\n");
        return 2;
    }
    kvf_runtime_config rc;
    kvf_runtime *runtime = NULL;
    kvf_stream *stream = NULL;
    kvf_error error;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST; /* buffers below are host memory */
    rc.allow_unpinned = 1;
    if (kvf_runtime_open(&rc, &runtime, &error) != KVF_OK) {
        fprintf(stderr, "kvf_runtime_open: %s\n", error.text);
        return 1;
    }
    stop_if(runtime, kvf_stream_create(runtime, &stream), "kvf_stream_create");
    landscape l;
    make_landscape(&l, prompt, steps, seed);
    printf("attention recall, %u tokens and %u steps, synthetic keys, seed %llu\n\n%-12s", prompt,
           steps, (unsigned long long)seed, "budget");
    for (size_t i = 0; i < BUDGETS; i++)
        printf(" %8u", budgets[i]);
    printf("\n");
    cell cells[METHODS][BUDGETS];
    for (size_t m = 0; m < METHODS; m++) {
        printf("%-12s", methods[m].name);
        for (size_t i = 0; i < BUDGETS; i++) {
            const kvf_cache_config c = config_of(methods[m].select, budgets[i], prompt + steps);
            cells[m][i] = run_cell(runtime, stream, &l, &c, prompt);
            printf(" %8.4f", cells[m][i].recall);
            fflush(stdout);
        }
        printf("\n");
    }
    if (json)
        write_json(json, cells, prompt, steps, argc, argv);
    free(l.q);
    free(l.k);
    free(l.v);
    kvf_stream_destroy(stream);
    kvf_runtime_close(runtime);
    return 0;
}
