/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels on scores and lists against their references: reduce, topk, pool, convert.
 *
 * topk, pooling by maximum: bit for bit. Averages of n terms in fp32 are off by at most n
 * * 2^-24 of the sum of magnitudes. A softmax weight is off by at most its logit's error, scale *
 * |s - top| * 2^-23, and that of the exponential, 2e-7.
 */

#include <float.h>
#include <math.h>
#include <string.h>

#include "check_support.h"
#include "common/convert.h"

/* Scores of pages: usual, or with everything that damages a comparison. */
static void fill_scores(check *c, float *to, size_t count, uint32_t kind)
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

static void reduce_case(check *c, kvf_group_reduce kind, uint32_t pages, uint32_t data)
{
    kvf_reduce_args a = {.kind = kind};
    if (!check_begin(c))
        return;
    a.pages_max = pages + check_below(c, 9);
    a.outputs = 1 + check_below(c, 3);
    a.heads = check_groups[check_below(c, CHECK_GROUPS)];
    a.scale = 0.09f;
    a.cap = check_cap(c);
    check_describe(c, "kind=%d outputs=%u heads=%u pages=%u data=%u", (int)kind, a.outputs, a.heads,
                   pages, data);
    const size_t outs = (size_t)a.outputs * a.pages_max;
    float *scores = check_in(c, outs * a.heads * sizeof *scores);
    fill_scores(c, scores, outs * a.heads, data);
    a.scores = scores;
    a.pages = check_counts(c, a.outputs, pages);
    double magnitude = 0.0;
    for (size_t i = 0; i < outs * a.heads; i++)
        if (isfinite(scores[i]))
            magnitude = fmax(magnitude, fabs((double)scores[i]));
    const double capped = fmin((double)a.cap, magnitude * (double)a.scale);
    if (a.cap > 0.0f)
        magnitude = capped;
    double absolute = kind == KVF_GROUP_SUM ? a.heads * a.heads * 0x1p-24 * magnitude : 0.0;
    if (kind == KVF_GROUP_MEAN_SOFTMAX)
        /* x e^-x <= 0.37 bounds what the rounding of a logit does to its weight */
        absolute = 0.37 * 0x1p-22 + 4e-7;
    else if (kind == KVF_GROUP_SUM)
        absolute += a.heads * 1e-6 * capped;
    if (kind == KVF_GROUP_MEAN_SOFTMAX)
        absolute += fmin(1.0, 2e-6 * capped);
    a.out = check_near(c, "out", KVF_FP32, outs, absolute,
                       kind == KVF_GROUP_MEAN_SOFTMAX ? (pages + 16) * 0x1p-24 : 0.0);
    CHECK_BOTH(c, reduce, &a);
}

void check_reduce(check *c)
{
    static const uint32_t pages[] = {0, 1, 7, 8, 15, 16, 33, 100, 1000};
    for (uint32_t kind = 0; kind < 3; kind++)
        for (uint32_t p = 0; p < 9; p++)
            for (uint32_t data = 0; data < 8; data++)
                if (kind != KVF_GROUP_SUM || data != 4) /* inf - inf */
                    reduce_case(c, (kvf_group_reduce)kind, pages[p], data);
}

static void topk_case(check *c, uint32_t count, uint32_t k, uint32_t data)
{
    kvf_topk_args a = {0};
    if (!check_begin(c))
        return;
    a.lists = 1 + check_below(c, 3);
    const uint32_t offset = check_below(c, 2) ? check_below(c, 40) : 0;
    a.stride = offset + count + check_below(c, 5);
    a.ids_max = k + check_below(c, 3);
    a.work_stride = count;
    check_describe(c, "lists=%u first=%u count=%u k=%u data=%u", a.lists, offset, count, k, data);
    float *scores = check_in(c, (size_t)a.lists * a.stride * sizeof *scores);
    uint32_t *first = check_in(c, a.lists * sizeof *first);
    for (uint32_t i = 0; i < a.lists; i++) {
        fill_scores(c, scores + (size_t)i * a.stride, a.stride, data);
        first[i] = offset;
    }
    a.scores = scores;
    a.first = offset ? first : NULL;
    a.count = check_counts(c, a.lists, count);
    a.k = check_counts(c, a.lists, k);
    const bool is_shared = check_below(c, 4) > 0;
    uint32_t *arrived = check_out(c, a.lists * sizeof *arrived);
    memset(arrived, 0, a.lists * sizeof *arrived);
    a.arrived = is_shared ? arrived : NULL;
    a.ids = check_changed(c, "ids", (size_t)a.lists * a.ids_max * sizeof *a.ids);
    a.id_count = check_changed(c, "id_count", a.lists * sizeof *a.id_count);
    a.work = check_changed(c, NULL, (size_t)a.lists * a.work_stride * sizeof *a.work);
    CHECK_BOTH(c, topk, &a);
    for (uint32_t i = 0; i < a.lists; i++)
        if (arrived[i] != 0)
            check_fail(c, "list %u still counts %u blocks", i, arrived[i]);
}

void check_topk(check *c)
{
    static const uint32_t counts[] = {0, 1, 2, 7, 8, 31, 64, 100, 513, 4096};
    static const uint32_t ks[] = {0, 1, 2, 8, 24, 100, 5000};
    for (uint32_t n = 0; n < 10; n++)
        for (uint32_t k = 0; k < 7; k++)
            for (uint32_t data = 0; data < 8; data++)
                topk_case(c, counts[n], ks[k], data);
    for (uint32_t data = 0; data < 11; data++) {
        topk_case(c, 65536 + 37, 24, data);
        topk_case(c, 70001, 1024, data);
        topk_case(c, 131072, 512, data);
        topk_case(c, 8000 + 1600 * data, 500, data); /* about where sets begin to pay */
    }
    topk_case(c, 1u << 20, 2048, 0);
    topk_case(c, 1000003, 512, 2);
    topk_case(c, 1000001, 256, 8);
    topk_case(c, 1u << 20, 1024, 10);
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
        fill_scores(c, in, all, a.average ? 0 : check_below(c, 8));
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

/* Every fp16 and bf16 number survives, and rounding is to the nearest of the two neighbours. */
void check_convert(check *c)
{
    if (c->cuda || !check_begin(c)) /* the host's functions; kernels that convert have checks */
        return;
    for (uint32_t i = 0; i < 65536; i++) {
        const uint16_t h = (uint16_t)i;
        const float x = kvf_fp16_to_float(h), y = kvf_bf16_to_float(h);
        check_describe(c, "bits %04x", i);
        if (isnan(x) ? !isnan(kvf_fp16_to_float(kvf_fp16_from_float(x)))
                     : kvf_fp16_from_float(x) != h)
            check_fail(c, "fp16 does not survive");
        if (isnan(y) ? !isnan(kvf_bf16_to_float(kvf_bf16_from_float(y)))
                     : kvf_bf16_from_float(y) != h || kvf_bf16_down(y) != h || kvf_bf16_up(y) != h)
            check_fail(c, "bf16 does not survive");
    }
    for (uint32_t i = 0; i < 300000; i++) {
        const float x = kvf_bits_float((uint32_t)check_random(c));
        if (isnan(x))
            continue;
        check_describe(c, "value %a", (double)x);
        const float down = kvf_bf16_to_float(kvf_bf16_down(x)),
                    up = kvf_bf16_to_float(kvf_bf16_up(x));
        const float near = kvf_bf16_to_float(kvf_bf16_from_float(x));
        if (down > x || up < x || (near != down && near != up))
            check_fail(c, "bf16 rounds to %a, %a, %a", (double)down, (double)near, (double)up);
        if (isfinite(near) && isfinite(down) && isfinite(up) &&
            fabs((double)near - (double)x) > fmin((double)x - (double)down, (double)up - (double)x))
            check_fail(c, "bf16 %a is not nearest", (double)near);
        const uint16_t h = kvf_fp16_from_float(x);
        const double error = fabs((double)kvf_fp16_to_float(h) - (double)x);
        const double below = (h & 0x7fff) && (h & 0x7fff) <= 0x7c00
                                 ? fabs((double)kvf_fp16_to_float((uint16_t)(h - 1)) - (double)x)
                                 : INFINITY;
        const double above = (h & 0x7fff) < 0x7bff
                                 ? fabs((double)kvf_fp16_to_float((uint16_t)(h + 1)) - (double)x)
                                 : INFINITY;
        if ((h & 0x7fff) != 0x7c00 && (error > below || error > above))
            check_fail(c, "fp16 %04x is not nearest", h);
        if ((h & 0x7fff) == 0x7c00 && fabsf(x) < 65520.0f)
            check_fail(c, "fp16 overflows too early");
    }
}
