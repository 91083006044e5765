/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The ways to multiply R rows by bf16 weights that no cache holds, on one thread: what justifies
 * each, and the number of rows up to which the matrix-vector kernel is used.
 *
 * The matrix-vector kernel row by row over a panel; strips in fp32; oneDNN in bf16, where that is
 * thought to be faster. They take turns within a repetition; medians over repetitions. The speed-up
 * is that of the matrix-vector kernel over the better of the other two.
 */

#include "bench_report.h"
#include "common/clock.h"
#include "linear.h"
#include "matmul.h"
#include "random_model.h"

#include <stdlib.h>

#define OUTPUTS     8192u
#define INPUTS      4096u
#define PANEL       128u
#define ROWS_MAX    512u
#define REPETITIONS 9u
#define WAYS        3u

typedef struct bench {
    const kvf_linear_kernels *kernels;
    kvf_matmul *matmul; /* NULL: no bf16 in hardware */
    uint16_t *weight;   /* [OUTPUTS, INPUTS] */
    float *scratch;     /* [KVF_STRIP_FLOATS] */
    float *x;           /* [ROWS_MAX, INPUTS] */
    uint16_t *narrow_x;
    float *y; /* [ROWS_MAX, OUTPUTS] */
} bench;

static kvf_matmul_shape shape_of(uint32_t rows, uint32_t outputs)
{
    return (kvf_matmul_shape){rows, outputs, INPUTS, INPUTS, INPUTS, OUTPUTS};
}

static bool by_vector(const bench *b, uint32_t rows)
{
    for (uint32_t first = 0; first < OUTPUTS; first += PANEL)
        for (uint32_t row = 0; row < rows; row++)
            b->kernels->dot_rows[KVF_BF16](b->weight + (size_t)first * INPUTS, PANEL, INPUTS,
                                           b->x + (size_t)row * INPUTS,
                                           b->y + (size_t)row * OUTPUTS + first);
    return true;
}

static bool by_strips(const bench *b, uint32_t rows)
{
    const kvf_linear linear = {
        .weight = b->weight, .dtype = KVF_BF16, .outputs = OUTPUTS, .inputs = INPUTS};
    const kvf_strip_kernel *kernel = b->kernels->strip;
    for (uint32_t first = 0; first < OUTPUTS; first += kernel->outputs)
        kernel->multiply(&(kvf_strip){.linear = &linear,
                                      .first = first,
                                      .outputs = kvf_min_u32(kernel->outputs, OUTPUTS - first),
                                      .rows = rows,
                                      .x = b->x,
                                      .y = b->y + first,
                                      .y_stride = OUTPUTS,
                                      .scratch = b->scratch});
    return true;
}

static bool by_bf16(const bench *b, uint32_t rows)
{
    kvf_matmul_shape shape = shape_of(rows, OUTPUTS);
    return b->matmul && kvf_matmul_bf16(b->matmul, &shape, b->narrow_x, b->weight, b->y);
}

typedef bool (*way_fn)(const bench *b, uint32_t rows);

static const struct {
    const char *name;
    way_fn run;
} ways[WAYS] = {
    {"kernel", by_vector},
    {"strips", by_strips},
    {"onednn_bf16", by_bf16},
};

/* Medians in ms; 0 where a way does not exist here. */
static void measure(const bench *b, uint32_t rows, double median[WAYS])
{
    double seconds[WAYS][REPETITIONS];
    for (uint32_t r = 0; r < REPETITIONS; r++)
        for (uint32_t w = 0; w < WAYS; w++) {
            double start = kvf_now_seconds();
            bool done = ways[w].run(b, rows);
            seconds[w][r] = done ? kvf_now_seconds() - start : 0.0;
        }
    for (uint32_t w = 0; w < WAYS; w++) {
        double p[3];
        bench_percentiles(seconds[w], REPETITIONS, p);
        median[w] = p[1] * 1e3;
    }
}

static bool fill(bench *b)
{
    size_t count = (size_t)OUTPUTS * INPUTS;
    random_stream stream = random_stream_of("bench_linear");
    b->weight = malloc(count * sizeof *b->weight);
    b->scratch = malloc(KVF_STRIP_FLOATS * sizeof *b->scratch);
    b->x = malloc((size_t)ROWS_MAX * INPUTS * sizeof *b->x);
    b->narrow_x = malloc((size_t)ROWS_MAX * INPUTS * sizeof *b->narrow_x);
    b->y = malloc((size_t)ROWS_MAX * OUTPUTS * sizeof *b->y);
    if (!b->weight || !b->scratch || !b->x || !b->narrow_x || !b->y)
        return false;
    /* bf16 bits of numbers between 1 and 2 in size, either sign. */
    for (size_t i = 0; i < count; i++)
        b->weight[i] = (uint16_t)(0x3f80u | (random_stream_next(&stream) & 0x807fu));
    for (size_t i = 0; i < (size_t)ROWS_MAX * INPUTS; i++)
        b->narrow_x[i] = (uint16_t)(0x3f80u | (random_stream_next(&stream) & 0x807fu));
    b->kernels = kvf_linear_kernels_choose(KVF_ISA_ALL);
    b->kernels->widen[KVF_BF16](b->narrow_x, (size_t)ROWS_MAX * INPUTS, b->x);
    return !kvf_matmul_bf16_native() || kvf_matmul_create(&b->matmul) == KVF_OK;
}

static void drop(bench *b)
{
    kvf_matmul_destroy(b->matmul);
    free(b->weight);
    free(b->scratch);
    free(b->x);
    free(b->narrow_x);
    free(b->y);
}

static double best_of_others(const double median[WAYS])
{
    return median[2] > 0.0 && median[2] < median[1] ? median[2] : median[1];
}

int main(int argc, char **argv)
{
    static const uint32_t rows[] = {1, 2, 3, 4, 8, 16, 64, 512};
    const bench_args args = bench_args_read(argc, argv, &(bench_option){0});
    bench b = {0};
    if (!fill(&b)) {
        fputs("bench_linear: no memory\n", stderr);
        drop(&b);
        return 1;
    }
    FILE *json = bench_json_open(&args);
    char onednn[64];
    kvf_matmul_describe(onednn, sizeof onednn);
    double gigabytes = (double)OUTPUTS * INPUTS * 2e-9;
    printf("bf16 weights [%u, %u], one thread, %s, kernel %s; ms, medians of %u\n", OUTPUTS, INPUTS,
           onednn, b.kernels->name, REPETITIONS);
    printf("%5s %9s %9s %12s %13s %9s\n", "rows", "kernel", "strips", "onednn bf16", "kernel GB/s",
           "speed-up");
    if (json)
        fprintf(json, "  \"onednn\": \"%s\",\n  \"kernel\": \"%s\",\n  \"rows\": [", onednn,
                b.kernels->name);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double m[WAYS];
        measure(&b, rows[i], m);
        double speed_up = best_of_others(m) / m[0];
        printf("%5u %9.2f %9.2f %12.2f %13.1f %8.2fx\n", rows[i], m[0], m[1], m[2],
               gigabytes / m[0] * 1e3, speed_up);
        if (json)
            fprintf(json,
                    "%s\n    {\"rows\": %u, \"kernel_ms\": %.4f, \"strips_ms\": %.4f, "
                    "\"onednn_bf16_ms\": %.4f, \"speed_up\": %.3f}",
                    i ? "," : "", rows[i], m[0], m[1], m[2], speed_up);
    }
    if (json)
        fputs("\n  ]\n", json);
    bench_json_close(json);
    drop(&b);
    return 0;
}
