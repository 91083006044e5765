/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The matrix products of a decode step on a GPU, of Llama-3.1-8B's shape in bf16: the runner's own
 * kernel and cuBLAS, beside the time that reading the weights takes at the rate of a copy.
 *
 * It knows no models. Products follow each other on one stream, each on weights that no cache
 * holds; the host's clock is around many of them. Without cuBLAS the own kernel is all there is.
 * --divide makes everything smaller, for the emulator, whose times say nothing. Exit: 77 without a
 * GPU.
 */

#include "common/clock.h"
#include "common/random.h"
#include "matmul_cublas.h"
#include "options.h"
#include "output.h"
#include "small_batch_gemm.h"

#include <string.h>

#define REPETITIONS  15u
#define ROWS_MAX     64u
#define INPUTS_MAX   14336u
#define OUTPUTS_MAX  128256u
#define WEIGHT_BYTES ((size_t)2 << 30) /* what products take turns on */
#define FILL_BYTES   ((size_t)8 << 20)

typedef struct shape {
    const char *name;
    uint32_t outputs, inputs;
} shape;

static const shape shapes[] = {{"queries, keys, values", 6144, 4096},
                               {"output", 4096, 4096},
                               {"gate, up", 28672, 4096},
                               {"down", 4096, 14336},
                               {"logits", OUTPUTS_MAX, 4096}};

#define COLUMNS(X)                                                                                 \
    X(SMALL_BATCH_NAME, "name", "product", TEXT, 0)                                                \
    X(SMALL_BATCH_ROWS, "rows", "rows", INTEGER, 0)                                                \
    X(SMALL_BATCH_BYTES, "bytes", NULL, REAL, 0)                                                   \
    X(SMALL_BATCH_FLOOR, "floor_us", "floor us", REAL, 2)                                          \
    X(SMALL_BATCH_KERNEL, "kernel_us", "kernel us", REAL, 2)                                       \
    X(SMALL_BATCH_KERNEL_P10, "kernel_p10_us", "p10", REAL, 2)                                     \
    X(SMALL_BATCH_KERNEL_P90, "kernel_p90_us", "p90", REAL, 2)                                     \
    X(SMALL_BATCH_OF_COPIES, "of_copies", "of copies", REAL, 2)                                    \
    X(SMALL_BATCH_CUBLAS, "cublas_us", "cuBLAS us", REAL, 2)                                       \
    X(SMALL_BATCH_CUBLAS_P10, "cublas_p10_us", "p10", REAL, 2)                                     \
    X(SMALL_BATCH_CUBLAS_P90, "cublas_p90_us", "p90", REAL, 2)

enum small_batch_column { COLUMNS(CLI_COLUMN_NUMBER) SMALL_BATCH_COLUMNS };

static const cli_column columns[] = {COLUMNS(CLI_COLUMN_ROW)};

typedef struct small_batch_options {
    uint32_t divide;
    const char *json;
} small_batch_options;

typedef struct bench {
    small_batch_options options;
    uint32_t repetitions;
    cli_table table;
    cli_output json;
    size_t bytes; /* of all weights */
    kvf_runtime *runtime;
    kvf_stream *stream;
    char *weights, *x; /* random */
    float *y;
    void *workspace;
    kvf_cublas *cublas; /* NULL = not here */
    double rate;        /* bytes per ns of a copy */
} bench;

typedef kvf_status (*way_fn)(const bench *b, const shape *s, uint32_t rows, const void *weight);

static kvf_status by_kernel(const bench *b, const shape *s, uint32_t rows, const void *weight)
{
    const kvf_small_batch_gemm product = {.dtype = KVF_BF16,
                                          .rows = rows,
                                          .inputs = s->inputs,
                                          .outputs = s->outputs,
                                          .weight = weight,
                                          .x = b->x};
    return kvf_small_batch_gemm_cuda(&product, b->y, 0, kvf_stream_native(b->stream)) == 0
               ? KVF_OK
               : KVF_DEVICE_FAILED;
}

static kvf_status by_cublas(const bench *b, const shape *s, uint32_t rows, const void *weight)
{
    const kvf_cublas_product product = {.dtype = KVF_BF16,
                                        .rows = rows,
                                        .outputs = s->outputs,
                                        .inputs = s->inputs,
                                        .weight = weight,
                                        .x = b->x,
                                        .y = b->y,
                                        .y_stride = s->outputs};
    return kvf_cublas_multiply(b->cublas, &product, kvf_stream_native(b->stream));
}

/* Microseconds of one product: the median, and the 10th and 90th percentile. */
static kvf_status measure(const bench *b, way_fn way, const shape *s, uint32_t rows,
                          cli_cell *cells)
{
    double taken[REPETITIONS];
    const size_t bytes = (size_t)s->outputs * s->inputs * 2;
    const uint32_t places = b->options.divide == 1 ? (uint32_t)(b->bytes / bytes) : 1;
    const uint32_t launches = 2 * places;
    kvf_status status = way(b, s, rows, b->weights); /* loads it */
    for (uint32_t r = 0; r < b->repetitions && status == KVF_OK; r++) {
        status = kvf_stream_wait(b->stream);
        const uint64_t start = kvf_now_ns();
        for (uint32_t i = 0; i < launches && status == KVF_OK; i++)
            status = way(b, s, rows, b->weights + i % places * bytes);
        if (status == KVF_OK)
            status = kvf_stream_wait(b->stream);
        taken[r] = 1e-3 * (double)(kvf_now_ns() - start) / launches;
    }
    if (status == KVF_OK)
        cli_cells_spread(cells, taken, b->repetitions);
    return status;
}

static kvf_status measure_copy(bench *b)
{
    uint64_t best = UINT64_MAX;
    kvf_status status = KVF_OK;
    const size_t half = b->bytes / 2;
    for (uint32_t r = 0; r < b->repetitions + 1 && status == KVF_OK; r++) {
        const uint64_t start = kvf_now_ns();
        status = kvf_memory_copy(b->stream, b->weights, b->weights + half, half);
        if (status == KVF_OK)
            status = kvf_stream_wait(b->stream);
        const uint64_t ns = kvf_now_ns() - start;
        best = ns < best ? ns : best;
    }
    b->rate = (double)b->bytes / (double)best;
    return status;
}

static kvf_status add_row(bench *b, const shape *s, uint32_t rows)
{
    const double bytes = 2.0 * s->inputs * ((double)s->outputs + rows) + 4.0 * rows * s->outputs;
    const double floor = 1e-3 * bytes / b->rate;
    cli_cell *row = cli_table_row(&b->table);
    if (!row)
        return KVF_OUT_OF_MEMORY;
    cli_cell_text(&row[SMALL_BATCH_NAME], s->name);
    cli_cell_integer(&row[SMALL_BATCH_ROWS], rows);
    cli_cell_real(&row[SMALL_BATCH_BYTES], bytes);
    cli_cell_real(&row[SMALL_BATCH_FLOOR], floor);
    KVF_TRY(measure(b, by_kernel, s, rows, &row[SMALL_BATCH_KERNEL]));
    cli_cell_real(&row[SMALL_BATCH_OF_COPIES], floor / row[SMALL_BATCH_KERNEL].real);
    return b->cublas ? measure(b, by_cublas, s, rows, &row[SMALL_BATCH_CUBLAS]) : KVF_OK;
}

static kvf_status measure_all(bench *b)
{
    static const uint32_t rows[] = {1, 4, 16, ROWS_MAX};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
            shape s = shapes[i];
            s.outputs /= b->options.divide;
            KVF_TRY(add_row(b, &s, rows[k]));
        }
    return KVF_OK;
}

/* Everywhere the same numbers between 1 and 2 in size, either sign. */
static kvf_status fill(bench *b)
{
    uint64_t random = 1;
    void *host = NULL, *alias = NULL;
    kvf_status status = kvf_pinned_alloc(b->runtime, FILL_BYTES, &host, &alias);
    for (size_t i = 0; i < FILL_BYTES / 8 && status == KVF_OK; i++) {
        const uint64_t bits = (kvf_random_next(&random) & UINT64_C(0x807f807f807f807f)) |
                              UINT64_C(0x3f803f803f803f80);
        memcpy((char *)host + i * 8, &bits, 8);
    }
    for (size_t at = 0; at < b->bytes && status == KVF_OK; at += FILL_BYTES)
        status = kvf_memory_copy(b->stream, b->weights + at, alias, FILL_BYTES);
    if (status == KVF_OK)
        status = kvf_memory_copy(b->stream, b->x, alias, ROWS_MAX * INPUTS_MAX * 2);
    if (status == KVF_OK)
        status = kvf_stream_wait(b->stream);
    if (b->runtime)
        kvf_pinned_free(b->runtime, host);
    return status;
}

static kvf_status reserve(bench *b)
{
    void *weights = NULL, *x = NULL, *y = NULL;
    kvf_status status = kvf_stream_create(b->runtime, &b->stream);
    if (status == KVF_OK)
        status = kvf_memory_alloc(b->runtime, b->bytes, &weights);
    if (status == KVF_OK)
        status = kvf_memory_alloc(b->runtime, ROWS_MAX * INPUTS_MAX * 2, &x);
    if (status == KVF_OK)
        status = kvf_memory_alloc(b->runtime, ROWS_MAX * OUTPUTS_MAX * sizeof *b->y, &y);
    if (status == KVF_OK)
        status = kvf_memory_alloc(b->runtime, KVF_CUBLAS_WORKSPACE_BYTES, &b->workspace);
    b->weights = weights;
    b->x = x;
    b->y = y;
    return status == KVF_OK ? fill(b) : status;
}

static void close_bench(bench *b)
{
    cli_output_discard(&b->json);
    cli_table_free(&b->table);
    kvf_cublas_close(b->cublas);
    kvf_memory_free(b->runtime, b->workspace);
    kvf_memory_free(b->runtime, b->y);
    kvf_memory_free(b->runtime, b->x);
    kvf_memory_free(b->runtime, b->weights);
    kvf_stream_destroy(b->stream);
    kvf_runtime_close(b->runtime);
}

/* @return exit status */
static int run(bench *b)
{
    kvf_error error = {0};
    kvf_status status = reserve(b);
    if (status == KVF_OK && kvf_cublas_open(b->workspace, NULL, &b->cublas, &error) != KVF_OK)
        fprintf(stderr, "bench_small_batch: %s\n", error.text);
    if (status == KVF_OK)
        status = measure_copy(b);
    if (status == KVF_OK)
        status = measure_all(b);
    if (status != KVF_OK) {
        fprintf(stderr, "bench_small_batch: %s\n", kvf_runtime_error(b->runtime)->text);
        return 1;
    }
    const cli_fact facts[] = {{"bench", "thin", 0.0}, {"copy_gb_per_s", NULL, b->rate}, {0}};
    return cli_table_write(&b->table, CLI_FORMAT_TABLE, facts, stdout) &&
                   cli_table_save(&b->table, facts, &b->json)
               ? 0
               : 1;
}

static void set_defaults(void *options)
{
    *(small_batch_options *)options = (small_batch_options){.divide = 1};
}

int main(int argc, char **argv)
{
    static const cli_option rows[] = {
        {.is = {"divide", KVF_SETTING_WHOLE, CLI_FIELD(small_batch_options, divide), .low = 1,
                .high = 512, .meaning = "make everything smaller"}},
        {.is = {"json", KVF_SETTING_TEXT, CLI_FIELD(small_batch_options, json),
                .meaning = "write every figure there as well"}},
    };
    bench b = {.table = {.columns = columns, .column_count = SMALL_BATCH_COLUMNS}};
    cli_command command = {.name = "bench_small_batch",
                           .usage = "usage: bench_small_batch [OPTION...]",
                           .stray = "it takes options alone",
                           .defaults = set_defaults};
    kvf_runtime_config config;
    kvf_error error = {0};
    cli_add(&command, rows, 2, 0);
    const int parsed = cli_parse(&command, argc, argv, &b.options);
    if (parsed >= 0)
        return parsed;
    kvf_runtime_config_init(&config);
    config.device = KVF_DEVICE_CUDA;
    config.calibrate = 0;
    b.repetitions = b.options.divide == 1 ? REPETITIONS : 1;
    b.bytes = kvf_round_up(WEIGHT_BYTES / b.options.divide, FILL_BYTES);
    if (kvf_runtime_open(&config, &b.runtime, &error) != KVF_OK) {
        fprintf(stderr, "bench_small_batch: %s\n", error.text);
        return error.status == KVF_UNSUPPORTED ? 77 : 1;
    }
    const int status = b.options.json && !cli_output_open(&b.json, b.options.json) ? 1 : run(&b);
    close_bench(&b);
    return status;
}
