/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Matrix products and row operations against plain double precision; every instruction set that the
 * CPU has, every weight type, odd shapes, several matrices side by side, bias,
 * accumulation; and the same bits with 1, 2 and 3 threads, and of separate rows whatever is beside
 * them. Products of several rows have the bits of each row alone: with every number of rows, shapes
 * that fill no tile and no piece, random and extreme numbers; and nothing beside the results is
 * written.
 */

#include "common/convert.h"
#include "layer_ops.h"
#include "linear.h"
#include "random_model.h"
#include "unit.h"
#include "weights.h"

#include <float.h>
#include <math.h>

#define ROWS_MAX   33u
#define INPUTS_MAX 4200u

typedef struct problem {
    uint32_t rows, inputs, outputs[KVF_LINEAR_PARTS_MAX];
    uint32_t parts;
    kvf_dtype dtype;
    bool accumulate, separate;
} problem;

/* Numbers of a problem; bias on the second part. */
typedef struct data {
    kvf_linear parts[KVF_LINEAR_PARTS_MAX];
    float *numbers[KVF_LINEAR_PARTS_MAX]; /* the same in fp32 */
    float *x, *y, *start, *bias;
    uint32_t columns;
} data;

static kvf_linear make_part(const problem *p, uint32_t part, float **numbers, random_stream *stream)
{
    const size_t count = (size_t)p->outputs[part] * p->inputs;
    void *weight = malloc(count * kvf_dtype_bytes(p->dtype));
    *numbers = malloc(count * sizeof **numbers);
    for (size_t i = 0; i < count; i++)
        kvf_element_set(weight, p->dtype, i, random_stream_unit(stream));
    kvf_numbers_widen(weight, p->dtype, count, *numbers);
    return (kvf_linear){
        .weight = weight, .dtype = p->dtype, .outputs = p->outputs[part], .inputs = p->inputs};
}

static void free_part(const kvf_linear *part, float *numbers)
{
    union {
        const void *from;
        void *to;
    } weight = {.from = part->weight};
    free(weight.to);
    free(numbers);
}

static data data_create(const problem *p)
{
    random_stream stream = random_stream_of("linear");
    data d = {0};
    d.x = malloc((size_t)p->rows * p->inputs * sizeof(float));
    for (size_t i = 0; i < (size_t)p->rows * p->inputs; i++)
        d.x[i] = random_stream_unit(&stream);
    for (uint32_t part = 0; part < p->parts; part++) {
        d.parts[part] = make_part(p, part, &d.numbers[part], &stream);
        d.columns += p->outputs[part];
    }
    d.bias = malloc(d.columns * sizeof(float));
    d.y = malloc((size_t)p->rows * d.columns * sizeof(float));
    d.start = malloc((size_t)p->rows * d.columns * sizeof(float));
    for (size_t i = 0; i < d.columns; i++)
        d.bias[i] = random_stream_unit(&stream);
    for (size_t i = 0; i < (size_t)p->rows * d.columns; i++)
        d.start[i] = random_stream_unit(&stream);
    if (p->parts > 1)
        d.parts[1].bias = d.bias;
    return d;
}

static void data_destroy(const problem *p, data *d)
{
    for (uint32_t part = 0; part < p->parts; part++)
        free_part(&d->parts[part], d->numbers[part]);
    free(d->x);
    free(d->y);
    free(d->start);
    free(d->bias);
}

/* The products of the host device. */
typedef struct rig {
    kvf_runtime *runtime;
    kvf_stream *stream;
} rig;

static rig rig_open(uint32_t threads)
{
    rig r;
    kvf_runtime_config rc;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST;
    rc.threads = threads;
    assert_int_equal(kvf_runtime_open(&rc, &r.runtime, NULL), KVF_OK);
    assert_int_equal(kvf_stream_create(r.runtime, &r.stream), KVF_OK);
    return r;
}

static void rig_close(rig *r, kvf_linear_engine *engine)
{
    kvf_linear_engine_close(engine);
    kvf_stream_destroy(r->stream);
    kvf_runtime_close(r->runtime);
}

static void multiply(const problem *p, data *d, uint32_t threads, uint32_t isa)
{
    kvf_error error = {0};
    rig r = rig_open(threads);
    kvf_linear_engine *engine;
    const kvf_linear_limits limits = {.rows_max = ROWS_MAX,
                                      .inputs_max = INPUTS_MAX,
                                      .isa_mask = isa,
                                      .bf16 = KVF_LINEAR_BF16_OFF};
    assert_int_equal(kvf_linear_engine_open(r.runtime, &limits, &engine, &error), KVF_OK);
    kvf_linear_call call = {.part_count = p->parts,
                            .rows = p->rows,
                            .x = d->x,
                            .y = d->y,
                            .accumulate = p->accumulate,
                            .separate = p->separate};
    for (uint32_t i = 0; i < p->parts; i++)
        call.parts[i] = &d->parts[i];
    memcpy(d->y, d->start, (size_t)p->rows * d->columns * sizeof(float));
    assert_int_equal(kvf_linear_enqueue(engine, &call, r.stream), KVF_OK);
    assert_int_equal(kvf_stream_wait(r.stream), KVF_OK);
    assert_false(kvf_linear_engine_failed(engine));
    rig_close(&r, engine);
}

/* In fp32 a sum of n terms of at most m is off by less than m n^2 / 2^24 in the worst case, and by
 * a small multiple of n^(1/2) 2^-24 times its partial sums in practice; m 2^-18 n^(1/2) is far
 * above. */
static void compare(const problem *p, const data *d)
{
    uint32_t column = 0;
    for (uint32_t part = 0; part < p->parts; part++)
        for (uint32_t out = 0; out < p->outputs[part]; out++, column++)
            for (uint32_t row = 0; row < p->rows; row++) {
                size_t at = (size_t)row * d->columns + column;
                double want = p->accumulate ? (double)d->start[at] : 0.0, largest = 1.0;
                if (d->parts[part].bias)
                    want += (double)d->parts[part].bias[out];
                for (uint32_t i = 0; i < p->inputs; i++) {
                    const double w = (double)d->numbers[part][(size_t)out * p->inputs + i];
                    want += w * (double)d->x[(size_t)row * p->inputs + i];
                    largest = fmax(largest, fabs(w));
                }
                const double tolerance = largest * sqrt((double)p->inputs) * 0x1p-18;
                if (!(fabs(want - (double)d->y[at]) <= tolerance))
                    fail_msg("row %u, output %u of part %u: %.7g, expected %.7g", row, out, part,
                             (double)d->y[at], want);
            }
}

static const problem problems[] = {
    {.rows = 1, .inputs = 64, .outputs = {5}, .parts = 1},
    {.rows = 1, .inputs = 67, .outputs = {300, 1, 33}, .parts = 3, .accumulate = true},
    {.rows = 3, .inputs = 131, .outputs = {70, 30}, .parts = 2},
    {.rows = 1, .inputs = 4200, .outputs = {50}, .parts = 1},
    {.rows = 5, .inputs = 67, .outputs = {257, 1, 33}, .parts = 3, .accumulate = true},
    {.rows = 33, .inputs = 128, .outputs = {300, 20}, .parts = 2},
    {.rows = 9, .inputs = 4200, .outputs = {150}, .parts = 1},
};

#define PROBLEMS (sizeof problems / sizeof problems[0])

static const uint32_t isas[] = {KVF_ISA_REFERENCE, KVF_ISA_BASELINE,
                                KVF_ISA_BASELINE | KVF_ISA_AVX2, KVF_ISA_ALL};

#define ISAS (sizeof isas / sizeof isas[0])

TEST(products_are_right)
{
    for (size_t i = 0; i < PROBLEMS * 3; i++) {
        problem p = problems[i / 3];
        p.dtype = (kvf_dtype)(i % 3);
        data d = data_create(&p);
        for (size_t isa = 0; isa < ISAS; isa++) {
            multiply(&p, &d, 2, isas[isa]);
            compare(&p, &d);
        }
        data_destroy(&p, &d);
    }
}

TEST(threads_do_not_change_bits)
{
    for (size_t i = 0; i < PROBLEMS; i++) {
        problem p = problems[i];
        data d = data_create(&p);
        size_t bytes = (size_t)p.rows * d.columns * sizeof(float);
        float *first = malloc(bytes);
        multiply(&p, &d, 1, KVF_ISA_ALL);
        memcpy(first, d.y, bytes);
        for (uint32_t threads = 2; threads <= 3; threads++) {
            multiply(&p, &d, threads, KVF_ISA_ALL);
            assert_memory_equal(first, d.y, bytes);
        }
        free(first);
        data_destroy(&p, &d);
    }
}

/* Beyond the rows that go one by one, all rows against some of them. */
TEST(rows_beside_do_not_change_bits)
{
    for (size_t i = 0; i < PROBLEMS * 3; i++) {
        problem p = problems[i / 3];
        if (p.rows <= KVF_LINEAR_VECTOR_ROWS_MAX + 1)
            continue;
        p.dtype = (kvf_dtype)(i % 3);
        data d = data_create(&p);
        const size_t row = d.columns * sizeof(float);
        float *all = malloc(p.rows * row);
        multiply(&p, &d, 2, KVF_ISA_ALL);
        memcpy(all, d.y, p.rows * row);
        const uint32_t rows = p.rows;
        for (p.rows = KVF_LINEAR_VECTOR_ROWS_MAX + 1; p.rows < rows; p.rows++) {
            multiply(&p, &d, 2, KVF_ISA_ALL);
            assert_memory_equal(all, d.y, p.rows * row);
        }
        free(all);
        data_destroy(&p, &d);
    }
}

/* Many rows at once against each row alone. */
static void check_separate_rows(problem p)
{
    p.separate = true;
    data d = data_create(&p);
    multiply(&p, &d, 2, KVF_ISA_ALL);
    compare(&p, &d);
    for (uint32_t row = 0; row < p.rows; row++) {
        problem one = p;
        data alone = d;
        one.rows = 1;
        one.separate = false;
        alone.x = d.x + (size_t)row * p.inputs;
        alone.start = d.start + (size_t)row * d.columns;
        alone.y = malloc(d.columns * sizeof(float));
        multiply(&one, &alone, 2, KVF_ISA_ALL);
        assert_memory_equal(alone.y, d.y + (size_t)row * d.columns, d.columns * sizeof(float));
        free(alone.y);
    }
    data_destroy(&p, &d);
}

TEST(separate_rows_do_not_change_bits)
{
    for (size_t i = 0; i < PROBLEMS * 3; i++) {
        problem p = problems[i / 3];
        p.dtype = (kvf_dtype)(i % 3);
        check_separate_rows(p);
    }
}

/* ---- several rows at once against each alone, bit for bit ---- */

#define GUARD       7.25f
#define GUARD_WIDTH 3u

/* Every third number is one of those that sums remember: they absorb, overflow or vanish. */
static float extreme(random_stream *stream)
{
    static const float of[] = {0.0f,       -0.0f,   FLT_MAX,         -FLT_MAX, FLT_MIN,
                               -0x1p-149f, 0x1p60f, -0x1.fffffep60f, INFINITY, NAN};
    const uint64_t draw = random_stream_next(stream);
    return draw % 3 ? random_stream_unit(stream) : of[(draw >> 8) % (sizeof of / sizeof *of)];
}

typedef struct shape {
    uint32_t inputs, outputs;
} shape;

static const char *const dtypes[] = {[KVF_BF16] = "bf16", [KVF_FP16] = "fp16", [KVF_FP32] = "fp32"};

static bool have_same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

/* The rows at once, between guards, against each alone. */
static void compare_rows(const kvf_linear_kernels *k, const kvf_linear *l, const float *x,
                         uint32_t rows)
{
    const size_t stride = l->outputs + GUARD_WIDTH, count = (rows + 1) * stride;
    const kvf_dot_rows_fn alone = k->dot_rows[l->dtype];
    float *y = malloc(count * sizeof *y), *want = malloc(l->outputs * sizeof *want);
    for (size_t i = 0; i < count; i++)
        y[i] = GUARD;
    k->wide->multiply(&(kvf_small_batch_product){.linear = l,
                                                 .weight = l->weight,
                                                 .outputs = l->outputs,
                                                 .rows = rows,
                                                 .x = x,
                                                 .y = y + GUARD_WIDTH,
                                                 .y_stride = stride});
    for (uint32_t row = 0; row < rows; row++) {
        alone(l->weight, l->outputs, l->inputs, x + (size_t)row * l->inputs, want);
        for (uint32_t o = 0; o < l->outputs; o++)
            if (!have_same_bits(y[row * stride + GUARD_WIDTH + o], want[o]))
                fail_msg("%s, %s, %u x %u: output %u of row %u of %u is %a, alone %a", k->name,
                         dtypes[l->dtype], l->outputs, l->inputs, o, row, rows,
                         (double)y[row * stride + GUARD_WIDTH + o], (double)want[o]);
    }
    for (size_t i = 0; i < count; i++)
        if (i >= rows * stride || i % stride < GUARD_WIDTH)
            assert_true(y[i] == GUARD);
    free(want);
    free(y);
}

static void compare_shape(kvf_dtype dtype, const shape *s, float (*number)(random_stream *),
                          uint32_t rows_step)
{
    random_stream stream = random_stream_of("wide product");
    const size_t count = (size_t)KVF_SMALL_BATCH_ROWS_MAX * s->inputs;
    float *x = malloc(count * sizeof *x);
    float *numbers;
    const kvf_linear linear =
        make_part(&(problem){.inputs = s->inputs, .outputs = {s->outputs}, .dtype = dtype}, 0,
                  &numbers, &stream);
    for (size_t i = 0; i < count; i++)
        x[i] = number(&stream);
    for (size_t isa = 0; isa < ISAS; isa++)
        for (uint32_t rows = KVF_SMALL_BATCH_ROWS_MAX; rows >= 1;
             rows -= rows > rows_step ? rows_step : rows)
            compare_rows(kvf_linear_kernels_choose(isas[isa]), &linear, x, rows);
    free_part(&linear, numbers);
    free(x);
}

static void compare_shapes(const shape *shapes, size_t count, uint32_t rows_step)
{
    for (uint32_t i = 0; i < 3; i++)
        for (size_t j = 0; j < count; j++) {
            compare_shape((kvf_dtype)i, &shapes[j], random_stream_unit, rows_step);
            compare_shape((kvf_dtype)i, &shapes[j], extreme, rows_step);
        }
}

TEST(any_rows_have_the_bits_of_single_ones)
{
    static const shape shapes[] = {{1, 1}, {31, 5}, {67, 13}, {160, 12}, {288, 7}};
    compare_shapes(shapes, sizeof shapes / sizeof *shapes, 1);
}

/* Around the columns that are taken at a time, and those up to which x is read in order. */
TEST(long_rows_have_them_too)
{
    static const shape shapes[] = {{768, 25}, {769, 2},  {1537, 14},
                                   {3105, 9}, {4096, 3}, {4129, 8}};
    compare_shapes(shapes, sizeof shapes / sizeof *shapes, 7);
}

TEST(shapes_out_of_limits_are_refused)
{
    kvf_error error;
    rig r = rig_open(0);
    kvf_linear_engine *engine;
    kvf_linear_limits limits = {.rows_max = 0, .inputs_max = 8, .isa_mask = KVF_ISA_ALL};
    assert_int_equal(kvf_linear_engine_open(r.runtime, &limits, &engine, &error), KVF_INVALID);
    assert_null(engine);
    limits.rows_max = 2;
    assert_int_equal(kvf_linear_engine_open(r.runtime, &limits, &engine, &error), KVF_OK);
    const kvf_linear wide = {.outputs = 1, .inputs = 9};
    kvf_linear_call call = {.parts = {&wide}, .part_count = 1, .rows = 1};
    assert_int_equal(kvf_linear_enqueue(engine, &call, r.stream), KVF_INVALID);
    call.rows = 3;
    assert_int_equal(kvf_linear_enqueue(engine, &call, r.stream), KVF_INVALID);
    const kvf_linear fine = {.outputs = 1, .inputs = 8};
    call = (kvf_linear_call){.parts = {&fine}, .part_count = 1};
    assert_int_equal(kvf_linear_enqueue(engine, &call, r.stream), KVF_INVALID);
    rig_close(&r, engine);
}

TEST(norm_and_rope_and_swiglu)
{
    const float x[5] = {1.0f, -2.0f, 3.0f, -4.0f, 0.5f}, w[5] = {1.0f, 2.0f, 0.5f, 1.0f, -1.0f};
    float y[5];
    kvf_rms_norm(x, w, 5, 0.25, y);
    double scale = 1.0 / sqrt((1.0 + 4.0 + 9.0 + 16.0 + 0.25) / 5.0 + 0.25);
    for (int i = 0; i < 5; i++)
        assert_true(fabs((double)y[i] - (double)x[i] * (double)w[i] * scale) < 1e-6);

    const float inv_freq[2] = {1.0f, 0.01f};
    float cosine[2], sine[2], r[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    kvf_rope_angles(inv_freq, 2, 2.0f, 7, cosine, sine);
    kvf_rope_rotate(r, 2, cosine, sine);
    for (int i = 0; i < 2; i++) {
        double a = i ? 0.07 : 7.0, p = 1.0 + i, q = 3.0 + i;
        assert_true(fabs((double)r[i] - 2.0 * (p * cos(a) - q * sin(a))) < 1e-5);
        assert_true(fabs((double)r[i + 2] - 2.0 * (q * cos(a) + p * sin(a))) < 1e-5);
    }

    const float gate[3] = {0.0f, 100.0f, -100.0f}, up[3] = {5.0f, 2.0f, 2.0f};
    kvf_swiglu(gate, up, 3, y);
    assert_true(y[0] == 0.0f && y[1] == 200.0f && fabsf(y[2]) < 1e-30f);
}

/* For every instruction set, in any number. e^x is off by what rounds in x: 2^-24 of it, twice. */
TEST(vectors_of_rows_are_right)
{
    enum { COUNT = 37 };
    float gate[COUNT], up[COUNT], y[COUNT + 1];
    uint16_t bits[COUNT + 1];
    random_stream stream = random_stream_of("rows");
    for (int i = 0; i < COUNT; i++) {
        gate[i] = 100.0f * random_stream_unit(&stream);
        up[i] = random_stream_unit(&stream);
    }
    gate[3] = 0.0f;
    gate[5] = -3e38f;
    gate[36] = NAN;
    for (size_t isa = 0; isa < ISAS; isa++) {
        const kvf_linear_kernels *k = kvf_linear_kernels_choose(isas[isa]);
        for (size_t count = 1; count <= COUNT; count++) {
            y[count] = 7.0f;
            bits[count] = 7;
            k->swiglu(gate, up, count, y);
            k->round(gate, count, bits);
            assert_true(y[count] == 7.0f && bits[count] == 7);
            for (size_t i = 0; i < count; i++) {
                const double x = (double)gate[i], want = x / (1.0 + exp(-x)) * (double)up[i];
                if (!(fabs((double)y[i] - want) <= fabs(want) * 0x1p-15 + 1e-30) && i != 36)
                    fail_msg("%s: swiglu of %g is %g, expected %g", k->name, x, (double)y[i], want);
                assert_int_equal(bits[i], kvf_bf16_from_float(gate[i]));
            }
        }
        assert_true(isnan(y[36]));
    }
}

/* That every number survives, and the nearest is taken, is shown by check_convert (check_common.c).
 */
TEST(ties_are_rounded_to_even)
{
    assert_int_equal(kvf_fp16_from_float(65520.0f), 0x7c00);
    assert_int_equal(kvf_fp16_from_float(0x1.8p-24f), 2);
    assert_int_equal(kvf_fp16_from_float(0x1p-25f), 0);
    assert_int_equal(kvf_bf16_from_float(0x1.01p0f), 0x3f80);
}
