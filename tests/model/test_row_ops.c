/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A GPU's operations on rows against those of the host, and its products of a few rows against
 * plain sums in double: numbers, no write after an output, and bits that do not follow from the
 * number of rows.
 *
 * Buffers are pinned memory, which both sides read, so one program does on a GPU what it does in
 * the emulator. Tolerances of operations: sums of n squares in fp32 are off by at most n 2^-24
 * relative, which for n <= 4096 is 2.4e-4; cosine, sine and the exponential by a few units of the
 * last place; the result is then rounded to its type (2^-8 in bf16, 2^-11 in fp16).
 */

#include <math.h>

#include "common/convert.h"
#include "common/random.h"
#include "layer_ops.h"
#include "row_ops.h"
#include "small_batch_gemm.h"
#include "unit.h"

#define BUFFERS_MAX 64u
#define ROWS_MAX    70u
#define OUTPUTS_MAX 240u
#define WIDTH_MAX   4096u
#define GUARD       0x5a

static kvf_runtime *runtime;
static kvf_stream *stream;
static uint64_t random_state = 1;

/* ---- buffers: all that a case takes is released at its end ---- */

typedef struct buffer {
    void *host, *device;
    size_t bytes;
} buffer;

static buffer taken[BUFFERS_MAX];
static uint32_t taken_count;

static buffer take(size_t bytes)
{
    buffer b = {.bytes = bytes};
    assert_true(taken_count < BUFFERS_MAX);
    assert_int_equal(kvf_pinned_alloc(runtime, bytes + 64, &b.host, &b.device), KVF_OK);
    memset(b.host, GUARD, bytes + 64);
    return taken[taken_count++] = b;
}

static buffer take_numbers(kvf_dtype dtype, size_t count, double scale)
{
    const buffer b = take(count * kvf_dtype_bytes(dtype));
    for (size_t i = 0; i < count; i++)
        kvf_element_set(b.host, dtype, i,
                        (float)(scale * (2.0 * kvf_random_unit(&random_state) - 1.0)));
    return b;
}

static void release(void)
{
    while (taken_count > 0) {
        const buffer b = taken[--taken_count];
        for (size_t i = 0; i < 64; i++)
            assert_int_equal(((unsigned char *)b.host)[b.bytes + i], GUARD);
        kvf_pinned_free(runtime, b.host);
    }
}

static void *row_of(const buffer *b, kvf_dtype dtype, size_t row, size_t width)
{
    return (char *)b->host + row * width * kvf_dtype_bytes(dtype);
}

static void finish(int launched)
{
    assert_int_equal(launched, 0);
    assert_int_equal(kvf_stream_wait(stream), KVF_OK);
}

/* ---- operations ---- */

/* Element by element: |got - want| <= tolerance (|want| + floor). */
static void expect_row(const char *name, const void *got, kvf_dtype dtype, const float *want,
                       size_t count, double floor)
{
    const double rounding = dtype == KVF_BF16 ? 0x1p-8 : dtype == KVF_FP16 ? 0x1p-11 : 0.0;
    /* Below 6e-5 fp16 has one step, 2^-24, for all. */
    const double step = dtype == KVF_FP16 ? 0x1p-24 : 0.0;
    for (size_t i = 0; i < count; i++) {
        const double w = (double)want[i], g = (double)kvf_element_get(got, dtype, i);
        /* A number too large for its type may round to infinity, as on the host. */
        if (g != w && !(isnan(g) && isnan(w)) &&
            !(fabs(g - w) <= (3e-4 + rounding) * (fabs(w) + floor) + step) &&
            !(dtype == KVF_FP16 && fabs(w) > 65000.0 && isinf(g)))
            fail_msg("%s: [%zu] is %g, the host has %g", name, i, g, w);
    }
}

static void check_start(kvf_dtype dtype, uint32_t rows, uint32_t width, uint32_t half)
{
    enum { VOCABULARY = 37 };
    float want[WIDTH_MAX];
    const buffer table = take_numbers(dtype, (size_t)VOCABULARY * width, 2.0);
    const buffer words = take(2 * (size_t)rows * sizeof(uint32_t));
    const buffer freq = take(half * sizeof(float));
    const buffer hidden = take((size_t)rows * width * sizeof(float));
    const buffer cosine = take((size_t)rows * half * sizeof(float)), sine = take(cosine.bytes);
    uint32_t *ids = words.host, *positions = ids + rows;
    for (uint32_t i = 0; i < half; i++)
        ((float *)freq.host)[i] = powf(10000.0f, -(float)i / (float)half);
    for (uint32_t i = 0; i < rows; i++) {
        ids[i] = kvf_random_below(&random_state, VOCABULARY);
        positions[i] = kvf_random_below(&random_state, 131072);
    }
    const kvf_row_start_args args = {.dtype = dtype,
                                     .rows = rows,
                                     .width = width,
                                     .half = half,
                                     .scaling = 1.25f,
                                     .ids = words.device,
                                     .position = (const uint32_t *)words.device + rows,
                                     .embedding = table.device,
                                     .inv_freq = freq.device,
                                     .hidden = hidden.device,
                                     .cosine = cosine.device,
                                     .sine = sine.device};
    finish(kvf_row_start_cuda(&args, kvf_stream_native(stream)));
    for (uint32_t i = 0; i < rows; i++) {
        kvf_numbers_widen(row_of(&table, dtype, ids[i], width), dtype, width, want);
        expect_row("start, hidden", row_of(&hidden, KVF_FP32, i, width), KVF_FP32, want, width,
                   0.0);
        kvf_rope_angles(freq.host, half, 1.25f, positions[i], want, want + half);
        expect_row("start, cosine", row_of(&cosine, KVF_FP32, i, half), KVF_FP32, want, half, 1.0);
        expect_row("start, sine", row_of(&sine, KVF_FP32, i, half), KVF_FP32, want + half, half,
                   1.0);
    }
    release();
}

static void check_norm(kvf_dtype dtype, uint32_t rows, uint32_t width, double scale)
{
    float want[WIDTH_MAX];
    const buffer x = take_numbers(KVF_FP32, (size_t)rows * width, scale);
    const buffer weight = take_numbers(KVF_FP32, width, 1.0);
    const buffer y = take((size_t)rows * width * kvf_dtype_bytes(dtype));
    const kvf_row_norm_args args = {.dtype = dtype,
                                    .rows = rows,
                                    .width = width,
                                    .eps = 1e-5f,
                                    .x = x.device,
                                    .weight = weight.device,
                                    .y = y.device};
    finish(kvf_row_norm_cuda(&args, kvf_stream_native(stream)));
    for (uint32_t i = 0; i < rows; i++) {
        kvf_rms_norm(row_of(&x, KVF_FP32, i, width), weight.host, width, (double)args.eps, want);
        expect_row("norm", row_of(&y, dtype, i, width), dtype, want, width, 1e-6);
    }
    release();
}

/* One head as the host does it; of what is NULL nothing is done. */
static void rotate_head(float *x, uint32_t dim, const float *bias, const float *norm,
                        const float *cosine, const float *sine)
{
    for (uint32_t i = 0; bias && i < dim; i++)
        x[i] += bias[i];
    if (norm)
        kvf_rms_norm(x, norm, dim, 1e-6, x);
    if (cosine)
        kvf_rope_rotate(x, dim / 2, cosine, sine);
}

static void check_rotate(kvf_dtype dtype, uint32_t d, bool has_bias, bool has_norm)
{
    enum { ROWS = 3, QUERIES = 6, KVS = 2, HEADS = QUERIES + 2 * KVS };
    const uint32_t half = d / 2;
    const size_t kv_bytes = (size_t)ROWS * KVS * d * kvf_dtype_bytes(dtype);
    const buffer qkv = take_numbers(KVF_FP32, (size_t)ROWS * HEADS * d, 3.0);
    const buffer bias = take_numbers(KVF_FP32, (size_t)HEADS * d, 0.5);
    const buffer norm = take_numbers(KVF_FP32, 2 * (size_t)d, 1.0);
    const buffer cosine = take_numbers(KVF_FP32, (size_t)ROWS * half, 1.0);
    const buffer sine = take_numbers(KVF_FP32, (size_t)ROWS * half, 1.0);
    const buffer q = take(kv_bytes / KVS * QUERIES), k = take(kv_bytes), v = take(kv_bytes);
    const float *norm_device = norm.device;
    const kvf_row_rotate_args args = {.dtype = dtype,
                                      .rows = ROWS,
                                      .query_heads = QUERIES,
                                      .kv_heads = KVS,
                                      .head_dim = d,
                                      .eps = 1e-6f,
                                      .qkv = qkv.device,
                                      .bias = has_bias ? bias.device : NULL,
                                      .query_norm = has_norm ? norm_device : NULL,
                                      .key_norm = has_norm ? norm_device + d : NULL,
                                      .cosine = cosine.device,
                                      .sine = sine.device,
                                      .q = q.device,
                                      .k = k.device,
                                      .v = v.device};
    finish(kvf_row_rotate_cuda(&args, kvf_stream_native(stream)));
    for (uint32_t i = 0; i < ROWS * HEADS; i++) {
        const uint32_t row = i / HEADS, head = i % HEADS, kv = (head - QUERIES) % KVS;
        const bool is_query = head < QUERIES, is_value = head >= QUERIES + KVS;
        float want[256];
        memcpy(want, row_of(&qkv, KVF_FP32, i, d), d * sizeof *want);
        rotate_head(want, d, has_bias ? row_of(&bias, KVF_FP32, head, d) : NULL,
                    has_norm && !is_value ? row_of(&norm, KVF_FP32, !is_query, d) : NULL,
                    is_value ? NULL : row_of(&cosine, KVF_FP32, row, half),
                    row_of(&sine, KVF_FP32, row, half));
        expect_row("rotate",
                   is_query ? row_of(&q, dtype, row * QUERIES + head, d)
                            : row_of(is_value ? &v : &k, dtype, row * KVS + kv, d),
                   dtype, want, d, 1e-2);
    }
    release();
}

static void check_activate(kvf_dtype dtype, uint32_t rows, uint32_t width, double scale)
{
    float want[WIDTH_MAX];
    const buffer x = take_numbers(KVF_FP32, 2 * (size_t)rows * width, scale);
    const buffer y = take((size_t)rows * width * kvf_dtype_bytes(dtype));
    const kvf_row_activate_args args = {
        .dtype = dtype, .rows = rows, .width = width, .gate_up = x.device, .y = y.device};
    finish(kvf_row_activate_cuda(&args, kvf_stream_native(stream)));
    for (uint32_t i = 0; i < rows; i++) {
        const float *gate = row_of(&x, KVF_FP32, i, 2 * (size_t)width);
        kvf_swiglu(gate, gate + width, width, want);
        expect_row("activate", row_of(&y, dtype, i, width), dtype, want, width, 1e-6);
    }
    release();
}

/* Rows come over bit for bit, each once or not at all. */
static void check_gather(uint32_t rows, uint32_t width)
{
    const buffer from = take_numbers(KVF_FP32, 3 * (size_t)rows * width, 1.0);
    const buffer to = take((size_t)rows * width * sizeof(float));
    const buffer words = take(rows * sizeof(uint32_t));
    uint32_t *index = words.host;
    for (uint32_t i = 0; i < rows; i++)
        index[i] = 3 * i + kvf_random_below(&random_state, 3);
    const kvf_row_gather_args args = {
        .rows = rows, .width = width, .index = words.device, .from = from.device, .to = to.device};
    finish(kvf_row_gather_cuda(&args, kvf_stream_native(stream)));
    for (uint32_t i = 0; i < rows; i++)
        assert_memory_equal(row_of(&to, KVF_FP32, i, width),
                            row_of(&from, KVF_FP32, index[i], width), width * sizeof(float));
    release();
}

static void operations_are_those_of_the_host(void **state)
{
    static const uint32_t widths[] = {1, 64, 129, 896, WIDTH_MAX};
    static const uint32_t head_dims[] = {64, 80, 96, 128, 256, 32};
    for (kvf_dtype dtype = KVF_BF16; dtype <= KVF_FP32; dtype++) {
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
            check_start(dtype, 5, widths[w], 32);
            check_norm(dtype, 3, widths[w], 1.0);
            check_norm(dtype, 2, widths[w], 1e-20); /* eps decides */
            check_activate(dtype, 3, widths[w], 8.0);
            check_activate(dtype, 2, widths[w], 200.0); /* exp overflows */
        }
        for (size_t d = 0; d < sizeof head_dims / sizeof *head_dims; d++)
            for (uint32_t flags = 0; flags < 4; flags++)
                check_rotate(dtype, head_dims[d], flags & 1, flags & 2);
    }
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        check_gather(7, widths[w]);
}

/* ---- products ---- */

typedef struct problem {
    kvf_dtype dtype;
    uint32_t outputs, inputs, rows;
    uint32_t query_heads, kv_heads, head_dim; /* of outputs; 0 = no heads */
} problem;

typedef enum end_kind { STORE, ADD, ADD_NORM, SWIGLU, ROTATE, NORM_ROTATE } end_kind;

typedef struct data {
    buffer weight; /* of dtype */
    buffer x, bias, cosine, sine, norm;
    buffer arrived;                      /* [outputs], zeros between launches */
    double sums[ROWS_MAX * OUTPUTS_MAX]; /* [rows, outputs] */
} data;

static data make(const problem *p, uint64_t seed)
{
    random_state = seed;
    const size_t half = p->head_dim ? p->head_dim / 2 : 1;
    data d = {.weight = take_numbers(p->dtype, (size_t)p->outputs * p->inputs, 0.5),
              .x = take_numbers(p->dtype, (size_t)p->rows * p->inputs, 1.0),
              .bias = take_numbers(KVF_FP32, p->outputs, 1.0),
              .cosine = take_numbers(KVF_FP32, p->rows * half, 1.0),
              .sine = take_numbers(KVF_FP32, p->rows * half, 1.0),
              .norm = take_numbers(KVF_FP32, p->outputs, 1.0),
              .arrived = take(p->outputs * sizeof(uint32_t))};
    assert_true(p->rows <= ROWS_MAX && p->outputs <= OUTPUTS_MAX);
    memset(d.arrived.host, 0, d.arrived.bytes);
    for (uint32_t row = 0; row < p->rows; row++)
        for (uint32_t o = 0; o < p->outputs; o++)
            for (uint32_t i = 0; i < p->inputs; i++)
                d.sums[(size_t)row * p->outputs + o] +=
                    (double)kvf_element_get(d.x.host, p->dtype, (size_t)row * p->inputs + i) *
                    (double)kvf_element_get(d.weight.host, p->dtype, (size_t)o * p->inputs + i);
    return d;
}

static kvf_small_batch_gemm product_of(const problem *p, const data *d, uint32_t first,
                                       uint32_t rows)
{
    const size_t row_bytes = p->inputs * kvf_dtype_bytes(p->dtype);
    return (kvf_small_batch_gemm){.dtype = p->dtype,
                                  .rows = rows,
                                  .inputs = p->inputs,
                                  .outputs = p->outputs,
                                  .weight = d->weight.device,
                                  .x = (const char *)d->x.device + first * row_bytes};
}

static kvf_row_norm_args norm_of(const problem *p, const data *d, uint32_t rows,
                                 const buffer out[4])
{
    return (kvf_row_norm_args){.dtype = p->dtype,
                               .rows = rows,
                               .width = p->outputs,
                               .eps = 1e-5f,
                               .x = out[0].device,
                               .weight = d->norm.device,
                               .y = out[1].device};
}

static kvf_row_rotate_args heads_of(const problem *p, const data *d, bool has_norm, uint32_t first,
                                    const buffer out[4])
{
    const size_t half = p->head_dim / 2;
    const float *norm = d->norm.device;
    return (kvf_row_rotate_args){.dtype = p->dtype,
                                 .rows = p->rows,
                                 .query_heads = p->query_heads,
                                 .kv_heads = p->kv_heads,
                                 .head_dim = p->head_dim,
                                 .eps = 1e-5f,
                                 .qkv = out[3].device,
                                 .bias = d->bias.device,
                                 .query_norm = has_norm ? norm : NULL,
                                 .key_norm = has_norm ? norm + p->head_dim : NULL,
                                 .cosine = (const float *)d->cosine.device + first * half,
                                 .sine = (const float *)d->sine.device + first * half,
                                 .q = out[0].device,
                                 .k = out[1].device,
                                 .v = out[2].device};
}

/* The product of rows first to first + rows - 1. out: what comes out; of ADD_NORM the sums, then
 * their norm; of the last two queries, keys, values, and sums. */
static void launch(const problem *p, const data *d, end_kind kind, uint32_t first, uint32_t rows,
                   const buffer out[4])
{
    void *native = kvf_stream_native(stream), *y = out[0].device;
    const kvf_small_batch_gemm product = product_of(p, d, first, rows);
    int status = 0;
    if (kind == ROTATE || kind == NORM_ROTATE) {
        const kvf_row_rotate_args heads = heads_of(p, d, kind == NORM_ROTATE, first, out);
        status = kvf_small_batch_rotate_cuda(&product, &heads, d->arrived.device, native);
    } else if (kind == ADD_NORM) {
        const kvf_row_norm_args norm = norm_of(p, d, rows, out);
        status = kvf_small_batch_add_norm_cuda(&product, y, &norm, d->arrived.device, native);
    } else if (kind == SWIGLU) {
        status = kvf_small_batch_swiglu_cuda(&product, y, native);
    } else {
        status = kvf_small_batch_gemm_cuda(&product, y, kind == ADD, native);
    }
    finish(status);
    for (uint32_t i = 0; i < p->outputs; i++)
        assert_int_equal(((const uint32_t *)d->arrived.host)[i], 0);
}

/* Sums of `inputs` products in fp32, each below 0.5; then one rounding to the type. */
static void compare(const problem *p, float got, float want, kvf_dtype dtype, const char *what)
{
    const float rounding = dtype == KVF_BF16 ? 0x1p-8f : dtype == KVF_FP16 ? 0x1p-11f : 0x1p-23f;
    const float sum = (float)p->inputs * 0x1p-21f;
    if (!(fabsf(got - want) <= sum + rounding * fabsf(want)))
        fail_msg("%s of %u x %u, %u rows: %g, expected %g", what, p->outputs, p->inputs, p->rows,
                 (double)got, (double)want);
}

static void check_sums(const problem *p, const data *d, end_kind kind)
{
    const size_t count = (size_t)p->rows * p->outputs;
    buffer out[4] = {take(count * sizeof(float))};
    float *y = out[0].host;
    for (size_t i = 0; i < count; i++)
        y[i] = 0.25f;
    launch(p, d, kind, 0, p->rows, out);
    for (size_t i = 0; i < count; i++)
        compare(p, y[i], (float)d->sums[i] + (kind == ADD ? 0.25f : 0.0f), KVF_FP32, "a product");
}

static void check_swiglu(const problem *p, const data *d)
{
    const uint32_t width = p->outputs / 2;
    const size_t count = (size_t)p->rows * width;
    buffer out[4] = {take(count * kvf_dtype_bytes(p->dtype))};
    launch(p, d, SWIGLU, 0, p->rows, out);
    for (size_t i = 0; i < count; i++) {
        const double *sums = d->sums + i / width * p->outputs + i % width;
        const float gate = (float)sums[0], up = (float)sums[width];
        float want;
        kvf_swiglu(&gate, &up, 1, &want);
        /* An error of gate or up is multiplied by the other one, which is below 16. */
        compare(p, kvf_element_get(out[0].host, p->dtype, i) / 32.0f, want / 32.0f, p->dtype,
                "SwiGLU");
    }
}

static void check_heads(const problem *p, const data *d)
{
    const uint32_t heads = p->query_heads + 2 * p->kv_heads, dim = p->head_dim;
    const size_t element = kvf_dtype_bytes(p->dtype);
    const size_t kv = (size_t)p->rows * p->kv_heads * dim * element;
    buffer out[4] = {take((size_t)p->rows * p->query_heads * dim * element), take(kv), take(kv)};
    launch(p, d, ROTATE, 0, p->rows, out);
    for (uint32_t n = 0; n < p->rows * heads; n++) {
        const uint32_t row = n / heads, head = n % heads;
        const uint32_t part = head < p->query_heads ? 0 : head < heads - p->kv_heads ? 1 : 2;
        const uint32_t per_row = part ? p->kv_heads : p->query_heads;
        const uint32_t own = part ? (head - p->query_heads) % p->kv_heads : head;
        float want[256];
        for (uint32_t i = 0; i < dim; i++)
            want[i] = (float)d->sums[(size_t)n * dim + i];
        rotate_head(want, dim, row_of(&d->bias, KVF_FP32, head, dim), NULL,
                    part < 2 ? row_of(&d->cosine, KVF_FP32, row, dim / 2) : NULL,
                    row_of(&d->sine, KVF_FP32, row, dim / 2));
        const void *got = row_of(&out[part], p->dtype, (size_t)row * per_row + own, dim);
        for (uint32_t i = 0; i < dim; i++)
            compare(p, kvf_element_get(got, p->dtype, i), want[i], p->dtype, "a head");
    }
}

static buffer copy_of(const buffer *from)
{
    buffer b = take(from->bytes);
    memcpy(b.host, from->host, from->bytes);
    return b;
}

/* A norm after a product has the bits of one by itself; so have its sums. */
static void check_sum_norms(const problem *p, const data *d)
{
    const uint32_t rows = p->rows < KVF_SMALL_BATCH_NORM_ROWS ? p->rows : KVF_SMALL_BATCH_NORM_ROWS;
    const size_t count = (size_t)rows * p->outputs, element = kvf_dtype_bytes(p->dtype);
    buffer one[4] = {take_numbers(KVF_FP32, count, 1.0), take(count * element)};
    buffer two[4] = {copy_of(&one[0]), take(count * element)};
    const kvf_row_norm_args apart = norm_of(p, d, rows, two);
    launch(p, d, ADD_NORM, 0, rows, one);
    launch(p, d, ADD, 0, rows, two);
    finish(kvf_row_norm_cuda(&apart, kvf_stream_native(stream)));
    for (uint32_t i = 0; i < 2; i++)
        assert_memory_equal(one[i].host, two[i].host, one[i].bytes);
}

/* Likewise norms of heads. */
static void check_head_norms(const problem *p, const data *d)
{
    const size_t element = kvf_dtype_bytes(p->dtype), head = (size_t)p->rows * p->head_dim;
    const size_t bytes[] = {p->query_heads * head * element, p->kv_heads * head * element,
                            p->kv_heads * head * element,
                            (p->query_heads + 2 * p->kv_heads) * head * sizeof(float)};
    buffer one[4], two[4];
    for (uint32_t i = 0; i < 4; i++) {
        one[i] = take(bytes[i]);
        two[i] = take(bytes[i]);
    }
    const buffer sums[4] = {two[3]};
    const kvf_row_rotate_args apart = heads_of(p, d, true, 0, two);
    launch(p, d, NORM_ROTATE, 0, p->rows, one);
    launch(p, d, STORE, 0, p->rows, sums);
    finish(kvf_row_rotate_cuda(&apart, kvf_stream_native(stream)));
    for (uint32_t i = 0; i < 4; i++)
        assert_memory_equal(one[i].host, two[i].host, bytes[i]);
}

/* 64 rows are read at once, 8 and 16 by kernels of their own; ends of all kinds. */
static const problem problems[] = {
    {KVF_BF16, 16, 128, 1, 0, 0, 0},          {KVF_FP16, 50, 1160, 3, 0, 0, 0},
    {KVF_BF16, 96, 72, 9, 2, 2, 16},          {KVF_BF16, 160, 8, 16, 3, 1, 32},
    {KVF_FP16, 240, 264, ROWS_MAX, 1, 1, 80}, {KVF_BF16, 2, 2056, 17, 0, 0, 0},
};

static void products_are_right(void **state)
{
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) {
        const problem *p = &problems[i];
        data d = make(p, 5 + i);
        check_sums(p, &d, STORE);
        check_sums(p, &d, ADD);
        check_swiglu(p, &d);
        check_sum_norms(p, &d);
        if (p->head_dim) {
            check_heads(p, &d);
            check_head_norms(p, &d);
        }
        release();
    }
}

/* More rows than one block should have, and heads that share a block. */
static void others_are_refused(void **state)
{
    const problem p = {KVF_BF16, 144, 8, KVF_SMALL_BATCH_NORM_ROWS + 1, 2, 2, 24};
    void *native = kvf_stream_native(stream);
    data d = make(&p, 1);
    buffer none[4] = {take(64), take(64), take(64), take(64)};
    const kvf_small_batch_gemm product = product_of(&p, &d, 0, p.rows);
    const kvf_row_norm_args norm = norm_of(&p, &d, p.rows, none);
    const kvf_row_rotate_args heads = heads_of(&p, &d, true, 0, none);
    assert_int_not_equal(
        kvf_small_batch_add_norm_cuda(&product, none[0].device, &norm, d.arrived.device, native),
        0);
    assert_int_not_equal(kvf_small_batch_rotate_cuda(&product, &heads, d.arrived.device, native),
                         0);
    assert_int_equal(kvf_stream_wait(stream), KVF_OK);
    release();
}

static void rows_do_not_change_bits(void **state)
{
    static const uint32_t counts[] = {2, 8, 9, 16, 17, 65};
    const problem p = {KVF_BF16, 24, 1096, ROWS_MAX, 0, 0, 0};
    const size_t row_bytes = p.outputs * sizeof(float);
    data d = make(&p, 3);
    buffer one[4] = {take(row_bytes)}, many[4] = {take(ROWS_MAX * row_bytes)};
    float alone[ROWS_MAX][24];
    for (uint32_t row = 0; row < ROWS_MAX; row++) {
        launch(&p, &d, STORE, row, 1, one);
        memcpy(alone[row], one[0].host, row_bytes);
    }
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const uint32_t first = ROWS_MAX - counts[i];
        launch(&p, &d, STORE, first, counts[i], many);
        assert_memory_equal(many[0].host, alone[first], counts[i] * row_bytes);
    }
    release();
}

int main(void)
{
    kvf_error error;
    kvf_runtime_config rc;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_CUDA;
    if (kvf_runtime_open(&rc, &runtime, &error) != KVF_OK) {
        print_message("skipped: %s\n", error.text);
        return 77;
    }
    if (kvf_row_use_device(0) != 0 || kvf_row_load_kernels() != 0 ||
        kvf_stream_create(runtime, &stream) != KVF_OK)
        return 1;
    const int failed = unit_run(operations_are_those_of_the_host, products_are_right,
                                rows_do_not_change_bits, others_are_refused);
    kvf_stream_destroy(stream);
    kvf_runtime_close(runtime);
    return failed;
}
