/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A selection policy of one's own: half of the pages are the newest, half have the best scores.
 *
 * The same made-up tokens are decoded under three policies, each compared with dense attention, and
 * the share of the true attention that each one caught is printed. Queries ask for old topics, so
 * the newest pages alone catch little, and scores catch nearly everything.
 */

#include <kvferry/kvferry.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUERY_HEADS = 4,
    KV_HEADS = 2,
    HEAD_DIM = 64,
    PROMPT_TOKENS = 4096,
    STEPS = 32,
    TOPIC_TOKENS = 64,
    PAGE_SIZE = 16,
    PAGES_MAX = (PROMPT_TOKENS + STEPS) / PAGE_SIZE + 1,
    Q_FLOATS = QUERY_HEADS * HEAD_DIM,
    KV_FLOATS = KV_HEADS * HEAD_DIM,
};

static void must(kvf_status status, const kvf_error *error)
{
    if (status == KVF_OK)
        return;
    fprintf(stderr, "%s: %s\n", kvf_status_name(status), error->text);
    exit(1);
}

/* Runs once per KV head and step. Ids must be distinct and ascending. */
static uint32_t newest_and_best(void *user, const kvf_select_view *view, int32_t *ids)
{
    const uint32_t count = view->pages_max < view->pages ? view->pages_max : view->pages;
    const uint32_t newest = count / 2;
    char chosen[PAGES_MAX] = {0};
    (void)user;
    memset(chosen + view->pages - newest, 1, newest);
    for (uint32_t n = newest; n < count; n++) {
        uint32_t best = view->pages;
        for (uint32_t p = 0; p < view->pages; p++)
            if (!chosen[p] && (best == view->pages || view->scores[p] > view->scores[best]))
                best = p;
        chosen[best] = 1;
    }
    uint32_t written = 0;
    for (uint32_t p = 0; p < view->pages; p++)
        if (chosen[p] && view->scores[p] > -INFINITY)
            ids[written++] = (int32_t)p;
    return written;
}

static float sign(uint32_t topic, uint32_t i)
{
    uint32_t x = topic * 0x9e3779b9u ^ (i + 1) * 0x85ebca6bu;
    x = (x ^ x >> 15) * 0xc2b2ae35u;
    return (x ^ x >> 13) & 1 ? 1.0f : -1.0f;
}

/* In place of a model: every topic has a direction, and a query points along the one it wants. */
static void fill(float *row, uint32_t floats, uint32_t topic)
{
    for (uint32_t i = 0; i < floats; i++)
        row[i] = sign(topic, i % HEAD_DIM);
}

/* Decode under one policy. Returns the share of the attention that was caught, 0 to 1. */
static double recall_of(kvf_runtime *runtime, kvf_select select, float *q, float *k, float *v,
                        float *out)
{
    kvf_error error;
    kvf_cache *cache;
    kvf_cache_config config;
    kvf_cache_config_init(&config);
    config.layers = 1;
    config.query_heads = QUERY_HEADS;
    config.kv_heads = KV_HEADS;
    config.head_dim = HEAD_DIM;
    config.dtype = KVF_FP32;
    config.tokens_max = PROMPT_TOKENS + STEPS;
    config.prefill_chunk_max = PROMPT_TOKENS;
    config.page_size = PAGE_SIZE;
    config.budget_tokens = 512;
    config.select = select;
    config.select_fn = select == KVF_SELECT_CUSTOM ? newest_and_best : NULL;
    config.static_ratio = 0;
    config.verify_interval = 1;
    must(kvf_cache_open(runtime, &config, &cache, &error), &error);

    kvf_stream *stream;
    kvf_sequence *sequence;
    const kvf_error *last = kvf_runtime_error(runtime);
    must(kvf_stream_create(runtime, &stream), last);
    must(kvf_sequence_create(cache, &sequence), last);

    for (uint32_t t = 0; t < PROMPT_TOKENS; t++) {
        fill(k + t * KV_FLOATS, KV_FLOATS, t / TOPIC_TOKENS);
        fill(v + t * KV_FLOATS, KV_FLOATS, t);
    }
    const kvf_prefill_args prefill = {
        .sequence = sequence, .tokens = PROMPT_TOKENS, .k = k, .v = v}; /* append only: no q */
    must(kvf_prefill(cache, &prefill, stream), last);
    must(kvf_stream_wait(stream), last);

    for (uint32_t step = 0; step < STEPS; step++) {
        fill(q, Q_FLOATS, step % 16); /* one of the oldest sixteen topics */
        fill(k, KV_FLOATS, PROMPT_TOKENS / TOPIC_TOKENS);
        fill(v, KV_FLOATS, PROMPT_TOKENS + step);
        const kvf_decode_args decode = {
            .batch = 1, .sequences = &sequence, .q = q, .k = k, .v = v, .out = out};
        must(kvf_decode(cache, &decode, stream), last);
        must(kvf_stream_wait(stream), last);
    }

    kvf_stats stats;
    kvf_cache_stats(cache, &stats);
    kvf_cache_close(cache);
    kvf_stream_destroy(stream);
    return stats.verified ? stats.recall_sum / (double)stats.verified : 0;
}

int main(void)
{
    kvf_error error;
    kvf_runtime *runtime;
    kvf_runtime_config machine;
    kvf_runtime_config_init(&machine);
    machine.device = KVF_DEVICE_HOST; /* queries, keys and outputs below are host memory */
    must(kvf_runtime_open(&machine, &runtime, &error), &error);

    /* Ordinary memory does on the host device; kvf_memory_alloc serves every device. */
    float *q = calloc(Q_FLOATS, sizeof *q);
    float *k = calloc(PROMPT_TOKENS * KV_FLOATS, sizeof *k);
    float *v = calloc(PROMPT_TOKENS * KV_FLOATS, sizeof *v);
    float *out = calloc(Q_FLOATS, sizeof *out);
    if (!q || !k || !v || !out)
        return 1;

    const double newest = recall_of(runtime, KVF_SELECT_STREAMING, q, k, v, out);
    const double custom = recall_of(runtime, KVF_SELECT_CUSTOM, q, k, v, out);
    const double best = recall_of(runtime, KVF_SELECT_DYNAMIC, q, k, v, out);
    printf("attention caught within 512 of %d tokens\n", PROMPT_TOKENS);
    printf("  the newest (streaming)         %6.2f%%\n", 100 * newest);
    printf("  half newest, half best (ours)  %6.2f%%\n", 100 * custom);
    printf("  the best pages (dynamic)       %6.2f%%\n", 100 * best);

    free(q);
    free(k);
    free(v);
    free(out);
    kvf_runtime_close(runtime);
    return newest < custom && custom > 0.9 ? 0 : 1;
}
