/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The smallest embedding: a prompt goes in layer by layer, then tokens come out one by one.
 *
 * A made-up model stands in for yours. Its keys come in topics of 64 neighbouring tokens, and every
 * query asks for one topic, so attention is as uneven as that of real models. Each step attends
 * densely as well (verify_interval = 1), to show how much of the true attention was caught; leave
 * that setting at 0 in earnest.
 *
 *     cc decode_loop.c $(pkg-config --cflags --libs kvferry) && ./a.out
 */

#include <kvferry/kvferry.h>

#include <stdio.h>
#include <stdlib.h>

enum {
    LAYERS = 4,
    QUERY_HEADS = 8,
    KV_HEADS = 2,
    HEAD_DIM = 64,
    PROMPT_TOKENS = 2048,
    CHUNK_TOKENS = 512,
    STEPS = 64,
    TOPIC_TOKENS = 64,
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

/* One of +1 and -1, a function of its arguments only. */
static float sign(uint32_t topic, uint32_t i)
{
    uint32_t x = topic * 0x9e3779b9u ^ (i + 1) * 0x85ebca6bu;
    x = (x ^ x >> 15) * 0xc2b2ae35u;
    return (x ^ x >> 13) & 1 ? 1.0f : -1.0f;
}

static float noise(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

/* Rows of one token: the query asks for an earlier topic, the key belongs to its own. */
static void model_token(uint32_t position, uint32_t layer, float *q, float *k, float *v)
{
    const uint32_t own = position / TOPIC_TOKENS;
    const uint32_t asked = (position / 16 * 7 + layer) % (own + 1); /* for 16 tokens */
    for (uint32_t i = 0; i < Q_FLOATS; i++)
        q[i] = sign(asked, i % HEAD_DIM) + 0.2f * noise();
    for (uint32_t i = 0; i < KV_FLOATS; i++) {
        k[i] = sign(own, i % HEAD_DIM) + 0.5f * noise();
        v[i] = noise();
    }
}

typedef struct rows {
    float *q, *k, *v, *out;
} rows;

static rows rows_alloc(kvf_runtime *runtime, uint32_t tokens)
{
    rows r;
    const size_t q_bytes = tokens * Q_FLOATS * sizeof(float);
    const size_t kv_bytes = tokens * KV_FLOATS * sizeof(float);
    must(kvf_memory_alloc(runtime, q_bytes, (void **)&r.q), kvf_runtime_error(runtime));
    must(kvf_memory_alloc(runtime, kv_bytes, (void **)&r.k), kvf_runtime_error(runtime));
    must(kvf_memory_alloc(runtime, kv_bytes, (void **)&r.v), kvf_runtime_error(runtime));
    must(kvf_memory_alloc(runtime, q_bytes, (void **)&r.out), kvf_runtime_error(runtime));
    return r;
}

/* The prompt, chunk by chunk through all layers. */
static void prefill(kvf_cache *cache, kvf_sequence *sequence, kvf_stream *stream, rows r,
                    const kvf_error *last)
{
    for (uint32_t start = 0; start < PROMPT_TOKENS; start += CHUNK_TOKENS) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            for (uint32_t t = 0; t < CHUNK_TOKENS; t++)
                model_token(start + t, layer, r.q + t * Q_FLOATS, r.k + t * KV_FLOATS,
                            r.v + t * KV_FLOATS);
            const kvf_prefill_args chunk = {
                .sequence = sequence,
                .layer = layer,
                .tokens = CHUNK_TOKENS,
                .q = r.q,
                .k = r.k,
                .v = r.v,
                .out = r.out,
            };
            must(kvf_prefill(cache, &chunk, stream), last);
            must(kvf_stream_wait(stream), last); /* the rows are used again */
        }
    }
}

/* One token through all layers. */
static void decode(kvf_cache *cache, kvf_sequence *sequence, kvf_stream *stream, rows r,
                   uint32_t position, const kvf_error *last)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        model_token(position, layer, r.q, r.k, r.v);
        const kvf_decode_args step = {
            .layer = layer,
            .batch = 1,
            .sequences = &sequence,
            .q = r.q,
            .k = r.k,
            .v = r.v,
            .out = r.out,
        };
        must(kvf_decode(cache, &step, stream), last);
        must(kvf_stream_wait(stream), last);
    }
}

/* Prints what was attended and moved. Returns the recall of attention. */
static double report(const kvf_cache *cache, const kvf_sequence *sequence)
{
    kvf_stats s;
    kvf_cache_stats(cache, &s);
    const double head_steps = (double)s.steps * KV_HEADS;
    const double selected = (double)(s.hits + s.misses);
    const double recall = s.verified ? s.recall_sum / (double)s.verified : 0;
    printf("tokens in the cache            %u\n", kvf_sequence_length(sequence, 0));
    printf("attended per head and step     %.0f\n", (double)s.tokens_attended / head_steps);
    printf("pages found on the device      %.1f%%\n",
           selected > 0 ? 100 * (double)s.hits / selected : 100.0);
    printf("bytes moved per layer and step %.0f\n", (double)s.bytes_to_device / (double)s.steps);
    printf("attention caught               %.2f%%\n", 100 * recall);
    return recall;
}

int main(void)
{
    kvf_error error;
    kvf_runtime *runtime;
    kvf_runtime_config machine;
    kvf_runtime_config_init(&machine);
    machine.device = KVF_DEVICE_HOST; /* queries, keys and outputs below are host memory */
    must(kvf_runtime_open(&machine, &runtime, &error), &error);

    kvf_cache *cache;
    kvf_cache_config config;
    kvf_cache_config_init(&config);
    config.layers = LAYERS;
    config.query_heads = QUERY_HEADS;
    config.kv_heads = KV_HEADS;
    config.head_dim = HEAD_DIM;
    config.dtype = KVF_FP32;
    config.tokens_max = PROMPT_TOKENS + STEPS;
    config.prefill_chunk_max = CHUNK_TOKENS;
    config.budget_tokens = 384;
    config.transfer = KVF_TRANSFER_GATHER; /* move pages as a GPU would, */
    config.device_bytes = 4 << 20;         /* one with room for some of them */
    config.verify_interval = 1;
    must(kvf_cache_open(runtime, &config, &cache, &error), &error);

    kvf_stream *stream;
    kvf_sequence *sequence;
    const kvf_error *last = kvf_runtime_error(runtime);
    must(kvf_stream_create(runtime, &stream), last);
    must(kvf_sequence_create(cache, &sequence), last);
    rows r =
        rows_alloc(runtime, CHUNK_TOKENS); /* device memory; on the host device, plain memory */

    prefill(cache, sequence, stream, r, last);
    for (uint32_t token = 0; token < STEPS; token++)
        decode(cache, sequence, stream, r, PROMPT_TOKENS + token, last);
    const double recall = report(cache, sequence);

    kvf_memory_free(runtime, r.q);
    kvf_memory_free(runtime, r.k);
    kvf_memory_free(runtime, r.v);
    kvf_memory_free(runtime, r.out);
    kvf_sequence_destroy(sequence);
    kvf_cache_close(cache);
    kvf_stream_destroy(stream);
    kvf_runtime_close(runtime);
    return recall > 0.9 ? 0 : 1;
}
