/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels of pages' scores against their references: digest, score, reduce.
 *
 * Minmax digests: bit for bit. The other digests round an fp32 result that may differ in its last
 * bits, so neighbours in bf16 are equal enough, plus n * 2^-23 of the largest key where terms
 * cancel. A score is a sum of 2 head_dim products: off by at most 2 head_dim * 2^-24 (twice that
 * without fused multiply-add) of the sum of their magnitudes, which is at most |q| (|lo| + |hi|). A
 * softmax weight is off by at most its logit's error, scale * |s - top| * 2^-23, and that of the
 * exponential, 2e-7.
 */

#include <math.h>

#include "check_support.h"
#include "common/convert.h"

static void digest_case(check *c, const kvf_shape *keys, kvf_digest_kind kind, uint32_t subs,
                        check_data data)
{
    kvf_digest_args a = {.kind = kind, .subs = subs};
    const kvf_shape *shape = &a.shape;
    if (!check_begin(c))
        return;
    a.shape = check_values(c, keys);
    a.job_count = 1 + check_below(c, 4);
    check_describe(c, "%s kind=%d subs=%u jobs=%u data=%d", check_shape_text(shape), (int)kind,
                   subs, a.job_count, (int)data);
    const size_t elements = kvf_page_bytes(shape) / kvf_dtype_bytes(shape->dtype);
    const size_t bytes = kvf_digest_bytes(shape->head_dim, subs);
    double largest = 0.0;
    kvf_digest_job *jobs = check_in(c, a.job_count * sizeof *jobs);
    for (uint32_t i = 0; i < a.job_count; i++) {
        uint8_t *page = check_in(c, kvf_page_bytes(shape));
        jobs[i] = (kvf_digest_job){.page = page, .count = shape->page_size};
        if (check_below(c, 3) == 0)
            jobs[i].count = check_below(c, shape->page_size + 1);
        if (check_below(c, 2))
            jobs[i].skip = check_below(c, 8) ? check_random(c) : UINT64_MAX;
        if (i == 3)
            jobs[i].page = NULL; /* left out: its digest is not written */
        check_fill(c, page, shape->dtype, elements, data);
        for (size_t k = 0; k < elements; k++)
            largest = fmax(largest, fabs(check_value(page, shape->dtype, k)));
        const uint64_t live = kvf_live_bits(jobs[i].count, jobs[i].skip);
        for (uint32_t t = 0; t < shape->page_size; t++)
            if (!(live >> t & 1))
                check_fill_nan(page + t * kvf_token_bytes(shape), shape->dtype, shape->head_dim);
    }
    a.jobs = jobs;
    uint8_t *out = kind == KVF_DIGEST_MINMAX
                       ? check_changed(c, "digest", a.job_count * bytes)
                       : check_near(c, "digest", KVF_BF16, a.job_count * bytes / 2,
                                    largest * (shape->page_size + 4) * 0x1p-23 + 0x1p-133, 0x1p-7);
    for (uint32_t i = 0; i < a.job_count; i++)
        jobs[i].digest = out + i * bytes;
    CHECK_BOTH(c, digest, &a);
}

void check_digest(check *c)
{
    for (uint32_t i = 0; i < 9 * check_dims(c) * CHECK_PAGE_SIZES; i++)
        for (uint32_t kind = 0; kind < 3; kind++) {
            const kvf_shape s = check_shape(c, i, i / 3, i / (3 * check_dims(c)));
            const uint32_t sub = i / (3 * check_dims(c) * CHECK_PAGE_SIZES);
            digest_case(c, &s, (kvf_digest_kind)kind, kvf_min_u32(s.page_size, 1u << sub),
                        check_data_of(i));
        }
}

/* Boxes with lo <= hi; some empty. Returns the largest |lo| + |hi| of a box. */
static double fill_boxes(check *c, uint16_t *to, size_t boxes, uint32_t head_dim, check_data data)
{
    double best = 0.0;
    for (size_t b = 0; b < boxes; b++, to += 2 * head_dim) {
        check_fill(c, to, KVF_BF16, 2 * head_dim, data);
        const bool empty = check_below(c, 6) == 0;
        for (uint32_t d = 0; d < head_dim; d++) {
            uint16_t lo = to[d], hi = to[head_dim + d];
            const bool swap = kvf_bf16_to_float(lo) > kvf_bf16_to_float(hi);
            to[d] = empty ? 0x7f80 : swap ? hi : lo;
            to[head_dim + d] = empty ? 0xff80 : swap ? lo : hi;
        }
        best = fmax(best, check_norm(to, KVF_BF16, 1, head_dim) +
                              check_norm(to + head_dim, KVF_BF16, 1, head_dim));
    }
    return best;
}

static void score_case(check *c, kvf_dtype dtype, uint32_t head_dim, uint32_t group, uint32_t subs,
                       uint32_t pages, check_data data)
{
    kvf_score_args a = {
        .shape = {dtype, head_dim, 32, KVF_PAGES_NATIVE, 0}, .group = group, .subs = subs};
    if (!check_begin(c))
        return;
    a.lists = 1 + check_below(c, 2);
    a.pages_max = pages + check_below(c, 300);
    check_describe(c, "%s d=%u G=%u subs=%u lists=%u pages=%u of %u data=%d",
                   check_dtype_name(dtype), head_dim, group, subs, a.lists, pages, a.pages_max,
                   (int)data);
    if (a.pages_max == 0)
        a.pages_max = 1;
    a.sub = check_subgroup(c, group);
    const size_t rows = (size_t)a.lists * group;
    void *q = check_in(c, rows * kvf_key_bytes(&a.shape));
    const void **digests = check_in(c, a.lists * sizeof *digests);
    uint32_t *counts = check_in(c, a.lists * sizeof *counts);
    double norm = 0.0;
    check_fill(c, q, dtype, rows * head_dim, data);
    a.block_size = check_below(c, 2) ? 32 : 64;
    const uint32_t per = a.block_size / a.shape.page_size;
    const bool is_apart = check_below(c, 2);
    const uint32_t **block_of = check_in(c, a.lists * sizeof *block_of);
    for (uint32_t i = 0; i < a.lists; i++) {
        counts[i] = i == 0 ? pages : check_below(c, pages + 1);
        uint32_t blocks = kvf_div_ceil_u32(counts[i], per);
        if (is_apart)
            block_of[i] = check_block_of(c, blocks, &blocks);
        uint16_t *boxes = check_in(c, blocks * per * kvf_digest_bytes(head_dim, subs));
        norm = fmax(norm, fill_boxes(c, boxes, (size_t)blocks * per * subs, head_dim, data));
        digests[i] = boxes;
    }
    a.q = q;
    a.digests = digests;
    a.block_of = is_apart ? block_of : NULL;
    a.pages = counts;
    if (check_below(c, 2)) { /* whole pages are left out, and parts, which change nothing */
        const uint64_t **bits = check_in(c, a.lists * sizeof *bits);
        for (uint32_t i = 0; i < a.lists; i++) {
            const uint32_t blocks = kvf_div_ceil_u32(counts[i] * 32, a.block_size);
            uint64_t *words = check_in(c, blocks * sizeof *words);
            for (uint32_t b = 0; b < blocks; b++)
                words[b] = check_below(c, 3) ? check_random(c)
                                             : check_below(c, 4) * UINT64_C(0x55555555ffffffff);
            bits[i] = words;
        }
        a.bits = bits;
    }
    const double q_norm = check_norm(q, dtype, rows, head_dim);
    a.scores = check_near(c, "scores", KVF_FP32, rows * a.pages_max,
                          4.0 * head_dim * 0x1p-24 * q_norm * norm + 0x1p-126, 0x1p-23);
    CHECK_BOTH(c, score, &a);
}

void check_score(check *c)
{
    static const uint32_t pages[] = {0, 1, 2, 7, 40, 255, 256, 257, 600};
    for (uint32_t g = 0; g < CHECK_GROUPS; g++)
        for (uint32_t d = 0; d < check_dims(c); d++)
            for (uint32_t sub = 0; sub < 3; sub++) {
                const uint32_t group = check_groups[g], i = (g * check_dims(c) + d) * 3 + sub;
                score_case(c, (kvf_dtype)(i % 3), check_head_dims[d], group, 1u << sub,
                           pages[group > 4 ? i % 5 : i % 9], check_data_of(i));
            }
    score_case(c, KVF_BF16, 64, 1, 1, 65536 + 3, DATA_NORMAL);
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
    check_scores(c, scores, outs * a.heads, data);
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
