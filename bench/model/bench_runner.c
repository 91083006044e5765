/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decoding of the runner against the time that reading its weights once takes, in the same run.
 *
 * A random bf16 model of about 0.43 GB is written to the folder for temporary files, mapped, and
 * decodes with a short context, so that weights are nearly all that is read. Read bandwidth is that
 * of the same threads over the same mapped weights. The two take turns; medians.
 */

#include "bench_model.h"
#include "bench_report.h"
#include "common/clock.h"

#include <stdatomic.h>

#define STEPS       30u
#define PROMPT      64u
#define SLICE_BYTES (1u << 20)
#define CONTEXT     256u

static const char config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": 2048,"
    " \"intermediate_size\": 5632, \"num_hidden_layers\": 4, \"num_attention_heads\": 16,"
    " \"num_key_value_heads\": 4, \"head_dim\": 128, \"vocab_size\": 16384, \"hidden_act\": "
    "\"silu\","
    " \"max_position_embeddings\": 4096, \"rope_theta\": 10000.0, \"rms_norm_eps\": 1e-5,"
    " \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\"}";

/* ---- bandwidth ---- */

typedef struct read_args {
    const kvf_tensor *tensor;
    atomic_uint_fast64_t *sum; /* so that reading cannot be left out */
} read_args;

static void read_task(const void *raw, uint32_t task)
{
    const read_args *args = raw;
    uint64_t first = (uint64_t)task * SLICE_BYTES, left = args->tensor->bytes - first;
    uint64_t words = (left < SLICE_BYTES ? left : SLICE_BYTES) / 64 * 8;
    const uint64_t *p = (const void *)((const unsigned char *)args->tensor->data + first);
    uint64_t a[8] = {0};
    for (uint64_t i = 0; i < words; i += 8)
        for (int j = 0; j < 8; j++)
            a[j] ^= p[i + (uint64_t)j];
    uint64_t sum = 0;
    for (int j = 0; j < 8; j++)
        sum ^= a[j];
    atomic_fetch_xor(args->sum, sum);
}

/* Bytes per second of reading all weights once. */
static double read_all(bench_model *m, kvf_status *status)
{
    atomic_uint_fast64_t sum = 0;
    double start = kvf_now_seconds();
    for (size_t i = 0; i < kvf_weights_count(m->weights) && *status == KVF_OK; i++) {
        read_args args = {kvf_weights_at(m->weights, i), &sum};
        *status =
            kvf_stream_launch(m->stream, read_task, &args, sizeof args,
                              (uint32_t)((args.tensor->bytes + SLICE_BYTES - 1) / SLICE_BYTES));
    }
    *status = bench_model_wait(m, *status);
    return (double)kvf_weights_bytes(m->weights) / (kvf_now_seconds() - start);
}

static double decode_one(bench_model *m, kvf_sequence *sequence, uint32_t id, kvf_status *status)
{
    double start = kvf_now_seconds();
    *status = bench_model_wait(
        m, kvf_transformer_decode(m->transformer, m->cache, &sequence, &id, 1, true, m->stream));
    return kvf_now_seconds() - start;
}

typedef struct result {
    double prefill_seconds;
    double bandwidth[3], step[3];
} result;

static kvf_status measure(bench_model *m, result *out)
{
    uint32_t ids[PROMPT];
    double bandwidth[STEPS], step[STEPS];
    kvf_sequence *sequence = NULL; /* the cache's */
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = i * 31u % 1000u;
    kvf_status status = kvf_sequence_create(m->cache, &sequence);
    double start = kvf_now_seconds();
    if (status == KVF_OK)
        status = bench_model_wait(
            m, kvf_transformer_prefill(m->transformer, m->cache, sequence, ids, PROMPT, m->stream));
    out->prefill_seconds = kvf_now_seconds() - start;
    for (uint32_t i = 0; i < STEPS && status == KVF_OK; i++) {
        bandwidth[i] = read_all(m, &status);
        if (status == KVF_OK)
            step[i] = decode_one(m, sequence, i, &status);
    }
    if (status != KVF_OK)
        return status;
    bench_percentiles(bandwidth, STEPS, out->bandwidth);
    bench_percentiles(step, STEPS, out->step);
    return KVF_OK;
}

static void report(const bench_model *m, const result *r, const bench_args *args)
{
    const uint64_t bytes = kvf_transformer_weight_bytes(m->transformer);
    const uint32_t threads = kvf_runtime_threads(m->runtime);
    const double floor_seconds = (double)bytes / r->bandwidth[1];
    const double share = floor_seconds / r->step[1];
    printf("random model, %.0f MB of bf16 weights, %u threads; medians of %u (p10 to p90)\n",
           (double)bytes * 1e-6, threads, STEPS);
    printf("read bandwidth   %8.1f GB/s (%.1f to %.1f)\n", r->bandwidth[1] * 1e-9,
           r->bandwidth[0] * 1e-9, r->bandwidth[2] * 1e-9);
    printf("decode step      %8.2f ms   (%.2f to %.2f)\n", r->step[1] * 1e3, r->step[0] * 1e3,
           r->step[2] * 1e3);
    printf("weights alone    %8.2f ms   %.0f%% of a step (the goal is 60%%)\n", floor_seconds * 1e3,
           share * 100.0);
    printf("prefill          %8.0f tokens/s (%u tokens)\n", PROMPT / r->prefill_seconds, PROMPT);
    FILE *json = bench_json_open(args);
    if (!json)
        return;
    fprintf(json,
            "  \"threads\": %u,\n  \"weight_bytes\": %llu,\n  \"prefill_tokens\": %u,\n"
            "  \"prefill_seconds\": %.5f,\n  \"share_of_bandwidth\": %.3f,\n  ",
            threads, (unsigned long long)bytes, PROMPT, r->prefill_seconds, share);
    bench_json_three(json, "read_bytes_per_s", r->bandwidth, ",\n  ");
    bench_json_three(json, "step_seconds", r->step, "\n");
    bench_json_close(json);
}

int main(int argc, char **argv)
{
    const bench_args args = bench_args_read(argc, argv, &(bench_option){0});
    bench_model m = {0};
    result r = {0};
    kvf_cache_config cc;
    kvf_cache_config_init(&cc);
    cc.tokens_max = CONTEXT;
    cc.select = KVF_SELECT_FULL;
    kvf_status status = KVF_SYSTEM;
    if (bench_model_open(&m, NULL, config, PROMPT, 0, &cc))
        status = measure(&m, &r);
    if (status == KVF_OK)
        report(&m, &r, &args);
    bench_model_close(&m);
    return status != KVF_OK;
}
