/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry bench decode`: one decode step over context, budget, batch and method, with the floor
 * beside it.
 *
 * The floor of a step is the larger of two times: what it must read on the device over the read
 * bandwidth, and what it moved over the link's peak, both measured in the same run. A case with a
 * disk tier takes turns, step by step, with the same case in memory, and forks with sequences of
 * their own. A step is several layers,
 * enqueued together and waited for once, as a model does; figures are per layer. Layers and
 * sequences have pages and digests of their own, of equal keys, so digests come from memory and not
 * from a cache that only one layer would fit into. It knows the public API only.
 */

#include "bench_commands.h"
#include "decode_floor.h"
#include "decode_inputs.h"

#include "calibration_file.h"
#include "common/clock.h"
#include "common/percentile.h"
#include "interrupt.h"
#include "progress.h"

#include <kvferry/link.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BLOCK_TOKENS 64u /* of a block, at most */

/* ---- output ---- */

/* Phases stand in the order of kvf_stats. */
#define COLUMNS(X)                                                                                 \
    X(DECODE_CONTEXT, "context_tokens", "context", INTEGER, 0)                                     \
    X(DECODE_BUDGET, "budget_tokens", "budget", INTEGER, 0)                                        \
    X(DECODE_BATCH, "batch", "batch", INTEGER, 0)                                                  \
    X(DECODE_SELECT, "select", "select", TEXT, 0)                                                  \
    X(DECODE_METHOD, "method", "method", TEXT, 0)                                                  \
    X(DECODE_PAGES, "pages", "pages", TEXT, 0)                                                     \
    X(DECODE_SPECULATE, "speculate", "spec", INTEGER, 0)                                           \
    X(DECODE_HOT, "hot_heads", "hot", REAL, 2)                                                     \
    X(DECODE_FORKS, "forks", "forks", INTEGER, 0)                                                  \
    X(DECODE_RECORDED, "recorded", "rec", INTEGER, 0)                                              \
    X(DECODE_NODES, "graph_nodes", NULL, INTEGER, 0)                                               \
    X(DECODE_MEDIAN, "layer_us", "us/layer", REAL, 1)                                              \
    X(DECODE_P10, "layer_p10_us", "p10", REAL, 1)                                                  \
    X(DECODE_P95, "layer_p95_us", "p95", REAL, 1)                                                  \
    X(DECODE_P99, "layer_p99_us", "p99", REAL, 1)                                                  \
    X(DECODE_MEAN, "layer_mean_us", NULL, REAL, 1)                                                 \
    X(DECODE_CPU, "layer_cpu_us", NULL, REAL, 1)                                                   \
    X(DECODE_HOST, "enqueue_us", "enqueue", REAL, 1)                                               \
    X(DECODE_FLOOR, "floor_us", "floor", REAL, 1)                                                  \
    X(DECODE_OF_FLOOR, "times_floor", "x floor", REAL, 2)                                          \
    X(DECODE_TOKENS, "tokens_attended", "tokens", REAL, 0)                                         \
    X(DECODE_READ, "read_bytes", "MiB read", REAL, 2)                                              \
    X(DECODE_MOVED, "moved_bytes", "MiB moved", REAL, 3)                                           \
    X(DECODE_HITS, "hit_rate", "hits", REAL, 3)                                                    \
    X(DECODE_VS_DENSE, "faster_than_dense", "vs dense", REAL, 1)                                   \
    X(DECODE_OVERHEAD, "overhead", "overhead", REAL, 3)                                            \
    X(DECODE_REFRESH, "refresh", "refresh", REAL, 3)                                               \
    X(DECODE_FORESEEN, "pages_ahead_used", NULL, INTEGER, 0)                                       \
    X(DECODE_PAGES_THERE, "pages_in_memory", "pages there", REAL, 4)                               \
    X(DECODE_BUNDLES_THERE, "bundles_in_memory", "bundles there", REAL, 4)                         \
    X(DECODE_BUNDLES, "bundles_wanted", "bundles", REAL, 0)                                        \
    X(DECODE_FROM_DISK, "disk_mib", "MiB disk", REAL, 3)                                           \
    X(DECODE_DISK_WAIT, "disk_wait_us", "disk wait", REAL, 1)                                      \
    X(DECODE_VS_MEMORY, "times_in_memory", "x memory", REAL, 2)                                    \
    X(DECODE_VS_MEMORY_P10, "times_in_memory_p10", "p10", REAL, 2)                                 \
    X(DECODE_VS_MEMORY_P90, "times_in_memory_p90", "p90", REAL, 2)                                 \
    X(DECODE_VS_APART, "times_apart", "x apart", REAL, 2)                                          \
    X(DECODE_VS_APART_P10, "times_apart_p10", "p10", REAL, 2)                                      \
    X(DECODE_VS_APART_P90, "times_apart_p90", "p90", REAL, 2)                                      \
    X(DECODE_APPEND_US, "append_us", NULL, REAL, 1)                                                \
    X(DECODE_SCORE_US, "score_us", NULL, REAL, 1)                                                  \
    X(DECODE_SELECT_US, "select_us", NULL, REAL, 1)                                                \
    X(DECODE_GATHER_US, "gather_us", NULL, REAL, 1)                                                \
    X(DECODE_COPY_US, "copy_us", NULL, REAL, 1)                                                    \
    X(DECODE_ATTEND_US, "attend_us", NULL, REAL, 1)                                                \
    X(DECODE_REFRESH_US, "refresh_us", NULL, REAL, 1)                                              \
    X(DECODE_DEVICE_BYTES, "device_bytes", NULL, INTEGER, 0)                                       \
    X(DECODE_HOST_BYTES, "host_bytes", NULL, INTEGER, 0)                                           \
    X(DECODE_STATUS, "status", "", TEXT, 0)

enum decode_column { COLUMNS(CLI_COLUMN_NUMBER) DECODE_COLUMN_COUNT };

static const cli_column columns[] = {COLUMNS(CLI_COLUMN_ROW)};

/* ---- bench ---- */

typedef struct decode_bench {
    decode_options o; /* of the case that is measured */
    decode_sweep sweep;
    kvf_runtime *runtime;
    kvf_stream *stream;
    decode_inputs inputs;
    void *out;
    double read_rate; /* bytes per ns on the device */
    double link_rate; /* bytes per ns over the link */
    double dense_ns;  /* median of dense attention over this context; NAN = not measured */
    cli_table table;
    cli_output json;
    bool failed;
} decode_bench;

/* What a case runs on. */
typedef struct decode_case {
    kvf_cache_config config;
    uint32_t context, batch, steps;
    double hot_heads; /* share of the KV heads */
    bool is_dense;    /* what the other cases of its context are compared with */
    bool is_forked;   /* all sequences are forks of the first */
    kvf_cache *cache;
    kvf_sequence *sequences[DECODE_BATCH_MAX];
    kvf_recording *recording;
    double *step_ns, *host_ns; /* [steps] per layer: the whole, and until it was enqueued */
    double *cpu_ns;            /* [steps] of all threads, likewise */
    double *ratios;            /* [steps] to the case beside it; NULL = there is none */
    cli_cell *row;
} decode_case;

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
    return b->o.record || (kvf_runtime_device(b->runtime) == KVF_DEVICE_CUDA && !b->o.eager);
}

/* A token of a page: packed ones by what the pool has for it. */
static double page_token_bytes(const decode_case *c, double exact)
{
    const kvf_cache_config *config = kvf_cache_settings(c->cache);
    const double tokens = (double)config->host_tokens_max * config->layers * config->kv_heads;
    return config->pages == KVF_PAGES_BF16 || config->disk_path || config->head_mask
               ? exact
               : (double)kvf_cache_memory(c->cache)->host_kv_bytes / tokens;
}

/* What one layer of one step must read on the device: attended keys and values, and digests. */
static double bytes_to_read(const decode_case *c, const kvf_stats *s)
{
    const double layer_steps = (double)c->steps * c->config.layers;
    const double exact = 2.0 * c->config.head_dim * 2.0, token = page_token_bytes(c, exact);
    const double tokens = (double)c->context * c->config.kv_heads * (c->is_forked ? 1 : c->batch);
    const bool has_codes = c->config.digest == KVF_DIGEST_CODES;
    const double boxes = exact * c->config.sub_digests / c->config.page_size;
    const double code = c->config.head_dim / 4.0 + 2.0;
    const double coarse = (c->config.head_dim + 2.0) / 64.0 + (double)c->config.coarse_share * code;
    const double digest = has_codes ? c->hot_heads * code + (1.0 - c->hot_heads) * coarse : boxes;
    const bool has_digests = c->config.select != KVF_SELECT_FULL &&
                             c->config.select != KVF_SELECT_STREAMING &&
                             c->config.select != KVF_SELECT_STATIC;
    return (double)s->tokens_attended / layer_steps * token + (has_digests ? tokens * digest : 0.0);
}

/* Sorts the times. */
static void set_times(const decode_bench *b, const decode_case *c, cli_cell *row)
{
    double mean = 0.0, *step = c->step_ns, *host = c->host_ns;
    kvf_sort(c->cpu_ns, c->steps);
    cli_cell_real(&row[DECODE_CPU], 1e-3 * kvf_percentile(c->cpu_ns, c->steps, 50));
    for (uint32_t i = 0; i < c->steps; i++)
        mean += step[i] / c->steps;
    kvf_sort(step, c->steps);
    kvf_sort(host, c->steps);
    const double median = kvf_percentile(step, c->steps, 50);
    cli_cell_real(&row[DECODE_MEDIAN], 1e-3 * median);
    cli_cell_real(&row[DECODE_P10], 1e-3 * kvf_percentile(step, c->steps, 10));
    cli_cell_real(&row[DECODE_P95], 1e-3 * kvf_percentile(step, c->steps, 95));
    cli_cell_real(&row[DECODE_P99], 1e-3 * kvf_percentile(step, c->steps, 99));
    cli_cell_real(&row[DECODE_MEAN], 1e-3 * mean);
    cli_cell_real(&row[DECODE_HOST], 1e-3 * kvf_percentile(host, c->steps, 50));
    cli_cell_real(&row[DECODE_VS_DENSE], b->dense_ns / median * c->batch);
}

/* What the device did, where it has the times. Overhead is none of attention, scoring and the
 * renewal of static sets: append, select and whatever the clock has beyond the sum of the parts. */
static void set_phases(const decode_case *c, const kvf_stats *s, cli_cell *row)
{
    const double per_us = 1e3 * c->steps * c->config.layers, mean_us = row[DECODE_MEAN].real;
    const uint64_t ns[] = {s->append_ns, s->score_ns,  s->select_ns, s->gather_ns,
                           s->copy_ns,   s->attend_ns, s->refresh_ns};
    if (!s->attend_ns)
        return;
    for (size_t i = 0; i < sizeof ns / sizeof *ns; i++)
        cli_cell_real(&row[DECODE_APPEND_US + i], (double)ns[i] / per_us);
    const double work_us = (double)(s->attend_ns + s->score_ns + s->refresh_ns) / per_us;
    cli_cell_real(&row[DECODE_OVERHEAD], 1.0 - fmin(1.0, work_us / mean_us));
    cli_cell_real(&row[DECODE_REFRESH], row[DECODE_REFRESH_US].real / mean_us);
}

/* What the tier had to read; per layer. */
static void set_disk(const decode_case *c, const kvf_stats *s, cli_cell *row)
{
    const double layer_steps = (double)c->steps * c->config.layers;
    const double pages = fmax(1.0, (double)s->pages_selected);
    const double bundles = fmax(1.0, (double)s->disk_wanted);
    cli_cell_real(&row[DECODE_PAGES_THERE], 1.0 - (double)s->pages_from_disk / pages);
    cli_cell_real(&row[DECODE_BUNDLES_THERE], 1.0 - (double)s->disk_reads / bundles);
    cli_cell_real(&row[DECODE_BUNDLES], (double)s->disk_wanted / layer_steps);
    cli_cell_real(&row[DECODE_FROM_DISK], (double)s->bytes_from_disk / layer_steps / 1048576.0);
    cli_cell_real(&row[DECODE_DISK_WAIT], 1e-3 * (double)s->disk_wait_ns / layer_steps);
    kvf_sort(c->ratios, c->steps);
    cli_cell_real(&row[DECODE_VS_MEMORY], kvf_percentile(c->ratios, c->steps, 50));
    cli_cell_real(&row[DECODE_VS_MEMORY_P10], kvf_percentile(c->ratios, c->steps, 10));
    cli_cell_real(&row[DECODE_VS_MEMORY_P90], kvf_percentile(c->ratios, c->steps, 90));
}

/* Beside sequences of their own. */
static void set_apart(const decode_case *c, cli_cell *row)
{
    cli_cell_integer(&row[DECODE_FORKS], 1);
    kvf_sort(c->ratios, c->steps);
    cli_cell_real(&row[DECODE_VS_APART], kvf_percentile(c->ratios, c->steps, 50));
    cli_cell_real(&row[DECODE_VS_APART_P10], kvf_percentile(c->ratios, c->steps, 10));
    cli_cell_real(&row[DECODE_VS_APART_P90], kvf_percentile(c->ratios, c->steps, 90));
}

static void set_work(const decode_bench *b, const decode_case *c, const kvf_stats *s, cli_cell *row)
{
    const double layer_steps = (double)c->steps * c->config.layers;
    const kvf_cache_plan *plan = kvf_cache_memory(c->cache);
    const kvf_cache_config in_force = {.transfer = plan->transfer};
    char text[32];
    const double read = bytes_to_read(c, s), moved = (double)s->bytes_to_device / layer_steps;
    const double floor_us = 1e-3 * fmax(read / b->read_rate, moved / b->link_rate);
    cli_cell_text(&row[DECODE_METHOD], cli_show(kvf_cache_setting, "transfer", &in_force, text));
    cli_cell_real(&row[DECODE_FLOOR], floor_us);
    cli_cell_real(&row[DECODE_OF_FLOOR], row[DECODE_MEDIAN].real / floor_us);
    cli_cell_real(&row[DECODE_TOKENS],
                  (double)s->tokens_attended / layer_steps / c->batch / c->config.kv_heads);
    cli_cell_real(&row[DECODE_READ], read / 1048576.0);
    cli_cell_real(&row[DECODE_MOVED], moved / 1048576.0);
    cli_cell_real(&row[DECODE_HITS], (double)s->hits / fmax(1.0, (double)s->pages_selected));
    if (c->config.speculate)
        cli_cell_integer(&row[DECODE_FORESEEN], s->pages_ahead_used);
    if (plan->disk_bundle_bytes)
        set_disk(c, s, row);
    if (c->is_forked)
        set_apart(c, row);
    cli_cell_integer(&row[DECODE_DEVICE_BYTES],
                     plan->device_kv_bytes + plan->device_digest_bytes + plan->device_table_bytes);
    cli_cell_integer(&row[DECODE_HOST_BYTES],
                     plan->host_kv_bytes + plan->host_staging_bytes + plan->host_table_bytes);
}

static void set_result(decode_bench *b, const decode_case *c)
{
    kvf_stats s;
    kvf_cache_stats(c->cache, &s);
    set_times(b, c, c->row);
    set_phases(c, &s, c->row);
    set_work(b, c, &s, c->row);
    if (c->is_dense)
        b->dense_ns = 1e3 * c->row[DECODE_MEDIAN].real;
}

static kvf_status record_if_wanted(const decode_bench *b, decode_case *c)
{
    const kvf_status recorded = records(b) ? record_step(b, c) : KVF_OK;
    /* What cannot be recorded is refused only where that was asked for. */
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
        set_result(b, &c->cases[i]);
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
    c.config.speculate = 0;
    forget_disk(&c.config);
    return c;
}

static void set_names(const decode_case *c, cli_cell *row)
{
    char text[32];
    cli_cell_integer(&row[DECODE_CONTEXT], c->context);
    if (!c->is_dense)
        cli_cell_integer(&row[DECODE_BUDGET], c->config.budget_tokens);
    cli_cell_integer(&row[DECODE_BATCH], c->batch);
    cli_cell_text(&row[DECODE_SELECT], cli_show(kvf_cache_setting, "select", &c->config, text));
    cli_cell_text(&row[DECODE_METHOD], cli_show(kvf_cache_setting, "transfer", &c->config, text));
    cli_cell_text(&row[DECODE_PAGES], cli_show(kvf_cache_setting, "pages", &c->config, text));
    if (c->config.speculate)
        cli_cell_integer(&row[DECODE_SPECULATE], 1);
    if (c->hot_heads < 1.0)
        cli_cell_real(&row[DECODE_HOT], c->hot_heads);
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
    const kvf_status status = kvf_cache_open(b->runtime, &c->config, &c->cache, error);
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

/* What does not fit or does not exist here is an answer of its own. */
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
    b->failed = b->failed || !is_lack;
}

/* @return false if there is no memory for a row */
static bool add_rows(decode_bench *b, const decode_cases *c, cli_cell (*rows)[DECODE_COLUMN_COUNT])
{
    for (uint32_t i = 0; i < c->count; i++) {
        cli_cell *row = cli_table_row(&b->table);
        if (!row)
            return false;
        memcpy(row, rows[i], sizeof rows[i]);
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
        set_names(&c->cases[i], rows[i]);
    }
    for (uint32_t i = 0; i < c->count && status == KVF_OK; i++)
        status = open_case(b, &c->cases[i], &error);
    if (status == KVF_OK) {
        status = run_steps(b, c);
        if (status != KVF_OK)
            error = *kvf_runtime_error(b->runtime);
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
static bool run_case(decode_bench *b)
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
    kvf_status status = kvf_stream_create(b->runtime, &b->stream);
    if (status == KVF_OK)
        status = decode_inputs_open(&b->inputs, b->runtime, b->stream, &b->o);
    if (status == KVF_OK)
        status = kvf_memory_alloc(b->runtime, out, &b->out);
    if (status == KVF_OK)
        status = decode_floor_reading(b->runtime, b->stream, &b->read_rate);
    return status == KVF_OK ? decode_floor_link(b->runtime, &b->link_rate) : status;
}

static void run_cases(decode_bench *b)
{
    const decode_sweep *s = &b->sweep;
    const uint64_t cases = cli_axes_product(s->axes, s->axis_count);
    const char *contexts = cli_option_find(&s->command, "context")->given;
    const uint64_t per_context = contexts ? cases / cli_axis_count(contexts) : cases;
    bool go_on = true;
    cli_progress progress;
    cli_progress_begin(&progress, "measuring", cases, "cases");
    for (uint64_t n = 0; n < cases && go_on && !cli_interrupted(); n++) {
        cli_axes_set(s->axes, s->axis_count, n, &b->o);
        if (n % per_context == 0) {
            b->dense_ns = NAN;
            go_on = !b->o.dense_steps || run_dense_case(b);
        }
        go_on = go_on && run_case(b);
        cli_progress_at(&progress, n + 1);
    }
    cli_progress_end(&progress);
    b->failed = b->failed || !go_on;
}

static bool write_results(decode_bench *b)
{
    const kvf_cache_config *c = &b->o.cache;
    const char *device = kvf_runtime_device(b->runtime) == KVF_DEVICE_CUDA ? "cuda" : "host";
    const cli_fact facts[] = {{"kvferry", kvf_version(), 0.0},
                              {"bench", "decode", 0.0},
                              {"device", device, 0.0},
                              {"device_name", kvf_runtime_device_name(b->runtime), 0.0},
                              {"layers", NULL, c->layers},
                              {"kv_heads", NULL, c->kv_heads},
                              {"group", NULL, b->o.group},
                              {"head_dim", NULL, c->head_dim},
                              {"page_size", NULL, c->page_size},
                              {"steps", NULL, b->o.steps},
                              {"read_gb_per_s", NULL, b->read_rate},
                              {"link_gb_per_s", NULL, b->link_rate},
                              {NULL, NULL, 0.0}};
    fprintf(stderr,
            "%s (%s): reads %.1f GB/s, link %.1f GB/s; %u layers, %u KV heads, group %u, head_dim "
            "%u, bf16, pages of %u\n",
            kvf_runtime_device_name(b->runtime), device, b->read_rate, b->link_rate, c->layers,
            c->kv_heads, b->o.group, c->head_dim, c->page_size);
    return cli_table_write(&b->table, b->o.format, facts, stdout) &&
           cli_table_save(&b->table, facts, &b->json);
}

static int run_all(decode_bench *b)
{
    kvf_error error = {0};
    if (kvf_runtime_open(&b->o.runtime, &b->runtime, &error) != KVF_OK) {
        cli_complain(&b->sweep.command, error.text);
        return 1;
    }
    if (reserve(b) != KVF_OK) {
        fprintf(stderr, "kvferry: %s\n", kvf_runtime_error(b->runtime)->text);
        return 1;
    }
    run_cases(b);
    b->failed = !write_results(b) || b->failed;
    return cli_interrupted() ? 130 : b->failed ? 1 : 0;
}

int cli_bench_decode_main(int argc, char **argv)
{
    decode_bench b = {.table = {.columns = columns, .column_count = DECODE_COLUMN_COUNT}};
    char calibration[CLI_CALIBRATION_BYTES];
    const int parsed = decode_options_parse(argc, argv, &b.sweep, &b.o);
    if (parsed >= 0)
        return parsed;
    cli_calibration_choose(&b.o.runtime, calibration);
    cli_interrupt_watch();
    const int status = !b.o.json || cli_output_open(&b.json, b.o.json) ? run_all(&b) : 1;
    cli_output_discard(&b.json);
    decode_inputs_close(&b.inputs);
    if (b.runtime)
        kvf_memory_free(b.runtime, b.out);
    kvf_stream_destroy(b.stream);
    kvf_runtime_close(b.runtime);
    cli_table_free(&b.table);
    return status;
}
