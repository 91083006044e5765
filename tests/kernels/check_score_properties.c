/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Properties of codes, whatever the variant: the rotation keeps products, a code is as long as
 * its key in the key's direction, estimates follow the true products, and from queries and keys to
 * scores of pages the chain of kernels is softmax over estimates, page by page.
 */

#include <float.h>
#include <math.h>
#include <string.h>

#include "check_support.h"
#include "common/convert.h"
#include "score/codes.h"

#define TOKENS 2048u /* two tiles */
#define BLOCK  64u
#define GROUP  3u

static const double levels[4] = {-10.0, -3.0, 3.0, 10.0};

static double dot(const float *a, const float *b, uint32_t n)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* A product changes by the rounding of 9 stages and a scale, so by 11 * 2^-24 of |a| |b| per side,
 * and by the error of 1 / sqrt(block), twice 2^-25. */
static void rotation_keeps_products(check *c, uint32_t head_dim)
{
    float a[KVF_HEAD_DIM_MAX], b[KVF_HEAD_DIM_MAX];
    uint32_t negative = 0;
    if (!check_begin(c))
        return;
    check_describe(c, "rotation keeps products, d=%u", head_dim);
    check_fill(c, a, KVF_FP32, head_dim, DATA_NORMAL);
    check_fill(c, b, KVF_FP32, head_dim, DATA_NORMAL);
    const double want = dot(a, b, head_dim);
    const double size = sqrt(dot(a, a, head_dim) * dot(b, b, head_dim));
    kvf_code_rotate(a, head_dim);
    kvf_code_rotate(b, head_dim);
    const double got = dot(a, b, head_dim);
    if (!(fabs(got - want) <= 23.0 * 0x1p-24 * size))
        check_fail(c, "product %.9g, rotated %.9g", want, got);
    /* Signs of a fair coin leave this range once in a million. */
    for (uint32_t i = 0; i < KVF_HEAD_DIM_MAX; i++)
        negative += kvf_code_sign(i) != 0;
    if (negative < KVF_HEAD_DIM_MAX / 2 - 54 || negative > KVF_HEAD_DIM_MAX / 2 + 54)
        check_fail(c, "%u of %u signs are negative", negative, KVF_HEAD_DIM_MAX);
    for (uint32_t block = 16; block <= KVF_HEAD_DIM_MAX; block *= 2)
        if (!(fabs((double)kvf_code_unit(block) * sqrt(block) - 1.0) <= 0x1p-24))
            check_fail(c, "1 / sqrt(%u) is %.9g", block, (double)kvf_code_unit(block));
}

/* A context of one list: its keys, their codes, and queries. */
typedef struct context {
    kvf_dtype dtype;
    uint32_t head_dim;
    float *keys; /* [TOKENS, head_dim], rounded to dtype */
    float *q;    /* [GROUP, head_dim], likewise */
    char *codes; /* code groups */
    int8_t *y;   /* [GROUP, head_dim] */
    float *y_scale;
} context;

/* Keys with a common part and a few large channels, as real ones have. */
static void make_context(check *c, context *x)
{
    const kvf_shape s = {x->dtype, x->head_dim, BLOCK, KVF_PAGES_NATIVE, 0};
    const uint32_t d = x->head_dim, jobs = TOKENS / BLOCK;
    const size_t bytes = BLOCK / KVF_CODE_TOKENS * kvf_code_bytes(d);
    kvf_digest_job *job = check_in(c, jobs * sizeof *job);
    char *q = check_in(c, GROUP * kvf_key_bytes(&s));
    x->keys = check_in(c, (size_t)TOKENS * d * sizeof(float));
    x->q = check_in(c, (size_t)GROUP * d * sizeof(float));
    x->codes = check_out(c, jobs * bytes);
    for (uint32_t t = 0; t < TOKENS; t++) {
        char *page = t % BLOCK ? (char *)job[t / BLOCK].page : check_in(c, kvf_page_bytes(&s));
        char *key = page + ((const char *)kvf_page_key(&s, page, t % BLOCK) - page);
        if (t % BLOCK == 0)
            job[t / BLOCK] = (kvf_digest_job){
                .page = page, .digest = x->codes + t / BLOCK * bytes, .count = BLOCK};
        for (uint32_t i = 0; i < d; i++) {
            kvf_element_set(key, x->dtype, i, (float)check_normal(c) + (i % 17 ? 0.0f : 2.0f));
            x->keys[(size_t)t * d + i] = (float)check_value(key, x->dtype, i);
        }
    }
    check_fill(c, q, x->dtype, (size_t)GROUP * d, DATA_NORMAL);
    for (uint32_t i = 0; i < GROUP * d; i++)
        x->q[i] = (float)check_value(q, x->dtype, i);
    x->y = check_out(c, (size_t)GROUP * d);
    x->y_scale = check_out(c, GROUP * sizeof(float));
    const kvf_encode_args e = {.shape = s, .job_count = jobs, .jobs = job};
    const kvf_rotate_args r = {.dtype = x->dtype,
                               .head_dim = d,
                               .queries = GROUP,
                               .scale = 1.0f / sqrtf((float)d),
                               .q = q,
                               .y = x->y,
                               .y_scale = x->y_scale};
    CHECK_RUN(c, c->var, encode, &e, false);
    CHECK_RUN(c, c->var, rotate, &r, false);
}

/* Levels of a token, in order; returns its scale. */
static double decode(const context *x, uint32_t token, double level[KVF_HEAD_DIM_MAX])
{
    const char *group = x->codes + token / KVF_CODE_TOKENS * kvf_code_bytes(x->head_dim);
    const uint32_t t = token % KVF_CODE_TOKENS;
    uint16_t scale;
    for (uint32_t i = 0; i < x->head_dim; i++) {
        uint32_t word;
        memcpy(&word, group + 4 * kvf_code_word(x->head_dim, t, i / KVF_CODE_LANES), sizeof word);
        level[i] = levels[word >> kvf_code_shift(i % KVF_CODE_LANES) & 3];
    }
    memcpy(&scale, group + kvf_code_scales(x->head_dim) + 2 * t, sizeof scale);
    return (double)kvf_fp16_to_float(scale);
}

static double estimate(const context *x, uint32_t head, uint32_t token)
{
    double level[KVF_HEAD_DIM_MAX], sum = 0.0;
    const double scale = decode(x, token, level);
    for (uint32_t i = 0; i < x->head_dim; i++)
        sum += level[i] * x->y[(size_t)head * x->head_dim + i];
    return sum * scale * (double)x->y_scale[head];
}

static void codes_have_length(check *c, const context *x)
{
    const uint32_t d = x->head_dim;
    for (uint32_t t = 0; t < TOKENS; t++) {
        float key[KVF_HEAD_DIM_MAX];
        double level[KVF_HEAD_DIM_MAX], along = 0.0;
        memcpy(key, x->keys + (size_t)t * d, d * sizeof *key);
        kvf_code_rotate(key, d);
        const double scale = decode(x, t, level), n2 = dot(key, key, d);
        for (uint32_t i = 0; i < d; i++)
            along += scale * level[i] * (double)key[i];
        /* fp16 keeps 11 bits; sums of at most 256 terms in fp32 */
        if (!(fabs(along - n2) <= (0x1p-11 + 0x1p-18) * n2))
            check_fail(c, "token %u: scale * c.x is %.7g, |x|^2 is %.7g", t, along, n2);
    }
}

/* The error of a code is about a third of its key's length and spread over all directions, so the
 * correlation is about 0.94 at any head_dim; 2,048 tokens find it to 0.01. */
static void estimates_follow(check *c, const context *x)
{
    const uint32_t d = x->head_dim;
    for (uint32_t h = 0; h < GROUP; h++) {
        double s1 = 0.0, s2 = 0.0, s11 = 0.0, s22 = 0.0, s12 = 0.0;
        for (uint32_t t = 0; t < TOKENS; t++) {
            const double a = dot(x->q + (size_t)h * d, x->keys + (size_t)t * d, d);
            const double b = estimate(x, h, t);
            s1 += a, s2 += b, s11 += a * a, s22 += b * b, s12 += a * b;
        }
        const double n = TOKENS;
        const double r = (n * s12 - s1 * s2) / sqrt((n * s11 - s1 * s1) * (n * s22 - s2 * s2));
        if (!(r > 0.9))
            check_fail(c, "head %u: estimates correlate with products by %.4f", h, r);
    }
}

static bool is_skipped(const uint64_t *bits, uint32_t token)
{
    return bits[token / BLOCK] >> token % BLOCK & 1;
}

/* Log-sum-exp of the tokens first .. first + count - 1 that count. */
static double weight_of(const context *x, const uint64_t *bits, uint32_t head, uint32_t first,
                        uint32_t count)
{
    double top = -INFINITY, sum = 0.0;
    for (uint32_t t = first; t < first + count; t++)
        if (!is_skipped(bits, t))
            top = fmax(top, estimate(x, head, t));
    for (uint32_t t = first; t < first + count && !isinf(top); t++)
        if (!is_skipped(bits, t))
            sum += exp(estimate(x, head, t) - top);
    return isinf(top) ? -INFINITY : top + log(sum);
}

static void pages_are_sums(check *c, const context *x, uint32_t page_size, kvf_group_reduce kind)
{
    const uint32_t pages = TOKENS / page_size, tiles = kvf_tiles(pages, page_size);
    uint64_t *bits = check_in(c, TOKENS / BLOCK * sizeof *bits);
    uint32_t *block_of = check_in(c, TOKENS / BLOCK * sizeof *block_of);
    const uint32_t *count = check_put(c, &pages, sizeof pages);
    for (uint32_t b = 0; b < TOKENS / BLOCK; b++)
        block_of[b] = b;
    for (uint32_t b = 0; b < TOKENS / BLOCK; b++)
        bits[b] = b % 5 ? check_random(c) & check_random(c) : b ? UINT64_MAX : 0;
    const kvf_score_codes_args w = {.head_dim = x->head_dim,
                                    .page_size = page_size,
                                    .block_size = BLOCK,
                                    .lists = 1,
                                    .group = GROUP,
                                    .pages_max = pages,
                                    .tiles_max = tiles,
                                    .q = x->y,
                                    .q_scale = x->y_scale,
                                    .codes = check_put(c, &x->codes, sizeof x->codes),
                                    .block_of = check_put(c, &block_of, sizeof block_of),
                                    .bits = check_put(c, &bits, sizeof bits),
                                    .pages = count,
                                    .mass = check_out(c, (size_t)GROUP * pages * sizeof(uint16_t)),
                                    .tile_max = check_out(c, (size_t)GROUP * tiles * sizeof(float)),
                                    .tile_sum =
                                        check_out(c, (size_t)GROUP * tiles * sizeof(float))};
    const kvf_reduce_mass_args f = {.kind = kind,
                                    .page_size = page_size,
                                    .block_size = BLOCK,
                                    .lists = 1,
                                    .group = GROUP,
                                    .pages_max = pages,
                                    .tiles_max = tiles,
                                    .mass = w.mass,
                                    .tile_max = w.tile_max,
                                    .tile_sum = w.tile_sum,
                                    .bits = w.bits,
                                    .pages = count,
                                    .out = check_out(c, pages * sizeof(float))};
    CHECK_RUN(c, c->var, score_codes, &w, false);
    CHECK_RUN(c, c->var, reduce_mass, &f, false);
    double all[GROUP], total = 0.0;
    for (uint32_t h = 0; h < GROUP; h++)
        all[h] = weight_of(x, bits, h, 0, TOKENS);
    for (uint32_t p = 0; p < pages; p++) {
        double want = kind == KVF_GROUP_MAX ? -INFINITY : 0.0;
        for (uint32_t h = 0; h < GROUP; h++) {
            const double one = weight_of(x, bits, h, p * page_size, page_size);
            want = kind == KVF_GROUP_MAX   ? fmax(want, one)
                   : kind == KVF_GROUP_SUM ? want + one
                                           : want + exp(one - all[h]) / GROUP;
        }
        if (isinf(weight_of(x, bits, 0, p * page_size, page_size)))
            want = -INFINITY;
        const double got = (double)f.out[p];
        /* bf16 rounds a mass by 2^-9 of itself, its logarithm by 2^-9 */
        const double allowed = kind == KVF_GROUP_MEAN_SOFTMAX ? 0x1p-8 * want : GROUP * 0x1p-8;
        if (isinf(want) ? got != want : !(fabs(got - want) <= allowed))
            check_fail(c, "P=%u kind=%d page %u: %.7g, log-sum-exp says %.7g", page_size, (int)kind,
                       p, got, want);
        total += isinf(got) ? 0.0 : got;
    }
    if (kind == KVF_GROUP_MEAN_SOFTMAX && !(fabs(total - 1.0) <= 0x1p-8))
        check_fail(c, "P=%u: weights add up to %.6f", page_size, total);
}

void check_codes(check *c)
{
    static const uint32_t head_dims[] = {64, 80, 96, 128, 256, 48, 512};
    const uint32_t dims = c->cuda ? 6 : 7; /* the last one is the host device's */
    for (uint32_t i = 0; i < dims; i++)
        for (uint32_t repeat = 0; repeat < 10; repeat++)
            rotation_keeps_products(c, head_dims[i]);
    for (uint32_t i = 0; i < 3 * dims; i++) {
        context x = {.dtype = (kvf_dtype)(i % 3), .head_dim = head_dims[i / 3]};
        if (!check_begin(c))
            continue;
        check_describe(c, "codes of %s, d=%u", check_dtype_name(x.dtype), x.head_dim);
        make_context(c, &x);
        codes_have_length(c, &x);
        estimates_follow(c, &x);
        pages_are_sums(c, &x, 1u << i % 7, (kvf_group_reduce)(i % 3));
        pages_are_sums(c, &x, 1, KVF_GROUP_MEAN_SOFTMAX);
    }
}
