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

#include "bench_report.h"
#include "common/clock.h"
#include "common/random.h"
#include "matmul_cublas.h"
#include "thin_product.h"

#include <stdbool.h>
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

typedef struct bench {
    uint32_t divide, repetitions;
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
    const kvf_thin_product product = {
        .dtype = KVF_BF16,
        .rows = rows,
        .inputs = s->inputs,
        .part_count = 1,
        .parts = {{.weight = weight, .row_bytes = s->inputs * 2ull, .outputs = s->outputs}},
        .x = b->x};
    return kvf_thin_product_cuda(&product, b->y, 0, kvf_stream_native(b->stream)) == 0
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

/* Microseconds of one product, three percentiles. */
static kvf_status measure(const bench *b, way_fn way, const shape *s, uint32_t rows, double us[3])
{
    double taken[REPETITIONS];
    const size_t bytes = (size_t)s->outputs * s->inputs * 2;
    const uint32_t places = b->divide == 1 ? (uint32_t)(b->bytes / bytes) : 1;
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
        bench_percentiles(taken, b->repetitions, us);
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

static void tell(const bench *b, FILE *json, bool is_first, const shape *s, uint32_t rows,
                 double us[2][3])
{
    const double bytes = 2.0 * s->inputs * ((double)s->outputs + rows) + 4.0 * rows * s->outputs;
    const double floor = 1e-3 * bytes / b->rate;
    printf("%-22s rows %2u  floor %8.2f us  kernel %8.2f us (%.2f to %.2f), %3.0f%% of copies",
           s->name, rows, floor, us[0][1], us[0][0], us[0][2], 100.0 * floor / us[0][1]);
    if (b->cublas)
        printf("  cuBLAS %8.2f us (%.2f to %.2f)", us[1][1], us[1][0], us[1][2]);
    puts("");
    if (!json)
        return;
    fprintf(json, "%s\n    {\"name\": \"%s\", \"rows\": %u, \"bytes\": %.0f, \"floor_us\": %.4f, ",
            is_first ? "" : ",", s->name, rows, bytes, floor);
    bench_json_three(json, "kernel_us", us[0], b->cublas ? ", " : "}");
    if (b->cublas)
        bench_json_three(json, "cublas_us", us[1], "}");
}

static kvf_status measure_all(const bench *b, FILE *json)
{
    static const uint32_t rows[] = {1, 4, 16, ROWS_MAX};
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t k = 0; k < sizeof rows / sizeof *rows && status == KVF_OK; k++) {
            shape s = shapes[i];
            double us[2][3] = {{0}};
            s.outputs /= b->divide;
            status = measure(b, by_kernel, &s, rows[k], us[0]);
            if (status == KVF_OK && b->cublas)
                status = measure(b, by_cublas, &s, rows[k], us[1]);
            if (status == KVF_OK)
                tell(b, json, i + k == 0, &s, rows[k], us);
        }
    return status;
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
    kvf_cublas_close(b->cublas);
    kvf_memory_free(b->runtime, b->workspace);
    kvf_memory_free(b->runtime, b->y);
    kvf_memory_free(b->runtime, b->x);
    kvf_memory_free(b->runtime, b->weights);
    kvf_stream_destroy(b->stream);
    kvf_runtime_close(b->runtime);
}

int main(int argc, char **argv)
{
    bench b = {.divide = 1};
    const bench_option options[] = {{"--divide", &b.divide, 1, 512, NULL}, {0}};
    const bench_args args = bench_args_read(argc, argv, options);
    kvf_runtime_config config;
    kvf_error error = {0};
    kvf_runtime_config_init(&config);
    config.device = KVF_DEVICE_CUDA;
    config.calibrate = 0;
    b.repetitions = b.divide == 1 ? REPETITIONS : 1;
    b.bytes = kvf_round_up(WEIGHT_BYTES / b.divide, FILL_BYTES);
    if (kvf_runtime_open(&config, &b.runtime, &error) != KVF_OK) {
        fprintf(stderr, "bench_thin: %s\n", error.text);
        return error.status == KVF_UNSUPPORTED ? 77 : 1;
    }
    kvf_status status = reserve(&b);
    if (status == KVF_OK && kvf_cublas_open(b.workspace, NULL, &b.cublas, &error) != KVF_OK)
        fprintf(stderr, "bench_thin: %s\n", error.text);
    if (status == KVF_OK)
        status = measure_copy(&b);
    FILE *json = status == KVF_OK ? bench_json_open(&args) : NULL;
    if (json)
        fprintf(json, "  \"copy_gb_per_s\": %.3f,\n  \"products\": [", b.rate);
    if (status == KVF_OK)
        status = measure_all(&b, json);
    if (json)
        fputs("]\n", json);
    bench_json_close(json);
    if (status != KVF_OK)
        fprintf(stderr, "bench_thin: %s\n", kvf_runtime_error(b.runtime)->text);
    close_bench(&b);
    return status != KVF_OK;
}
