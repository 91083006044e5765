/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels that look at a prompt and at a static set against their references: observe, pool,
 * profile, cover, pack.
 *
 * Bounds of observe are those of check_attend.c. Pooling by maximum, cover and pack: bit for bit.
 * Averages of n terms in fp32 are off by at most n * 2^-24 of the sum of magnitudes. The meaning of
 * cover and pack is checked without the reference as well: cover has every token once, pack leaves
 * bits that say exactly what its store holds.
 *
 * A profile is compared with the same figures from a sorted row, too. A sum of n terms in fp32,
 * over 64 partial sums at least, is off by at most r = (n / 64 + 24) * 2^-24 of itself. The sum
 * divides every share, so an entropy H is off by (1 + H) r and by what its own sum and logarithms
 * add; a variance v, whose terms are squares of differences from 1 / n, by 2 r (v + 2 / n^2) and
 * its own sum.
 */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check_attend.h"
#include "check_rows.h"

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
    const double largest = b->logit / (CUT * a->shape.head_dim); /* check_bounds */
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
        spans[i] = check_span(c, shape, false, data);
        index[i] = (uint32_t)(i % spans_max) * shape->page_size;
        check_span_bounds(shape, &spans[i], &k_norm, &unused);
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
    a.sinks = check_sinks(c, a.kv_heads * a.group);
    observe_buffers want = observe_run(c, &a, c->ref, false);
    observe_buffers got = observe_run(c, &a, c->var, true);
    bounds b = check_bounds(shape, check_norm(q, shape->dtype, rows, shape->head_dim), k_norm, 1.0,
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

void check_pool(check *c)
{
    static const uint32_t counts[] = {0, 1, 2, 3, 8, 17, 64, 1001};
    for (uint32_t i = 0; i < 8 * 6 * 2; i++) {
        kvf_pool_args a = {.count = counts[i / 12], .average = i % 2, .width = 2 * (i / 2 % 6) + 1};
        if (!check_begin(c))
            continue;
        a.vectors = 1 + check_below(c, 3);
        a.stride = a.count + check_below(c, 4);
        a.out_stride = check_below(c, 2) ? a.count + check_below(c, 4) : 0;
        a.combine = (kvf_pool_combine)check_below(c, 3);
        a.scale = check_below(c, 2) ? 0.25f + (float)check_below(c, 3) : 0.0f;
        check_describe(c, "vectors=%u count=%u width=%u average=%u combine=%d scale=%g", a.vectors,
                       a.count, a.width, a.average, (int)a.combine, (double)a.scale);
        const size_t all = (size_t)a.vectors * a.stride;
        const size_t written = (size_t)a.vectors * (a.out_stride ? a.out_stride : a.stride);
        float *in = check_in(c, all * sizeof *in);
        check_scores(c, in, all, a.average ? 0 : check_below(c, 8));
        a.in = in;
        /* 13 terms of at most 120, divided by their number; a quarter to 2.25 of it is a product
         * that is rounded, and a sum with it is rounded again. */
        const double rounded =
            a.scale != 0.0f && a.combine == KVF_COMBINE_ADD ? 300.0 * 0x1p-23 : 0.0;
        const double average = a.average ? 300.0 * (a.width + 2) * 0x1p-24 : 0.0;
        a.out = check_near(c, "out", KVF_FP32, written, average + rounded, 0.0);
        for (size_t n = 0; n < written; n++)
            a.out[n] = (float)(n % 5) - 2.0f;
        CHECK_BOTH(c, pool, &a);
    }
}

/* ---- profile ---- */

#define DATA_KINDS 8u

static void fill_row(check *c, float *row, uint32_t count, uint32_t data)
{
    static const float special[] = {0.0f, -0.0f, 0x1p-149f, -3.0f, NAN, 2.0f, 2.0f, -INFINITY};
    const uint32_t only = count ? check_below(c, count) : 0;
    for (uint32_t i = 0; i < count; i++) {
        switch (data) {
        case 0: /* few large ones */
            row[i] = (float)exp(3.0 * check_normal(c) - 6.0);
            break;
        case 1: /* ties and zeros */
            row[i] = (float)check_below(c, 3);
            break;
        case 2:
            row[i] = 0.37f;
            break;
        case 3:
            row[i] = 0.0f;
            break;
        case 4:
            row[i] = i == only ? 5.5f : 0.0f;
            break;
        case 5: /* what counts as nothing, too */
            row[i] = special[check_below(c, 8)];
            break;
        case 6: /* all digits of the keys differ */
            row[i] = ldexpf(1.0f + (float)i / (float)count, (int)(i % 60) - 100);
            break;
        default: /* only the last digit differs */
            row[i] = 1.0f + (float)check_below(c, 200) * 0x1p-23f;
            break;
        }
    }
}

static int descending(const void *x, const void *y)
{
    const float a = *(const float *)x, b = *(const float *)y;
    return (a < b) - (a > b);
}

/* In double, from the sorted row, by the definition. */
static void restate(float *sorted, uint32_t count, uint32_t top, float out[KVF_PROFILE_VALUES])
{
    double total = 0.0, entropy = 0.0, mass = 0.0, squares = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        if (!(sorted[i] > 0.0f))
            sorted[i] = 0.0f;
        total += (double)sorted[i];
    }
    out[0] = out[1] = out[2] = 0.0f;
    if (total == 0.0)
        return;
    qsort(sorted, count, sizeof *sorted, descending);
    for (uint32_t i = 0; i < count; i++) {
        const double a = (double)sorted[i] / total;
        entropy += a > 0.0 ? a * log(1.0 / a) : 0.0;
        mass += i < top ? a : 0.0;
        squares += pow(a - 1.0 / count, 2.0);
    }
    out[0] = (float)entropy;
    out[1] = (float)mass;
    out[2] = (float)(squares / count);
}

static void compare(check *c, const char *what, const float *got, const float *want, uint32_t rows,
                    double r, double n)
{
    for (uint32_t i = 0; i < rows; i++) {
        const size_t at = (size_t)i * KVF_PROFILE_VALUES;
        check_describe(c, "%s row=%u", what, i);
        check_elements(c, "entropy", got + at, want + at, KVF_FP32, 1, 2 * r + 2e-7, 3 * r + 3e-7);
        check_elements(c, "mass", got + at + 1, want + at + 1, KVF_FP32, 1, 0.0, 2 * r + 2e-7);
        check_elements(c, "variance", got + at + 2, want + at + 2, KVF_FP32, 1, 5 * r / (n * n),
                       4 * r + 2e-7);
    }
}

static void profile_case(check *c, uint32_t count, uint32_t top, uint32_t data)
{
    kvf_profile_args a = {.count = count, .top = top};
    char what[96];
    if (!check_begin(c))
        return;
    a.vectors = 1 + check_below(c, 3);
    a.stride = count + check_below(c, 5);
    snprintf(what, sizeof what, "vectors=%u count=%u top=%u data=%u", a.vectors, count, top, data);
    check_describe(c, "%s", what);
    const size_t values = (size_t)a.vectors * KVF_PROFILE_VALUES;
    float *scores = check_in(c, (size_t)a.vectors * a.stride * sizeof *scores);
    float *sorted = check_in(c, count * sizeof *sorted);
    float *want = check_in(c, values * sizeof *want);
    for (uint32_t i = 0; i < a.vectors; i++) {
        float *vector = scores + (size_t)i * a.stride;
        fill_row(c, vector, a.stride, data);
        for (uint32_t j = 0; j < count; j++)
            sorted[j] = vector[j];
        restate(sorted, count, top, want + (size_t)i * KVF_PROFILE_VALUES);
    }
    a.scores = scores;
    float *out[2];
    for (int i = 0; i < 2; i++) {
        out[i] = a.out = check_out(c, values * sizeof(float));
        CHECK_RUN(c, i ? c->var : c->ref, profile, &a, i);
    }
    compare(c, what, out[0], want, a.vectors, 0x1p-22, fmax(count, 1.0));
    compare(c, what, out[1], out[0], a.vectors, (count / 64.0 + 24) * 0x1p-24, fmax(count, 1.0));
}

void check_profile(check *c)
{
    static const uint32_t counts[] = {0, 1, 2, 7, 8, 31, 64, 100, 513, 4096};
    for (uint32_t n = 0; n < 10; n++)
        for (uint32_t data = 0; data < DATA_KINDS; data++) {
            const uint32_t tops[] = {0, 1, counts[n] / 10, counts[n] / 2, counts[n], counts[n] + 5};
            for (uint32_t t = 0; t < 6; t++)
                profile_case(c, counts[n], tops[t], data);
        }
    for (uint32_t data = 0; data < DATA_KINDS; data++)
        profile_case(c, 16384 + 37, 1638, data);
}

/* ---- cover and pack ---- */

static kvf_cover_args cover_args(check *c, const check_rows *w, bool resident)
{
    const kvf_paging *p = &w->p;
    kvf_cover_args a = {.paging = *p,
                        .resident = resident,
                        .spans_max = p->pages_max + p->static_pages,
                        .row = w->row};
    const size_t all = (size_t)p->kv_heads * a.spans_max;
    a.spans = check_changed(c, "spans", all * sizeof *a.spans);
    a.span_index = check_changed(c, "span_index", all * sizeof *a.span_index);
    a.span_count = check_changed(c, "span_count", p->kv_heads * sizeof *a.span_count);
    a.first = check_changed(c, "first", p->kv_heads * sizeof *a.first);
    a.count = check_changed(c, "count", p->kv_heads * sizeof *a.count);
    a.take = check_changed(c, "take", p->kv_heads * sizeof *a.take);
    a.limit = check_changed(c, "limit", p->query_window * sizeof *a.limit);
    return a;
}

/* Every token of the row at most once, those of pages that can be read exactly once. */
static void cover_properties(check *c, const kvf_cover_args *a, uint32_t head)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = a->row;
    const uint32_t page_size = p->shape.page_size;
    const uint32_t tokens = kvf_cover_tokens(p, a->resident);
    const uint32_t *index = row->static_ids + head * kvf_static_room(p);
    const uint32_t stored = a->resident ? row->static_count[head] : 0;
    uint8_t *seen = calloc(row->length, 1);
    KVF_ASSERT(seen);
    for (uint32_t i = 0; i < stored; i++)
        seen[index[i]]++;
    for (uint32_t i = kvf_div_ceil_u32(stored, page_size); i < a->span_count[head]; i++) {
        const size_t at = (size_t)head * a->spans_max + i;
        const uint64_t live = kvf_live_bits(a->spans[at].count, a->spans[at].skip);
        for (uint32_t t = 0; t < tokens; t++)
            if (live >> t & 1)
                seen[a->span_index[at] + t]++;
    }
    for (uint32_t t = 0; t < row->length; t++) {
        const uint32_t page = t / page_size;
        const bool is_far = a->resident && page < kvf_row_sealed_pages(p, row) &&
                            !kvf_row_is_recent(p, row, head, page);
        if (seen[t] > 1 || (seen[t] == 0 && !is_far))
            check_fail(c, "head %u: token %u is covered %u times", head, t, seen[t]);
    }
    free(seen);
}

static void cover_case(check *c, uint32_t blocks_max)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "cover", .rows = 1, .blocks_max = blocks_max,
                    .without_slots = blocks_max > 100 || check_below(c, 3) == 0, .pool_blocks = 30))
        return;
    kvf_cover_args a = cover_args(c, &w, check_below(c, 2));
    a.take_tokens = check_below(c, 2) ? check_below(c, 100) : 0;
    if (check_below(c, 4) == 0) {
        a.first = a.count = a.take = a.limit = NULL;
        a.take_tokens = 0;
    } else if (check_below(c, 4) == 0) {
        a.limit = NULL;
    }
    CHECK_BOTH(c, cover, &a);
    for (uint32_t h = 0; h < w.p.kv_heads; h++)
        cover_properties(c, &a, h);
}

void check_cover(check *c)
{
    for (uint32_t i = 0; i < 60; i++)
        cover_case(c, 1 + i);
    for (uint32_t i = 0; i < 4; i++) /* around the edges of parts, and long */
        cover_case(c, i < 3 ? 1023 + i : 5000);
}

/* Candidates of one row in `cover`'s spans, and at most statics_max of them per KV head. */
typedef struct chosen_tokens {
    kvf_cover_args cover;
    uint32_t ids_max;
    int32_t *ids;       /* [kv_heads, ids_max] */
    uint32_t *id_count; /* [kv_heads] */
} chosen_tokens;

static chosen_tokens choose_tokens(check *c, const check_rows *w, bool resident)
{
    chosen_tokens t = {.cover = cover_args(c, w, resident), .ids_max = w->statics_max};
    CHECK_RUN(c, c->ref, cover, &t.cover, false);
    t.ids = check_in(c, (size_t)w->p.kv_heads * t.ids_max * sizeof *t.ids);
    t.id_count = check_in(c, w->p.kv_heads * sizeof *t.id_count);
    for (uint32_t h = 0; h < w->p.kv_heads; h++) {
        int32_t *ids = t.ids + (size_t)h * t.ids_max;
        t.id_count[h] = check_subset(c, t.cover.count[h], t.ids_max, ids);
        for (uint32_t i = 0; i < t.id_count[h]; i++)
            ids[i] += (int32_t)t.cover.first[h];
    }
    return t;
}

/* A new store ascends, holds what pages hold, and is what the bits say. */
static void pack_properties(check *c, const kvf_pack_args *a, uint32_t head)
{
    const kvf_paging *p = &a->paging;
    const uint32_t count = a->static_count[head];
    const size_t bytes = kvf_token_bytes(&p->shape);
    const uint32_t *index = a->static_ids + head * kvf_static_room(p);
    const uint64_t *bits = kvf_row_bits(p, a->row, head);
    uint32_t said = 0;
    for (uint32_t i = 0; i < a->row->sealed; i++)
        said += (uint32_t)__builtin_popcountll(bits[i]);
    if (said != count)
        check_fail(c, "head %u: %u tokens in the store, %u bits", head, count, said);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t token = index[i], t = token % p->block_size;
        const char *run = kvf_row_run(p, a->row, token / p->block_size, head);
        if ((i && token <= index[i - 1]) || !(bits[token / p->block_size] >> t & 1))
            check_fail(c, "head %u: entry %u is token %u", head, i, token);
        if (memcmp(kvf_page_key(&p->shape, run, t), kvf_static_token(p, a->static_kv, head, i),
                   bytes) != 0)
            check_fail(c, "head %u: entry %u is not what token %u is", head, i, token);
    }
}

static void pack_case(check *c, uint32_t blocks_max, uint32_t statics_max, bool resident)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, resident ? "pack resident" : "pack", .rows = 1, .blocks_max = blocks_max,
                    .without_slots = check_below(c, 3) == 0, .statics_max = statics_max,
                    .pool_blocks = 40))
        return;
    const kvf_paging *p = &w.p;
    const kvf_row *row = w.row;
    const chosen_tokens t = choose_tokens(c, &w, resident);
    kvf_pack_args a = {.paging = *p,
                       .resident = resident,
                       .spans_max = t.cover.spans_max,
                       .ids_max = t.ids_max,
                       .row = row,
                       .spans = t.cover.spans,
                       .span_index = t.cover.span_index,
                       .ids = t.ids,
                       .id_count = t.id_count,
                       .counters = w.counters};
    const size_t store_bytes = p->kv_heads * p->static_pages * kvf_page_bytes(&p->shape);
    const size_t index_bytes = p->kv_heads * kvf_static_room(p) * sizeof(uint32_t);
    a.static_kv = check_changed(c, "static_kv", store_bytes);
    a.static_ids = check_changed(c, "static_ids", index_bytes);
    a.static_count = check_changed(c, "static_count", p->kv_heads * sizeof(uint32_t));
    check_track(c, "counters", a.counters, sizeof *a.counters);
    check_track(c, "bits", row->bits, p->kv_heads * p->blocks_max * sizeof *row->bits);
    CHECK_BOTH(c, pack, &a);
    for (uint32_t h = 0; h < p->kv_heads; h++)
        pack_properties(c, &a, h);
}

void check_pack(check *c)
{
    for (uint32_t i = 0; i < 80; i++)
        pack_case(c, 1 + i, 0, i / 2 % 2);
    for (uint32_t i = 0; i < 5; i++) /* the last two take more rounds than a GPU has parts */
        pack_case(c, 1500, i < 3 ? 0 : 6000, i % 2);
}
