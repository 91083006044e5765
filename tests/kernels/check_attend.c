/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels of attention against their references: attend, attend_step, merge, prefill, assemble,
 * csr_out, csr_in, compare.
 *
 * Tolerances. A sum of n products in fp32 is off by at most n * 2^-24 of the sum of their
 * magnitudes (twice that without fused multiply-add), which is at most |q| |k|. A logit is
 * therefore off by at most D = scale * 2 * head_dim * 2^-24 * |q| |k|. A shift of every logit by at
 * most D moves each weight by a factor within e^(+-2D), and an average of values v by at most
 * (e^(2D) - 1) * 2 max|v|; the sum over n tokens and the exponentials add (n + 16) * 2^-23 of
 * max|v|. As D grows the bound ends at 2 max|v|, which any average fulfils. The tensor cores of the
 * CUDA device take weights in the element type: rounding each by a factor within 1 +- e moves the
 * average by at most e max|v| more. Under a cap a logit moves no more than without, and the tangent
 * adds 6e-7 of it, which is less than D. Rows and tokens that must not count hold NaN, which any
 * use would spread. Spans are bit for bit. compare calls exp(): two good exponentials differ by an
 * ulp or two, so a recall of at most `heads` terms is held to 1e-14 of itself.
 */

#include "check_attend.h"

#include <math.h>
#include <string.h>

#include "check_rows.h"
#include "quantized.h"

bounds check_bounds(const kvf_shape *s, double q_norm, double k_norm, double v_max, float scale,
                    size_t tokens, double lost)
{
    bounds b;
    b.logit = fabs((double)scale) * (CUT * s->head_dim + lost) * q_norm * k_norm;
    double factor = 2.0 * expm1(fmin(2.0 * b.logit, 1.0)) + CUT * (double)(tokens + 16);
    b.out = fmin(factor, 2.0) * v_max;
    return b;
}

/* The loss of a query that meets quantized keys as two bf16 numbers, relative to itself. */
static double query_error(const check *c, const kvf_shape *s)
{
    return c->cuda && s->pages != KVF_PAGES_NATIVE ? 0x1p-17 : 0.0;
}

/* And what its values are made of, relative to the largest: of int4 weights multiply codes, up to
 * twice as large, and minima, of which a product of rests is left out. */
static double value_parts(const check *c, const kvf_shape *s)
{
    return c->cuda && s->pages == KVF_PAGES_K8V4 ? 4.0 : 1.0;
}

/* The loss of weights that multiply values as `words` numbers of the element type each, relative to
 * max |v|: the rounding of each word, and what is below the smallest fp16. */
static double weight_error(const check *c, kvf_dtype dtype, uint32_t words, size_t tokens)
{
    if (!c->cuda || dtype == KVF_FP32)
        return 0.0;
    const double unit = dtype == KVF_BF16 ? 0x1p-9 : 0x1p-12;
    return pow(unit, words) + (dtype == KVF_FP16 ? (double)tokens * 0x1p-25 : 0.0);
}

/* Two numbers that nearly agree may round to neighbours: one unit in the last place. */
static double dtype_epsilon(kvf_dtype dtype)
{
    return dtype == KVF_BF16 ? 0x1p-7 : dtype == KVF_FP16 ? 0x1p-10 : 0x1p-22;
}

static double dtype_tiny(kvf_dtype dtype)
{
    return dtype == KVF_FP16 ? 0x1p-24 : dtype == KVF_BF16 ? 0x1p-133 : 0x1p-126;
}

/* A page whose tokens that do not count are NaN. */
static void *make_page(check *c, const kvf_shape *s, uint32_t count, uint64_t skip, check_data data)
{
    uint8_t *page = check_in(c, kvf_page_bytes(s));
    const uint64_t live = kvf_live_bits(count, skip);
    check_fill(c, page, s->dtype, kvf_page_bytes(s) / kvf_dtype_bytes(s->dtype), data);
    for (uint32_t t = 0; t < s->page_size; t++)
        if (!(live >> t & 1))
            check_fill_nan(page + t * kvf_token_bytes(s), s->dtype, s->head_dim + kvf_value_dim(s));
    return page;
}

/* The same quantized. Scales of tokens that do not count are NaN. */
static void *make_quantized(check *c, const kvf_shape *s, uint32_t count, uint64_t skip,
                            check_data data)
{
    uint8_t *page = check_in(c, kvf_stored_page_bytes(s)), *exact = malloc(kvf_page_bytes(s));
    const uint64_t live = kvf_live_bits(count, skip);
    float x[KVF_HEAD_DIM_MAX];
    KVF_ASSERT(exact);
    check_fill(c, exact, s->dtype, kvf_page_bytes(s) / kvf_dtype_bytes(s->dtype), data);
    for (uint32_t t = 0; t < s->page_size; t++) {
        kvf_quantize_token(s, page, t, exact + t * kvf_token_bytes(s), x);
        if (live >> t & 1)
            continue;
        memset(kvf_quantized_key_scale(s, page, t), 0xff, 2);
        memset(kvf_quantized_value_scale(s, page, t), 0xff, kvf_quantized_scale_bytes(s));
    }
    free(exact);
    return page;
}

kvf_span check_span(check *c, const kvf_shape *s, bool is_quantized, check_data data)
{
    /* Bytes that are here already, said to be on their way. */
    kvf_span span = {.count = s->page_size, .quantized = is_quantized};
    const bool has_home = check_below(c, 4) == 0;
    if (check_below(c, 4) == 0)
        span.count = check_below(c, s->page_size + 1);
    switch (check_below(c, 8)) {
    case 0:
        span.skip = UINT64_MAX;
        break;
    case 1:
    case 2:
    case 3:
        span.skip = check_random(c) & check_random(c);
        break;
    case 4:
        span.skip = ~(UINT64_C(1) << check_below(c, s->page_size));
        break;
    default:
        break;
    }
    span.page = span.quantized ? make_quantized(c, s, span.count, span.skip, data)
                               : make_page(c, s, span.count, span.skip, data);
    span.home = has_home ? span.page : NULL;
    return span;
}

/* The spans of a list: where pages are quantized, exact ones before quantized ones. */
static void make_spans(check *c, const kvf_shape *s, kvf_span *spans, uint32_t count,
                       check_data data)
{
    uint32_t exact = count;
    if (s->pages != KVF_PAGES_NATIVE)
        exact = check_below(c, 2) ? check_below(c, count + 1) : 0;
    for (uint32_t i = 0; i < count; i++)
        spans[i] = check_span(c, s, i >= exact, data);
}

void check_span_bounds(const kvf_shape *s, const kvf_span *span, double *k_norm, double *v_max)
{
    for (uint32_t t = 0; span->quantized && t < s->page_size; t++) {
        float x[KVF_HEAD_DIM_MAX];
        kvf_dequantize_key(s, span->page, t, x);
        *k_norm = fmax(*k_norm, check_norm(x, KVF_FP32, 1, s->head_dim));
        kvf_dequantize_value(s, span->page, t, x);
        for (uint32_t d = 0; d < kvf_value_dim(s); d++)
            *v_max = isfinite(x[d]) ? fmax(*v_max, fabs((double)x[d])) : *v_max;
    }
    for (uint32_t t = 0; !span->quantized && t < s->page_size; t++) {
        const void *value = kvf_page_value(s, span->page, t);
        *k_norm =
            fmax(*k_norm, check_norm(kvf_page_key(s, span->page, t), s->dtype, 1, s->head_dim));
        for (uint32_t d = 0; d < kvf_value_dim(s); d++) {
            const double v = fabs(check_value(value, s->dtype, d));
            *v_max = isfinite(v) ? fmax(*v_max, v) : *v_max;
        }
    }
}

/* Queries and spans of all lists. Returns what partial results over `tokens` may be off by. */
static bounds make_lists(check *c, kvf_attend_args *a, size_t tokens, check_data data)
{
    const kvf_shape *s = &a->shape;
    const size_t rows = (size_t)a->lists * a->group, all = (size_t)a->lists * a->spans_max;
    void *q = check_in(c, rows * kvf_key_bytes(s));
    kvf_span *spans = check_in(c, all * sizeof *spans);
    double k_norm = 0.0, v_max = 0.0;
    check_fill(c, q, s->dtype, rows * s->head_dim, data);
    for (uint32_t i = 0; i < a->lists; i++)
        make_spans(c, s, spans + (size_t)i * a->spans_max, a->spans_max, data);
    for (size_t i = 0; i < all; i++)
        check_span_bounds(s, &spans[i], &k_norm, &v_max);
    a->q = q;
    a->spans = spans;
    a->span_count = check_counts(c, a->lists, a->spans_max);
    v_max *= value_parts(c, s);
    bounds b = check_bounds(s, check_norm(q, s->dtype, rows, s->head_dim), k_norm, v_max, a->scale,
                            tokens, query_error(c, s));
    b.out += weight_error(c, s->dtype, 2, tokens) * v_max;
    return b;
}

/* Averages of values, and the logarithms of sums of exponentials of `tokens` logits. */
static void *out_near(check *c, const kvf_shape *s, kvf_dtype dtype, size_t rows, const bounds *b)
{
    return check_near(c, "out", dtype, rows * kvf_value_dim(s), b->out + dtype_tiny(dtype),
                      dtype_epsilon(dtype));
}

static float *lse_near(check *c, size_t rows, const bounds *b, size_t tokens)
{
    return check_near(c, "lse", KVF_FP32, rows, b->logit + (double)(tokens + 16) * 0x1p-23,
                      0x1p-22);
}

/* `tokens` of a split at least: 0 for a few spans. */
static void attend_case(check *c, const kvf_shape *keys, uint32_t group, uint32_t tokens_min,
                        check_data data)
{
    kvf_attend_args a = {.group = group};
    const kvf_shape *shape = &a.shape;
    if (!check_begin(c))
        return;
    a.shape = check_values(c, keys);
    a.pass = (kvf_pass)check_below(c, 3);
    a.lists = 1 + check_below(c, 2);
    a.spans_max = 1 + check_below(c, 5);
    a.split = 1 + check_below(c, 3);
    if (tokens_min) {
        a.split = kvf_div_ceil_u32(tokens_min, shape->page_size);
        a.spans_max = a.split + check_below(c, a.split);
    }
    a.scale = 1.0f / sqrtf((float)shape->head_dim);
    a.cap = check_cap(c);
    a.sub = check_subgroup(c, group);
    check_describe(c, "%s G=%u+%u/%u pass=%d lists=%u spans=%u split=%u data=%d",
                   check_shape_text(shape), a.sub.first, a.sub.count, group, (int)a.pass, a.lists,
                   a.spans_max, a.split, (int)data);
    const size_t tokens = (size_t)a.split * shape->page_size;
    const size_t parts = (size_t)a.lists * kvf_div_ceil_u32(a.spans_max, a.split) * group;
    const bounds b = make_lists(c, &a, tokens, data);
    a.partial_o =
        check_near(c, "partial_o", KVF_FP32, parts * kvf_value_dim(shape), b.out + 0x1p-126, 0.0);
    a.partial_lse = lse_near(c, parts, &b, tokens);
    CHECK_BOTH(c, attend, &a);
}

/* Bytes of the page of a span. */
static size_t span_bytes(const kvf_shape *s, const kvf_span *span)
{
    return span->quantized ? kvf_stored_page_bytes(s) : kvf_page_bytes(s);
}

/* Some of the spans get a home, where pages are quantized only those that are. Nothing good is in
 * the place of a page that is on its way. */
static void send_home(check *c, const kvf_attend_args *a)
{
    const kvf_shape *s = &a->shape;
    const size_t count = (size_t)a->lists * a->spans_max;
    const size_t room = kvf_round_up(kvf_page_bytes(s), 64); /* quantized ones are smaller */
    kvf_span *spans = (kvf_span *)(uintptr_t)a->spans;
    size_t sent = 0;
    for (size_t i = 0; i < count; i++) {
        if (s->pages != KVF_PAGES_NATIVE && !spans[i].quantized)
            spans[i].home = NULL;
        sent += spans[i].home != NULL;
    }
    char *pages = check_changed(c, "pages", sent * (room + 64)); /* with a guard after each */
    check_fill_nan(pages, KVF_BF16, sent * (room + 64) / 2);
    for (size_t i = 0; i < count; i++)
        if (spans[i].home)
            spans[i].page = pages + --sent * (room + 64);
}

/* Pages that were at home are here. */
static void expect_brought(check *c, const kvf_attend_step_args *a)
{
    const kvf_attend_args *t = &a->attend;
    for (uint32_t l = 0; l < t->lists; l++) {
        for (uint32_t i = 0; i < t->span_count[l]; i++) {
            const kvf_span *span = &t->spans[(size_t)l * t->spans_max + i];
            if (span->home)
                check_bits(c, "page", span->page, span->home, span_bytes(&t->shape, span));
        }
        if (a->arrived[l] != 0)
            check_fail(c, "list %u still counts %u blocks", l, a->arrived[l]);
    }
}

static void step_case(check *c, const kvf_shape *keys, uint32_t group, uint32_t split_tokens,
                      check_data data)
{
    kvf_attend_step_args a = {.attend = {.group = group}};
    kvf_attend_args *t = &a.attend;
    const kvf_shape *shape = &t->shape;
    if (!check_begin(c))
        return;
    t->shape = check_values(c, keys);
    t->lists = 1 + check_below(c, 3);
    t->split = kvf_max_u32(1, split_tokens / shape->page_size);
    t->spans_max = 1 + check_below(c, kvf_min_u32(5 * t->split, 400));
    t->scale = 1.0f / sqrtf((float)shape->head_dim);
    t->cap = check_cap(c);
    a.out_dtype = check_below(c, 2) ? shape->dtype : KVF_FP32;
    check_describe(c, "%s to %s G=%u lists=%u spans=%u split=%u data=%d", check_shape_text(shape),
                   check_dtype_name(a.out_dtype), group, t->lists, t->spans_max, t->split,
                   (int)data);
    const size_t rows = (size_t)t->lists * group, tokens = (size_t)t->spans_max * shape->page_size;
    const size_t parts = rows * kvf_div_ceil_u32(t->spans_max, t->split);
    const bounds b = make_lists(c, t, tokens, data);
    a.arrived = check_changed(c, "arrived", t->lists * sizeof *a.arrived);
    memset(a.arrived, 0, t->lists * sizeof *a.arrived);
    send_home(c, t);
    a.out = out_near(c, shape, a.out_dtype, rows, &b);
    a.lse = lse_near(c, rows, &b, tokens);
    t->partial_o = check_changed(c, NULL, parts * kvf_value_dim(shape) * sizeof *t->partial_o);
    t->partial_lse = check_changed(c, NULL, parts * sizeof *t->partial_lse);
    CHECK_BOTH(c, attend_step, &a);
    expect_brought(c, &a);
}

/* A GPU dequantizes some sizes of heads, in bf16. */
static kvf_shape quantized_shape(const check *c, uint32_t i)
{
#define SIZE(d) d,
    static const uint32_t sizes[] = {KVF_GPU_QUANTIZED_DIMS(SIZE)};
#undef SIZE
    const uint32_t count = c->cuda ? sizeof sizes / sizeof *sizes : check_dims(c);
    return (kvf_shape){c->cuda ? KVF_BF16 : (kvf_dtype)(i % 3),
                       c->cuda ? sizes[i % count] : check_head_dims[i % count],
                       check_page_sizes[i / count % CHECK_PAGE_SIZES],
                       i / (count * CHECK_PAGE_SIZES) % 2 ? KVF_PAGES_K8V8 : KVF_PAGES_K8V4, 0};
}

void check_attend_step(check *c)
{
    for (uint32_t d = 0; d < check_dims(c); d++)
        for (uint32_t p = d % 2; p < CHECK_PAGE_SIZES; p += 2) {
            const kvf_shape s = check_shape(c, d + p / 2, d, p);
            const check_data data = p % 3 ? DATA_NORMAL : (check_data)((d + p) % DATA_COUNT);
            step_case(c, &s, check_groups[(d * 5 + p) % CHECK_GROUPS], 32, data);
        }
    for (uint32_t i = 0; i < 6; i++) { /* every buffer is used several times */
        const kvf_shape s = check_shape(c, i, i, i);
        step_case(c, &s, 1 + i * 5 % 16, 512, DATA_NORMAL);
    }
    for (uint32_t i = 0; i < 10; i++) {
        const kvf_shape s = quantized_shape(c, 3 * i);
        step_case(c, &s, check_groups[i * 5 % CHECK_GROUPS], i % 4 ? 64 : 512, DATA_NORMAL);
    }
}

void check_attend(check *c)
{
    for (uint32_t d = 0; d < check_dims(c); d++)
        for (uint32_t p = 0; p < CHECK_PAGE_SIZES; p++)
            for (uint32_t i = 0; i < CHECK_GROUPS; i++) {
                const uint32_t group = check_groups[i];
                /* every dtype with every head_dim and page size; every group with every head_dim */
                const kvf_shape s = check_shape(c, p + group, d, p);
                check_data data =
                    group % 4 ? DATA_NORMAL : (check_data)((d + p + group) % DATA_COUNT);
                attend_case(c, &s, group, 0, data);
            }
    for (uint32_t i = 0; i < 3 * DATA_COUNT; i++) {
        kvf_shape s = {(kvf_dtype)(i % 3), 64, 32, KVF_PAGES_NATIVE, 0};
        attend_case(c, &s, 1 + i % 5, 0, (check_data)(i / 3));
    }
    for (uint32_t i = 0; i < (c->cuda ? 4 : 4 * check_dims(c)) * CHECK_PAGE_SIZES; i++) {
        const kvf_shape s = quantized_shape(c, i);
        attend_case(c, &s, check_groups[i % CHECK_GROUPS],
                    i % 5     ? 0
                    : c->cuda ? 700
                              : 300,
                    check_data_of(i));
    }
    /* Every buffer of a kernel is used several times. */
    for (uint32_t i = 0; i < 3 * check_dims(c); i++) {
        const kvf_shape s = check_shape(c, i, i / 3, i);
        attend_case(c, &s, 1 + i * 5 % 16, 700, i % 5 ? DATA_NORMAL : DATA_LARGE);
    }
}

const float *check_sinks(check *c, uint32_t heads)
{
    float *sinks = check_in(c, heads * sizeof *sinks);
    for (uint32_t h = 0; h < heads; h++)
        sinks[h] = check_below(c, 4) == 0 ? -INFINITY
                                          : (float)(check_normal(c) * (check_below(c, 5) ? 3 : 90));
    return check_below(c, 3) ? NULL : sinks;
}

static void merge_case(check *c, const kvf_shape *keys)
{
    kvf_merge_args a = {.lists = 0};
    const kvf_shape *shape = &a.shape;
    if (!check_begin(c))
        return;
    a.shape = check_values(c, keys);
    a.lists = 1 + check_below(c, 3);
    a.group = check_groups[check_below(c, CHECK_GROUPS)];
    a.splits_max = 1 + check_below(c, 9);
    a.split = 1 + check_below(c, 4);
    check_describe(c, "%s G=%u lists=%u splits=%u", check_shape_text(shape), a.group, a.lists,
                   a.splits_max);
    const size_t rows = (size_t)a.lists * a.group, parts = rows * a.splits_max;
    uint32_t *counts = check_in(c, a.lists * sizeof *counts);
    float *o = check_in(c, parts * kvf_value_dim(shape) * sizeof *o);
    float *lse = check_in(c, parts * sizeof *lse);
    for (uint32_t i = 0; i < a.lists; i++)
        counts[i] = check_below(c, a.splits_max * a.split + 1);
    check_fill(c, o, KVF_FP32, parts * kvf_value_dim(shape), DATA_NORMAL);
    for (size_t i = 0; i < parts; i++) {
        lse[i] = (float)(check_normal(c) * (check_below(c, 4) ? 3.0 : 1e4));
        if (check_below(c, 4) == 0) {
            lse[i] = -INFINITY;
            check_fill_nan(o + i * kvf_value_dim(shape), KVF_FP32, kvf_value_dim(shape));
        }
    }
    a.span_count = counts;
    a.partial_o = o;
    a.partial_lse = lse;
    a.heads = a.group * (a.lists % 2 ? a.lists : a.lists / 2);
    a.sinks = check_sinks(c, a.heads);
    /* lse - top is rounded before the exponential: |lse| up to 5e4, in units of ln 2 */
    const bounds b = {.out = 12.0 * 5e4 * 0x1p-23};
    a.out = out_near(c, shape, shape->dtype, rows, &b);
    a.lse = check_near(c, "lse", KVF_FP32, rows, 1e-5, 0x1p-22);
    if (check_below(c, 4) == 0)
        a.lse = NULL; /* and nothing is written there */
    CHECK_BOTH(c, merge, &a);
}

void check_merge(check *c)
{
    for (uint32_t i = 0; i < 300; i++)
        merge_case(c, &(kvf_shape){(kvf_dtype)(i % 3), check_head_dims[i / 3 % check_dims(c)], 32,
                                   KVF_PAGES_NATIVE, 0});
}

/* No query of the launch attends to a token of its run of KVF_PREFILL_KEYS. */
static bool is_unread(const kvf_prefill_kernel_args *a, uint32_t token)
{
    const uint32_t first = token / KVF_PREFILL_KEYS * KVF_PREFILL_KEYS;
    return a->window && first >= a->sink && first + KVF_PREFILL_KEYS - 1 + a->window <= a->base;
}

static void prefill_case(check *c, const kvf_prefill_kernel_args *given, check_data data)
{
    kvf_prefill_kernel_args a = *given;
    const kvf_shape *shape = &a.shape;
    const uint32_t group = a.group, tokens = a.tokens, base = a.base;
    if (!check_begin(c))
        return;
    a.shape = check_values(c, &given->shape);
    a.kv_heads = given->kv_heads ? given->kv_heads : 1 + check_below(c, 2);
    a.scale = 1.0f / sqrtf((float)shape->head_dim);
    a.cap = check_cap(c);
    a.q_dtype = a.out_dtype = shape->dtype;
    if (check_below(c, 3) == 0)
        a.out_dtype = KVF_FP32;
    if (a.out_dtype == KVF_FP32 && check_below(c, 2))
        a.q_dtype = KVF_FP32;
    check_describe(c, "%s q=%s out=%s G=%u heads=%u tokens=%u base=%u sink=%u window=%u data=%d",
                   check_shape_text(shape), check_dtype_name(a.q_dtype),
                   check_dtype_name(a.out_dtype), group, a.kv_heads, tokens, base, a.sink, a.window,
                   (int)data);
    const size_t rows = (size_t)tokens * a.kv_heads * group;
    const uint32_t pages = kvf_div_ceil_u32(base + tokens, shape->page_size);
    const size_t token = shape->head_dim + kvf_value_dim(shape);
    const size_t elements = shape->page_size * token * a.kv_heads;
    const void **blocks = check_in(c, pages * sizeof *blocks);
    void *q = check_in(c, rows * kvf_key_bytes(shape));
    double k_norm = 0.0, v_max = 0.0;
    check_fill(c, q, shape->dtype, rows * shape->head_dim, data);
    for (uint32_t b = 0; b < pages; b++) {
        uint8_t *block = check_in(c, a.kv_heads * kvf_page_bytes(shape));
        blocks[b] = block;
        check_fill(c, block, shape->dtype, elements, data);
        k_norm = fmax(k_norm, check_norm(block, shape->dtype, (size_t)shape->page_size * a.kv_heads,
                                         (uint32_t)token));
        for (size_t k = 0; k < elements; k++)
            v_max = fmax(v_max, fabs(check_value(block, shape->dtype, k)));
        for (uint32_t t = 0; t < shape->page_size; t++)
            for (uint32_t h = 0; h < a.kv_heads; h++)
                if (b * shape->page_size + t >= base + tokens ||
                    is_unread(&a, b * shape->page_size + t))
                    check_fill_nan(block + h * kvf_page_bytes(shape) + t * kvf_token_bytes(shape),
                                   shape->dtype, (uint32_t)token);
    }
    a.q = a.q_dtype == shape->dtype ? q : check_widen(c, q, shape->dtype, rows * shape->head_dim);
    a.blocks = blocks;
    a.sinks = check_sinks(c, a.kv_heads * group);
    bounds b = check_bounds(shape, check_norm(q, shape->dtype, rows, shape->head_dim), k_norm,
                            v_max, a.scale, base + tokens, 0.0);
    b.out += weight_error(c, shape->dtype, 1, base + tokens) * v_max;
    a.out = out_near(c, shape, a.out_dtype, rows, &b);
    a.lse = lse_near(c, rows, &b, base + tokens);
    CHECK_BOTH(c, prefill, &a);
}

void check_prefill(check *c)
{
    static const uint32_t tokens[] = {1, 5, 47, 48, 49, 100}, bases[] = {0, 1, 37, 64, 150};
    for (uint32_t i = 0; i < 60; i++) {
        kvf_prefill_kernel_args a = {.shape = check_shape(c, i, i / 3, i % 4),
                                     .group = check_groups[i * 7 % CHECK_GROUPS],
                                     .base = bases[i / 3 % 5]};
        a.tokens = a.group > 6 ? tokens[i % 3] : tokens[i % 6];
        prefill_case(c, &a, check_data_of(i));
    }
    /* Windows: of one token, within a tile, over tiles, as long as all; none, part, much of a sink.
     */
    static const uint32_t windows[] = {1, 2, 33, 64, 65, 150, 1u << 20};
    static const uint32_t sinks[] = {0, 1, 64, 70, 128, 1000}, far[] = {0, 40, 150, 333, 448};
    for (uint32_t i = 0; i < 60; i++) {
        kvf_prefill_kernel_args a = {.shape = check_shape(c, i, i / 3, i % 4),
                                     .group = check_groups[i * 7 % CHECK_GROUPS],
                                     .base = far[i / 3 % 5],
                                     .window = windows[i % 7],
                                     .sink = sinks[i / 5 % 6]};
        a.tokens = a.group > 6 ? tokens[i % 3] : tokens[i % 6];
        prefill_case(c, &a, check_data_of(i));
    }
    /* So many heads that a GPU has blocks of four warps: whole tiles of keys, and a part of one. */
    for (uint32_t i = 0; i < 3; i++) {
        const bool is_windowed = i == 1;
        kvf_prefill_kernel_args a = {.shape = {is_windowed ? KVF_FP16 : KVF_BF16, 64 * (i + 1),
                                               is_windowed ? 32 : 64, KVF_PAGES_NATIVE, 0},
                                     .kv_heads = 64,
                                     .group = 8,
                                     .tokens = i == 2 ? 9 : 17,
                                     .base = is_windowed ? 200 : 75,
                                     .window = is_windowed ? 66 : 0};
        prefill_case(c, &a, DATA_NORMAL);
    }
}

/* ---- lists of pages ---- */

/* Ascending pages of every list and their numbers, and a slot and a miss for each. */
static void make_ids(check *c, const check_rows *w, kvf_choices *a)
{
    const uint32_t lists = w->rows * w->p.lists;
    const size_t all = (size_t)lists * a->ids_max;
    int32_t *ids = check_in(c, all * sizeof *ids), *slots = check_in(c, all * sizeof *slots);
    uint32_t *missed = check_in(c, all * sizeof *missed);
    uint32_t *count = check_in(c, lists * sizeof *count);
    for (size_t i = 0; i < all; i++) {
        slots[i] = (int32_t)check_below(c, w->p.slots);
        missed[i] = check_below(c, 3);
    }
    for (uint32_t l = 0; l < lists; l++)
        count[l] = check_subset(c, kvf_row_sealed_pages(&w->p, &w->row[l / w->p.lists]), a->ids_max,
                                ids + (size_t)l * a->ids_max);
    a->ids = ids;
    a->id_count = count;
    a->slot_of_id = slots;
    a->missed = missed;
}

static void assemble_case(check *c, uint32_t rows, uint32_t blocks_max)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "assemble", .rows = rows, .blocks_max = blocks_max,
                    .without_slots = check_below(c, 3) == 0, .pages = (kvf_pages)check_below(c, 3),
                    .pool_blocks = 20))
        return;
    const uint32_t lists = w.rows * w.p.lists;
    kvf_assemble_args a = {.arrival = (kvf_arrival)check_below(c, 3),
                           .choices = {.paging = w.p,
                                       .rows = w.rows,
                                       .ids_max = 1 + check_below(c, w.p.pages_max),
                                       .row = w.row,
                                       .counters = w.counters}};
    const uint32_t ids_max = a.choices.ids_max;
    a.spans_max = w.p.static_pages + w.p.ring_blocks * w.p.block_pages + ids_max;
    make_ids(c, &w, &a.choices);
    if (check_below(c, 2))
        a.masks = check_noise_in(c, (size_t)lists * ids_max * sizeof *a.masks);
    a.spans = check_changed(c, "spans", (size_t)lists * a.spans_max * sizeof *a.spans);
    a.span_count = check_changed(c, "span_count", lists * sizeof *a.span_count);
    check_track(c, "counters", w.counters, sizeof *w.counters);
    for (uint32_t b = 0; b < w.rows; b++)
        check_track(c, "chosen_at", w.row[b].chosen_at,
                    (size_t)w.p.kv_heads * w.p.pages_max * sizeof *w.row[b].chosen_at);
    const uint64_t before = w.counters->tokens_attended;
    uint64_t tokens = 0;
    CHECK_BOTH(c, assemble, &a);
    for (uint32_t l = 0; l < lists; l++)
        for (uint32_t i = 0; i < a.span_count[l]; i++) {
            const kvf_span *s = &a.spans[(size_t)l * a.spans_max + i];
            tokens += (uint64_t)__builtin_popcountll(kvf_live_bits(s->count, s->skip));
        }
    if (w.counters->tokens_attended != before + tokens)
        check_fail(c, "%llu tokens in spans, %llu counted", (unsigned long long)tokens,
                   (unsigned long long)(w.counters->tokens_attended - before));
}

static void csr_case(check *c, uint32_t rows)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "csr", .rows = rows, .blocks_max = 1 + check_below(c, 50),
                    .by_kv_head = true, .pages = (kvf_pages)check_below(c, 3), .pool_blocks = 8))
        return;
    const uint32_t lists = w.rows * w.p.lists;
    kvf_choices ids = {.ids_max = 1 + check_below(c, 30)};
    kvf_csr_args a = {.paging = w.p, .rows = w.rows, .ids_max = ids.ids_max, .row = w.row};
    make_ids(c, &w, &ids);
    a.ids = ids.ids;
    a.id_count = ids.id_count;
    a.spans_max = w.p.pages_max + 1;
    a.indptr = check_changed(c, "indptr", (lists + 1) * sizeof *a.indptr);
    a.indices = check_changed(c, "indices", (size_t)lists * w.p.pages_max * sizeof *a.indices);
    a.last_page_len = check_changed(c, "last_page_len", lists * sizeof *a.last_page_len);
    a.spans = check_changed(c, "spans", (size_t)lists * a.spans_max * sizeof *a.spans);
    a.span_count = check_changed(c, "span_count", lists * sizeof *a.span_count);
    CHECK_BOTH(c, csr_out, &a);
    for (uint32_t l = 0; l < lists; l++)
        for (int32_t i = a.indptr[l] + 1; i < a.indptr[l + 1]; i++)
            if (a.indices[i] <= a.indices[i - 1])
                check_fail(c, "list %u does not ascend at %d", l, i);
    for (uint32_t l = 0; l < lists; l++) /* a caller may attend less of the last page */
        a.last_page_len[l] -= (int32_t)check_below(c, (uint32_t)a.last_page_len[l] + 1);
    CHECK_BOTH(c, csr_in, &a);
}

static void compare_case(check *c, uint32_t heads)
{
    kvf_compare_args a = {.heads = heads};
    if (!check_begin(c))
        return;
    a.shape.dtype = (kvf_dtype)check_below(c, 3);
    a.shape.head_dim = check_head_dims[check_below(c, check_dims(c))];
    a.shape = check_values(c, &a.shape);
    check_describe(c, "compare, %s heads=%u", check_shape_text(&a.shape), heads);
    const size_t count = (size_t)heads * kvf_value_dim(&a.shape);
    void *out = check_in(c, count * kvf_dtype_bytes(a.shape.dtype));
    void *dense = check_in(c, count * kvf_dtype_bytes(a.shape.dtype));
    float *lse = check_in(c, heads * sizeof *lse), *dense_lse = check_in(c, heads * sizeof *lse);
    check_fill(c, out, a.shape.dtype, count, DATA_NORMAL);
    check_fill(c, dense, a.shape.dtype, count, DATA_NORMAL);
    if (check_below(c, 4) == 0)
        kvf_element_set(out, a.shape.dtype, check_below(c, (uint32_t)count), NAN);
    for (uint32_t h = 0; h < heads; h++) {
        dense_lse[h] = (float)check_normal(c) * 10.0f;
        lse[h] = check_below(c, 9) ? dense_lse[h] - fabsf((float)check_normal(c)) : -INFINITY;
    }
    a.out = out;
    a.dense = dense;
    a.lse = lse;
    a.dense_lse = dense_lse;
    kvf_layer_counters *got[2];
    for (int i = 0; i < 2; i++) {
        got[i] = check_put_out(c, &(kvf_layer_counters){.recall_sum = 2.5, .verified = 3},
                               sizeof *got[i]);
        a.counters = got[i];
        CHECK_RUN(c, i ? c->var : c->ref, compare, &a, i);
    }
    if (fabs(got[1]->recall_sum - got[0]->recall_sum) > 1e-14 * got[0]->recall_sum)
        check_fail(c, "recall %.17g, reference %.17g", got[1]->recall_sum, got[0]->recall_sum);
    got[1]->recall_sum = got[0]->recall_sum;
    check_bits(c, "counters", got[1], got[0], sizeof *got[0]);
}

void check_spans(check *c)
{
    for (uint32_t i = 0; i < 20; i++)
        assemble_case(c, 1 + i % 4, i % 7 == 6 ? 700 : 1 + 3 * i);
    for (uint32_t i = 0; i < 16; i++)
        csr_case(c, i % 4 == 3 ? 20 : 1 + i % 3);
    for (uint32_t i = 0; i < 10; i++)
        compare_case(c, i ? 4 * i : 300);
}
