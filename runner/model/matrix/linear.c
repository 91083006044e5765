/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Splits products into panels of outputs and runs each panel as a task.
 *
 * It knows panel sizes and which kernel is faster when; what a panel computes is in linear_simd.c,
 * small_batch_simd.c, fp32_gemm_simd.c and matmul_dnnl.c. Invariant: no two tasks write the same
 * output, and scratch belongs to a task index, of which there are never more than compute threads.
 */

#include "linear.h"
#include "common/cpu_isa.h"
#include "matmul.h"

#include <stdatomic.h>
#include <stdlib.h>

/* A vector task reads about this much: long against the cost of handing out a task (microseconds),
 * short against a whole matrix. */
#define VECTOR_PANEL_BYTES   (128u * 1024u)
#define VECTOR_PANEL_OUTPUTS 240u
/* And multiplies about this much, where it has several rows. */
#define WIDE_PANEL_PRODUCTS  (512u * 1024u)
/* A multiple of KVF_SMALL_BATCH_OUTPUTS. */
#define PANEL_MULTIPLE       48u

/* From so many rows on they meet weights together: bf16, and other types. */
#define WIDE_ROWS       2u
#define WIDE_ROWS_OTHER 3u

/* For products in bf16: wide panels pack x less often. */
#define MATRIX_PANEL_BYTES    (1024u * 1024u)
#define MATRIX_PANEL_OUTPUTS  256u
#define MATRIX_PANEL_MULTIPLE 16u

struct kvf_linear_engine {
    kvf_runtime *runtime;
    kvf_linear_limits limits;
    const kvf_linear_kernels *kernels;
    uint32_t threads;
    size_t scratch_bytes; /* per task, multiple of 64 */
    unsigned char *scratch;
    /* Both NULL unless multiplying in bf16: x rounded, for the products of one launch. */
    void *narrow_x;       /* [rows_max, inputs_max] bf16 */
    kvf_matmul **matmuls; /* [threads] */
    atomic_bool failed;
};

typedef struct linear_args {
    kvf_linear_engine *engine;
    kvf_linear_call call;
    uint32_t panels[KVF_LINEAR_PARTS_MAX];
    uint32_t panel_count; /* their sum */
    uint32_t y_stride;
    uint32_t tasks;
} linear_args;

/* ---- choosing kernels ---- */

extern const kvf_linear_kernels kvf_linear_kernels_plain, kvf_linear_kernels_baseline,
    kvf_linear_kernels_avx2, kvf_linear_kernels_avx512, kvf_linear_kernels_neon;

const kvf_linear_kernels *kvf_linear_kernels_choose(uint32_t isa_mask)
{
    static const struct {
        uint32_t isa;
        const kvf_linear_kernels *kernels;
    } variants[] = {
#ifdef KVF_HAVE_AVX512
        {KVF_ISA_AVX512, &kvf_linear_kernels_avx512},
#endif
#ifdef KVF_HAVE_AVX2
        {KVF_ISA_AVX2, &kvf_linear_kernels_avx2},
#endif
#ifdef KVF_HAVE_BASELINE
        {KVF_ISA_BASELINE, &kvf_linear_kernels_baseline},
#endif
#ifdef KVF_HAVE_NEON
        {KVF_ISA_NEON, &kvf_linear_kernels_neon},
#endif
        {KVF_ISA_REFERENCE, &kvf_linear_kernels_plain},
    };
    const uint32_t usable = kvf_cpu_has() & KVF_ISA_LIMIT & isa_mask;
    size_t i = 0;
    while (variants[i].isa && !(variants[i].isa & usable))
        i++;
    return variants[i].kernels;
}

/* ---- the engine ---- */

static uint32_t matrix_panel(uint32_t inputs)
{
    uint32_t outputs = MATRIX_PANEL_BYTES / (inputs * (uint32_t)sizeof(uint16_t));
    outputs -= outputs % MATRIX_PANEL_MULTIPLE;
    if (outputs < MATRIX_PANEL_MULTIPLE)
        return MATRIX_PANEL_MULTIPLE;
    return outputs > MATRIX_PANEL_OUTPUTS ? MATRIX_PANEL_OUTPUTS : outputs;
}

static uint32_t vector_panel(const kvf_linear *part, uint32_t rows)
{
    const size_t by_bytes = VECTOR_PANEL_BYTES / kvf_linear_row_bytes(part);
    const size_t by_work = WIDE_PANEL_PRODUCTS / ((size_t)part->inputs * rows);
    size_t outputs = rows > 1 && by_work < by_bytes ? by_work : by_bytes;
    outputs -= outputs % PANEL_MULTIPLE;
    if (outputs < PANEL_MULTIPLE)
        return PANEL_MULTIPLE;
    return outputs > VECTOR_PANEL_OUTPUTS ? VECTOR_PANEL_OUTPUTS : (uint32_t)outputs;
}

static bool multiplies_bf16(const kvf_linear_limits *limits)
{
    const uint32_t usable = kvf_cpu_has() & KVF_ISA_LIMIT & limits->isa_mask;
    return limits->bf16 == KVF_LINEAR_BF16_AUTO && (usable & KVF_ISA_AVX512_BF16) &&
           kvf_matmul_bf16_native();
}

static size_t round_up_64(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* The scratch of a strip, or the largest panel of weights in bf16. */
static size_t panel_bytes(const kvf_linear_limits *limits)
{
    const size_t strip = KVF_STRIP_FLOATS * sizeof(float);
    if (!multiplies_bf16(limits))
        return strip;
    size_t widest = (size_t)MATRIX_PANEL_OUTPUTS * limits->inputs_max * sizeof(uint16_t);
    size_t floor = (size_t)MATRIX_PANEL_MULTIPLE * limits->inputs_max * sizeof(uint16_t);
    size_t cap = floor > MATRIX_PANEL_BYTES ? floor : MATRIX_PANEL_BYTES;
    size_t panel = round_up_64(widest < cap ? widest : cap);
    return panel > strip ? panel : strip;
}

/* A panel of weights, and after it a panel of outputs where bf16 products accumulate. */
static size_t scratch_per_task(const kvf_linear_limits *limits)
{
    size_t product = (size_t)MATRIX_PANEL_OUTPUTS * limits->rows_max * sizeof(float);
    return panel_bytes(limits) + (multiplies_bf16(limits) ? round_up_64(product) : 0);
}

static size_t narrow_bytes(const kvf_linear_limits *limits)
{
    const size_t numbers = (size_t)limits->rows_max * limits->inputs_max;
    return multiplies_bf16(limits) ? numbers * sizeof(uint16_t) : 0;
}

uint64_t kvf_linear_engine_bytes(const kvf_linear_limits *limits, uint32_t threads)
{
    return (uint64_t)scratch_per_task(limits) * threads + narrow_bytes(limits);
}

static kvf_status engine_fill(kvf_linear_engine *engine, kvf_error *error)
{
    uint64_t bytes = kvf_linear_engine_bytes(&engine->limits, engine->threads);
    size_t scratch = engine->scratch_bytes * engine->threads;
    void *memory;
    if (kvf_memory_alloc(engine->runtime, scratch, &memory) != KVF_OK)
        return model_out_of_memory(error, bytes, "the scratch of the matrix products");
    engine->scratch = memory;
    const size_t narrow = narrow_bytes(&engine->limits);
    if (narrow > 0 && kvf_memory_alloc(engine->runtime, narrow, &engine->narrow_x) != KVF_OK)
        return model_out_of_memory(error, bytes, "the scratch of the matrix products");
    if (!multiplies_bf16(&engine->limits))
        return KVF_OK;
    engine->matmuls = calloc(engine->threads, sizeof *engine->matmuls);
    if (!engine->matmuls)
        return model_out_of_memory(error, engine->threads, "oneDNN handles");
    for (uint32_t i = 0; i < engine->threads; i++)
        if (kvf_matmul_create(&engine->matmuls[i]) != KVF_OK)
            return model_out_of_memory(error, sizeof(void *), "a oneDNN stream");
    return KVF_OK;
}

kvf_status kvf_linear_engine_open(kvf_runtime *runtime, const kvf_linear_limits *limits,
                                  kvf_linear_engine **out, kvf_error *error)
{
    *out = NULL;
    if (limits->rows_max == 0 || limits->inputs_max == 0)
        return model_fail(error, KVF_INVALID, "rows_max is %u and inputs_max %u; give at least 1",
                          limits->rows_max, limits->inputs_max);
    kvf_linear_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return model_out_of_memory(error, sizeof *engine, "the matrix products");
    engine->runtime = runtime;
    engine->limits = *limits;
    engine->kernels = kvf_linear_kernels_choose(limits->isa_mask);
    engine->threads = kvf_runtime_threads(runtime);
    engine->scratch_bytes = scratch_per_task(limits);
    atomic_init(&engine->failed, false);
    kvf_status status = engine_fill(engine, error);
    if (status != KVF_OK) {
        kvf_linear_engine_close(engine);
        return status;
    }
    *out = engine;
    return KVF_OK;
}

void kvf_linear_engine_close(kvf_linear_engine *engine)
{
    if (!engine)
        return;
    for (uint32_t i = 0; engine->matmuls && i < engine->threads; i++)
        kvf_matmul_destroy(engine->matmuls[i]);
    free(engine->matmuls);
    kvf_memory_free(engine->runtime, engine->narrow_x);
    kvf_memory_free(engine->runtime, engine->scratch);
    free(engine);
}

bool kvf_linear_engine_failed(const kvf_linear_engine *engine)
{
    return atomic_load(&engine->failed);
}

/* ---- panels ---- */

static bool narrows(const linear_args *args, const kvf_linear *part)
{
    return args->engine->matmuls && part->dtype == KVF_BF16;
}

/* Outputs of a panel. */
static uint32_t panel_size(const linear_args *args, const kvf_linear *part, bool vector)
{
    return vector                ? vector_panel(part, args->call.rows)
           : narrows(args, part) ? matrix_panel(part->inputs)
                                 : args->engine->kernels->strip->outputs;
}

/* Where a panel of the call lies. */
typedef struct panel {
    const kvf_linear *part;
    const unsigned char *weight; /* of its first output */
    uint32_t first;              /* output within the part */
    uint32_t outputs;
    uint32_t y_offset; /* column of y */
} panel;

static panel panel_find(const linear_args *args, uint32_t index, bool vector)
{
    uint32_t part = 0, column = 0;
    while (index >= args->panels[part]) {
        index -= args->panels[part];
        column += args->call.parts[part]->outputs;
        part++;
    }
    const kvf_linear *linear = args->call.parts[part];
    uint32_t size = panel_size(args, linear, vector);
    panel p = {.part = linear, .first = index * size};
    p.outputs = linear->outputs - p.first < size ? linear->outputs - p.first : size;
    p.weight = (const unsigned char *)linear->weight + kvf_linear_row_bytes(linear) * p.first;
    p.y_offset = column + p.first;
    return p;
}

static void add_bias(const panel *p, float *y)
{
    if (!p->part->bias)
        return;
    const float *bias = p->part->bias + p->first;
    for (uint32_t i = 0; i < p->outputs; i++)
        y[i] += bias[i];
}

/* Rows that meet a panel next: all times as many as each other. */
static uint32_t rows_at_once(uint32_t left)
{
    const uint32_t times = (left + KVF_SMALL_BATCH_ROWS_MAX - 1) / KVF_SMALL_BATCH_ROWS_MAX;
    return (left + times - 1) / times;
}

static void multiply_rows(const kvf_linear_kernels *kernels, const kvf_small_batch_product *p)
{
    const kvf_linear *linear = p->linear;
    if (p->rows >= (linear->dtype == KVF_BF16 ? WIDE_ROWS : WIDE_ROWS_OTHER)) {
        kernels->wide->multiply(p);
        return;
    }
    for (uint32_t row = 0; row < p->rows; row++)
        kernels->dot_rows[linear->dtype](p->weight, p->outputs, linear->inputs,
                                         p->x + (size_t)row * linear->inputs,
                                         p->y + row * p->y_stride);
}

static void vector_panel_multiply(const linear_args *args, const panel *p)
{
    const kvf_linear_call *call = &args->call;
    const size_t inputs = p->part->inputs;
    float product[KVF_SMALL_BATCH_ROWS_MAX * VECTOR_PANEL_OUTPUTS];
    for (uint32_t row = 0, count; row < call->rows; row += count) {
        float *y = call->y + (size_t)row * args->y_stride + p->y_offset;
        count = rows_at_once(call->rows - row);
        multiply_rows(args->engine->kernels,
                      &(kvf_small_batch_product){.linear = p->part,
                                                 .weight = p->weight,
                                                 .outputs = p->outputs,
                                                 .rows = count,
                                                 .x = call->x + row * inputs,
                                                 .y = call->accumulate ? product : y,
                                                 .y_stride = call->accumulate ? VECTOR_PANEL_OUTPUTS
                                                                              : args->y_stride});
        for (uint32_t i = 0; call->accumulate && i < count; i++, y += args->y_stride)
            for (uint32_t o = 0; o < p->outputs; o++)
                y[o] += product[i * VECTOR_PANEL_OUTPUTS + o];
    }
}

/* One task is one panel. */
static void vector_task(const void *raw, uint32_t task)
{
    const linear_args *args = raw;
    panel p = panel_find(args, task, true);
    vector_panel_multiply(args, &p);
    for (uint32_t row = 0; row < args->call.rows; row++)
        add_bias(&p, args->call.y + (size_t)row * args->y_stride + p.y_offset);
}

static void *panel_scratch(const linear_args *args, uint32_t task)
{
    return args->engine->scratch + args->engine->scratch_bytes * task;
}

static float *product_scratch(const linear_args *args, uint32_t task)
{
    const kvf_linear_engine *engine = args->engine;
    return (float *)(void *)(engine->scratch + engine->scratch_bytes * task +
                             panel_bytes(&engine->limits));
}

static bool panel_bf16(const linear_args *args, const panel *p, uint32_t task)
{
    const kvf_linear_call *call = &args->call;
    kvf_linear_engine *engine = args->engine;
    const uint32_t inputs = p->part->inputs;
    const kvf_matmul_shape shape = {
        .rows = call->rows,
        .outputs = p->outputs,
        .inputs = inputs,
        .a_stride = inputs,
        .b_stride = inputs,
        .c_stride = call->accumulate ? p->outputs : args->y_stride,
    };
    float *y = call->y + p->y_offset, *product = call->accumulate ? product_scratch(args, task) : y;
    if (!kvf_matmul_bf16(engine->matmuls[task], &shape, engine->narrow_x, (const void *)p->weight,
                         product))
        return false;
    for (uint32_t row = 0; call->accumulate && row < call->rows; row++)
        for (uint32_t i = 0; i < p->outputs; i++)
            y[(size_t)row * args->y_stride + i] += product[(size_t)row * p->outputs + i];
    return true;
}

static void panel_fp32(const linear_args *args, const panel *p, uint32_t task)
{
    const kvf_linear_call *call = &args->call;
    const kvf_strip strip = {.linear = p->part,
                             .first = p->first,
                             .outputs = p->outputs,
                             .rows = call->rows,
                             .x = call->x,
                             .y = call->y + p->y_offset,
                             .y_stride = args->y_stride,
                             .accumulate = call->accumulate,
                             .scratch = panel_scratch(args, task)};
    args->engine->kernels->strip->multiply(&strip);
}

static bool panel_multiply(const linear_args *args, const panel *p, uint32_t task)
{
    if (narrows(args, p->part))
        return panel_bf16(args, p, task);
    panel_fp32(args, p, task);
    return true;
}

/* One task is every tasks-th panel, so that scratch can belong to the task. */
static void matrix_task(const void *raw, uint32_t task)
{
    const linear_args *args = raw;
    for (uint32_t index = task; index < args->panel_count; index += args->tasks) {
        panel p = panel_find(args, index, false);
        if (!panel_multiply(args, &p, task)) {
            atomic_store(&args->engine->failed, true);
            return;
        }
        for (uint32_t row = 0; row < args->call.rows; row++)
            add_bias(&p, args->call.y + (size_t)row * args->y_stride + p.y_offset);
    }
}

/* One task is one row. */
static void narrow_task(const void *raw, uint32_t row)
{
    const linear_args *args = raw;
    size_t inputs = args->call.parts[0]->inputs;
    const float *x = args->call.x + row * inputs;
    uint16_t *to = (uint16_t *)args->engine->narrow_x + row * inputs;
    args->engine->kernels->round(x, inputs, to);
}

/* ---- enqueueing ---- */

static kvf_status call_check(const kvf_linear_engine *engine, const kvf_linear_call *call)
{
    if (call->part_count == 0 || call->part_count > KVF_LINEAR_PARTS_MAX || call->rows == 0 ||
        call->rows > engine->limits.rows_max)
        return KVF_INVALID;
    for (uint32_t i = 0; i < call->part_count; i++) {
        const kvf_linear *part = call->parts[i];
        if (part->inputs != call->parts[0]->inputs || part->inputs == 0 ||
            part->inputs > engine->limits.inputs_max || part->outputs == 0)
            return KVF_INVALID;
    }
    return KVF_OK;
}

kvf_status kvf_linear_enqueue(kvf_linear_engine *engine, const kvf_linear_call *call,
                              kvf_stream *stream)
{
    KVF_TRY(call_check(engine, call));
    const bool vector = call->separate || call->rows <= KVF_LINEAR_VECTOR_ROWS_MAX;
    linear_args args = {.engine = engine, .call = *call};
    bool narrow = false;
    for (uint32_t i = 0; i < call->part_count; i++) {
        const kvf_linear *part = call->parts[i];
        uint32_t size = panel_size(&args, part, vector);
        args.panels[i] = (part->outputs + size - 1) / size;
        args.y_stride += part->outputs;
        args.panel_count += args.panels[i];
        narrow = narrow || narrows(&args, part);
    }
    if (vector)
        return kvf_stream_launch(stream, vector_task, &args, sizeof args, args.panel_count);
    if (narrow)
        KVF_TRY(kvf_stream_launch(stream, narrow_task, &args, sizeof args, call->rows));
    args.tasks = kvf_min_u32(args.panel_count, engine->threads);
    return kvf_stream_launch(stream, matrix_task, &args, sizeof args, args.tasks);
}
