/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A small model, token after token: every second layer has a window, and all have attention sinks,
 * as gpt-oss does. Beside it the same model attends by a plain loop over all keys, and both must
 * have the same hidden states.
 *
 *     cc windows_and_sinks.c $(pkg-config --cflags --libs kvferry) -lm && ./a.out
 */

#include <kvferry/kvferry.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 4, QUERY_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32, TOKENS = 300, WINDOW = 128 };
enum { WIDTH = QUERY_HEADS * HEAD_DIM, KV_WIDTH = KV_HEADS * HEAD_DIM };

/* Layers with a 0 have the window: all their heads stream, and keep no first tokens. */
static const uint8_t mask[LAYERS * KV_HEADS] = {0, 0, 1, 1, 0, 0, 1, 1};
static const float sinks[QUERY_HEADS] = {-INFINITY, 0.0f, 2.0f, 4.0f}; /* head 0 has none */

static struct {
    float query[WIDTH][WIDTH], key[KV_WIDTH][WIDTH], value[KV_WIDTH][WIDTH], out[WIDTH][WIDTH];
} weights[LAYERS];

static kvf_runtime *runtime;
static kvf_stream *stream;
static kvf_cache *cache;
static kvf_sequence *sequence;

static void must(kvf_status status, const kvf_error *error)
{
    if (status == KVF_OK)
        return;
    fprintf(stderr, "%s: %s\n", kvf_status_name(status), error->text);
    exit(1);
}

/* ---- two ways to attend ---- */

typedef void attend_fn(uint32_t layer, uint32_t token, const float *q, const float *k,
                       const float *v, float *out);

static void attend_with_kvferry(uint32_t layer, uint32_t token, const float *q, const float *k,
                                const float *v, float *out)
{
    const kvf_decode_args step = {
        .layer = layer, .batch = 1, .sequences = &sequence, .q = q, .k = k, .v = v, .out = out};
    (void)token;
    must(kvf_decode(cache, &step, stream), kvf_runtime_error(runtime));
    must(kvf_stream_wait(stream), kvf_runtime_error(runtime));
}

/* By its definition: a sink is one more term of the denominator. */
static void attend_by_a_loop(uint32_t layer, uint32_t token, const float *q, const float *k,
                             const float *v, float *out)
{
    static float keys[LAYERS][TOKENS][KV_WIDTH], values[LAYERS][TOKENS][KV_WIDTH];
    const uint32_t first = mask[layer * KV_HEADS] || token < WINDOW ? 0 : token + 1 - WINDOW;
    for (uint32_t i = 0; i < KV_WIDTH; i++) {
        keys[layer][token][i] = k[i];
        values[layer][token][i] = v[i];
    }
    for (uint32_t head = 0; head < QUERY_HEADS; head++) {
        const uint32_t at = head / (QUERY_HEADS / KV_HEADS) * HEAD_DIM;
        double sum[HEAD_DIM] = {0}, all = exp((double)sinks[head]);
        for (uint32_t t = first; t <= token; t++) {
            double logit = 0;
            for (uint32_t i = 0; i < HEAD_DIM; i++)
                logit += (double)q[head * HEAD_DIM + i] * (double)keys[layer][t][at + i];
            const double share = exp(logit / sqrt(HEAD_DIM));
            all += share;
            for (uint32_t i = 0; i < HEAD_DIM; i++)
                sum[i] += share * (double)values[layer][t][at + i];
        }
        for (uint32_t i = 0; i < HEAD_DIM; i++)
            out[head * HEAD_DIM + i] = (float)(sum[i] / all);
    }
}

/* ---- the model ---- */

/* From -1 to 1. */
static float draw(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

/* So that sums have the size of what they are made of. */
static void fill(float *weight, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        weight[i] = draw() * sqrtf(3.0f / WIDTH);
}

static void multiply(const float (*weight)[WIDTH], uint32_t outputs, const float *x, float *y)
{
    for (uint32_t o = 0; o < outputs; o++) {
        y[o] = 0.0f;
        for (uint32_t i = 0; i < WIDTH; i++)
            y[o] += weight[o][i] * x[i];
    }
}

/* One token through all layers. */
static void forward(attend_fn *attend, uint32_t token, float x[WIDTH])
{
    float q[WIDTH], k[KV_WIDTH], v[KV_WIDTH], out[WIDTH], added[WIDTH];
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        multiply(weights[layer].query, WIDTH, x, q);
        multiply(weights[layer].key, KV_WIDTH, x, k);
        multiply(weights[layer].value, KV_WIDTH, x, v);
        attend(layer, token, q, k, v, out);
        multiply(weights[layer].out, WIDTH, out, added);
        for (uint32_t i = 0; i < WIDTH; i++)
            x[i] += added[i];
    }
}

/* ---- kvferry ---- */

static void open_all(void)
{
    kvf_error error;
    kvf_runtime_config machine;
    kvf_cache_config config;
    kvf_attention_params params;
    kvf_runtime_config_init(&machine);
    machine.device = KVF_DEVICE_HOST; /* q, k, v and out are host memory */
    must(kvf_runtime_open(&machine, &runtime, &error), &error);
    kvf_cache_config_init(&config);
    config.layers = LAYERS;
    config.query_heads = QUERY_HEADS;
    config.kv_heads = KV_HEADS;
    config.head_dim = HEAD_DIM;
    config.dtype = KVF_FP32;
    config.tokens_max = TOKENS;
    config.head_mask = mask;
    config.streaming_sink = 0;
    config.streaming_recent = WINDOW;
    must(kvf_cache_open(runtime, &config, &cache, &error), &error);
    kvf_attention_params_init(&params);
    params.sinks = sinks;
    for (uint32_t layer = 0; layer < LAYERS; layer++) /* before the first token */
        must(kvf_cache_attention_params(cache, layer, &params), kvf_runtime_error(runtime));
    must(kvf_stream_create(runtime, &stream), kvf_runtime_error(runtime));
    must(kvf_sequence_create(cache, &sequence), kvf_runtime_error(runtime));
}

static void close_all(void)
{
    kvf_sequence_destroy(sequence);
    kvf_cache_close(cache);
    kvf_stream_destroy(stream);
    kvf_runtime_close(runtime);
}

int main(void)
{
    double worst = 0;
    fill((float *)weights, sizeof weights / (sizeof(float)));
    open_all();
    for (uint32_t token = 0; token < TOKENS; token++) {
        float x[WIDTH], expected[WIDTH];
        for (uint32_t i = 0; i < WIDTH; i++)
            x[i] = expected[i] = draw();
        forward(attend_with_kvferry, token, x);
        forward(attend_by_a_loop, token, expected);
        for (uint32_t i = 0; i < WIDTH; i++) {
            const double apart = fabs((double)x[i] - (double)expected[i]);
            worst = apart <= worst ? worst : isnan(apart) ? INFINITY : apart;
        }
        if (token == WINDOW - 1 || token + 1 == TOKENS)
            printf("%u tokens: hidden state %.4f, by a loop %.4f, at most %.1e apart\n", token + 1,
                   (double)x[0], (double)expected[0], worst);
    }
    close_all();
    return worst < 1e-4 ? 0 : 1;
}
