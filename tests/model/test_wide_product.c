/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Products of several rows against each row alone, bit for bit: every instruction set that the CPU
 * has, every weight type, every number of rows, shapes that fill no tile and no piece, random and
 * extreme numbers; and nothing beside the results is written.
 */

#include "common/convert.h"
#include "linear.h"
#include "random_model.h"
#include "unit.h"

#include <float.h>
#include <math.h>

#define GUARD       7.25f
#define GUARD_WIDTH 3u

static const uint32_t isas[] = {KVF_ISA_REFERENCE, KVF_ISA_BASELINE,
                                KVF_ISA_BASELINE | KVF_ISA_AVX2, KVF_ISA_ALL};

#define ISAS (sizeof isas / sizeof isas[0])

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

static void *make_weights(kvf_dtype dtype, const shape *s, random_stream *stream)
{
    const size_t count = (size_t)s->inputs * s->outputs;
    void *weight = malloc(count * kvf_dtype_bytes(dtype));
    for (size_t i = 0; i < count; i++)
        kvf_element_set(weight, dtype, i, random_stream_unit(stream));
    return weight;
}

static const char *const dtypes[] = {[KVF_BF16] = "bf16", [KVF_FP16] = "fp16", [KVF_FP32] = "fp32"};

static bool have_same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

/* The rows at once, between guards, against each alone. */
static void compare(const kvf_linear_kernels *k, const kvf_linear *l, const float *x, uint32_t rows)
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
    void *weight = make_weights(dtype, s, &stream);
    const kvf_linear linear = {
        .weight = weight, .dtype = dtype, .outputs = s->outputs, .inputs = s->inputs};
    for (size_t i = 0; i < count; i++)
        x[i] = number(&stream);
    for (size_t isa = 0; isa < ISAS; isa++)
        for (uint32_t rows = KVF_SMALL_BATCH_ROWS_MAX; rows >= 1;
             rows -= rows > rows_step ? rows_step : rows)
            compare(kvf_linear_kernels_choose(isas[isa]), &linear, x, rows);
    free(weight);
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
