/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decoding of the runner against the time that reading its weights once takes, in the same run.
 *
 * A random bf16 model of about 0.43 GB is written to the folder for temporary files, mapped, and
 * decodes with a short context, so that weights are nearly all that is read. Read bandwidth is that
 * of the same threads over the same mapped weights. The two take turns; medians.
 */

#include "bench.h"
#include "common/clock.h"
#include "random_model.h"
#include "transformer.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/text.h"

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

/* ---- the model ---- */

typedef struct bench_model {
    char directory[512]; /* of the random weights, until it is closed; empty = not made */
    kvf_model_config config;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_weights *weights;
    kvf_transformer *transformer;
    kvf_cache *cache;
} bench_model;

static bool write_random(bench_model *m)
{
    const char *base = getenv("TMPDIR");
    snprintf(m->directory, sizeof m->directory, "%s/kvf-bench-XXXXXX", base ? base : "/tmp");
    if (mkdtemp(m->directory))
        return random_model_write(m->directory, config);
    perror(m->directory);
    m->directory[0] = '\0';
    return false;
}

static kvf_status open_all(bench_model *m, kvf_error *error)
{
    kvf_transformer_options options = {.chunk_max = PROMPT, .batch_max = 1};
    kvf_runtime_config rc;
    kvf_cache_config cc;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST; /* buffers of the benchmark are host memory */
    rc.allow_unpinned = 1;
    kvf_cache_config_init(&cc);
    cc.tokens_max = CONTEXT;
    cc.select = KVF_SELECT_FULL;
    KVF_TRY(kvf_runtime_open(&rc, &m->runtime, error));
    KVF_TRY(kvf_stream_create(m->runtime, &m->stream));
    KVF_TRY(kvf_model_config_read(m->directory, &m->config, error));
    KVF_TRY(kvf_weights_open(m->directory, &m->weights, error));
    kvf_model_config_fit(&m->config, m->weights);
    options.model = &m->config;
    options.runtime = m->runtime;
    options.weights = m->weights;
    KVF_TRY(kvf_transformer_open(&options, &m->transformer, error));
    kvf_transformer_geometry(&options, &cc);
    return kvf_transformer_cache_open(m->transformer, &cc, &m->cache, error);
}

static void close_all(bench_model *m)
{
    static const char *const files[] = {"config.json", "model.safetensors"};
    kvf_cache_close(m->cache);
    kvf_transformer_close(m->transformer);
    kvf_stream_destroy(m->stream);
    kvf_runtime_close(m->runtime);
    kvf_weights_close(m->weights);
    for (size_t i = 0; m->directory[0] && i < sizeof files / sizeof *files; i++) {
        char path[640];
        snprintf(path, sizeof path, "%s/%s", m->directory, files[i]);
        unlink(path);
    }
    if (m->directory[0])
        rmdir(m->directory);
}

/* Wait for the stream, whatever came before. @return the first failure */
static kvf_status wait_for(bench_model *m, kvf_status status)
{
    const kvf_status waited = kvf_stream_wait(m->stream);
    return status == KVF_OK ? waited : status;
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
    *status = wait_for(m, *status);
    return (double)kvf_weights_bytes(m->weights) / (kvf_now_seconds() - start);
}

static double decode_one(bench_model *m, kvf_sequence *sequence, uint32_t id, kvf_status *status)
{
    double start = kvf_now_seconds();
    *status = wait_for(
        m, kvf_transformer_decode(m->transformer, m->cache, &sequence, &id, 1, true, m->stream));
    return kvf_now_seconds() - start;
}

/* ---- figures ---- */

#define COLUMNS(X)                                                                                 \
    X(RUNNER_READ, "read_gb_per_s", "read GB/s", REAL, 1)                                          \
    X(RUNNER_READ_P10, "read_p10_gb_per_s", "p10", REAL, 1)                                        \
    X(RUNNER_READ_P90, "read_p90_gb_per_s", "p90", REAL, 1)                                        \
    X(RUNNER_STEP, "step_ms", "step ms", REAL, 2)                                                  \
    X(RUNNER_STEP_P10, "step_p10_ms", "p10", REAL, 2)                                              \
    X(RUNNER_STEP_P90, "step_p90_ms", "p90", REAL, 2)                                              \
    X(RUNNER_WEIGHTS, "weights_ms", "weights alone ms", REAL, 2)                                   \
    X(RUNNER_SHARE, "weights_of_step", "of a step (the goal is 0.60)", REAL, 2)                    \
    X(RUNNER_PREFILL, "prefill_tokens_per_s", "prefill tokens/s", REAL, 0)

enum runner_column { COLUMNS(CLI_COLUMN_NUMBER) RUNNER_COLUMNS };

static const cli_column columns[] = {COLUMNS(CLI_COLUMN_ROW)};

static kvf_status measure(bench_model *m, cli_cell *row)
{
    uint32_t ids[PROMPT];
    double bandwidth[STEPS], step[STEPS];
    kvf_sequence *sequence = NULL; /* the cache's */
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = i * 31u % 1000u;
    KVF_TRY(kvf_sequence_create(m->cache, &sequence));
    const double start = kvf_now_seconds();
    KVF_TRY(wait_for(
        m, kvf_transformer_prefill(m->transformer, m->cache, sequence, ids, PROMPT, m->stream)));
    cli_cell_real(&row[RUNNER_PREFILL], PROMPT / (kvf_now_seconds() - start));
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < STEPS && status == KVF_OK; i++) {
        bandwidth[i] = 1e-9 * read_all(m, &status);
        if (status == KVF_OK)
            step[i] = 1e3 * decode_one(m, sequence, i, &status);
    }
    if (status != KVF_OK)
        return status;
    cli_cells_spread(&row[RUNNER_READ], bandwidth, STEPS);
    cli_cells_spread(&row[RUNNER_STEP], step, STEPS);
    const double bytes = (double)kvf_transformer_weight_bytes(m->transformer);
    cli_cell_real(&row[RUNNER_WEIGHTS], 1e-6 * bytes / row[RUNNER_READ].real);
    cli_cell_real(&row[RUNNER_SHARE], row[RUNNER_WEIGHTS].real / row[RUNNER_STEP].real);
    return KVF_OK;
}

static bool report(const bench_model *m, const cli_table *table, cli_output *json)
{
    const double bytes = (double)kvf_transformer_weight_bytes(m->transformer);
    const uint32_t threads = kvf_runtime_threads(m->runtime);
    bench_machine machine;
    bench_machine_read(&machine);
    const cli_fact facts[] = {{"bench", "runner", 0.0},
                              {"machine", machine.processor, 0.0},
                              {"cpus", NULL, machine.cpus},
                              {"threads", NULL, threads},
                              {"weight_bytes", NULL, bytes},
                              {"prefill_tokens", NULL, PROMPT},
                              {0}};
    kvf_print(stdout, "random model, %.0f MB of bf16 weights, %u threads; medians of %u\n",
              bytes * 1e-6, threads, STEPS);
    return cli_table_write(table, CLI_FORMAT_TABLE, facts, stdout) &&
           cli_table_save(table, facts, json);
}

typedef struct runner_options {
    const char *json;
} runner_options;

static void set_defaults(void *options)
{
    *(runner_options *)options = (runner_options){0};
}

int main(int argc, char **argv)
{
    static const cli_option rows[] = {
        {.is = {"json", KVF_SETTING_TEXT, CLI_FIELD(runner_options, json),
                .meaning = "write every figure there as well"}},
    };
    cli_command command = {.name = "bench_runner",
                           .usage = "usage: bench_runner [OPTION...]",
                           .stray = "it takes options alone",
                           .defaults = set_defaults};
    runner_options options;
    cli_add(&command, rows, 1, 0);
    const int parsed = cli_parse(&command, argc, argv, &options);
    if (parsed >= 0)
        return parsed;
    bench_model m = {0};
    cli_output json = {0};
    cli_table table = {.columns = columns, .column_count = RUNNER_COLUMNS};
    cli_cell *row = cli_table_row(&table);
    kvf_error error = {0};
    bool done = row && (!options.json || cli_output_open(&json, options.json));
    kvf_status status = done && write_random(&m) ? open_all(&m, &error) : KVF_SYSTEM;
    if (status == KVF_OK)
        status = measure(&m, row);
    if (status != KVF_OK)
        fprintf(stderr, "bench_runner: %s %s\n", kvf_status_name(status), error.text);
    done = status == KVF_OK && report(&m, &table, &json);
    cli_output_discard(&json);
    cli_table_free(&table);
    close_all(&m);
    return !done;
}
