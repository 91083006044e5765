/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Products of a few rows on a GPU: numbers against plain sums in double and the row operations of
 * the host, no write after an output, and bits that do not follow from the number of rows.
 */

#include <math.h>

#include "common/convert.h"
#include "common/random.h"
#include "layer_ops.h"
#include "model_fixture.h"
#include "row_ops.h"
#include "small_batch_gemm.h"
#include "unit.h"

#define ROWS_MAX 70u
#define GUARD    0x5a

static kvf_runtime *runtime;
static kvf_stream *stream;

/* Pinned memory; on a machine with CUDA both sides read it. */
typedef struct buffer {
    void *host, *device;
    size_t bytes;
} buffer;

static buffer take(size_t bytes)
{
    buffer b = {.bytes = bytes};
    assert_int_equal(kvf_pinned_alloc(runtime, bytes + 64, &b.host, &b.device), KVF_OK);
    memset(b.host, GUARD, bytes + 64);
    return b;
}

static void release(buffer *b)
{
    for (size_t i = 0; i < 64; i++)
        assert_int_equal(((unsigned char *)b->host)[b->bytes + i], GUARD);
    kvf_pinned_free(runtime, b->host);
}

static buffer take_numbers(kvf_dtype dtype, size_t count, double scale, uint64_t *random)
{
    buffer b = take(count * kvf_dtype_bytes(dtype));
    for (size_t i = 0; i < count; i++)
        kvf_element_set(b.host, dtype, i, (float)(scale * (2.0 * kvf_random_unit(random) - 1.0)));
    return b;
}

typedef struct problem {
    kvf_dtype dtype;
    uint32_t outputs, inputs, rows;
    uint32_t query_heads, kv_heads, head_dim; /* of outputs; 0 = no heads */
} problem;

typedef enum end_kind { STORE, ADD, ADD_NORM, SWIGLU, ROTATE, NORM_ROTATE } end_kind;

typedef struct data {
    buffer weight; /* of dtype */
    buffer x, bias, cosine, sine, norm;
    buffer arrived; /* [outputs], zeros between launches */
    double *sums;   /* [rows, outputs] */
} data;

static data make(const problem *p, uint64_t seed)
{
    uint64_t random = seed;
    const size_t half = p->head_dim ? p->head_dim / 2 : 1;
    data d = {.weight = take_numbers(p->dtype, (size_t)p->outputs * p->inputs, 0.5, &random),
              .x = take_numbers(p->dtype, (size_t)p->rows * p->inputs, 1.0, &random),
              .bias = take_numbers(KVF_FP32, p->outputs, 1.0, &random),
              .cosine = take_numbers(KVF_FP32, p->rows * half, 1.0, &random),
              .sine = take_numbers(KVF_FP32, p->rows * half, 1.0, &random),
              .norm = take_numbers(KVF_FP32, p->outputs, 1.0, &random),
              .arrived = take(p->outputs * sizeof(uint32_t)),
              .sums = calloc((size_t)p->rows * p->outputs, sizeof(double))};
    assert_non_null(d.sums);
    memset(d.arrived.host, 0, d.arrived.bytes);
    for (uint32_t row = 0; row < p->rows; row++)
        for (uint32_t o = 0; o < p->outputs; o++)
            for (uint32_t i = 0; i < p->inputs; i++)
                d.sums[(size_t)row * p->outputs + o] +=
                    (double)kvf_element_get(d.x.host, p->dtype, (size_t)row * p->inputs + i) *
                    (double)kvf_element_get(d.weight.host, p->dtype, (size_t)o * p->inputs + i);
    return d;
}

static void drop(data *d)
{
    release(&d->weight);
    release(&d->x);
    release(&d->bias);
    release(&d->cosine);
    release(&d->sine);
    release(&d->norm);
    release(&d->arrived);
    free(d->sums);
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
    assert_int_equal(status, 0);
    assert_int_equal(kvf_stream_wait(stream), KVF_OK);
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
    release(&out[0]);
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
    release(&out[0]);
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
            want[i] =
                (float)d->sums[(size_t)n * dim + i] + ((const float *)d->bias.host)[head * dim + i];
        if (part < 2)
            kvf_rope_rotate(want, dim / 2, (const float *)d->cosine.host + row * dim / 2,
                            (const float *)d->sine.host + row * dim / 2);
        for (uint32_t i = 0; i < dim; i++)
            compare(
                p,
                kvf_element_get(out[part].host, p->dtype, ((size_t)row * per_row + own) * dim + i),
                want[i], p->dtype, "a head");
    }
    for (uint32_t i = 0; i < 3; i++)
        release(&out[i]);
}

static buffer copy_of(const buffer *from)
{
    buffer b = take(from->bytes);
    memcpy(b.host, from->host, from->bytes);
    return b;
}

/* A norm after a product has the bits of one by itself; so have its sums. */
static void check_norm(const problem *p, const data *d)
{
    const uint32_t rows = p->rows < KVF_SMALL_BATCH_NORM_ROWS ? p->rows : KVF_SMALL_BATCH_NORM_ROWS;
    const size_t count = (size_t)rows * p->outputs, element = kvf_dtype_bytes(p->dtype);
    uint64_t random = 9;
    buffer one[4] = {take_numbers(KVF_FP32, count, 1.0, &random), take(count * element)};
    buffer two[4] = {copy_of(&one[0]), take(count * element)};
    const kvf_row_norm_args apart = norm_of(p, d, rows, two);
    launch(p, d, ADD_NORM, 0, rows, one);
    launch(p, d, ADD, 0, rows, two);
    assert_int_equal(kvf_row_norm_cuda(&apart, kvf_stream_native(stream)), 0);
    assert_int_equal(kvf_stream_wait(stream), KVF_OK);
    for (uint32_t i = 0; i < 2; i++) {
        assert_memory_equal(one[i].host, two[i].host, one[i].bytes);
        release(&one[i]);
        release(&two[i]);
    }
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
    assert_int_equal(kvf_row_rotate_cuda(&apart, kvf_stream_native(stream)), 0);
    assert_int_equal(kvf_stream_wait(stream), KVF_OK);
    for (uint32_t i = 0; i < 4; i++) {
        assert_memory_equal(one[i].host, two[i].host, bytes[i]);
        release(&one[i]);
        release(&two[i]);
    }
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
        check_norm(p, &d);
        if (p->head_dim) {
            check_heads(p, &d);
            check_head_norms(p, &d);
        }
        drop(&d);
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
    for (uint32_t i = 0; i < 4; i++)
        release(&none[i]);
    drop(&d);
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
    release(&one[0]);
    release(&many[0]);
    drop(&d);
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
    const int failed = unit_run(products_are_right, rows_do_not_change_bits, others_are_refused);
    kvf_stream_destroy(stream);
    kvf_runtime_close(runtime);
    return failed;
}
