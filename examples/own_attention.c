/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Selection only, for an engine that keeps its own attention kernel: the library appends the token,
 * chooses pages and says which in FlashInfer's CSR form; plain C attends over them here.
 *
 * The result is compared with kvf_attend_pages on the same lists, in fp32.
 */

#include <kvferry/kvferry.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    QUERY_HEADS = 8,
    KV_HEADS = 2,
    GROUP = QUERY_HEADS / KV_HEADS,
    HEAD_DIM = 64,
    PAGE_SIZE = 32,
    BATCH = 2,
    PROMPT_TOKENS = 1000, /* and 100 more for the second sequence */
    STEPS = 40,
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

static void *device_memory(kvf_runtime *runtime, size_t bytes)
{
    void *pointer;
    must(kvf_memory_alloc(runtime, bytes, &pointer), kvf_runtime_error(runtime));
    return pointer;
}

static void fill(float *values, size_t count)
{
    static uint32_t state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
}

/* One query head over one page list: softmax(q k / sqrt(d)) v, in two passes. */
static void attend_list(const kvf_sequence *sequence, uint32_t kv_head, const int32_t *pages,
                        int32_t page_count, int32_t last_page_len, const float *q, float *out)
{
    double sum = 0, acc[HEAD_DIM] = {0};
    float top = -INFINITY;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < page_count; i++) {
            const float *keys = kvf_page_address(sequence, 0, kv_head, (uint32_t)pages[i]);
            const float *values = keys + HEAD_DIM; /* each after its key */
            const int32_t tokens = i + 1 < page_count ? PAGE_SIZE : last_page_len;
            for (int32_t t = 0; t < tokens; t++) {
                float logit = 0;
                for (int d = 0; d < HEAD_DIM; d++)
                    logit += q[d] * keys[2 * t * HEAD_DIM + d];
                logit /= sqrtf((float)HEAD_DIM);
                if (pass == 0) {
                    top = fmaxf(top, logit);
                    continue;
                }
                const double weight = exp((double)logit - (double)top);
                sum += weight;
                for (int d = 0; d < HEAD_DIM; d++)
                    acc[d] += weight * (double)values[2 * t * HEAD_DIM + d];
            }
        }
    }
    for (int d = 0; d < HEAD_DIM; d++)
        out[d] = (float)(acc[d] / sum);
}

/* All heads of the batch. Returns the largest difference from `theirs`. */
static float compare(kvf_sequence *const *sequences, const kvf_page_lists *lists, const float *q,
                     const float *theirs)
{
    float worst = 0, own[HEAD_DIM];
    for (uint32_t b = 0; b < BATCH; b++) {
        for (uint32_t h = 0; h < QUERY_HEADS; h++) {
            const uint32_t list = b * KV_HEADS + h / GROUP;
            const size_t row = (size_t)(b * QUERY_HEADS + h) * HEAD_DIM;
            const int32_t first = lists->indptr[list];
            attend_list(sequences[b], h / GROUP, lists->indices + first,
                        lists->indptr[list + 1] - first, lists->last_page_len[list], q + row, own);
            for (int d = 0; d < HEAD_DIM; d++)
                worst = fmaxf(worst, fabsf(own[d] - theirs[row + (size_t)d]));
        }
    }
    return worst;
}

static kvf_cache *open_cache(kvf_runtime *runtime)
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
    config.sequences_max = BATCH;
    config.tokens_max = PROMPT_TOKENS + 100 + STEPS;
    config.prefill_chunk_max = PROMPT_TOKENS + 100;
    config.page_size = PAGE_SIZE;
    config.budget_tokens = 512;
    config.select = KVF_SELECT_DYNAMIC;
    config.static_ratio = 0; /* every token to attend must be in a listed page */
    must(kvf_cache_open(runtime, &config, &cache, &error), &error);
    return cache;
}

/* Appended alone: there is no q. */
static void read_prompts(kvf_cache *cache, kvf_stream *stream, float *k, float *v,
                         kvf_sequence **sequences, const kvf_error *last)
{
    for (uint32_t b = 0; b < BATCH; b++) {
        const uint32_t tokens = PROMPT_TOKENS + b * 100;
        must(kvf_sequence_create(cache, &sequences[b]), last);
        fill(k, tokens * KV_FLOATS);
        fill(v, tokens * KV_FLOATS);
        const kvf_prefill_args prefill = {
            .sequence = sequences[b], .tokens = tokens, .k = k, .v = v};
        must(kvf_prefill(cache, &prefill, stream), last);
        must(kvf_stream_wait(stream), last);
    }
}

int main(void)
{
    kvf_error error;
    kvf_runtime *runtime;
    kvf_runtime_config machine;
    kvf_runtime_config_init(&machine);
    machine.device = KVF_DEVICE_HOST; /* queries, keys and outputs below are host memory */
    must(kvf_runtime_open(&machine, &runtime, &error), &error);
    kvf_cache *cache = open_cache(runtime);
    const kvf_error *last = kvf_runtime_error(runtime);
    kvf_stream *stream;
    must(kvf_stream_create(runtime, &stream), last);

    const uint32_t rows = PROMPT_TOKENS + 100;
    const uint32_t capacity = BATCH * KV_HEADS * kvf_select_pages_max(cache);
    float *q = device_memory(runtime, BATCH * Q_FLOATS * sizeof(float));
    float *k = device_memory(runtime, rows * KV_FLOATS * sizeof(float));
    float *v = device_memory(runtime, rows * KV_FLOATS * sizeof(float));
    float *out = device_memory(runtime, BATCH * Q_FLOATS * sizeof(float));
    const kvf_page_lists lists = {
        .indptr = device_memory(runtime, (BATCH * KV_HEADS + 1) * sizeof(int32_t)),
        .indices = device_memory(runtime, capacity * sizeof(int32_t)),
        .capacity = capacity,
        .last_page_len = device_memory(runtime, BATCH * KV_HEADS * sizeof(int32_t)),
    };

    kvf_sequence *sequences[BATCH];
    read_prompts(cache, stream, k, v, sequences, last);

    float worst = 0;
    int32_t pages = 0;
    for (uint32_t step = 0; step < STEPS; step++) {
        fill(q, BATCH * Q_FLOATS);
        fill(k, BATCH * KV_FLOATS);
        fill(v, BATCH * KV_FLOATS);
        const kvf_decode_args args = {
            .batch = BATCH, .sequences = sequences, .q = q, .k = k, .v = v, .out = out};
        must(kvf_select_pages(cache, &args, &lists, stream), last);
        must(kvf_attend_pages(cache, &args, &lists, stream), last);
        must(kvf_stream_wait(stream), last);
        worst = fmaxf(worst, compare(sequences, &lists, q, out));
        pages = lists.indptr[BATCH * KV_HEADS];
    }
    printf("pages listed in the last step  %d for %d heads\n", (int)pages, BATCH * KV_HEADS);
    printf("own kernel against the library %.2g at most\n", (double)worst);

    kvf_memory_free(runtime, q);
    kvf_memory_free(runtime, k);
    kvf_memory_free(runtime, v);
    kvf_memory_free(runtime, out);
    kvf_memory_free(runtime, lists.indptr);
    kvf_memory_free(runtime, lists.indices);
    kvf_memory_free(runtime, lists.last_page_len);
    kvf_cache_close(cache);
    kvf_stream_destroy(stream);
    kvf_runtime_close(runtime);
    return worst < 1e-5f ? 0 : 1;
}
