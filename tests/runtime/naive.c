/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The naive model; see naive.h. Everything is the definition written out, in double, with no
 * thought of speed.
 */

#include "naive.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention_params.h"
#include "common/convert.h"
#include "harness.h"
#include "score/codes.h"
#include "score/score_args.h"

/* ---- numbers ---- */

static float element(const void *base, kvf_dtype dtype, size_t i)
{
    if (dtype == KVF_FP32)
        return ((const float *)base)[i];
    const uint16_t h = ((const uint16_t *)base)[i];
    if (dtype == KVF_BF16) {
        const uint32_t u = (uint32_t)h << 16;
        float x;
        memcpy(&x, &u, sizeof x);
        return x;
    }
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const double magnitude = exponent == 0    ? ldexp(mantissa, -24)
                             : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                              : ldexp(1024 + mantissa, exponent - 25);
    return (float)(h >> 15 ? -magnitude : magnitude);
}

/* A number that a caller handed over, as a cache has it. */
static float taken(const kvf_cache_config *c, const void *base, size_t i)
{
    return kvf_element_round(c->dtype, element(base, test_tensor_dtype(c), i));
}

/* Neighbours of x in bf16: the largest not above it, or the smallest not below it. */
static double bf16_towards(float x, int up)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    u &= 0xffff0000u; /* towards zero */
    float y;
    memcpy(&y, &u, sizeof y);
    if (up ? y < x : y > x) {
        u += 0x10000u; /* away from zero */
        memcpy(&y, &u, sizeof y);
    }
    return (double)y;
}

static double bf16_nearest(double x)
{
    const double lo = bf16_towards((float)x, 0), hi = bf16_towards((float)x, 1);
    if (lo == hi)
        return lo;
    if (x - lo != hi - x)
        return x - lo < hi - x ? lo : hi;
    const float f = (float)lo;
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u >> 16 & 1 ? hi : lo;
}

typedef struct ranked {
    double score;
    uint32_t index;
} ranked;

static int ranked_compare(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

double naive_top(const double *scores, uint32_t count, uint32_t k, unsigned char *mask)
{
    ranked *order = calloc(count + 1, sizeof *order);
    assert(order);
    uint32_t valid = 0;
    for (uint32_t i = 0; i < count; i++) {
        mask[i] = 0;
        if (scores[i] > -INFINITY)
            order[valid++] = (ranked){scores[i], i};
    }
    qsort(order, valid, sizeof *order, ranked_compare);
    for (uint32_t i = 0; i < valid && i < k; i++)
        mask[order[i].index] = 1;
    double gap = 1.0;
    if (k > 0 && k < valid) {
        const double a = order[k - 1].score, b = order[k].score;
        const double size = fmax(fabs(a), fabs(b));
        gap = size > 0.0 ? (a - b) / size : 0.0;
    }
    free(order);
    return gap;
}

/* ---- state ---- */

void naive_open(naive *n, const kvf_cache_config *settings, const kvf_cache_plan *plan)
{
    *n = (naive){.c = *settings, .plan = *plan, .border = 1.0};
    if (n->c.value_dim == 0)
        n->c.value_dim = settings->head_dim;
    n->group = settings->query_heads / settings->kv_heads;
    const size_t tokens = settings->tokens_max, d = settings->head_dim, kv = settings->kv_heads;
    n->lists = settings->select == KVF_SELECT_QUEST ? settings->query_heads : settings->kv_heads;
    n->attended = calloc(settings->query_heads * tokens, 1);
    n->layers = calloc(settings->layers, sizeof *n->layers);
    assert(n->layers && n->attended);
    for (uint32_t i = 0; i < settings->layers; i++) {
        naive_layer *l = &n->layers[i];
        l->index = i;
        l->q = calloc(tokens * settings->query_heads * d, sizeof *l->q);
        l->k = calloc(tokens * kv * d, sizeof *l->k);
        l->v = calloc(tokens * kv * n->c.value_dim, sizeof *l->v);
        l->rotated =
            calloc(settings->digest == KVF_DIGEST_CODES ? tokens * kv * d : 1, sizeof *l->rotated);
        l->has_q = calloc(tokens, 1);
        l->fixed = calloc(kv * tokens, 1);
        l->chosen_at = calloc(n->lists * tokens, sizeof *l->chosen_at);
        assert(l->q && l->k && l->v && l->rotated && l->has_q && l->fixed && l->chosen_at);
        l->static_tokens = plan->static_tokens;
    }
}

void naive_close(naive *n)
{
    for (uint32_t i = 0; n->layers && i < n->c.layers; i++) {
        naive_layer *l = &n->layers[i];
        free(l->q);
        free(l->k);
        free(l->v);
        free(l->rotated);
        free(l->has_q);
        free(l->fixed);
        free(l->chosen_at);
    }
    free(n->layers);
    free(n->attended);
    *n = (naive){0};
}

/* As codes do; see kernels/score/codes.h, whose signs these are. */
static void rotate(const float *from, uint32_t dim, double *x)
{
    for (uint32_t i = 0; i < dim; i++)
        x[i] = kvf_code_sign(i) ? -(double)from[i] : (double)from[i];
    for (uint32_t first = 0, size; first < dim; first += size) {
        for (size = 256; size > dim - first;)
            size /= 2;
        for (uint32_t stride = 1; stride < size; stride *= 2)
            for (uint32_t i = first; i < first + size; i++)
                if (!((i - first) & stride)) {
                    const double a = x[i], b = x[i + stride];
                    x[i] = a + b;
                    x[i + stride] = a - b;
                }
        for (uint32_t i = first; i < first + size; i++)
            x[i] /= sqrt(size);
    }
}

static void append_row(naive *n, naive_layer *l, const void *q, const void *k, const void *v)
{
    const size_t k_row = (size_t)n->c.kv_heads * n->c.head_dim;
    const size_t v_row = (size_t)n->c.kv_heads * n->c.value_dim;
    const size_t q_row = (size_t)n->c.query_heads * n->c.head_dim;
    assert(l->length < n->c.tokens_max);
    for (size_t i = 0; i < k_row; i++)
        l->k[l->length * k_row + i] = taken(&n->c, k, i);
    for (size_t i = 0; i < v_row; i++)
        l->v[l->length * v_row + i] = taken(&n->c, v, i);
    for (size_t i = 0; n->c.digest == KVF_DIGEST_CODES && i < k_row; i += n->c.head_dim)
        rotate(l->k + l->length * k_row + i, n->c.head_dim, l->rotated + l->length * k_row + i);
    l->has_q[l->length] = q != NULL;
    for (size_t i = 0; q && i < q_row; i++)
        l->q[l->length * q_row + i] = taken(&n->c, q, i);
    l->length++;
}

void naive_append(naive *n, uint32_t layer, const void *q, const void *k, const void *v)
{
    append_row(n, &n->layers[layer], q, k, v);
    n->layers[layer].chosen = 0;
}

/* ---- attention ---- */

static const float *key(const naive *n, const naive_layer *l, uint32_t kv_head, uint32_t token)
{
    return l->k + ((size_t)token * n->c.kv_heads + kv_head) * n->c.head_dim;
}

static double dot(const float *a, const float *b, uint32_t count)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* weights[token] = softmax over tokens < length (and mask, if any) of a query head; returns the log
 * of the sum. */
static double softmax_row(const naive *n, const naive_layer *l, uint32_t head, const float *q,
                          uint32_t length, const unsigned char *mask, double *weights)
{
    const uint32_t kv_head = head / n->group;
    const double sink = test_sink(l->index, head);
    double top = sink, sum = 0.0;
    for (uint32_t t = 0; t < length; t++) {
        weights[t] = mask && !mask[t] ? -INFINITY
                                      : test_logit(&n->c, l->index,
                                                   dot(q, key(n, l, kv_head, t), n->c.head_dim));
        top = fmax(top, weights[t]);
    }
    if (top == -INFINITY) {
        memset(weights, 0, length * sizeof *weights);
        return -INFINITY;
    }
    sum = exp(sink - top);
    for (uint32_t t = 0; t < length; t++) {
        weights[t] = exp(weights[t] - top);
        sum += weights[t];
    }
    for (uint32_t t = 0; t < length; t++)
        weights[t] /= sum;
    return top + log(sum);
}

static void mix_values(const naive *n, const naive_layer *l, uint32_t kv_head, uint32_t length,
                       const double *weights, double *out)
{
    memset(out, 0, n->c.value_dim * sizeof *out);
    for (uint32_t t = 0; t < length; t++) {
        const float *v = l->v + ((size_t)t * n->c.kv_heads + kv_head) * n->c.value_dim;
        for (uint32_t d = 0; d < n->c.value_dim && weights[t] != 0.0; d++)
            out[d] += weights[t] * (double)v[d];
    }
}

static float *query_floats(const naive *n, const void *q)
{
    const size_t count = (size_t)n->c.query_heads * n->c.head_dim;
    float *out = calloc(count, sizeof *out);
    assert(out);
    for (size_t i = 0; i < count; i++)
        out[i] = taken(&n->c, q, i);
    return out;
}

void naive_dense(const naive *n, uint32_t layer, const void *q, uint32_t length, double *out,
                 double *lse)
{
    const naive_layer *l = &n->layers[layer];
    float *qf = query_floats(n, q);
    double *weights = calloc(length + 1, sizeof *weights);
    assert(weights);
    for (uint32_t h = 0; h < n->c.query_heads; h++) {
        lse[h] = softmax_row(n, l, h, qf + (size_t)h * n->c.head_dim, length, NULL, weights);
        mix_values(n, l, h / n->group, length, weights, out + (size_t)h * n->c.value_dim);
    }
    free(weights);
    free(qf);
}

/* The share of a head's attention that its sink has. */
static double sink_share(const naive_layer *l, uint32_t head, double lse)
{
    return exp(test_sink(l->index, head) - lse);
}

void naive_attend(const naive *n, uint32_t layer, const void *q, const unsigned char *mask,
                  naive_result *r)
{
    const naive_layer *l = &n->layers[layer];
    float *qf = query_floats(n, q);
    double *weights = calloc(l->length + 1, sizeof *weights);
    assert(weights);
    r->attended = 0;
    for (uint32_t h = 0; h < n->c.query_heads; h++) {
        const float *row = qf + (size_t)h * n->c.head_dim;
        const unsigned char *m = mask + (size_t)h * n->c.tokens_max;
        const double lse = softmax_row(n, l, h, row, l->length, NULL, weights);
        r->recall[h] = sink_share(l, h, lse);
        for (uint32_t t = 0; t < l->length; t++) {
            r->recall[h] += m[t] ? weights[t] : 0.0;
            r->attended += h % (n->c.query_heads / n->lists) == 0 && m[t];
        }
        mix_values(n, l, h / n->group, l->length, weights, r->dense + (size_t)h * n->c.value_dim);
        r->lse[h] = softmax_row(n, l, h, row, l->length, m, weights);
        mix_values(n, l, h / n->group, l->length, weights, r->out + (size_t)h * n->c.value_dim);
    }
    r->attended /= n->lists / n->c.kv_heads;
    free(weights);
    free(qf);
}

double naive_distance(const double *values, const void *got, kvf_dtype dtype, size_t count)
{
    double worst = 0.0;
    for (size_t i = 0; i < count; i++) {
        const double x = fabs(values[i] - (double)element(got, dtype, i));
        worst = x <= worst ? worst : isnan(x) ? INFINITY : x;
    }
    return worst;
}

void naive_result_open(naive_result *r, const kvf_cache_config *c)
{
    const size_t heads = c->query_heads, d = c->value_dim ? c->value_dim : c->head_dim;
    r->out = calloc(heads * d, sizeof(double));
    r->dense = calloc(heads * d, sizeof(double));
    r->lse = calloc(heads, sizeof(double));
    r->recall = calloc(heads, sizeof(double));
    assert(r->out && r->dense && r->lse && r->recall);
}

void naive_result_close(naive_result *r)
{
    free(r->out);
    free(r->dense);
    free(r->lse);
    free(r->recall);
}

/* ---- whole runs ---- */

static void expect_row(const naive_run *x, const naive_result *r, uint32_t layer, uint32_t token,
                       const void *out, const float *lse)
{
    const kvf_cache_config *c = &x->scenario->cc;
    const double far =
        naive_distance(r->out, out, c->dtype, (size_t)c->query_heads * test_value_dim(c));
    if (far > test_tolerance(c->dtype))
        fail_msg("%s: layer %u token %u is off by %g (allowed %g)", x->what, layer, token, far,
                 test_tolerance(c->dtype));
    for (uint32_t h = 0; lse && h < c->query_heads; h++)
        if (!(fabs(r->lse[h] - (double)lse[h]) <= TEST_LSE_TOLERANCE))
            fail_msg("%s: layer %u token %u head %u has LSE %g, the naive model has %g", x->what,
                     layer, token, h, (double)lse[h], r->lse[h]);
}

static void attend_run(const naive_run *x, naive *n, uint32_t layer, const void *q, naive_result *r)
{
    const uint32_t length = n->layers[layer].length;
    if (!x->sees) {
        naive_dense(n, layer, q, length, r->out, r->lse);
        return;
    }
    for (uint32_t h = 0; h < n->c.query_heads; h++)
        for (uint32_t t = 0; t < length; t++)
            n->attended[(size_t)h * n->c.tokens_max + t] =
                x->sees(&n->c, layer, h / n->group, length - 1, t) != 0;
    naive_attend(n, layer, q, n->attended, r);
}

void naive_expect_run(const naive_run *x)
{
    const test_scenario *sc = x->scenario;
    const uint32_t layers = sc->cc.layers, heads = sc->cc.query_heads;
    test_trace trace;
    test_tokens t;
    test_tokens_spec spec = sc->tokens;
    naive n;
    naive_result r;
    spec.count = sc->prompt + sc->steps;
    test_run(sc, &trace);
    test_tokens_make(&t, &sc->cc, &spec);
    naive_open(&n, &sc->cc, &(kvf_cache_plan){0});
    naive_result_open(&r, &sc->cc);
    const size_t row = test_steps_bytes(&t, 1) / layers;
    for (uint32_t at = 0; at < layers * spec.count; at++) {
        const uint32_t layer = at / spec.count, i = at % spec.count;
        const void *q = test_q(&t, layer, i);
        naive_append(&n, layer, q, test_k(&t, layer, i), test_v(&t, layer, i));
        if (x->appended)
            x->appended(&n, &t, layer);
        if (i < sc->prompt && x->every && i % x->every != 0 && i + 1 != sc->prompt)
            continue;
        attend_run(x, &n, layer, q, &r);
        if (i < sc->prompt) {
            const size_t place = (size_t)layer * sc->prompt + i;
            expect_row(x, &r, layer, i, (char *)trace.prefill + place * row, NULL);
        } else {
            const size_t place = (size_t)(i - sc->prompt) * layers + layer;
            expect_row(x, &r, layer, i, (char *)trace.out + place * row, trace.lse + place * heads);
        }
    }
    naive_result_close(&r);
    naive_close(&n);
    test_tokens_free(&t);
    test_trace_free(&trace);
}

/* ---- scoring ---- */

uint32_t naive_sealed(const naive *n, uint32_t layer)
{
    const uint32_t length = n->layers[layer].length;
    const uint32_t block = n->plan.block_size;
    return length > n->c.local_tokens
               ? (length - n->c.local_tokens) / block * (block / n->c.page_size)
               : 0;
}

/* Box of the tokens of one sub-box of a page that are not in the sink. 0 if there are none. */
static int box_of(const naive *n, const naive_layer *l, uint32_t kv_head, uint32_t first,
                  double *lo, double *hi)
{
    const uint32_t tokens = n->c.page_size / n->c.sub_digests;
    const int passes = n->c.digest == KVF_DIGEST_CUBOID_MEAN ? 2 : 1;
    uint32_t live = 0;
    for (uint32_t d = 0; d < n->c.head_dim; d++) {
        float min = INFINITY, max = -INFINITY;
        double sum = 0.0, away = 0.0;
        live = 0;
        for (int pass = 0; pass < passes; pass++)
            for (uint32_t t = first; t < first + tokens; t++) {
                if (t < n->c.sink_tokens)
                    continue;
                const float x = key(n, l, kv_head, t)[d];
                if (pass == 0) {
                    live++;
                    sum += (double)x;
                    min = x < min ? x : min;
                    max = x > max ? x : max;
                } else {
                    away += fabs(((double)max + (double)min) / 2.0 - (double)x);
                }
            }
        if (live == 0)
            return 0;
        if (n->c.digest == KVF_DIGEST_MINMAX) {
            lo[d] = bf16_towards(min, 0);
            hi[d] = bf16_towards(max, 1);
        } else if (n->c.digest == KVF_DIGEST_MEAN) {
            lo[d] = hi[d] = bf16_nearest(sum / live);
        } else {
            const double centre = ((double)max + (double)min) / 2.0;
            lo[d] = bf16_nearest(centre - away / live);
            hi[d] = bf16_nearest(centre + away / live);
        }
    }
    return 1;
}

/* Tokens of a page that are neither sink nor static. */
static uint32_t tokens_left(const naive *n, const naive_layer *l, uint32_t kv_head, uint32_t page)
{
    const unsigned char *fixed = l->fixed + (size_t)kv_head * n->c.tokens_max;
    uint32_t left = 0;
    for (uint32_t t = page * n->c.page_size; t < (page + 1) * n->c.page_size; t++)
        left += t >= n->c.sink_tokens && !fixed[t];
    return left;
}

static double page_score(const naive *n, const naive_layer *l, uint32_t kv_head, uint32_t page,
                         const float *q)
{
    double lo[256], hi[256], best = -INFINITY;
    const uint32_t tokens = n->c.page_size / n->c.sub_digests;
    const uint32_t boxes = tokens_left(n, l, kv_head, page) ? n->c.sub_digests : 0;
    for (uint32_t sub = 0; sub < boxes; sub++) {
        if (!box_of(n, l, kv_head, page * n->c.page_size + sub * tokens, lo, hi))
            continue;
        double sum = 0.0;
        for (uint32_t d = 0; d < n->c.head_dim; d++)
            sum += fmax((double)q[d] * lo[d], (double)q[d] * hi[d]);
        best = fmax(best, sum);
    }
    return best;
}

/* ---- codes ---- */

/* A rotated query in int8. */
typedef struct naive_query {
    double units[256], unit;
} naive_query;

static naive_query quantize(const float *q, uint32_t dim)
{
    naive_query y;
    double most = 0.0;
    rotate(q, dim, y.units);
    for (uint32_t i = 0; i < dim; i++)
        most = fmax(most, fabs(y.units[i]));
    for (uint32_t i = 0; i < dim; i++)
        y.units[i] = rint(y.units[i] * 127.0 / most);
    y.unit = most / 127.0;
    return y;
}

/* The estimate of its product with a rotated key, by two bits per channel. */
static double estimate(const double *x, const naive_query *q, uint32_t dim)
{
    double n2 = 0.0, along = 0.0, product = 0.0;
    for (uint32_t i = 0; i < dim; i++)
        n2 += x[i] * x[i];
    const double middle = 0.9815 * sqrt(n2 / dim);
    for (uint32_t i = 0; i < dim; i++) {
        const double size = fabs(x[i]) < middle ? 3.0 : 10.0;
        const double level = x[i] < 0.0 ? -size : size;
        along += level * x[i];
        product += level * q->units[i];
    }
    const uint16_t scale = kvf_fp16_from_float((float)(n2 / along));
    return (double)kvf_fp16_to_float(scale) * q->unit * product;
}

/* Per page the mass of its tokens relative to the best of all, in bf16; -1 = nothing left. Fewer
 * tokens than a tile of kernel `score_codes`. Returns the sum, and the largest logit. */
static double page_masses(const naive *n, const naive_layer *l, uint32_t kv_head, uint32_t pages,
                          const float *q, double *mass, double *top)
{
    const uint32_t P = n->c.page_size;
    const naive_query rotated = quantize(q, n->c.head_dim);
    double *logit = calloc((size_t)pages * P + 1, sizeof *logit), all = 0.0;
    assert(logit && pages * P <= KVF_SCORE_CODES_TOKENS);
    *top = -INFINITY;
    for (uint32_t t = 0; t < pages * P; t++) {
        logit[t] = -INFINITY;
        if (t >= n->c.sink_tokens && !l->fixed[(size_t)kv_head * n->c.tokens_max + t])
            logit[t] = test_logit(
                &n->c, l->index,
                estimate(l->rotated + (key(n, l, kv_head, t) - l->k), &rotated, n->c.head_dim));
        *top = fmax(*top, logit[t]);
    }
    for (uint32_t p = 0; p < pages; p++) {
        double sum = 0.0;
        uint32_t live = 0;
        for (uint32_t t = p * P; t < (p + 1) * P; t++) {
            sum += logit[t] > -INFINITY ? exp(logit[t] - *top) : 0.0;
            live += logit[t] > -INFINITY;
        }
        mass[p] = live ? bf16_nearest(sum) : -1.0;
        all += sum;
    }
    free(logit);
    return all;
}

static void code_scores(const naive *n, const naive_layer *l, uint32_t pages, naive_heads heads,
                        const float *q, double *scores)
{
    double *mass = calloc(pages + 1, sizeof *mass), top;
    assert(mass);
    for (uint32_t p = 0; p < pages; p++)
        scores[p] = n->c.group_reduce == KVF_GROUP_MAX ? -INFINITY : 0.0;
    for (uint32_t h = heads.first; h < heads.first + heads.count; h++) {
        const double all =
            page_masses(n, l, h / n->group, pages, q + (size_t)h * n->c.head_dim, mass, &top);
        for (uint32_t p = 0; p < pages; p++) {
            const double x = top + log(mass[p]);
            if (mass[p] < 0.0)
                scores[p] = -INFINITY;
            else if (n->c.group_reduce == KVF_GROUP_MEAN_SOFTMAX)
                scores[p] += mass[p] / all / heads.count;
            else if (n->c.group_reduce == KVF_GROUP_MAX)
                scores[p] = fmax(scores[p], x);
            else
                scores[p] += x;
        }
    }
    free(mass);
}

void naive_scores(const naive *n, uint32_t layer, naive_heads heads, const void *q, double *scores)
{
    const naive_layer *l = &n->layers[layer];
    const uint32_t pages = naive_sealed(n, layer);
    const int softmax = n->c.group_reduce == KVF_GROUP_MEAN_SOFTMAX && n->lists != n->c.query_heads;
    float *qf = query_floats(n, q);
    if (n->c.digest == KVF_DIGEST_CODES) {
        code_scores(n, l, pages, heads, qf, scores);
        free(qf);
        return;
    }
    double *row = calloc(pages + 1, sizeof *row);
    assert(row);
    for (uint32_t p = 0; p < pages; p++)
        scores[p] = n->c.group_reduce == KVF_GROUP_MAX ? -INFINITY : 0.0;
    for (uint32_t h = heads.first; h < heads.first + heads.count; h++) {
        double top = -INFINITY, sum = 0.0;
        for (uint32_t p = 0; p < pages; p++) {
            row[p] = page_score(n, l, h / n->group, p, qf + (size_t)h * n->c.head_dim);
            top = fmax(top, row[p]);
        }
        for (uint32_t p = 0; p < pages; p++)
            sum += exp(test_logit(&n->c, layer, row[p]) - test_logit(&n->c, layer, top));
        for (uint32_t p = 0; p < pages; p++) {
            if (softmax)
                scores[p] += exp(test_logit(&n->c, layer, row[p]) - test_logit(&n->c, layer, top)) /
                             sum / heads.count;
            else if (n->c.group_reduce == KVF_GROUP_MAX)
                scores[p] = fmax(scores[p], row[p]);
            else
                scores[p] += test_cap(layer) > 0.0 ? test_logit(&n->c, layer, row[p]) : row[p];
        }
    }
    /* A page is out only if no token of it is left; a softmax then gave it exactly 0. */
    for (uint32_t p = 0; p < pages && softmax; p++)
        if (scores[p] == 0.0)
            scores[p] = -INFINITY;
    free(row);
    free(qf);
}
