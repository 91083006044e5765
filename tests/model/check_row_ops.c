/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The row operations of a GPU against those of the host, on random rows, with guard
 * bands after every output.
 *
 *     check_row_ops [--seed N]
 *
 * The buffers are pinned memory, which both sides read, so one program does on a GPU what it does
 * in the emulator. Tolerances: sums of n squares in fp32 are off by at most n 2^-24 relative, which
 * for n <= 4096 is 2.4e-4; cosine, sine and the exponential by a few units of the last place; the
 * result is then rounded to its type (2^-8 in bf16, 2^-11 in fp16). Exit: 0 agree, 1 not, 77 no
 * CUDA device.
 */

#include "common/random.h"
#include "layer_ops.h"
#include "row_ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD_BYTES 256u
#define GUARD       0xa5
#define BUFFERS     8u

typedef struct buffer {
    unsigned char *host;
    void *device;
    size_t bytes;
} buffer;

typedef struct rig {
    kvf_runtime *runtime;
    kvf_stream *stream;
    buffer buffers[BUFFERS];
    uint32_t used;
    uint64_t seed, random;
    uint32_t cases, failures;
} rig;

static void stop(const char *what)
{
    fprintf(stderr, "check_row_ops: %s\n", what);
    exit(1);
}

static double next_uniform(rig *r)
{
    return kvf_random_unit(&r->random);
}

/* ---- buffers ---- */

static buffer *take(rig *r, size_t bytes)
{
    void *host = NULL;
    buffer *b = &r->buffers[r->used++];
    if (kvf_pinned_alloc(r->runtime, bytes + GUARD_BYTES, &host, &b->device) != KVF_OK)
        stop(kvf_runtime_error(r->runtime)->text);
    b->host = host;
    b->bytes = bytes;
    memset(b->host, GUARD, bytes + GUARD_BYTES);
    return b;
}

static float *take_floats(rig *r, size_t count, double scale, void **device)
{
    buffer *b = take(r, count * sizeof(float));
    float *x = (float *)(void *)b->host;
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(scale * (2.0 * next_uniform(r) - 1.0));
    *device = b->device;
    return x;
}

/* Waits, and looks after every buffer. */
static void finish(rig *r, int launched, const char *name)
{
    if (launched != 0 || kvf_stream_wait(r->stream) != KVF_OK) {
        printf("%s: the launch failed (%d)\n", name, launched);
        r->failures++;
    }
    for (uint32_t i = 0; i < r->used; i++)
        for (uint32_t j = 0; j < GUARD_BYTES; j++)
            if (r->buffers[i].host[r->buffers[i].bytes + j] != GUARD) {
                printf("%s: wrote after buffer %u\n", name, i);
                r->failures++;
                break;
            }
    r->cases++;
}

static void release(rig *r)
{
    while (r->used > 0)
        kvf_pinned_free(r->runtime, r->buffers[--r->used].host);
}

static double tolerance(kvf_dtype dtype)
{
    return 3e-4 + (dtype == KVF_BF16 ? 0x1p-8 : dtype == KVF_FP16 ? 0x1p-11 : 0.0);
}

/* Element by element: |got - want| <= tolerance (|want| + floor). */
static void compare(rig *r, const char *name, const void *got, kvf_dtype dtype, const float *want,
                    size_t count, double floor)
{
    /* Below 6e-5 fp16 has one step, 2^-24, for all. */
    const double step = dtype == KVF_FP16 ? 0x1p-24 : 0.0;
    float *wide = malloc((count ? count : 1) * sizeof *wide);
    if (!wide)
        stop("out of memory");
    kvf_numbers_widen(got, dtype, count, wide);
    for (size_t i = 0; i < count; i++) {
        const double w = (double)want[i], g = (double)wide[i];
        /* A number too large for its type may round to infinity, as on the host. */
        const bool same = g == w || (isnan(g) && isnan(w)) ||
                          fabs(g - w) <= tolerance(dtype) * (fabs(w) + floor) + step ||
                          (dtype == KVF_FP16 && fabs(w) > 65000.0 && isinf(g));
        if (!same) {
            printf("%s: [%zu] is %g, the host has %g (seed %llu)\n", name, i, g, w,
                   (unsigned long long)r->seed);
            r->failures++;
            break;
        }
    }
    free(wide);
}

/* ---- operations ---- */

static size_t element(kvf_dtype dtype)
{
    return dtype == KVF_FP32 ? 4 : 2;
}

static void check_start(rig *r, kvf_dtype dtype, uint32_t rows, uint32_t width, uint32_t half)
{
    enum { VOCABULARY = 37 };
    void *wide_device, *freq_device, *hidden_device, *cosine_device, *sine_device;
    const float *wide = take_floats(r, (size_t)VOCABULARY * width, 2.0, &wide_device);
    buffer *table = take(r, (size_t)VOCABULARY * width * element(dtype));
    buffer *words = take(r, 2 * (size_t)rows * sizeof(uint32_t));
    float *freq = take_floats(r, half, 1.0, &freq_device);
    const float *hidden = take_floats(r, (size_t)rows * width, 1.0, &hidden_device);
    const float *cosine = take_floats(r, (size_t)rows * half, 1.0, &cosine_device);
    const float *sine = take_floats(r, (size_t)rows * half, 1.0, &sine_device);
    uint32_t *ids = (uint32_t *)(void *)words->host, *positions = ids + rows;
    kvf_numbers_narrow(wide, dtype, (size_t)VOCABULARY * width, table->host);
    for (uint32_t i = 0; i < half; i++)
        freq[i] = powf(10000.0f, -(float)i / (float)half);
    for (uint32_t i = 0; i < rows; i++) {
        ids[i] = (uint32_t)(next_uniform(r) * VOCABULARY);
        positions[i] = (uint32_t)(next_uniform(r) * 131072.0);
    }
    const kvf_row_start_args args = {.dtype = dtype,
                                     .rows = rows,
                                     .width = width,
                                     .half = half,
                                     .scaling = 1.25f,
                                     .ids = words->device,
                                     .position = (const uint32_t *)words->device + rows,
                                     .embedding = table->device,
                                     .inv_freq = freq_device,
                                     .hidden = hidden_device,
                                     .cosine = cosine_device,
                                     .sine = sine_device};
    finish(r, kvf_row_start_cuda(&args, kvf_stream_native(r->stream)), "start");
    float *want = malloc((width + 2 * (size_t)half) * sizeof *want);
    if (!want)
        stop("out of memory");
    for (uint32_t i = 0; i < rows; i++) {
        kvf_numbers_widen(table->host + (size_t)ids[i] * width * element(dtype), dtype, width,
                          want);
        kvf_rope_angles(freq, half, 1.25f, positions[i], want + width, want + width + half);
        compare(r, "start, hidden", hidden + (size_t)i * width, KVF_FP32, want, width, 0.0);
        compare(r, "start, cosine", cosine + (size_t)i * half, KVF_FP32, want + width, half, 1.0);
        compare(r, "start, sine", sine + (size_t)i * half, KVF_FP32, want + width + half, half,
                1.0);
    }
    free(want);
    release(r);
}

static void check_norm(rig *r, kvf_dtype dtype, uint32_t rows, uint32_t width, double scale)
{
    void *x_device, *weight_device;
    const float *x = take_floats(r, (size_t)rows * width, scale, &x_device);
    const float *weight = take_floats(r, width, 1.0, &weight_device);
    buffer *y = take(r, (size_t)rows * width * element(dtype));
    const kvf_row_norm_args args = {.dtype = dtype,
                                    .rows = rows,
                                    .width = width,
                                    .eps = 1e-5f,
                                    .x = x_device,
                                    .weight = weight_device,
                                    .y = y->device};
    finish(r, kvf_row_norm_cuda(&args, kvf_stream_native(r->stream)), "norm");
    float *want = malloc(width * sizeof *want);
    if (!want)
        stop("out of memory");
    for (uint32_t i = 0; i < rows; i++) {
        kvf_rms_norm(x + (size_t)i * width, weight, width, (double)args.eps, want);
        compare(r, "norm", y->host + (size_t)i * width * element(dtype), dtype, want, width, 1e-6);
    }
    free(want);
    release(r);
}

typedef struct rotation {
    kvf_dtype dtype;
    uint32_t rows, query_heads, kv_heads, head_dim;
    bool has_bias, has_norm;
} rotation;

/* One head as the host does it. */
static void rotate_head(const rotation *c, float *x, const float *bias, const float *norm,
                        const float *cosine, const float *sine)
{
    for (uint32_t i = 0; bias && i < c->head_dim; i++)
        x[i] += bias[i];
    if (norm)
        kvf_rms_norm(x, norm, c->head_dim, 1e-6, x);
    if (cosine)
        kvf_rope_rotate(x, c->head_dim / 2, cosine, sine);
}

static void check_rotate(rig *r, const rotation *c)
{
    const uint32_t heads = c->query_heads + 2 * c->kv_heads, d = c->head_dim, half = d / 2;
    const size_t head_bytes = d * element(c->dtype);
    void *device[5];
    const float *qkv = take_floats(r, (size_t)c->rows * heads * d, 3.0, &device[0]);
    const float *bias = take_floats(r, (size_t)heads * d, 0.5, &device[1]);
    const float *norm = take_floats(r, 2 * (size_t)d, 1.0, &device[2]);
    const float *cosine = take_floats(r, (size_t)c->rows * half, 1.0, &device[3]);
    const float *sine = take_floats(r, (size_t)c->rows * half, 1.0, &device[4]);
    buffer *q = take(r, (size_t)c->rows * c->query_heads * head_bytes);
    buffer *k = take(r, (size_t)c->rows * c->kv_heads * head_bytes);
    buffer *v = take(r, (size_t)c->rows * c->kv_heads * head_bytes);
    const float *norm_device = device[2];
    const kvf_row_rotate_args args = {.dtype = c->dtype,
                                      .rows = c->rows,
                                      .query_heads = c->query_heads,
                                      .kv_heads = c->kv_heads,
                                      .head_dim = d,
                                      .eps = 1e-6f,
                                      .qkv = device[0],
                                      .bias = c->has_bias ? device[1] : NULL,
                                      .query_norm = c->has_norm ? norm_device : NULL,
                                      .key_norm = c->has_norm ? norm_device + d : NULL,
                                      .cosine = device[3],
                                      .sine = device[4],
                                      .q = q->device,
                                      .k = k->device,
                                      .v = v->device};
    finish(r, kvf_row_rotate_cuda(&args, kvf_stream_native(r->stream)), "rotate");
    for (uint32_t i = 0; i < c->rows * heads; i++) {
        const uint32_t row = i / heads, head = i % heads;
        const bool is_query = head < c->query_heads;
        const bool is_value = head >= c->query_heads + c->kv_heads;
        const uint32_t kv = (head - c->query_heads) % c->kv_heads;
        const buffer *to = is_query ? q : is_value ? v : k;
        const size_t at =
            is_query ? (size_t)row * c->query_heads + head : (size_t)row * c->kv_heads + kv;
        float want[256];
        memcpy(want, qkv + (size_t)i * d, d * sizeof *want);
        rotate_head(c, want, c->has_bias ? bias + (size_t)head * d : NULL,
                    c->has_norm && !is_value ? norm + (is_query ? 0 : d) : NULL,
                    is_value ? NULL : cosine + (size_t)row * half, sine + (size_t)row * half);
        compare(r, "rotate", to->host + at * head_bytes, c->dtype, want, d, 1e-2);
    }
    release(r);
}

static void check_activate(rig *r, kvf_dtype dtype, uint32_t rows, uint32_t width, double scale)
{
    void *device;
    const float *x = take_floats(r, 2 * (size_t)rows * width, scale, &device);
    buffer *y = take(r, (size_t)rows * width * element(dtype));
    const kvf_row_activate_args args = {
        .dtype = dtype, .rows = rows, .width = width, .gate_up = device, .y = y->device};
    finish(r, kvf_row_activate_cuda(&args, kvf_stream_native(r->stream)), "activate");
    float *want = malloc(width * sizeof *want);
    if (!want)
        stop("out of memory");
    for (uint32_t i = 0; i < rows; i++) {
        const float *gate = x + 2 * (size_t)i * width;
        kvf_swiglu(gate, gate + width, width, want);
        compare(r, "activate", y->host + (size_t)i * width * element(dtype), dtype, want, width,
                1e-6);
    }
    free(want);
    release(r);
}

/* Rows come over bit for bit, each once or not at all. */
static void check_gather(rig *r, uint32_t rows, uint32_t width)
{
    void *from_device, *to_device;
    const float *from = take_floats(r, 3 * (size_t)rows * width, 1.0, &from_device);
    const float *to = take_floats(r, (size_t)rows * width, 1.0, &to_device);
    buffer *words = take(r, rows * sizeof(uint32_t));
    uint32_t *index = (uint32_t *)(void *)words->host;
    for (uint32_t i = 0; i < rows; i++)
        index[i] = 3 * i + (uint32_t)(next_uniform(r) * 3.0);
    const kvf_row_gather_args args = {
        .rows = rows, .width = width, .index = words->device, .from = from_device, .to = to_device};
    finish(r, kvf_row_gather_cuda(&args, kvf_stream_native(r->stream)), "gather");
    for (uint32_t i = 0; i < rows; i++)
        if (memcmp(to + (size_t)i * width, from + (size_t)index[i] * width, width * sizeof *to) !=
            0) {
            printf("gather: row %u is not row %u (seed %llu)\n", i, index[i],
                   (unsigned long long)r->seed);
            r->failures++;
        }
    release(r);
}

/* ---- all ---- */

static void check_all(rig *r)
{
    static const kvf_dtype dtypes[] = {KVF_BF16, KVF_FP16, KVF_FP32};
    static const uint32_t widths[] = {1, 64, 129, 896, 4096};
    static const uint32_t head_dims[] = {64, 80, 96, 128, 256, 32};
    for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) {
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
            check_start(r, dtypes[t], 5, widths[w], 32);
            check_norm(r, dtypes[t], 3, widths[w], 1.0);
            check_norm(r, dtypes[t], 2, widths[w], 1e-20); /* eps decides */
            check_activate(r, dtypes[t], 3, widths[w], 8.0);
            check_activate(r, dtypes[t], 2, widths[w], 200.0); /* exp overflows */
        }
        for (size_t d = 0; d < sizeof head_dims / sizeof *head_dims; d++)
            for (uint32_t flags = 0; flags < 4; flags++)
                check_rotate(r, &(rotation){.dtype = dtypes[t],
                                            .rows = 3,
                                            .query_heads = 6,
                                            .kv_heads = 2,
                                            .head_dim = head_dims[d],
                                            .has_bias = flags & 1,
                                            .has_norm = flags & 2});
    }
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        check_gather(r, 7, widths[w]);
}

int main(int argc, char **argv)
{
    rig r = {.seed = 1};
    kvf_runtime_config config;
    kvf_error error;
    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        r.seed = strtoull(argv[2], NULL, 10);
    else if (argc != 1)
        return 2;
    r.random = r.seed;
    kvf_runtime_config_init(&config);
    config.device = KVF_DEVICE_CUDA;
    if (kvf_runtime_open(&config, &r.runtime, &error) != KVF_OK) {
        printf("skipped: %s\n", error.text);
        return 77;
    }
    if (kvf_row_use_device(0) != 0 || kvf_stream_create(r.runtime, &r.stream) != KVF_OK)
        stop("no stream");
    check_all(&r);
    kvf_stream_destroy(r.stream);
    printf("%s, seed %llu: %u cases, %u failures\n", kvf_runtime_device_name(r.runtime),
           (unsigned long long)r.seed, r.cases, r.failures);
    kvf_runtime_close(r.runtime);
    return r.failures ? 1 : 0;
}
