/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry bench decode`: one decode step over context, budget, batch and method, with the floor
 * beside it.
 *
 * A case with a disk tier takes turns, step by step, with the same case in memory, and forks with
 * sequences of their own. A step is several layers, enqueued together and waited for once, as a
 * model does; figures are per layer. Layers and sequences have pages and digests of their own, of
 * equal keys, so digests come from memory and not from a cache that only one layer would fit into.
 * It knows the public API only.
 */

#include "bench.h"
#include "bench_decode.h"

#include "commands.h"
#include "common/clock.h"

#include <kvferry/link.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/text.h"

#define BLOCK_TOKENS 64u /* of a block, at most */

typedef struct decode_bench {
    bench_sweep sweep;
    decode_options o; /* of the case that is measured */
    cli_axis axes[CLI_AXES_MAX];
    uint32_t axis_count;
    uint64_t per_context; /* cases */
    kvf_stream *stream;
    decode_inputs inputs;
    void *out;
    decode_rates rates;
} decode_bench;

/* Cases that take turns, step by step, on the same inputs. */
#define TOGETHER_MAX 2u

typedef struct decode_cases {
    decode_case cases[TOGETHER_MAX];
    uint32_t count;
} decode_cases;

/* The same keys for all: numbers for every layer of a batch would take minutes. */
static kvf_status append_chunk(decode_bench *b, const decode_cases *c, uint32_t first)
{
    const uint32_t rest = b->o.context - first, batch = c->cases[0].batch;
    kvf_prefill_args a = {.k = b->inputs.kv.device,
                          .v = b->inputs.kv.device,
                          .tokens = rest < DECODE_CHUNK ? rest : DECODE_CHUNK};
    kvf_status status = decode_inputs_keys(&b->inputs, &b->o, first, a.tokens);
    for (a.layer = 0; a.layer < b->o.cache.layers; a.layer++)
        for (uint32_t i = 0; i < batch * c->count && status == KVF_OK; i++) {
            const decode_case *of = &c->cases[i / batch];
            a.sequence = of->sequences[i % batch];
            if (a.sequence)
                status = kvf_prefill(of->cache, &a, b->stream);
        }
    return status == KVF_OK ? kvf_stream_wait(b->stream) : status; /* the keys are made anew */
}

static kvf_status append_prompts(decode_bench *b, const decode_cases *c)
{
    kvf_status status = KVF_OK;
    for (uint32_t at = 0; at < b->o.context && status == KVF_OK; at += DECODE_CHUNK)
        status = append_chunk(b, c, at);
    return status;
}

static kvf_status enqueue_layers(const decode_bench *b, const decode_case *c)
{
    kvf_decode_args a = {.batch = c->batch,
                         .sequences = c->sequences,
                         .q = b->inputs.q.device,
                         .k = b->inputs.kv.device,
                         .v = b->inputs.kv.device,
                         .out = b->out};
    kvf_status status = KVF_OK;
    for (a.layer = 0; a.layer < c->config.layers && status == KVF_OK; a.layer++)
        status = kvf_decode(c->cache, &a, b->stream);
    return status;
}

static kvf_status enqueue_step(const decode_bench *b, const decode_case *c)
{
    if (c->recording && kvf_replay_is_possible(c->recording))
        return kvf_replay(c->recording, b->stream);
    return enqueue_layers(b, c);
}

/* @param n  where the times go; UINT32_MAX = nowhere */
static kvf_status time_step(const decode_bench *b, const decode_case *c, uint32_t n)
{
    const uint64_t start = kvf_now_ns();
    const clock_t cpu = clock();
    kvf_status status = enqueue_step(b, c);
    const double host = (double)(kvf_now_ns() - start) / c->config.layers;
    if (status == KVF_OK)
        status = kvf_stream_wait(b->stream);
    const double whole = (double)(kvf_now_ns() - start) / c->config.layers;
    if (n != UINT32_MAX) {
        c->cpu_ns[n] = (double)(clock() - cpu) * 1e9 / CLOCKS_PER_SEC / c->config.layers;
        c->host_ns[n] = host;
        c->step_ns[n] = whole;
    }
    return status;
}

/* A step of every case, on the same inputs. */
static kvf_status one_step(decode_bench *b, const decode_cases *c, uint32_t n)
{
    kvf_status status = decode_inputs_step(&b->inputs, &b->o, c->cases[0].batch);
    for (uint32_t i = 0; i < c->count && status == KVF_OK; i++)
        status = time_step(b, &c->cases[i], n);
    for (uint32_t i = 1; i < c->count && status == KVF_OK && n != UINT32_MAX; i++)
        c->cases[i].ratios[n] = c->cases[i].step_ns[n] / c->cases[0].step_ns[n];
    return status;
}

static kvf_status record_step(const decode_bench *b, decode_case *c)
{
    kvf_status status = kvf_record_begin(c->cache, c->sequences, c->batch, b->stream);
    if (status != KVF_OK)
        return status;
    status = enqueue_layers(b, c);
    const kvf_status ended = kvf_record_end(c->cache, &c->recording);
    return status == KVF_OK ? ended : status;
}

/* A GPU is fast enough that launches one by one would be all there is to see. */
static bool records(const decode_bench *b)
{
    return b->o.record || (kvf_runtime_device(b->sweep.runtime) == KVF_DEVICE_CUDA && !b->o.eager);
}

static kvf_status record_if_wanted(const decode_bench *b, decode_case *c)
{
    const kvf_status recorded = records(b) ? record_step(b, c) : KVF_OK;
    /* A case that cannot be recorded is refused only where that was asked for. */
    if (recorded != KVF_OK && (b->o.record || recorded != KVF_UNSUPPORTED))
        return recorded;
    cli_cell_integer(&c->row[DECODE_RECORDED], c->recording != NULL);
    if (c->recording)
        cli_cell_integer(&c->row[DECODE_NODES], kvf_recording_nodes(c->recording));
    return KVF_OK;
}

static kvf_status create_sequences(decode_case *c)
{
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < (c->is_forked ? 1 : c->batch) && status == KVF_OK; i++)
        status = kvf_sequence_create(c->cache, &c->sequences[i]);
    return status;
}

static kvf_status fork_sequences(const decode_bench *b, decode_case *c)
{
    kvf_status status = KVF_OK;
    for (uint32_t i = 1; c->is_forked && i < c->batch && status == KVF_OK; i++)
        status = kvf_sequence_fork(c->cache, c->sequences[0], b->stream, &c->sequences[i]);
    return status;
}

static kvf_status run_steps(decode_bench *b, decode_cases *c)
{
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < c->count && status == KVF_OK; i++)
        status = create_sequences(&c->cases[i]);
    if (status == KVF_OK)
        status = append_prompts(b, c);
    for (uint32_t i = 0; i < c->count && status == KVF_OK; i++)
        status = fork_sequences(b, &c->cases[i]);
    for (uint32_t i = 0; i < b->o.warmup + 1 && status == KVF_OK; i++)
        status = one_step(b, c, UINT32_MAX);
    for (uint32_t i = 0; i < c->count && status == KVF_OK; i++) {
        status = record_if_wanted(b, &c->cases[i]);
        kvf_cache_stats_reset(c->cases[i].cache);
    }
    for (uint32_t i = 0; i < c->cases[0].steps && status == KVF_OK; i++)
        status = one_step(b, c, i);
    for (uint32_t i = 0; i < c->count && status == KVF_OK; i++)
        decode_row_results(&c->cases[i], &b->rates);
    return status;
}

/* The case of one combination of values. */
static decode_case case_of(const decode_bench *b)
{
    decode_case c = {
        .config = b->o.cache, .context = b->o.context, .batch = b->o.batch, .steps = b->o.steps};
    c.hot_heads = b->o.hot_heads;
    c.config.query_heads = c.config.kv_heads * b->o.group;
    c.config.prefill_chunk_max = DECODE_CHUNK;
    return c;
}

/* All of it in memory. */
static void forget_disk(kvf_cache_config *config)
{
    config->disk_path = NULL;
    config->host_bytes = config->disk_bytes = config->disk_bundle_bytes = 0;
}

/* Full attention over the same context. */
static decode_case dense_case_of(const decode_bench *b)
{
    decode_case c = case_of(b);
    c.is_dense = true;
    c.hot_heads = 1.0;
    c.batch = 1;
    c.steps = b->o.dense_steps;
    c.config.select = KVF_SELECT_FULL;
    c.config.transfer = KVF_TRANSFER_AUTO;
    forget_disk(&c.config);
    return c;
}

/* Hot heads lie evenly among the coarse ones. */
static uint8_t *make_mask(const decode_case *c)
{
    const size_t heads = (size_t)c->config.layers * c->config.kv_heads;
    uint8_t *mask = malloc(heads);
    double hot = 0.0;
    for (size_t i = 0; mask && i < heads; i++) {
        hot += c->hot_heads;
        mask[i] = hot >= 0.999999 ? 1 : 2;
        hot -= mask[i] == 1 ? 1.0 : 0.0;
    }
    return mask;
}

static kvf_status open_case(const decode_bench *b, decode_case *c, kvf_error *error)
{
    c->config.sequences_max = c->batch;
    c->config.tokens_max = c->context + c->steps + b->o.warmup + 2;
    if (c->is_forked)
        c->config.host_tokens_max =
            c->context + (uint64_t)c->batch * (c->config.tokens_max - c->context + BLOCK_TOKENS);
    c->step_ns = calloc(c->steps, sizeof *c->step_ns);
    c->host_ns = calloc(c->steps, sizeof *c->host_ns);
    c->cpu_ns = calloc(c->steps, sizeof *c->cpu_ns);
    c->ratios = calloc(c->steps, sizeof *c->ratios);
    if (!c->step_ns || !c->host_ns || !c->cpu_ns || !c->ratios)
        return KVF_OUT_OF_MEMORY;
    uint8_t *mask = NULL;
    if (c->hot_heads < 1.0 && !(mask = make_mask(c)))
        return KVF_OUT_OF_MEMORY;
    c->config.head_mask = mask;
    const kvf_status status = kvf_cache_open(b->sweep.runtime, &c->config, &c->cache, error);
    c->config.head_mask = NULL;
    free(mask);
    return status;
}

static void close_case(decode_case *c)
{
    kvf_recording_destroy(c->recording);
    kvf_cache_close(c->cache);
    free(c->step_ns);
    free(c->host_ns);
    free(c->cpu_ns);
    free(c->ratios);
}

/* A case that does not fit or does not exist here is an answer of its own. */
static void set_failure(decode_bench *b, const decode_cases *c, kvf_status status,
                        const kvf_error *error)
{
    const bool is_lack = status == KVF_UNSUPPORTED || status == KVF_OUT_OF_MEMORY ||
                         status == KVF_OUT_OF_DEVICE_MEMORY || status == KVF_PIN_FAILED;
    for (uint32_t i = 0; i < c->count; i++)
        cli_cell_text(&c->cases[i].row[DECODE_STATUS], status == KVF_UNSUPPORTED ? "not here"
                                                       : is_lack                 ? "does not fit"
                                                                 : kvf_status_name(status));
    fprintf(stderr, "\nkvferry: %s\n", error->text);
    b->sweep.failed = b->sweep.failed || !is_lack;
}

/* @return false if there is no memory for a row */
static bool add_rows(decode_bench *b, const decode_cases *c, cli_cell (*rows)[DECODE_COLUMN_COUNT])
{
    for (uint32_t i = 0; i < c->count; i++) {
        cli_cell *row = bench_row(&b->sweep);
        if (!row)
            return false;
        memcpy(row, rows[i], sizeof rows[i]);
        b->sweep.measured += row[DECODE_MEDIAN].is_set;
    }
    return true;
}

/* @return false if there is no memory for a row */
static bool run_cases_together(decode_bench *b, decode_cases *c)
{
    cli_cell rows[TOGETHER_MAX][DECODE_COLUMN_COUNT] = {0};
    kvf_error error = {0};
    kvf_status status = KVF_OK;
    decode_inputs_begin(&b->inputs, &b->o);
    for (uint32_t i = 0; i < c->count; i++) {
        c->cases[i].row = rows[i];
        decode_row_names(&c->cases[i], rows[i]);
    }
    for (uint32_t i = 0; i < c->count && status == KVF_OK; i++)
        status = open_case(b, &c->cases[i], &error);
    if (status == KVF_OK) {
        status = run_steps(b, c);
        if (status != KVF_OK)
            error = *kvf_runtime_error(b->sweep.runtime);
    }
    (void)!kvf_stream_wait(b->stream);
    for (uint32_t i = 0; i < c->count; i++)
        close_case(&c->cases[i]);
    if (status != KVF_OK)
        set_failure(b, c, status, &error);
    return add_rows(b, c, rows);
}

static bool run_dense_case(decode_bench *b)
{
    decode_cases c = {.cases = {dense_case_of(b)}, .count = 1};
    return run_cases_together(b, &c);
}

/* With a disk tier, beside the same without; forks beside sequences of their own. */
static bool run_beside(decode_bench *b)
{
    decode_cases c = {.cases = {case_of(b), case_of(b)}, .count = 1};
    if (b->o.cache.disk_path) {
        c.count = 2;
        forget_disk(&c.cases[0].config);
    } else if (b->o.forks) {
        c.count = 2;
        c.cases[1].is_forked = true;
    }
    return run_cases_together(b, &c);
}

/* ---- all ---- */

static kvf_status reserve(decode_bench *b)
{
    const size_t out = (size_t)DECODE_BATCH_MAX * b->o.cache.kv_heads * b->o.group *
                       b->o.cache.head_dim * sizeof *b->inputs.q.host;
    kvf_status status = kvf_stream_create(b->sweep.runtime, &b->stream);
    if (status == KVF_OK)
        status = decode_inputs_open(&b->inputs, b->sweep.runtime, b->stream, &b->o);
    if (status == KVF_OK)
        status = kvf_memory_alloc(b->sweep.runtime, out, &b->out);
    if (status == KVF_OK)
        status = decode_floor_reading(b->sweep.runtime, b->stream, &b->rates.read_rate);
    return status == KVF_OK ? decode_floor_link(b->sweep.runtime, &b->rates.link_rate) : status;
}

static bool run_case(void *user, uint64_t n)
{
    decode_bench *b = user;
    cli_axes_set(b->axes, b->axis_count, n, &b->o);
    if (n % b->per_context == 0) {
        b->rates.dense_ns = NAN;
        if (b->o.dense_steps && !run_dense_case(b))
            return false;
    }
    return run_beside(b);
}

static bool write_results(decode_bench *b)
{
    const kvf_cache_config *c = &b->o.cache;
    const cli_fact facts[] = {{"layers", NULL, c->layers},
                              {"kv_heads", NULL, c->kv_heads},
                              {"group", NULL, b->o.group},
                              {"head_dim", NULL, c->head_dim},
                              {"page_size", NULL, c->page_size},
                              {"steps", NULL, b->o.steps},
                              {"read_gb_per_s", NULL, b->rates.read_rate},
                              {"link_gb_per_s", NULL, b->rates.link_rate},
                              {NULL, NULL, 0.0}};
    kvf_print(stderr,
              "%s: reads %.1f GB/s, link %.1f GB/s; %u layers, %u KV heads, group %u, head_dim %u, "
              "bf16, pages of %u\n",
              bench_device(&b->sweep), b->rates.read_rate, b->rates.link_rate, c->layers,
              c->kv_heads, b->o.group, c->head_dim, c->page_size);
    return bench_write(&b->sweep, facts);
}

static bool run_all(decode_bench *b)
{
    const char *contexts = cli_option_find(&b->sweep.command, "context")->given;
    b->axis_count = bench_axes(&b->sweep.command, NULL, NULL, b->axes);
    const uint64_t cases = cli_axes_product(b->axes, b->axis_count);
    b->per_context = contexts ? cases / cli_axis_count(contexts) : cases;
    bench_begin(&b->sweep, cases, "cases");
    bench_walk(&b->sweep, cases, run_case, b);
    bench_end(&b->sweep);
    b->sweep.failed = !write_results(b) || b->sweep.failed;
    return true;
}

int cli_bench_decode_main(int argc, char **argv)
{
    decode_bench b = {
        .sweep.table = {.columns = decode_columns, .column_count = DECODE_COLUMN_COUNT}};
    char calibration[CLI_CALIBRATION_BYTES];
    const int parsed = decode_options_parse(argc, argv, &b.sweep.command, &b.o);
    if (parsed >= 0)
        return parsed;
    cli_calibration_choose(&b.o.runtime, calibration);
    const bool is_done = bench_open(&b.sweep, &b.o.results, &b.o.runtime) &&
                         bench_opened(&b.sweep, reserve(&b), "") && run_all(&b);
    decode_inputs_close(&b.inputs);
    if (b.sweep.runtime)
        kvf_memory_free(b.sweep.runtime, b.out);
    kvf_stream_destroy(b.stream);
    return bench_close(&b.sweep, is_done);
}
