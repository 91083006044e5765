/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A cache for a model in which every second layer has a window, and all have attention sinks, as
 * gpt-oss does.
 *
 * Keys are all 0 here, so a token attends equally to all that it sees: its output is the sum of
 * their values by their number plus e^sink. Values are numbers of tokens, so the outputs show what
 * each layer saw.
 *
 *     cc windows_and_sinks.c $(pkg-config --cflags --libs kvferry) -lm && ./a.out
 */

#include <kvferry/kvferry.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, QUERY_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32, TOKENS = 300, WINDOW = 128 };

static void must(kvf_status status, const kvf_error *error)
{
    if (status == KVF_OK)
        return;
    fprintf(stderr, "%s: %s\n", kvf_status_name(status), error->text);
    exit(1);
}

/* Layer 0 has the window: all its heads stream, and keep the newest tokens and no first ones. */
static kvf_cache *open_cache(kvf_runtime *runtime)
{
    static const uint8_t mask[LAYERS * KV_HEADS] = {0, 0, 1, 1};
    kvf_error error;
    kvf_cache *cache;
    kvf_cache_config config;
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
    return cache;
}

int main(void)
{
    static float q[QUERY_HEADS * HEAD_DIM], k[KV_HEADS * HEAD_DIM], v[KV_HEADS * HEAD_DIM];
    static float out[LAYERS][QUERY_HEADS * HEAD_DIM];
    const float sinks[QUERY_HEADS] = {-INFINITY, 0.0f, 3.0f, 6.0f}; /* head 0 has none */
    kvf_error error;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_sequence *sequence;
    kvf_runtime_config machine;
    kvf_runtime_config_init(&machine);
    machine.device = KVF_DEVICE_HOST; /* q, k, v and out are host memory */
    must(kvf_runtime_open(&machine, &runtime, &error), &error);
    const kvf_error *last = kvf_runtime_error(runtime);
    kvf_cache *cache = open_cache(runtime);
    for (uint32_t layer = 0; layer < LAYERS; layer++) { /* before the first token */
        kvf_attention_params params;
        kvf_attention_params_init(&params);
        params.sinks = sinks;
        must(kvf_cache_attention_params(cache, layer, &params), last);
    }
    must(kvf_stream_create(runtime, &stream), last);
    must(kvf_sequence_create(cache, &sequence), last);
    for (uint32_t token = 0; token < TOKENS; token++)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            for (uint32_t i = 0; i < KV_HEADS * HEAD_DIM; i++)
                v[i] = (float)token;
            const kvf_decode_args step = {.layer = layer,
                                          .batch = 1,
                                          .sequences = &sequence,
                                          .q = q,
                                          .k = k,
                                          .v = v,
                                          .out = out[layer]};
            must(kvf_decode(cache, &step, stream), last);
            must(kvf_stream_wait(stream), last);
        }

    double worst = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t head = 0; head < QUERY_HEADS; head++) {
            const uint32_t seen = layer == 0 ? WINDOW : TOKENS;
            const double sum = seen * (TOKENS - 1 - (seen - 1) / 2.0);
            const double want = sum / (seen + exp((double)sinks[head]));
            const double got = (double)out[layer][head * HEAD_DIM];
            printf("layer %u, head %u: %.3f, expected %.3f\n", layer, head, got, want);
            worst = fmax(worst, fabs(got - want) / want);
        }
    kvf_sequence_destroy(sequence);
    kvf_cache_close(cache);
    kvf_stream_destroy(stream);
    kvf_runtime_close(runtime);
    return worst < 1e-5 ? 0 : 1;
}
