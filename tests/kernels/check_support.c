/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Seeded numbers, guarded buffers and comparisons; see check_support.h.
 */

#include "check_support.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/convert.h"
#include "common/random.h"

#define GUARD       64u
#define GUARD_BYTE  0xa5
#define FILL_BYTE   0xf7 /* a NaN in no element type, and no plausible result */
#define PRINTED_MAX 20u

const uint32_t check_head_dims[CHECK_HEAD_DIMS] = {64, 80, 96, 128, 192, 256, 32, 512};
const uint32_t check_groups[CHECK_GROUPS] = {
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 29, 32, 48, 71, KVF_GROUP_MAX_HEADS};
const uint32_t check_page_sizes[CHECK_PAGE_SIZES] = {8, 16, 32, 64, 1, 2, 4};

uint32_t check_dims(const check *c)
{
    return c->cuda ? CHECK_HEAD_DIMS - 1 : CHECK_HEAD_DIMS;
}

const char *check_dtype_name(kvf_dtype dtype)
{
    static const char *const names[] = {
        [KVF_BF16] = "bf16", [KVF_FP16] = "fp16", [KVF_FP32] = "fp32"};
    return names[dtype];
}

const char *check_shape_text(const kvf_shape *s)
{
    static char text[64];
    snprintf(text, sizeof text, "%s d=%u/%u P=%u pages=%d", check_dtype_name(s->dtype), s->head_dim,
             kvf_value_dim(s), s->page_size, (int)s->pages);
    return text;
}

uint64_t check_random(check *c)
{
    return kvf_random_next(&c->state);
}

uint32_t check_below(check *c, uint32_t n)
{
    return kvf_random_below(&c->state, n);
}

kvf_shape check_shape(const check *c, uint32_t dtype, uint32_t head_dim, uint32_t page_size)
{
    return (kvf_shape){(kvf_dtype)(dtype % 3), check_head_dims[head_dim % check_dims(c)],
                       check_page_sizes[page_size % CHECK_PAGE_SIZES], KVF_PAGES_NATIVE, 0};
}

check_data check_data_of(uint32_t i)
{
    return i % 4 ? DATA_NORMAL : (check_data)(i / 4 % DATA_COUNT);
}

kvf_shape check_values(check *c, const kvf_shape *shape)
{
    kvf_shape s = *shape;
    if (c->cuda)
        s.value_dim = (uint16_t)KVF_GPU_VALUE_DIM(s.head_dim);
    else if (check_below(c, 2))
        s.value_dim = (uint16_t)(s.head_dim - 32 * check_below(c, (s.head_dim + 31) / 32));
    return s;
}

kvf_subgroup check_subgroup(check *c, uint32_t group)
{
    kvf_subgroup sub = {.first = check_below(c, group)};
    sub.count = 1 + check_below(c, group - sub.first);
    return check_below(c, 4) ? (kvf_subgroup){0} : sub;
}

float check_cap(check *c)
{
    static const float caps[] = {0.5f, 3.0f, 50.0f, 1e6f};
    const uint32_t i = check_below(c, 8);
    return i < 4 ? caps[i] : 0.0f;
}

double check_normal(check *c)
{
    const uint64_t bits = check_random(c);
    double sum = -2.0;
    for (int i = 0; i < 4; i++)
        sum += (double)(bits >> 16 * i & 0xffff) * 0x1p-16;
    return sqrt(3.0) * sum;
}

static void release_buffers(check *c)
{
    for (uint32_t i = 0; i < c->buffer_count; i++) {
        check_buffer *b = &c->buffers[i];
        for (size_t k = 0; b->guarded && k < GUARD; k++)
            if (b->base[k] != GUARD_BYTE || b->base[GUARD + b->bytes + k] != GUARD_BYTE) {
                check_fail(c, "write outside output %u of %zu bytes", i, b->bytes);
                break;
            }
        if (!b->is_of_twin) {
            if (c->cuda)
                check_cuda_abandon(c->cuda, b->base);
            free(b->base);
        }
    }
    c->buffer_count = 0;
    c->tracked_count = 0;
    if (c->cuda)
        check_cuda_release(c->cuda);
}

bool check_begin(check *c)
{
    check_end(c);
    c->failed = false;
    c->state = c->seed * UINT64_C(1000003) + c->cases;
    c->cases++;
    check_describe(c, "-");
    if (c->only != UINT32_MAX ? c->cases - 1 != c->only : check_random(c) % c->one_in != 0)
        return false;
    c->state = c->seed * UINT64_C(1000003) + c->cases - 1;
    c->run++;
    return true;
}

void check_end(check *c)
{
    release_buffers(c);
}

void check_describe(check *c, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(c->params, sizeof c->params, format, list);
    va_end(list);
}

void check_fail(check *c, const char *format, ...)
{
    if (c->failed)
        return;
    c->failed = true;
    if (c->failures++ >= PRINTED_MAX)
        return;
    va_list list;
    va_start(list, format);
    printf("FAIL %s [%s] case %u of seed %llu: %s: ", c->op, c->isa, c->cases - 1,
           (unsigned long long)c->seed, c->params);
    vprintf(format, list);
    printf("\n");
    va_end(list);
}

static uint8_t *allocate(check *c, size_t bytes, bool guarded)
{
    const size_t all = bytes + (guarded ? 2 * GUARD : 0);
    void *base = c->cuda ? check_cuda_take(c->cuda, all) : NULL;
    const bool is_of_twin = base != NULL;
    KVF_ASSERT(c->buffer_count < CHECK_BUFFERS_MAX);
    if (!base)
        KVF_ASSERT(posix_memalign(&base, 64, all ? all : 1) == 0);
    c->buffers[c->buffer_count++] = (check_buffer){base, bytes, guarded, is_of_twin};
    if (c->cuda && !is_of_twin)
        check_cuda_adopt(c->cuda, base, all ? all : 1);
    return base;
}

void *check_in(check *c, size_t bytes)
{
    return allocate(c, bytes, false);
}

void *check_out(check *c, size_t bytes)
{
    uint8_t *base = allocate(c, bytes, true);
    memset(base, GUARD_BYTE, GUARD);
    memset(base + GUARD, FILL_BYTE, bytes);
    memset(base + GUARD + bytes, GUARD_BYTE, GUARD);
    return base + GUARD;
}

void *check_put(check *c, const void *data, size_t bytes)
{
    void *to = check_in(c, bytes);
    memcpy(to, data, bytes);
    return to;
}

void *check_put_out(check *c, const void *data, size_t bytes)
{
    void *to = check_out(c, bytes);
    memcpy(to, data, bytes);
    return to;
}

void check_noise(check *c, void *to, size_t bytes)
{
    uint8_t *at = to;
    for (size_t i = 0; i < bytes; i += 8) {
        const uint64_t x = check_random(c);
        memcpy(at + i, &x, bytes - i < 8 ? bytes - i : 8);
    }
}

void *check_noise_in(check *c, size_t bytes)
{
    void *to = check_in(c, bytes);
    check_noise(c, to, bytes);
    return to;
}

void *check_noise_out(check *c, size_t bytes)
{
    void *to = check_out(c, bytes);
    check_noise(c, to, bytes);
    return to;
}

uint32_t *check_counts(check *c, size_t n, uint32_t most)
{
    uint32_t *counts = check_in(c, n * sizeof *counts);
    for (size_t i = 0; i < n; i++)
        counts[i] = check_below(c, 4) ? most : check_below(c, most + 1);
    return counts;
}

/* Numbers of check_normal, the same for every case: 16 random bits choose one of them. */
static void fill_normal(check *c, void *to, kvf_dtype dtype, size_t count)
{
    enum { NUMBERS = 1 << 16 };
    static float numbers[NUMBERS];
    static bool are_drawn;
    uint64_t bits = 0;
    const uint64_t state = c->state;
    c->state = NUMBERS;
    for (size_t i = 0; !are_drawn && i < NUMBERS; i++)
        numbers[i] = (float)check_normal(c);
    are_drawn = true;
    c->state = state;
    for (size_t i = 0; i < count; i++, bits >>= 16) {
        if (i % 4 == 0)
            bits = check_random(c);
        kvf_element_set(to, dtype, i, numbers[bits & 0xffff]);
    }
}

static float draw(check *c, kvf_dtype dtype, check_data data, float constant)
{
    if (data == DATA_EQUAL)
        return constant;
    const uint64_t bits = check_random(c);
    const float sign = bits & 1 ? 1.0f : -1.0f, unit = (float)(bits >> 40) * 0x1p-24f;
    if (data == DATA_LARGE) /* (7e17)^2 * 512 < FLT_MAX */
        return sign * (dtype == KVF_FP16 ? 65504.0f : 7e17f) * (0.5f + 0.5f * unit);
    return data == DATA_TINY ? sign * unit * (dtype == KVF_FP16 ? 6e-5f : 1e-38f) : sign * 0.0f;
}

void check_fill(check *c, void *to, kvf_dtype dtype, size_t count, check_data data)
{
    const float constant = (float)check_normal(c);
    if (data == DATA_NORMAL)
        fill_normal(c, to, dtype, count);
    for (size_t i = 0; data != DATA_NORMAL && i < count; i++)
        kvf_element_set(to, dtype, i, draw(c, dtype, data, constant));
}

/* Less than half a step of the element type, either way; bits of fp32 are as even as numbers are
 * within a step. Numbers below the normal ones of fp16 are as far apart as those. */
static float beside(check *c, float x, kvf_dtype dtype)
{
    const float least = dtype == KVF_FP16 ? 0x1p-14f : 0.0f;
    const uint32_t half = dtype == KVF_BF16 ? 0x8000u : 0x1000u;
    const int32_t by = (int32_t)check_below(c, 2 * half - 1) - (int32_t)(half - 1);
    const bool is_exact = dtype == KVF_FP32 || !isfinite(x) || fabsf(x) <= least;
    return is_exact ? x : kvf_bits_float(kvf_float_bits(x) + (uint32_t)by);
}

float *check_widen(check *c, const void *from, kvf_dtype dtype, size_t count)
{
    float *to = check_in(c, count * sizeof *to);
    for (size_t i = 0; i < count; i++)
        to[i] = beside(c, kvf_element_get(from, dtype, i), dtype);
    return to;
}

void check_fill_nan(void *to, kvf_dtype dtype, size_t count)
{
    for (size_t i = 0; i < count; i++)
        kvf_element_set(to, dtype, i, NAN);
}

double check_value(const void *base, kvf_dtype dtype, size_t i)
{
    return (double)kvf_element_get(base, dtype, i);
}

double check_norm(const void *base, kvf_dtype dtype, size_t rows, uint32_t head_dim)
{
    double best = 0.0;
    for (size_t r = 0; r < rows; r++) {
        double sum = 0.0;
        for (uint32_t d = 0; d < head_dim; d++) {
            double x = check_value(base, dtype, r * head_dim + d);
            sum += isfinite(x) ? x * x : 0.0;
        }
        best = fmax(best, sqrt(sum));
    }
    return best;
}

/* Scores of pages: usual, or with everything that damages a comparison. */
void check_scores(check *c, float *to, size_t count, uint32_t kind)
{
    static const float special[] = {0.0f,     -0.0f,     INFINITY,   -INFINITY, FLT_MAX,
                                    -FLT_MAX, 0x1p-149f, -0x1p-149f, 1.0f,      1.0f};
    for (size_t i = 0; i < count; i++) {
        float x = (float)check_normal(c) * 20.0f;
        switch (kind) {
        case 1: /* ties */
            x = (float)check_below(c, 3);
            break;
        case 2:
            x = 7.25f;
            break;
        case 3: /* holes */
            x = check_below(c, 3) ? x : check_below(c, 2) ? -INFINITY : NAN;
            break;
        case 4:
            x = check_below(c, 4) ? special[check_below(c, 10)] : NAN;
            break;
        case 5:
            x = (float)i;
            break;
        case 6:
            x = -(float)(i / 2);
            break;
        case 7:
            x = -INFINITY;
            break;
        case 8: /* masses: most are zero, some equal */
            x = check_below(c, 50) ? 0.0f : (float)check_below(c, 1000) * 0x1p-20f;
            break;
        case 9: /* the same in every page */
            x = (float)(i * 37 % 64) + (float)check_below(c, 4);
            break;
        case 10: /* fewer numbers than are wanted, usually */
            x = check_below(c, 3000) ? -INFINITY : x;
            break;
        default:
            break;
        }
        to[i] = x;
    }
}

static void note_run(check *c, kvf_task_fn fn)
{
    size_t i = 0;
#define NOTE(family, op) c->ran[i++] |= fn == c->var->op;
    KVF_KERNEL_LIST(NOTE, NOTE)
#undef NOTE
}

static void remember(check_memory *m, uint32_t buffer, const uint8_t *data, size_t bytes)
{
    if (m->count == m->room) {
        m->room = 2 * m->room + 64;
        m->written = realloc(m->written, m->room * sizeof *m->written);
        KVF_ASSERT(m->written);
    }
    uint8_t *copy = data ? malloc(bytes) : NULL;
    KVF_ASSERT(!data || copy);
    if (data)
        memcpy(copy, data, bytes);
    m->written[m->count++] = (check_written){buffer, copy};
}

/* Outputs get what the reference wrote when it ran for another instruction set. */
static void recall(check *c)
{
    check_memory *m = c->memory;
    KVF_ASSERT(m->at < m->count && m->written[m->at].buffer == UINT32_MAX);
    for (m->at++; m->at < m->count && m->written[m->at].buffer != UINT32_MAX; m->at++) {
        const check_written *w = &m->written[m->at];
        KVF_ASSERT(w->buffer < c->buffer_count);
        memcpy(c->buffers[w->buffer].base + GUARD, w->data, c->buffers[w->buffer].bytes);
    }
}

static void run_tasks(kvf_task_fn fn, const void *args, uint32_t tasks, bool backwards)
{
    for (uint32_t i = 0; i < tasks; i++)
        fn(args, backwards ? tasks - 1 - i : i);
}

static void run_reference(check *c, kvf_task_fn fn, const void *args, uint32_t tasks)
{
    uint8_t *before[CHECK_BUFFERS_MAX];
    const uint32_t buffers = c->memory ? c->buffer_count : 0;
    if (c->memory && c->memory->is_full) {
        recall(c);
        return;
    }
    for (uint32_t i = 0; i < buffers; i++) {
        const check_buffer *b = &c->buffers[i];
        before[i] = b->guarded && b->bytes ? malloc(b->bytes) : NULL;
        if (before[i])
            memcpy(before[i], b->base + GUARD, b->bytes);
    }
    run_tasks(fn, args, tasks, false);
    if (c->memory)
        remember(c->memory, UINT32_MAX, NULL, 0);
    for (uint32_t i = 0; i < buffers; i++) {
        const check_buffer *b = &c->buffers[i];
        if (before[i] && memcmp(before[i], b->base + GUARD, b->bytes) != 0)
            remember(c->memory, i, b->base + GUARD, b->bytes);
        free(before[i]);
    }
}

void check_run(check *c, const kvf_kernels *table, kvf_task_fn fn, check_args args, uint32_t tasks,
               bool backwards)
{
    if (table == c->var)
        note_run(c, fn);
    if (c->cuda && table == c->var) {
        const char *error = check_cuda_put(c->cuda);
        if (!error)
            error = check_cuda_run(c->cuda, fn, args, tasks);
        if (!error)
            error = check_cuda_get(c->cuda);
        if (error)
            check_fail(c, "launch: %s", error);
        return;
    }
    if (table == c->ref && !backwards)
        run_reference(c, fn, args.at, tasks);
    else
        run_tasks(fn, args.at, tasks, backwards);
}

void check_track(check *c, const char *name, void *data, size_t bytes)
{
    KVF_ASSERT(c->tracked_count < CHECK_TRACKED_MAX);
    c->tracked[c->tracked_count++] = (check_tracked){.name = name, .data = data, .bytes = bytes};
}

void *check_changed(check *c, const char *name, size_t bytes)
{
    void *data = check_out(c, bytes);
    check_track(c, name, data, bytes);
    return data;
}

void *check_near(check *c, const char *name, kvf_dtype dtype, size_t count, double absolute,
                 double relative)
{
    void *data = check_changed(c, name, count * kvf_dtype_bytes(dtype));
    check_tracked *t = &c->tracked[c->tracked_count - 1];
    t->count = count;
    t->dtype = dtype;
    t->absolute = absolute;
    t->relative = relative;
    return data;
}

const uint32_t *check_block_of(check *c, uint32_t blocks, uint32_t *all)
{
    const bool is_apart = check_below(c, 3);
    const uint32_t first = check_below(c, 4);
    uint32_t *block_of = check_in(c, blocks * sizeof *block_of);
    *all = first + blocks;
    for (uint32_t b = 0; b < blocks; b++)
        block_of[b] = first + b;
    for (uint32_t b = 1; is_apart && b < blocks; b++) {
        const uint32_t other = check_below(c, b + 1), before = block_of[b];
        block_of[b] = block_of[other];
        block_of[other] = before;
    }
    return block_of;
}

/* Bytes of its copy, in which numbers are aligned, too. */
static size_t copy_bytes(const check_tracked *t)
{
    return kvf_round_up(t->bytes, sizeof(double));
}

/* All tracked bytes to or from one buffer of the host. */
static void copy_tracked(const check *c, uint8_t *copy, bool is_saved)
{
    for (uint32_t i = 0; i < c->tracked_count; i++) {
        const check_tracked *t = &c->tracked[i];
        if (t->bytes)
            memcpy(is_saved ? copy : t->data, is_saved ? t->data : copy, t->bytes);
        copy += copy_bytes(t);
    }
}

void check_both(check *c, kvf_task_fn ref, kvf_task_fn var, check_args args, uint32_t tasks)
{
    size_t bytes = 0, at = 0;
    for (uint32_t i = 0; i < c->tracked_count; i++)
        bytes += copy_bytes(&c->tracked[i]);
    uint8_t *before = malloc(2 * bytes + 1), *want = before + bytes;
    KVF_ASSERT(before);
    copy_tracked(c, before, true);
    check_run(c, c->ref, ref, args, tasks, false);
    copy_tracked(c, want, true);
    copy_tracked(c, before, false);
    check_run(c, c->var, var, args, tasks, true);
    for (uint32_t i = 0; i < c->tracked_count; i++) {
        const check_tracked *t = &c->tracked[i];
        if (t->count)
            check_elements(c, t->name, t->data, want + at, t->dtype, t->count, t->absolute,
                           t->relative);
        else if (t->name)
            check_bits(c, t->name, t->data, want + at, t->bytes);
        at += copy_bytes(t);
    }
    free(before);
}

void check_bits(check *c, const char *what, const void *got, const void *want, size_t bytes)
{
    const uint8_t *a = got, *b = want;
    if (!bytes || !memcmp(a, b, bytes))
        return;
    size_t i = 0;
    while (a[i] == b[i])
        i++;
    check_fail(c, "%s: byte %zu is %02x, reference %02x", what, i, a[i], b[i]);
}

void check_elements(check *c, const char *what, const void *got, const void *want, kvf_dtype dtype,
                    size_t count, double absolute, double relative)
{
    const size_t width = kvf_dtype_bytes(dtype);
    for (size_t i = 0; i < count; i++) {
        if (memcmp((const uint8_t *)got + i * width, (const uint8_t *)want + i * width, width) == 0)
            continue;
        const double x = check_value(got, dtype, i), y = check_value(want, dtype, i);
        if (isnan(x) && isnan(y))
            continue;
        if (isinf(x) || isinf(y) ? x == y : fabs(x - y) <= absolute + relative * fabs(y))
            continue;
        check_fail(c, "%s[%zu] is %.9g, reference %.9g, off by %.3g, allowed %.3g", what, i, x, y,
                   fabs(x - y), absolute + relative * fabs(y));
        return;
    }
}
