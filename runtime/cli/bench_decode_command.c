/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry bench decode`: one decode step over context, budget, batch and method, with the floor
 * beside it.
 *
 * The floor of a step is the larger of two times: what it must read on the device over the read
 * bandwidth, and what it moved over the link's peak, both measured in the same run. Keys and values
 * are random; queries drift slowly, so that a step chooses mostly the pages of the step before, as
 * real ones do. A step is several layers, enqueued together and waited for once, as a model does;
 * figures are per layer. Layers have keys of their own, so digests come from memory and not from a
 * cache that only one layer would fit into. It knows the public API only.
 */

#include "bench_link.h"

#include "bench_decode_options.h"

#include "calibration_file.h"
#include "common/clock.h"
#include "common/convert.h"
#include "common/percentile.h"
#include "common/random.h"
#include "interrupt.h"
#include "progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- output ---- */

enum column {
    CONTEXT,
    BUDGET,
    BATCH,
    SELECT,
    METHOD,
    SPECULATE,
    RECORDED,
    NODES,
    MEDIAN,
    P10,
    P95,
    P99,
    MEAN,
    HOST,
    FLOOR,
    OF_FLOOR,
    TOKENS,
    READ,
    MOVED,
    HITS,
    VS_DENSE,
    OVERHEAD,
    REFRESH,
    FORESEEN,
    APPEND_US, /* phases: in the order of kvf_stats */
    SCORE_US,
    SELECT_US,
    GATHER_US,
    COPY_US,
    ATTEND_US,
    REFRESH_US,
    DEVICE_BYTES,
    HOST_BYTES,
    STATUS,
    COLUMN_COUNT
};

static const cli_column columns[COLUMN_COUNT] = {
    [CONTEXT] = {"context_tokens", "context", CLI_CELL_INTEGER, 0},
    [BUDGET] = {"budget_tokens", "budget", CLI_CELL_INTEGER, 0},
    [BATCH] = {"batch", "batch", CLI_CELL_INTEGER, 0},
    [SELECT] = {"select", "select", CLI_CELL_TEXT, 0},
    [METHOD] = {"method", "method", CLI_CELL_TEXT, 0},
    [SPECULATE] = {"speculate", "spec", CLI_CELL_INTEGER, 0},
    [RECORDED] = {"recorded", "rec", CLI_CELL_INTEGER, 0},
    [NODES] = {"graph_nodes", NULL, CLI_CELL_INTEGER, 0},
    [MEDIAN] = {"layer_us", "us/layer", CLI_CELL_REAL, 1},
    [P10] = {"layer_p10_us", "p10", CLI_CELL_REAL, 1},
    [P95] = {"layer_p95_us", "p95", CLI_CELL_REAL, 1},
    [P99] = {"layer_p99_us", "p99", CLI_CELL_REAL, 1},
    [MEAN] = {"layer_mean_us", NULL, CLI_CELL_REAL, 1},
    [HOST] = {"enqueue_us", "enqueue", CLI_CELL_REAL, 1},
    [FLOOR] = {"floor_us", "floor", CLI_CELL_REAL, 1},
    [OF_FLOOR] = {"times_floor", "x floor", CLI_CELL_REAL, 2},
    [TOKENS] = {"tokens_attended", "tokens", CLI_CELL_REAL, 0},
    [READ] = {"read_bytes", "MiB read", CLI_CELL_REAL, 2},
    [MOVED] = {"moved_bytes", "MiB moved", CLI_CELL_REAL, 3},
    [HITS] = {"hit_rate", "hits", CLI_CELL_REAL, 3},
    [VS_DENSE] = {"faster_than_dense", "vs dense", CLI_CELL_REAL, 1},
    [OVERHEAD] = {"overhead", "overhead", CLI_CELL_REAL, 3},
    [REFRESH] = {"refresh", "refresh", CLI_CELL_REAL, 3},
    [FORESEEN] = {"pages_ahead_used", NULL, CLI_CELL_INTEGER, 0},
    [APPEND_US] = {"append_us", NULL, CLI_CELL_REAL, 1},
    [SCORE_US] = {"score_us", NULL, CLI_CELL_REAL, 1},
    [SELECT_US] = {"select_us", NULL, CLI_CELL_REAL, 1},
    [GATHER_US] = {"gather_us", NULL, CLI_CELL_REAL, 1},
    [COPY_US] = {"copy_us", NULL, CLI_CELL_REAL, 1},
    [ATTEND_US] = {"attend_us", NULL, CLI_CELL_REAL, 1},
    [REFRESH_US] = {"refresh_us", NULL, CLI_CELL_REAL, 1},
    [DEVICE_BYTES] = {"device_bytes", NULL, CLI_CELL_INTEGER, 0},
    [HOST_BYTES] = {"host_bytes", NULL, CLI_CELL_INTEGER, 0},
    [STATUS] = {"status", "", CLI_CELL_TEXT, 0},
};

/* ---- bench ---- */

#define CHUNK 512u

/* Written here, read on the device: where a model's own kernels would have left it. */
typedef struct vectors {
    uint16_t *host; /* pinned */
    void *alias;    /* of it */
    void *device;   /* memory of the device */
} vectors;

typedef struct decode_bench {
    decode_options o; /* of the case that is measured */
    decode_sweep sweep;
    kvf_runtime *runtime;
    kvf_stream *stream;
    vectors kv; /* [CHUNK or batch, kv_heads, head_dim] bf16, keys and values alike */
    vectors q;  /* [batch, query_heads, head_dim] */
    float *drift;
    void *out;
    double read_rate; /* bytes per ns on the device */
    double link_rate; /* bytes per ns over the link */
    double dense_ns;  /* median of dense attention over this context; NAN = not measured */
    uint64_t random;
    cli_table table;
    cli_output json;
    bool failed;
} decode_bench;

static size_t kv_count(const decode_bench *b, uint32_t rows)
{
    return (size_t)rows * b->o.cache.kv_heads * b->o.cache.head_dim;
}

static kvf_status upload(const decode_bench *b, const vectors *r, size_t count)
{
    const kvf_status status =
        kvf_memory_copy(b->stream, r->device, r->alias, count * sizeof *r->host);
    return status == KVF_OK ? kvf_stream_wait(b->stream) : status;
}

static kvf_status fill_kv(decode_bench *b, uint32_t count)
{
    for (size_t i = 0; i < kv_count(b, count); i++)
        b->kv.host[i] = kvf_bf16_from_float(kvf_random_normal(&b->random));
    return upload(b, &b->kv, kv_count(b, count));
}

static kvf_status drift_queries(decode_bench *b, uint32_t batch)
{
    const size_t count = kv_count(b, batch) * b->o.group;
    for (size_t i = 0; i < count; i++) {
        b->drift[i] = 0.95f * b->drift[i] + 0.31f * kvf_random_normal(&b->random);
        b->q.host[i] = kvf_bf16_from_float(2.0f * b->drift[i]);
    }
    return upload(b, &b->q, count);
}

/* What a case runs on. */
typedef struct decode_case {
    kvf_cache_config config;
    uint32_t context, batch, steps;
    bool is_dense; /* what the other cases of its context are compared with */
    kvf_cache *cache;
    kvf_sequence *sequences[DECODE_BATCH_MAX];
    kvf_recording *recording;
} decode_case;

static kvf_status append_prompt(decode_bench *b, const decode_case *c, kvf_sequence *s)
{
    for (uint32_t layer = 0; layer < c->config.layers; layer++)
        for (uint32_t at = 0; at < c->context; at += CHUNK) {
            kvf_status status = fill_kv(b, CHUNK);
            const kvf_prefill_args a = {.sequence = s,
                                        .layer = layer,
                                        .tokens = c->context - at < CHUNK ? c->context - at : CHUNK,
                                        .k = b->kv.device,
                                        .v = b->kv.device};
            if (status == KVF_OK)
                status = kvf_prefill(c->cache, &a, b->stream);
            if (status == KVF_OK)
                status = kvf_stream_wait(b->stream); /* the buffers are used again */
            if (status != KVF_OK)
                return status;
        }
    return KVF_OK;
}

static kvf_status enqueue_layers(const decode_bench *b, const decode_case *c)
{
    kvf_decode_args a = {.batch = c->batch,
                         .sequences = c->sequences,
                         .q = b->q.device,
                         .k = b->kv.device,
                         .v = b->kv.device,
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

/* @param ns  receives the whole step and the part until it was enqueued, per layer */
static kvf_status one_step(decode_bench *b, const decode_case *c, double ns[2])
{
    kvf_status status = drift_queries(b, c->batch);
    if (status == KVF_OK)
        status = fill_kv(b, c->batch);
    if (status != KVF_OK)
        return status;
    const uint64_t start = kvf_now_ns();
    status = enqueue_step(b, c);
    ns[1] = (double)(kvf_now_ns() - start) / c->config.layers;
    if (status == KVF_OK)
        status = kvf_stream_wait(b->stream);
    ns[0] = (double)(kvf_now_ns() - start) / c->config.layers;
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

/* What one layer of one step must read on the device: attended keys and values, and digests. */
static double bytes_to_read(const decode_case *c, const kvf_stats *s)
{
    const double layer_steps = (double)c->steps * c->config.layers;
    const double token = 2.0 * c->config.head_dim * 2.0;
    const double tokens = (double)c->context * c->config.kv_heads * c->batch;
    const bool has_codes = c->config.digest == KVF_DIGEST_CODES;
    const double digest = has_codes ? c->config.head_dim / 4.0 + 2.0
                                    : token * c->config.sub_digests / c->config.page_size;
    const bool has_digests = c->config.select != KVF_SELECT_FULL &&
                             c->config.select != KVF_SELECT_STREAMING &&
                             c->config.select != KVF_SELECT_STATIC;
    return (double)s->tokens_attended / layer_steps * token + (has_digests ? tokens * digest : 0.0);
}

/* Sorts step and host. */
static void set_times(const decode_bench *b, const decode_case *c, double *step, double *host,
                      cli_cell *row)
{
    double mean = 0.0;
    for (uint32_t i = 0; i < c->steps; i++)
        mean += step[i] / c->steps;
    kvf_sort(step, c->steps);
    kvf_sort(host, c->steps);
    const double median = kvf_percentile(step, c->steps, 50);
    cli_cell_real(&row[MEDIAN], 1e-3 * median);
    cli_cell_real(&row[P10], 1e-3 * kvf_percentile(step, c->steps, 10));
    cli_cell_real(&row[P95], 1e-3 * kvf_percentile(step, c->steps, 95));
    cli_cell_real(&row[P99], 1e-3 * kvf_percentile(step, c->steps, 99));
    cli_cell_real(&row[MEAN], 1e-3 * mean);
    cli_cell_real(&row[HOST], 1e-3 * kvf_percentile(host, c->steps, 50));
    cli_cell_real(&row[VS_DENSE], b->dense_ns / median * c->batch);
}

/* What the device did, where it has the times. Overhead is none of attention, scoring and the
 * renewal of static sets: append, select and whatever the clock has beyond the sum of the parts. */
static void set_phases(const decode_case *c, const kvf_stats *s, cli_cell *row)
{
    const double per_us = 1e3 * c->steps * c->config.layers, mean_us = row[MEAN].real;
    const uint64_t ns[] = {s->append_ns, s->score_ns,  s->select_ns, s->gather_ns,
                           s->copy_ns,   s->attend_ns, s->refresh_ns};
    if (!s->attend_ns)
        return;
    for (size_t i = 0; i < sizeof ns / sizeof *ns; i++)
        cli_cell_real(&row[APPEND_US + i], (double)ns[i] / per_us);
    const double work_us = (double)(s->attend_ns + s->score_ns + s->refresh_ns) / per_us;
    cli_cell_real(&row[OVERHEAD], 1.0 - fmin(1.0, work_us / mean_us));
    cli_cell_real(&row[REFRESH], row[REFRESH_US].real / mean_us);
}

static void set_work(const decode_bench *b, const decode_case *c, const kvf_stats *s, cli_cell *row)
{
    const double layer_steps = (double)c->steps * c->config.layers;
    const kvf_cache_plan *plan = kvf_cache_memory(c->cache);
    const kvf_cache_config in_force = {.transfer = plan->transfer};
    char text[32];
    const double read = bytes_to_read(c, s), moved = (double)s->bytes_to_device / layer_steps;
    const double floor_us = 1e-3 * fmax(read / b->read_rate, moved / b->link_rate);
    cli_cell_text(&row[METHOD], cli_show(kvf_cache_setting, "transfer", &in_force, text));
    cli_cell_real(&row[FLOOR], floor_us);
    cli_cell_real(&row[OF_FLOOR], row[MEDIAN].real / floor_us);
    cli_cell_real(&row[TOKENS],
                  (double)s->tokens_attended / layer_steps / c->batch / c->config.kv_heads);
    cli_cell_real(&row[READ], read / 1048576.0);
    cli_cell_real(&row[MOVED], moved / 1048576.0);
    cli_cell_real(&row[HITS], (double)s->hits / fmax(1.0, (double)s->pages_selected));
    if (c->config.speculate)
        cli_cell_integer(&row[FORESEEN], s->pages_ahead_used);
    cli_cell_integer(&row[DEVICE_BYTES],
                     plan->device_kv_bytes + plan->device_digest_bytes + plan->device_table_bytes);
    cli_cell_integer(&row[HOST_BYTES],
                     plan->host_kv_bytes + plan->host_staging_bytes + plan->host_table_bytes);
}

static void set_result(decode_bench *b, const decode_case *c, double *step, double *host,
                       cli_cell *row)
{
    kvf_stats s;
    kvf_cache_stats(c->cache, &s);
    set_times(b, c, step, host, row);
    set_phases(c, &s, row);
    set_work(b, c, &s, row);
    if (c->is_dense)
        b->dense_ns = 1e3 * row[MEDIAN].real;
}

static kvf_status run_steps(decode_bench *b, decode_case *c, cli_cell *row)
{
    double ns[2];
    for (uint32_t i = 0; i < c->batch; i++) {
        kvf_status status = kvf_sequence_create(c->cache, &c->sequences[i]);
        if (status == KVF_OK)
            status = append_prompt(b, c, c->sequences[i]);
        if (status != KVF_OK)
            return status;
    }
    for (uint32_t i = 0; i < b->o.warmup + 1; i++) {
        const kvf_status status = one_step(b, c, ns);
        if (status != KVF_OK)
            return status;
    }
    const kvf_status recorded = records(b) ? record_step(b, c) : KVF_OK;
    /* What cannot be recorded is refused only where that was asked for. */
    if (recorded != KVF_OK && (b->o.record || recorded != KVF_UNSUPPORTED))
        return recorded;
    cli_cell_integer(&row[RECORDED], c->recording != NULL);
    if (c->recording)
        cli_cell_integer(&row[NODES], kvf_recording_nodes(c->recording));
    double *step = calloc(c->steps, sizeof *step), *host = calloc(c->steps, sizeof *host);
    kvf_status status = step && host ? KVF_OK : KVF_OUT_OF_MEMORY;
    kvf_cache_stats_reset(c->cache);
    for (uint32_t i = 0; i < c->steps && status == KVF_OK; i++) {
        status = one_step(b, c, ns);
        step[i] = ns[0];
        host[i] = ns[1];
    }
    if (status == KVF_OK)
        set_result(b, c, step, host, row);
    free(step);
    free(host);
    return status;
}

/* The case of one combination of values. */
static decode_case case_of(const decode_bench *b)
{
    decode_case c = {
        .config = b->o.cache, .context = b->o.context, .batch = b->o.batch, .steps = b->o.steps};
    c.config.query_heads = c.config.kv_heads * b->o.group;
    c.config.prefill_chunk_max = CHUNK;
    return c;
}

/* Full attention over the same context. */
static decode_case dense_case_of(const decode_bench *b)
{
    decode_case c = case_of(b);
    c.is_dense = true;
    c.batch = 1;
    c.steps = b->o.dense_steps;
    c.config.select = KVF_SELECT_FULL;
    c.config.transfer = KVF_TRANSFER_AUTO;
    c.config.speculate = 0;
    return c;
}

static void set_names(const decode_case *c, cli_cell *row)
{
    char text[32];
    cli_cell_integer(&row[CONTEXT], c->context);
    if (!c->is_dense)
        cli_cell_integer(&row[BUDGET], c->config.budget_tokens);
    cli_cell_integer(&row[BATCH], c->batch);
    cli_cell_text(&row[SELECT], cli_show(kvf_cache_setting, "select", &c->config, text));
    cli_cell_text(&row[METHOD], cli_show(kvf_cache_setting, "transfer", &c->config, text));
    if (c->config.speculate)
        cli_cell_integer(&row[SPECULATE], 1);
}

/* @return false if there is no memory for a row */
static bool run_case(decode_bench *b, decode_case c)
{
    cli_cell *row = cli_table_row(&b->table);
    kvf_error error = {0};
    if (!row)
        return false;
    set_names(&c, row);
    c.config.sequences_max = c.batch;
    c.config.tokens_max = c.context + c.steps + b->o.warmup + 2;
    b->random = b->o.seed;
    memset(b->drift, 0, kv_count(b, DECODE_BATCH_MAX) * b->o.group * sizeof *b->drift);
    kvf_status status = kvf_cache_open(b->runtime, &c.config, &c.cache, &error);
    if (status == KVF_OK) {
        status = run_steps(b, &c, row);
        if (status != KVF_OK)
            error = *kvf_runtime_error(b->runtime);
    }
    (void)!kvf_stream_wait(b->stream);
    kvf_recording_destroy(c.recording);
    kvf_cache_close(c.cache);
    if (status == KVF_OK)
        return true;
    /* What does not fit or does not exist here is an answer of its own. */
    const bool is_lack = status == KVF_UNSUPPORTED || status == KVF_OUT_OF_MEMORY ||
                         status == KVF_OUT_OF_DEVICE_MEMORY || status == KVF_PIN_FAILED;
    cli_cell_text(&row[STATUS], status == KVF_UNSUPPORTED ? "not here"
                                : is_lack                 ? "does not fit"
                                                          : kvf_status_name(status));
    fprintf(stderr, "\nkvferry: %s\n", error.text);
    b->failed = b->failed || !is_lack;
    return true;
}

/* ---- the floor ---- */

typedef struct reading {
    const uint64_t *words;
    size_t words_per_task;
    uint64_t *sums;
} reading;

static void read_words(const void *args, uint32_t task)
{
    const reading *r = args;
    const uint64_t *w = r->words + task * r->words_per_task;
    uint64_t s[8] = {0};
    for (size_t i = 0; i < r->words_per_task; i += 8)
        for (size_t j = 0; j < 8; j++)
            s[j] += w[i + j];
    r->sums[task] = s[0] ^ s[1] ^ s[2] ^ s[3] ^ s[4] ^ s[5] ^ s[6] ^ s[7];
}

/* Best of several passes: reading on the host device, a copy on the GPU (read plus written bytes).
 */
static kvf_status measure_reading(decode_bench *b)
{
    enum { TASKS = 64, PASSES = 7 };
    const size_t bytes = (size_t)256 << 20;
    const bool on_gpu = kvf_runtime_device(b->runtime) == KVF_DEVICE_CUDA;
    void *memory = NULL;
    uint64_t sums[TASKS];
    double best = INFINITY;
    kvf_status status = kvf_memory_alloc(b->runtime, 2 * bytes, &memory);
    for (int i = 0; i < PASSES && status == KVF_OK; i++) {
        const reading r = {memory, 2 * bytes / 8 / TASKS, sums};
        const uint64_t start = kvf_now_ns();
        status = on_gpu ? kvf_memory_copy(b->stream, (char *)memory + bytes, memory, bytes)
                        : kvf_stream_launch(b->stream, read_words, &r, sizeof r, TASKS);
        if (status == KVF_OK)
            status = kvf_stream_wait(b->stream);
        best = fmin(best, (double)(kvf_now_ns() - start));
    }
    b->read_rate = 2.0 * (double)bytes / best;
    kvf_memory_free(b->runtime, memory);
    return status;
}

static kvf_status measure_link(decode_bench *b)
{
    kvf_link *link = NULL;
    kvf_link_case c;
    kvf_link_result r = {0};
    kvf_link_case_init(&c);
    c.what = KVF_LINK_PEAK;
    c.page_bytes = 65536;
    c.pages = 1024;
    c.repetitions = 5;
    kvf_status status = kvf_link_open(b->runtime, &link);
    if (status == KVF_OK)
        status = kvf_link_measure(link, &c, NULL, &r);
    kvf_link_close(link);
    const uint64_t ns = r.copying.min_ns ? r.copying.min_ns : r.total.min_ns;
    b->link_rate = ns ? (double)r.bytes / (double)ns : 1.0;
    return status;
}

/* ---- all ---- */

static kvf_status reserve_rows(decode_bench *b, size_t bytes, vectors *out)
{
    void *host = NULL;
    const kvf_status status = kvf_pinned_alloc(b->runtime, bytes, &host, &out->alias);
    out->host = status == KVF_OK ? host : NULL;
    return status == KVF_OK ? kvf_memory_alloc(b->runtime, bytes, &out->device) : status;
}

static kvf_status reserve(decode_bench *b)
{
    const size_t kv = kv_count(b, CHUNK) * 2, q = kv_count(b, DECODE_BATCH_MAX) * b->o.group * 2;
    kvf_status status = kvf_stream_create(b->runtime, &b->stream);
    if (status == KVF_OK)
        status = reserve_rows(b, kv, &b->kv);
    if (status == KVF_OK)
        status = reserve_rows(b, q, &b->q);
    if (status == KVF_OK)
        status = kvf_memory_alloc(b->runtime, q, &b->out);
    b->drift = calloc(kv_count(b, DECODE_BATCH_MAX) * b->o.group, sizeof *b->drift);
    if (status == KVF_OK && !b->drift)
        return KVF_OUT_OF_MEMORY;
    if (status == KVF_OK)
        status = measure_reading(b);
    return status == KVF_OK ? measure_link(b) : status;
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
            go_on = !b->o.dense_steps || run_case(b, dense_case_of(b));
        }
        go_on = go_on && run_case(b, case_of(b));
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
    decode_bench b = {.table = {.columns = columns, .column_count = COLUMN_COUNT}};
    char calibration[CLI_CALIBRATION_BYTES];
    const int parsed = decode_options_parse(argc, argv, &b.sweep, &b.o);
    if (parsed >= 0)
        return parsed;
    cli_calibration_choose(&b.o.runtime, calibration);
    cli_interrupt_watch();
    const int status = !b.o.json || cli_output_open(&b.json, b.o.json) ? run_all(&b) : 1;
    cli_output_discard(&b.json);
    if (b.runtime) {
        kvf_memory_free(b.runtime, b.kv.device);
        kvf_memory_free(b.runtime, b.q.device);
        kvf_pinned_free(b.runtime, b.kv.host);
        kvf_pinned_free(b.runtime, b.q.host);
        kvf_memory_free(b.runtime, b.out);
    }
    kvf_stream_destroy(b.stream);
    kvf_runtime_close(b.runtime);
    cli_table_free(&b.table);
    free(b.drift);
    return status;
}
