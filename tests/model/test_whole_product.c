/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Products in whole numbers against a plain loop over the blocks of a file, bit for bit: every
 * instruction set and type that has them, any number of rows and of outputs, random and extreme
 * numbers; nothing beside the results is written, and a row of x keeps what it is to 2^-16 of the
 * largest of 32.
 */

#include "common/convert.h"
#include "gguf_image.h"
#include "linear.h"
#include "random_model.h"
#include "unit.h"

#include <float.h>
#include <math.h>

#define GUARD       7.25f
#define GUARD_WIDTH 3u
#define ROWS_MAX    35u
#define TYPES_MAX   32u
#define COLUMNS     KVF_WHOLE_COLUMNS

/* A block as its format says: weight = (number - minus) x scale + shift. */
typedef struct plain_block {
    int32_t number[COLUMNS];
    int32_t minus;
    float scale, shift;
} plain_block;

static float half_at(const char *from)
{
    uint16_t bits;
    memcpy(&bits, from, sizeof bits);
    return kvf_fp16_to_float(bits);
}

static plain_block read_block(const gguf_type *type, const char *block)
{
    plain_block b = {.scale = half_at(block)};
    const bool has_shift = type->index == GGUF_Q4_1, is_byte = type->index == GGUF_Q8_0;
    b.shift = has_shift ? half_at(block + 2) : 0.0f;
    b.minus = type->index == GGUF_Q4_0 ? 8 : 0;
    for (size_t i = 0; i < COLUMNS; i++) {
        const uint8_t nibbles = (uint8_t)block[(has_shift ? 4 : 2) + i % 16];
        b.number[i] = is_byte ? (int8_t)block[2 + i] : i < 16 ? nibbles & 15 : nibbles >> 4;
    }
    return b;
}

static int32_t whole_of(const kvf_whole_kernel *k, const kvf_whole_block *x, size_t i)
{
    if (!k->in_pairs)
        return 256 * x->high[i] + x->low[i];
    const size_t swapped = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
    return x->pairs[swapped];
}

static float plain_product(const kvf_whole_kernel *k, const gguf_type *type, const char *row,
                           const kvf_whole_block *x, size_t blocks)
{
    float sum = 0.0f;
    for (size_t b = 0; b < blocks; b++, row += type->bytes, x++) {
        const plain_block w = read_block(type, row);
        int32_t whole = 0;
        for (size_t i = 0; i < COLUMNS; i++)
            whole += (w.number[i] - w.minus) * whole_of(k, x, i);
        sum = fmaf((float)whole, w.scale * x->scale, sum);
        if (type->index == GGUF_Q4_1)
            sum = fmaf(w.shift, x->sum, sum);
    }
    return sum;
}

static float extreme(random_stream *stream)
{
    static const float of[] = {0.0f, -0.0f, 0x1p60f, 0x1p-90f, -FLT_MAX, -0x1p-149f, INFINITY, NAN};
    const uint64_t draw = random_stream_next(stream);
    return draw % 61 ? random_stream_unit(stream) : of[(draw >> 8) % (sizeof of / sizeof *of)];
}

static bool have_same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

typedef struct problem {
    const kvf_whole_kernel *kernel;
    kvf_linear linear;
    kvf_whole_block *x; /* [ROWS_MAX, blocks] */
    size_t blocks;
} problem;

static void compare(const problem *p, uint32_t rows, bool accumulate)
{
    const kvf_linear *l = &p->linear;
    const size_t stride = l->outputs + GUARD_WIDTH, count = (rows + 1) * stride;
    float *y = malloc(count * sizeof *y);
    for (size_t i = 0; i < count; i++)
        y[i] = GUARD;
    p->kernel->multiply[l->blocks->index](&(kvf_whole_product){.linear = l,
                                                               .weight = l->weight,
                                                               .outputs = l->outputs,
                                                               .rows = rows,
                                                               .x = p->x,
                                                               .y = y + GUARD_WIDTH,
                                                               .y_stride = stride,
                                                               .accumulate = accumulate});
    for (size_t i = 0; i < count; i++) {
        if (i >= rows * stride || i % stride < GUARD_WIDTH) {
            assert_true(y[i] == GUARD);
            continue;
        }
        const size_t output = i % stride - GUARD_WIDTH, row = i / stride;
        const float product = plain_product(
            p->kernel, l->blocks, (const char *)l->weight + output * kvf_linear_row_bytes(l),
            p->x + row * p->blocks, p->blocks);
        const float want = accumulate ? GUARD + product : product;
        if (!have_same_bits(y[i], want))
            fail_msg("%s, %u x %u: output %zu of row %zu of %u is %a, expected %a", l->blocks->name,
                     l->outputs, l->inputs, output, row, rows, (double)y[i], (double)want);
    }
    free(y);
}

/* Rounding errs by a half of the scale, and by the product that comes before. */
static void check_narrow(const kvf_whole_kernel *k, const float *x, const kvf_whole_block *to,
                         size_t blocks)
{
    for (size_t b = 0; b < blocks; b++, x += COLUMNS, to++) {
        double largest = 0.0, sum = 0.0;
        bool is_finite = true;
        for (size_t i = 0; i < COLUMNS; i++) {
            largest = fmax(largest, fabs((double)x[i]));
            is_finite = is_finite && isfinite(x[i]);
        }
        for (size_t i = 0; i < COLUMNS && is_finite; i++) {
            const double got = whole_of(k, to, i) * (double)to->scale;
            sum += whole_of(k, to, i);
            if (fabs(got - (double)x[i]) > largest * 0x1.05p-16 + 0x1p-100)
                fail_msg("%a under %a is %a", (double)x[i], largest, got);
        }
        assert_int_equal(isnan(to->scale), !is_finite);
        assert_true(!is_finite || (double)to->whole_sum == sum);
        assert_true(!is_finite || to->sum == (float)to->whole_sum * to->scale);
    }
}

static void compare_shape(const kvf_whole_kernel *kernel, const gguf_type *type, uint32_t inputs,
                          uint32_t outputs, float (*number)(random_stream *))
{
    random_stream stream = random_stream_of("whole product");
    const size_t blocks = inputs / COLUMNS, count = (size_t)ROWS_MAX * inputs;
    char *weight = gguf_image_blocks(type, outputs * blocks), *odd;
    const size_t bytes = outputs * blocks * type->bytes;
    float *x = malloc(count * sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = number(&stream);
    memset(x, 0, COLUMNS * sizeof *x);
    odd = malloc(bytes + 1); /* blocks begin at any byte, and end where memory does */
    memcpy(odd + 1, weight, bytes);
    problem p = {
        .kernel = kernel,
        .linear = {.weight = odd + 1, .blocks = type, .outputs = outputs, .inputs = inputs},
        .x = malloc(ROWS_MAX * blocks * sizeof *p.x),
        .blocks = blocks};
    p.kernel->narrow(x, ROWS_MAX * blocks, p.x);
    check_narrow(p.kernel, x, p.x, ROWS_MAX * blocks);
    for (uint32_t rows = 1; rows <= ROWS_MAX; rows += rows < 9 ? 1 : 13)
        compare(&p, rows, rows % 2 == 0);
    free(p.x);
    free(odd);
    free(x);
    free(weight);
}

static const uint32_t isas[] = {KVF_ISA_AVX2, KVF_ISA_AVX2 | KVF_ISA_AVX_VNNI, KVF_ISA_ALL};

#define ISAS (sizeof isas / sizeof isas[0])

static void check_types(const kvf_whole_kernel *kernel)
{
    static const struct {
        uint32_t inputs, outputs;
    } shapes[] = {{32, 1}, {64, 17}, {160, 37}, {1536, 16}};
    uint32_t types = 0;
    for (uint32_t id = 0; id < TYPES_MAX; id++) {
        const gguf_type *type = gguf_type_find(id);
        if (!type || !kernel->multiply[type->index])
            continue;
        types++;
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            compare_shape(kernel, type, shapes[i].inputs, shapes[i].outputs, random_stream_unit);
            compare_shape(kernel, type, shapes[i].inputs, shapes[i].outputs, extreme);
        }
    }
    assert_int_equal(types, kernel->in_pairs ? 2 : 3);
}

static void products_are_those_of_whole_numbers(void **state)
{
    uint32_t kernels = 0;
    for (size_t i = 0; i < ISAS; i++) {
        const kvf_whole_kernel *kernel = kvf_whole_kernel_choose(isas[i]);
        if (!kernel)
            continue;
        kernels++;
        check_types(kernel);
    }
    if (kernels == 0)
        skip();
}

static void other_instruction_sets_have_none(void **state)
{
    assert_null(kvf_whole_kernel_choose(KVF_ISA_REFERENCE | KVF_ISA_BASELINE));
    assert_null(kvf_whole_kernel_choose(KVF_ISA_AVX512));
}

int main(void)
{
    return unit_run(products_are_those_of_whole_numbers, other_instruction_sets_have_none);
}
