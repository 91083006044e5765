/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention kernels against their references: attend, attend_step, merge, prefill, observe.
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
 * use would spread.
 */

#include <math.h>
#include <string.h>

#include "check_support.h"
#include "quantized.h"

/* The loss of a sum per term: tensor cores add 16 products and what was there, and cut off what is
 * below 2^-23 of the largest of the 17. */
#define CUT (17.0 / 16.0 * 0x1p-23)

typedef struct bounds {
    double logit; /* D */
    double out;
} bounds;

/* `lost`: of a query, relative to it, before it meets a key. */
static bounds bounds_of(const kvf_shape *s, double q_norm, double k_norm, double v_max, float scale,
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

static kvf_span make_span(check *c, const kvf_shape *s, bool is_quantized, check_data data)
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
        spans[i] = make_span(c, s, i >= exact, data);
}

/* Norm of the largest key of a span, and magnitude of the largest value. */
static void span_bounds(const kvf_shape *s, const kvf_span *span, double *k_norm, double *v_max)
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
        span_bounds(s, &spans[i], &k_norm, &v_max);
    a->q = q;
    a->spans = spans;
    a->span_count = check_counts(c, a->lists, a->spans_max);
    v_max *= value_parts(c, s);
    bounds b = bounds_of(s, check_norm(q, s->dtype, rows, s->head_dim), k_norm, v_max, a->scale,
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

/* Sinks of a third of all launches; some heads have none, some one that outweighs all. */
static const float *make_sinks(check *c, uint32_t heads)
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
    a.sinks = make_sinks(c, a.heads);
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
    a.sinks = make_sinks(c, a.kv_heads * group);
    bounds b = bounds_of(shape, check_norm(q, shape->dtype, rows, shape->head_dim), k_norm, v_max,
                         a.scale, base + tokens, 0.0);
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

typedef struct observe_buffers {
    float *query_max;
    float *query_sum;
    float *score;
} observe_buffers;

static observe_buffers observe_run(check *c, kvf_observe_args *a, const kvf_kernels *k, bool back)
{
    const size_t chunks = kvf_div_ceil_u32(a->spans_max, KVF_OBSERVE_SPANS);
    const size_t stats = a->kv_heads * chunks * a->group * a->window;
    const size_t scores = (size_t)a->kv_heads * a->spans_max * a->shape.page_size;
    observe_buffers b;
    b.query_max = a->query_max = check_out(c, stats * sizeof(float));
    b.query_sum = a->query_sum = check_out(c, stats * sizeof(float));
    b.score = a->score = check_out(c, scores * sizeof(float));
    for (size_t i = 0; a->accumulates && i < scores; i++)
        b.score[i] = (float)(i % 7);
    CHECK_RUN(c, k, observe_stats, a, back);
    CHECK_RUN(c, k, observe_score, a, back);
    return b;
}

static void observe_compare(check *c, const kvf_observe_args *a, const observe_buffers *want,
                            const observe_buffers *got, const bounds *b)
{
    const size_t stats = (size_t)a->kv_heads * kvf_div_ceil_u32(a->spans_max, KVF_OBSERVE_SPANS) *
                         a->group * a->window;
    const uint32_t heads = kvf_observe_heads(a);
    const double largest = b->logit / (CUT * a->shape.head_dim); /* bounds_of */
    const double logit = b->logit;
    /* Row maxima are stored in fp32: their rounding is one more error of a logit. */
    const double unit = a->group_reduce == KVF_GROUP_SUM ? heads : 1.0;
    double all = 0.0;
    for (uint32_t w = 0; w < a->window; w++)
        all += (double)kvf_observe_weight(a, w);
    all *= unit;
    const size_t count = (size_t)a->kv_heads * a->spans_max * a->shape.page_size;
    const double sums = 1e-5; /* also of what is added to */
    if (a->is_raw) {
        const double product = logit / (double)a->scale;
        check_elements(c, "score", got->score, want->score, KVF_FP32, count,
                       all * product + all * largest / (double)a->scale * 0x1p-20, sums);
        return;
    }
    check_elements(c, "query_max", got->query_max, want->query_max, KVF_FP32, stats, logit,
                   0x1p-22);
    if (logit < 0.01)
        check_elements(c, "query_sum", got->query_sum, want->query_sum, KVF_FP32, stats, 0.0,
                       4.0 * logit + 1e-4);
    const double top = b->logit / 0x1p-22;
    const double each = 2.0 * b->out;
    check_elements(c, "score", got->score, want->score, KVF_FP32, count,
                   fmin(each + top * 0x1p-23, 1.0) * all, sums);
}

/* Outputs that a launch of scores may ask for beyond the static set's; a third of them nothing. */
static void observe_extras(check *c, kvf_observe_args *a)
{
    if (check_below(c, 3) == 0)
        return;
    a->group_first = check_below(c, a->group);
    a->group_count = check_below(c, a->group - a->group_first + 1);
    if (a->group_count == 0)
        a->group_first = 0;
    a->ring_slots = check_below(c, 2) ? a->window + check_below(c, 5) : 0;
    a->ring_first = a->ring_slots ? check_below(c, a->ring_slots) : 0;
    a->window_total = check_below(c, 2) ? a->window + check_below(c, 9) : 0;
    a->window_first = a->window_total ? check_below(c, a->window_total - a->window + 1) : 0;
    a->is_weighted = check_below(c, 2);
    a->is_raw = check_below(c, 3) == 0;
    a->accumulates = check_below(c, 2);
    if (check_below(c, 3) == 0)
        a->token_first = check_below(c, a->spans_max * a->shape.page_size);
}

static void observe_case(check *c, const kvf_shape *keys, uint32_t spans_max, check_data data)
{
    kvf_observe_args a = {.spans_max = spans_max};
    const kvf_shape *shape = &a.shape;
    if (!check_begin(c))
        return;
    a.shape = check_values(c, keys);
    a.kv_heads = 1 + check_below(c, 2);
    a.group = check_groups[check_below(c, spans_max > 10 ? 4 : CHECK_GROUPS)];
    a.window =
        1 + check_below(c, kvf_min_u32(spans_max > 10 ? 8 : 24, kvf_observe_window_max(a.group)));
    a.window_mean = check_below(c, 2);
    a.group_reduce = (kvf_group_reduce)check_below(c, 3);
    a.scale = 1.0f / sqrtf((float)shape->head_dim);
    a.cap = check_cap(c);
    observe_extras(c, &a);
    check_describe(c,
                   "%s G=%u+%u/%u W=%u of %u heads=%u spans=%u reduce=%d data=%d mean=%u "
                   "weighted=%u raw=%u adds=%u ring=%u",
                   check_shape_text(shape), a.group_first, a.group_count, a.group, a.window,
                   a.window_total, a.kv_heads, spans_max, (int)a.group_reduce, (int)data,
                   a.window_mean, a.is_weighted, a.is_raw, a.accumulates, a.ring_slots);
    const size_t rows = (size_t)kvf_max_u32(a.window, a.ring_slots) * a.kv_heads * a.group;
    void *q = check_in(c, rows * kvf_key_bytes(shape));
    kvf_span *spans = check_in(c, (size_t)a.kv_heads * spans_max * sizeof *spans);
    uint32_t *index = check_in(c, (size_t)a.kv_heads * spans_max * sizeof *index);
    uint32_t *limit = check_in(c, a.window * sizeof *limit);
    check_fill(c, q, shape->dtype, rows * shape->head_dim, data);
    double k_norm = 0.0, unused = 0.0;
    for (size_t i = 0; i < (size_t)a.kv_heads * spans_max; i++) {
        spans[i] = make_span(c, shape, false, data);
        index[i] = (uint32_t)(i % spans_max) * shape->page_size;
        span_bounds(shape, &spans[i], &k_norm, &unused);
    }
    for (uint32_t w = 0; w < a.window; w++)
        limit[w] = check_below(c, 3) ? spans_max * shape->page_size
                                     : check_below(c, spans_max * shape->page_size);
    a.q = q;
    a.limit = a.ring_slots && check_below(c, 2) ? NULL : limit;
    a.limit_first = check_below(c, spans_max * shape->page_size);
    a.spans = spans;
    a.span_index = index;
    a.span_count = check_counts(c, a.kv_heads, spans_max);
    a.sinks = make_sinks(c, a.kv_heads * a.group);
    observe_buffers want = observe_run(c, &a, c->ref, false);
    observe_buffers got = observe_run(c, &a, c->var, true);
    bounds b = bounds_of(shape, check_norm(q, shape->dtype, rows, shape->head_dim), k_norm, 1.0,
                         a.scale, (size_t)KVF_OBSERVE_SPANS * shape->page_size, 0.0);
    observe_compare(c, &a, &want, &got, &b);
}

void check_observe(check *c)
{
    for (uint32_t i = 0; i < 60; i++) {
        const kvf_shape s = check_shape(c, i, i / 3, i);
        observe_case(c, &s, 1 + i % 4, check_data_of(i));
    }
    for (uint32_t i = 0; i < 3; i++) /* more than one chunk */
        observe_case(c, &(kvf_shape){(kvf_dtype)i, 64, 8, KVF_PAGES_NATIVE, 0}, 130, DATA_NORMAL);
}
