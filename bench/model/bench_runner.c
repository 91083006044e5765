/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decoding of the runner against the time that reading its weights once takes, in the same run.
 *
 * A random bf16 model of about 0.43 GB is written to the folder for temporary files, mapped, and
 * decodes with a short context, so that weights are nearly all that is read. Read bandwidth is that
 * of the same threads over the same mapped weights. The two take turns; medians.
 */

#include "bench_report.h"
#include "random_model.h"
#include "transformer.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

typedef struct rig {
    char directory[512];
    kvf_model_config model;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_weights *weights;
    kvf_transformer *transformer;
    kvf_cache *cache;
    kvf_sequence *sequence;
} rig;

/* Everything or a message. */
static bool rig_open(rig *r)
{
    kvf_error error = {0};
    kvf_runtime_config rc;
    kvf_cache_config cc;
    const char *base = getenv("TMPDIR");
    snprintf(r->directory, sizeof r->directory, "%s/kvf-bench-XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(r->directory) || !random_model_write(r->directory, config))
        return false;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST; /* buffers below are host memory */
    rc.allow_unpinned = 1;
    kvf_cache_config_init(&cc);
    kvf_transformer_options options = {
        .model = &r->model, .chunk_max = PROMPT, .batch_max = 1, .isa_mask = KVF_ISA_ALL};
    kvf_status status = kvf_runtime_open(&rc, &r->runtime, &error);
    if (status == KVF_OK)
        status = kvf_stream_create(r->runtime, &r->stream);
    if (status == KVF_OK)
        status = kvf_model_config_read(r->directory, NULL, &r->model, &error);
    if (status == KVF_OK)
        status = kvf_weights_open(r->directory, NULL, &r->weights, &error);
    options.runtime = r->runtime;
    options.weights = r->weights;
    if (status == KVF_OK)
        status = kvf_transformer_open(&options, &r->transformer, &error);
    kvf_transformer_geometry(&options, &cc);
    cc.tokens_max = CONTEXT;
    cc.select = KVF_SELECT_FULL;
    if (status == KVF_OK)
        status = kvf_cache_open(r->runtime, &cc, &r->cache, &error);
    if (status == KVF_OK)
        status = kvf_sequence_create(r->cache, &r->sequence);
    if (status != KVF_OK)
        fprintf(stderr, "bench_runner: %s %s\n", kvf_status_name(status), error.text);
    return status == KVF_OK;
}

static void rig_close(rig *r)
{
    char path[640];
    kvf_sequence_destroy(r->sequence);
    kvf_cache_close(r->cache);
    kvf_transformer_close(r->transformer);
    kvf_stream_destroy(r->stream);
    kvf_runtime_close(r->runtime);
    kvf_weights_close(r->weights);
    snprintf(path, sizeof path, "%s/config.json", r->directory);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", r->directory);
    unlink(path);
    rmdir(r->directory);
}

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
static double read_all(rig *r, kvf_status *status)
{
    atomic_uint_fast64_t sum = 0;
    double start = bench_seconds();
    for (size_t i = 0; i < kvf_weights_count(r->weights) && *status == KVF_OK; i++) {
        read_args args = {kvf_weights_at(r->weights, i), &sum};
        *status =
            kvf_stream_launch(r->stream, read_task, &args, sizeof args,
                              (uint32_t)((args.tensor->bytes + SLICE_BYTES - 1) / SLICE_BYTES));
    }
    kvf_status waited = kvf_stream_wait(r->stream);
    if (*status == KVF_OK)
        *status = waited;
    return (double)kvf_weights_bytes(r->weights) / (bench_seconds() - start);
}

static double decode_one(rig *r, uint32_t id, kvf_status *status)
{
    double start = bench_seconds();
    *status =
        kvf_transformer_decode(r->transformer, r->cache, &r->sequence, &id, 1, true, r->stream);
    kvf_status waited = kvf_stream_wait(r->stream);
    if (*status == KVF_OK)
        *status = waited;
    return bench_seconds() - start;
}

typedef struct result {
    double prefill_seconds;
    double bandwidth[3], step[3];
} result;

static kvf_status measure(rig *r, result *out)
{
    uint32_t ids[PROMPT];
    double bandwidth[STEPS], step[STEPS];
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = i * 31u % 1000u;
    double start = bench_seconds();
    kvf_status status =
        kvf_transformer_prefill(r->transformer, r->cache, r->sequence, ids, PROMPT, r->stream);
    kvf_status waited = kvf_stream_wait(r->stream);
    out->prefill_seconds = bench_seconds() - start;
    if (status == KVF_OK)
        status = waited;
    for (uint32_t i = 0; i < STEPS && status == KVF_OK; i++) {
        bandwidth[i] = read_all(r, &status);
        if (status == KVF_OK)
            step[i] = decode_one(r, i, &status);
    }
    if (status != KVF_OK)
        return status;
    bench_percentiles(bandwidth, STEPS, out->bandwidth);
    bench_percentiles(step, STEPS, out->step);
    return KVF_OK;
}

static void print_json(const char *path, int argc, char **argv, const rig *r, const result *m,
                       double share)
{
    FILE *json = fopen(path, "w");
    if (!json) {
        perror(path);
        return;
    }
    fputs("{\n", json);
    bench_json_machine(json, argc, argv);
    fprintf(json,
            "  \"threads\": %u,\n  \"weight_bytes\": %llu,\n  \"prefill_tokens\": %u,\n"
            "  \"prefill_ms\": %.2f,\n  \"read_bytes_per_s\": {\"p10\": %.4g, \"p50\": %.4g, "
            "\"p90\": %.4g},\n  \"step_ms\": {\"p10\": %.3f, \"p50\": %.3f, \"p90\": %.3f},\n"
            "  \"share_of_bandwidth\": %.3f\n}\n",
            kvf_runtime_threads(r->runtime),
            (unsigned long long)kvf_transformer_weight_bytes(r->transformer), PROMPT,
            m->prefill_seconds * 1e3, m->bandwidth[0], m->bandwidth[1], m->bandwidth[2],
            m->step[0] * 1e3, m->step[1] * 1e3, m->step[2] * 1e3, share);
    if (fclose(json) != 0)
        perror(path);
}

int main(int argc, char **argv)
{
    rig r = {0};
    result m = {0};
    kvf_status status = KVF_SYSTEM;
    if (rig_open(&r))
        status = measure(&r, &m);
    if (status == KVF_OK) {
        double bytes = (double)kvf_transformer_weight_bytes(r.transformer);
        double floor_seconds = bytes / m.bandwidth[1], share = floor_seconds / m.step[1];
        printf("random model, %.0f MB of bf16 weights, %u threads; medians of %u (p10 to p90)\n",
               bytes * 1e-6, kvf_runtime_threads(r.runtime), STEPS);
        printf("read bandwidth   %8.1f GB/s (%.1f to %.1f)\n", m.bandwidth[1] * 1e-9,
               m.bandwidth[0] * 1e-9, m.bandwidth[2] * 1e-9);
        printf("decode step      %8.2f ms   (%.2f to %.2f)\n", m.step[1] * 1e3, m.step[0] * 1e3,
               m.step[2] * 1e3);
        printf("weights alone    %8.2f ms   %.0f%% of a step (the goal is 60%%)\n",
               floor_seconds * 1e3, share * 100.0);
        printf("prefill          %8.0f tokens/s (%u tokens)\n", PROMPT / m.prefill_seconds, PROMPT);
        if (argc == 3 && strcmp(argv[1], "--json") == 0)
            print_json(argv[2], argc, argv, &r, &m, share);
    }
    rig_close(&r);
    return status == KVF_OK ? 0 : 1;
}
