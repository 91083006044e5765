/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_FUZZ_LIBRARY_H
#define KVF_TESTS_FUZZ_LIBRARY_H

/*
 * Helpers of targets that call the library: a promise that aborts when it is broken, numbers that
 * stand for keys and values, attention restated, runtimes and streams. Knows the public header
 * only.
 */

#include <kvferry/kvferry.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz_input.h"

#define FUZZ_DIM_MAX 512

#define PROMISE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #condition);        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* Values from -1 to 1. */
static inline void fuzz_fill(uint32_t *random, float *values, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        *random = *random * 1664525u + 1013904223u;
        values[i] = (float)(*random >> 8) / 8388608.0f - 1.0f;
    }
}

/* Pages that a caller wants: most from -1 to `pages`, now and then any number. */
static inline void fuzz_fill_ids(uint32_t random, int32_t *ids, size_t count, uint32_t pages)
{
    for (size_t i = 0; i < count; i++) {
        random = random * 1664525u + 1013904223u;
        ids[i] = random >> 29 ? (int32_t)((random >> 8) % (pages + 2)) - 1 : (int32_t)(random << 3);
    }
}

/* Whether steps are told which pages to select, and by the last byte but one. */
static inline int fuzz_gives(const uint8_t *data, size_t size)
{
    return size > 1 && data[size - 2] % 4 == 1;
}

/* Whether layers have windows of their own, by the byte before that: likewise. */
static inline int fuzz_has_windows(const uint8_t *data, size_t size)
{
    return size > 2 && data[size - 3] % 8 == 6;
}

/* Windows of a cache with a head mask, if `has` and there are streaming heads, else NULL. */
static inline const uint32_t *fuzz_windows(int has, const kvf_cache_config *c, uint32_t *windows)
{
    const size_t heads = c->kv_heads;
    for (uint32_t l = 0; l < c->layers; l++)
        windows[l] = memchr(c->head_mask + l * heads, 0, heads)
                         ? 1 + (c->streaming_recent + 31 * l) % 90
                         : 0;
    return has ? windows : NULL;
}

/* How a query head attends; see kvf_attention_params. */
typedef struct fuzz_params {
    double scale, sink;
    double cap; /* 0 = none */
} fuzz_params;

static inline double fuzz_logit(const fuzz_params *params, double product)
{
    const double s = params->scale * product;
    return params->cap > 0.0 ? params->cap * tanh(s / params->cap) : s;
}

/* They follow from the last byte of an input, so that the others mean what they meant: an even one
 * gives no layer any. */
static inline fuzz_params fuzz_params_of(uint32_t byte, uint32_t dim, uint32_t layer, uint32_t head)
{
    static const double factors[] = {1.0, 0.5, 1.25}, sinks[] = {-INFINITY, 0.0, 3.0, -2.0};
    const uint32_t x = byte % 2 ? byte / 2 + layer : 0;
    return (fuzz_params){factors[x % 3] / sqrt(dim), byte % 2 ? sinks[(x + head) % 4] : -INFINITY,
                         x % 5 == 2 ? 1.5 : 0.0};
}

/* That of a layer, whose sinks go to `sinks`. */
static inline kvf_attention_params fuzz_layer_params(uint32_t byte, const kvf_cache_config *c,
                                                     uint32_t layer, float *sinks)
{
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    params.scale = (float)fuzz_params_of(byte, c->head_dim, layer, 0).scale;
    params.soft_cap = (float)fuzz_params_of(byte, c->head_dim, layer, 0).cap;
    params.sinks = sinks;
    for (uint32_t h = 0; h < c->query_heads; h++)
        sinks[h] = (float)fuzz_params_of(byte, c->head_dim, layer, h).sink;
    return params;
}

/* The key of a token and, after it, its value, of one head. */
typedef const float *(*fuzz_token_fn)(void *user, uint32_t token);

/* Attention of `q` over the first `tokens` tokens, in double, against `out` [value_dim]. Returns
 * its log-sum-exp. */
static inline double fuzz_check_dense(const float *q, uint32_t dim, uint32_t value_dim,
                                      uint32_t tokens, fuzz_token_fn token_of, void *user,
                                      const fuzz_params *params, const float *out, double limit)
{
    double top = params->sink, sum = params->sink > -INFINITY, result[FUZZ_DIM_MAX] = {0};
    for (uint32_t t = 0; t < tokens; t++) {
        const float *key = token_of(user, t), *value = key + dim;
        double logit = 0;
        for (uint32_t d = 0; d < dim; d++)
            logit += (double)q[d] * (double)key[d];
        logit = fuzz_logit(params, logit);
        const double scale = logit > top ? exp(top - logit) : 1.0;
        top = fmax(top, logit);
        const double weight = exp(logit - top);
        sum = sum * scale + weight;
        for (uint32_t d = 0; d < value_dim; d++)
            result[d] = result[d] * scale + weight * (double)value[d];
    }
    for (uint32_t d = 0; d < value_dim; d++)
        PROMISE(fabs(result[d] / sum - (double)out[d]) < limit);
    return top + log(sum);
}

/* One runtime per number of threads, 1 or 2, open until the process ends: looking at the machine
 * takes long. */
static inline kvf_runtime *fuzz_runtime(uint32_t threads)
{
    static kvf_runtime *runtimes[3];
    kvf_runtime_config config;
    kvf_error error;
    if (!runtimes[threads]) {
        kvf_runtime_config_init(&config);
        config.device = KVF_DEVICE_HOST;
        config.threads = threads;
        config.allow_unpinned = 1;
        config.huge_pages = KVF_HUGE_PAGES_OFF; /* small pools, opened thousands of times */
        PROMISE(kvf_runtime_open(&config, &runtimes[threads], &error) == KVF_OK);
    }
    return runtimes[threads];
}

/* The beginning of every input: its bytes, a runtime of as many threads as the first one says, and
 * a stream. */
static inline void fuzz_begin(fuzz_input *in, kvf_runtime **runtime, kvf_stream **stream,
                              const uint8_t *data, size_t size)
{
    *in = (fuzz_input){data, size};
    *runtime = fuzz_runtime(1 + fuzz_range(in, 0, 1));
    PROMISE(kvf_stream_create(*runtime, stream) == KVF_OK);
}

/* An input of block tables, api_blocks.c. */
void fuzz_blocks(fuzz_input in, kvf_runtime *runtime, kvf_stream *stream);

#endif
