/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels on codes against their references: encode, rotate, score_codes, reduce_mass; centroids,
 * score_centroids, filter.
 *
 * Codes, scales, queries in int8 and the largest logits have the same bits everywhere. Where there
 * are exponentials or logarithms the tolerance is said beside the comparison. Keys that are not
 * finite, too large to be squared, or subnormal are mixed with the others.
 */

#include <math.h>
#include <string.h>

#include "check_support.h"
#include "common/convert.h"
#include "score/codes.h"

/* Every form of a block, and head sizes of no model; the last ones are the host device's. */
static const uint32_t head_dims[] = {64, 80, 96, 128, 256, 16, 48, 112, 192, 240, 32, 512, 496};
#define HEAD_DIMS (sizeof head_dims / sizeof *head_dims - (c->cuda ? 2 : 0))

/* A number that no key should have, in one of `rows` rows. */
static void damage(check *c, void *x, kvf_dtype dtype, uint32_t rows, uint32_t head_dim)
{
    static const float special[] = {NAN, INFINITY, -INFINITY, 3e38f, -0.0f, 1e-39f};
    const size_t row = check_below(c, rows);
    const float value = special[check_below(c, 6)];
    if (check_below(c, 3) == 0) /* a whole row: its rotation overflows, or all of it is tiny */
        for (uint32_t i = 0; i < head_dim; i++)
            kvf_element_set(x, dtype, row * head_dim + i, value);
    else
        kvf_element_set(x, dtype, row * head_dim + check_below(c, head_dim), value);
}

static void encode_case(check *c, kvf_dtype dtype, uint32_t head_dim, check_data data)
{
    if (!check_begin(c))
        return;
    const uint32_t jobs = 1 + check_below(c, 4), block = 32u << check_below(c, 2);
    const kvf_shape s = {dtype, head_dim, block, KVF_PAGES_NATIVE, 0};
    kvf_encode_args a = {.shape = s, .job_count = jobs};
    check_describe(c, "%s data=%d", check_shape_text(&s), (int)data);
    kvf_digest_job *job = check_in(c, jobs * sizeof *job);
    const size_t bytes = block / KVF_CODE_TOKENS * kvf_code_bytes(head_dim);
    char *out = check_changed(c, "codes", jobs * bytes);
    for (uint32_t i = 0; i < jobs; i++) {
        char *page = check_in(c, kvf_page_bytes(&s));
        check_fill(c, page, dtype, kvf_page_bytes(&s) / kvf_dtype_bytes(dtype), data);
        for (uint32_t n = check_below(c, 6); n; n--)
            damage(c, page, dtype, 2 * block, head_dim);
        job[i] = (kvf_digest_job){.page = check_below(c, 8) ? page : NULL,
                                  .digest = out + i * bytes,
                                  .skip = check_random(c),
                                  .count = block};
    }
    a.jobs = job;
    CHECK_BOTH(c, encode, &a);
}

void check_encode(check *c)
{
    for (uint32_t d = 0; d < HEAD_DIMS; d++)
        for (uint32_t i = 0; i < 3 * DATA_COUNT; i++)
            encode_case(c, (kvf_dtype)(i % 3), head_dims[d], (check_data)(i / 3));
}

static void rotate_case(check *c, kvf_dtype dtype, uint32_t head_dim, check_data data)
{
    if (!check_begin(c))
        return;
    const uint32_t queries = 1 + check_below(c, 40);
    const size_t count = (size_t)queries * head_dim;
    kvf_rotate_args a = {.dtype = dtype, .head_dim = head_dim, .queries = queries};
    a.scale = check_below(c, 4) ? 1.0f / sqrtf((float)head_dim) : 1e30f;
    check_describe(c, "%s d=%u queries=%u scale=%g data=%d", check_dtype_name(dtype), head_dim,
                   queries, (double)a.scale, (int)data);
    void *q = check_in(c, count * kvf_dtype_bytes(dtype));
    check_fill(c, q, dtype, count, data);
    for (uint32_t n = check_below(c, 4); n; n--)
        damage(c, q, dtype, queries, head_dim);
    a.q = q;
    a.y = check_changed(c, "y", count);
    a.y_scale = check_changed(c, "y_scale", queries * sizeof(float));
    CHECK_BOTH(c, rotate, &a);
    for (uint32_t r = 0; r < queries; r++)
        if (!(a.y_scale[r] >= 0.0f && a.y_scale[r] <= KVF_QUERY_SCALE_MAX))
            check_fail(c, "y_scale[%u] is %g", r, (double)a.y_scale[r]);
}

void check_rotate(check *c)
{
    for (uint32_t d = 0; d < HEAD_DIMS; d++)
        for (uint32_t i = 0; i < 3 * DATA_COUNT; i++)
            rotate_case(c, (kvf_dtype)(i % 3), head_dims[d], (check_data)(i / 3));
}

/* Skip bits of a list: none, some, nearly all, or whole blocks, few or most of them. */
static void make_bits(check *c, uint64_t *bits, uint32_t blocks)
{
    const uint32_t kind = check_below(c, 6);
    for (uint32_t b = 0; b < blocks; b++)
        bits[b] = kind == 5   ? (check_below(c, 6) ? UINT64_MAX : check_random(c) & check_random(c))
                  : kind == 0 ? 0
                  : kind == 1 ? check_random(c) & check_random(c) & check_random(c)
                  : kind == 2 ? check_random(c) | check_random(c) | check_random(c)
                  : kind == 3 ? (check_below(c, 3) ? 0 : UINT64_MAX >> 32 * check_below(c, 2))
                              : UINT64_MAX << check_below(c, 64);
}

/* Code groups of `tokens` tokens, and a query for each head: any words, scales that are numbers. */
static void make_codes(check *c, const kvf_score_codes_args *a, const void **codes, uint32_t tokens,
                       bool is_extreme)
{
    const uint32_t groups = kvf_div_ceil_u32(tokens, KVF_CODE_TOKENS);
    const size_t bytes = kvf_code_bytes(a->head_dim);
    char *base = check_in(c, groups * bytes);
    for (size_t i = 0; i < groups * bytes / 4; i++)
        ((uint32_t *)(void *)base)[i] = is_extreme && check_below(c, 2)
                                            ? (check_below(c, 2) ? UINT32_MAX : 0)
                                            : (uint32_t)check_random(c);
    for (uint32_t g = 0; g < groups; g++) {
        uint16_t *scale = (uint16_t *)(void *)(base + g * bytes + kvf_code_scales(a->head_dim));
        for (uint32_t t = 0; t < KVF_CODE_TOKENS; t++)
            scale[t] = is_extreme ? (uint16_t)check_below(c, 0x7c00)
                                  : kvf_fp16_from_float(0.05f + 0.1f * (float)check_below(c, 3));
    }
    *codes = base;
}

static void make_queries(check *c, kvf_score_codes_args *a, bool is_extreme)
{
    const uint32_t rows = a->lists * a->group;
    int8_t *q = check_in(c, (size_t)rows * a->head_dim);
    float *scale = check_in(c, rows * sizeof *scale);
    for (size_t i = 0; i < (size_t)rows * a->head_dim; i++)
        q[i] = (int8_t)(is_extreme && check_below(c, 2) ? (check_below(c, 2) ? 127 : -127)
                                                        : (int)check_below(c, 255) - 127);
    for (uint32_t r = 0; r < rows; r++)
        scale[r] = is_extreme ? (float)ldexp(1.0, (int)check_below(c, 200) - 108)
                              : 1e-3f * (float)(1 + check_below(c, 10));
    a->q = q;
    a->q_scale = scale;
}

/* Masses of blocks none of whose tokens counts may be anything. */
static void forget_masses(const kvf_score_codes_args *a)
{
    for (uint32_t r = 0; r < a->lists * a->group; r++)
        for (uint32_t p = 0; p < a->pages[r / a->group]; p++)
            if (!kvf_block_counts(a->bits[r / a->group][p / (a->block_size / a->page_size)],
                                  a->block_size))
                a->mass[(size_t)r * a->pages_max + p] = 0;
}

/* Masses, tops and sums in memory of their own. */
static kvf_score_codes_args run_codes(check *c, const kvf_kernels *table,
                                      const kvf_score_codes_args *given)
{
    kvf_score_codes_args a = *given;
    const size_t rows = (size_t)a.lists * a.group;
    a.mass = check_out(c, rows * a.pages_max * sizeof *a.mass);
    a.tile_max = check_out(c, rows * a.tiles_max * sizeof *a.tile_max);
    a.tile_sum = check_out(c, rows * a.tiles_max * sizeof *a.tile_sum);
    CHECK_RUN(c, table, score_codes, &a, table == c->var);
    forget_masses(&a);
    return a;
}

/* The same codes in another place: `a` gives the bits of `want`. */
static void expect_codes(check *c, const kvf_kernels *table, const kvf_score_codes_args *a,
                         const kvf_score_codes_args *want)
{
    const kvf_score_codes_args got = run_codes(c, table, a);
    const size_t rows = (size_t)a->lists * a->group, tiles = rows * a->tiles_max * sizeof(float);
    check_bits(c, "mass", got.mass, want->mass, rows * a->pages_max * sizeof *got.mass);
    check_bits(c, "tile_max", got.tile_max, want->tile_max, tiles);
    check_bits(c, "tile_sum", got.tile_sum, want->tile_sum, tiles);
}

#define CAP_MAX 50.0f /* a larger one tells masses less exactly */

static void compare_masses(check *c, const kvf_score_codes_args *a,
                           const kvf_score_codes_args *want)
{
    /* Exponentials are to 3e-6, and sums add 1e-6. The rounding of s - top, twice, adds (top - s) *
     * 2^-23 to a term. The largest term is 1, so what 1023 others add to the sum is most where they
     * are within 10 of the top. A cap moves a logit and the top by 1e-6 of them each, which are
     * within it. A mass may then round to the other neighbour in bf16. */
    const double term = 20.0 * 0x1p-23 + 4e-6 + 2e-6 * (double)a->cap;
    for (uint32_t r = 0; r < a->lists * a->group; r++) {
        const uint32_t pages = a->pages[r / a->group];
        const size_t at = (size_t)r * a->pages_max, tile = (size_t)r * a->tiles_max;
        check_elements(c, "mass", a->mass + at, want->mass + at, KVF_BF16, a->pages_max, 0x1p-125,
                       0x1p-7);
        check_elements(c, "tile_sum", a->tile_sum + tile, want->tile_sum + tile, KVF_FP32,
                       kvf_tiles(pages, a->page_size), 0.0, term);
        for (uint32_t p = 0; p < pages; p++)
            if ((want->mass[at + p] ^ a->mass[at + p]) & 0x8000)
                check_fail(c, "row %u page %u: %04x, reference %04x", r, p, a->mass[at + p],
                           want->mass[at + p]);
    }
}

/* The same codes in physical blocks, in another order, words and scales apart: nothing may change.
 */
static kvf_score_codes_args put_in_blocks(check *c, const kvf_score_codes_args *a)
{
    const uint32_t blocks = kvf_div_ceil_u32(a->pages_max * a->page_size, a->block_size);
    const uint32_t id_blocks = 1 + check_below(c, 3);
    const uint32_t ids = kvf_div_ceil_u32(blocks, id_blocks), physical_blocks = ids * id_blocks;
    const size_t code_bytes = (size_t)a->lists * a->block_size * a->head_dim / 4;
    kvf_score_codes_args to = *a;
    uint32_t *physical = check_in(c, blocks * sizeof *physical);
    to.codes = NULL;
    to.block_of = NULL;
    to.physical = physical;
    to.physical_stride = blocks;
    to.physical_codes.id_blocks = id_blocks;
    to.physical_codes.kv_heads = a->lists; /* the lists are the heads of one row */
    to.physical_codes.stride = id_blocks * code_bytes + 16 * check_below(c, 3);
    to.physical_codes.words = check_in(c, ids * to.physical_codes.stride);
    to.physical_codes.scales =
        check_in(c, (size_t)physical_blocks * a->lists * a->block_size * sizeof(uint16_t));
    for (uint32_t b = 0; b < blocks; b++)
        physical[b] = physical_blocks - 1 - b;
    for (uint32_t l = 0; l < a->lists; l++)
        for (uint32_t t = 0; t < a->pages[l] * a->page_size; t += KVF_CODE_TOKENS) {
            const kvf_code_group from = kvf_score_codes_group(a, l, t),
                                 at = kvf_score_codes_group(&to, l, t);
            memcpy((char *)at.words, from.words, kvf_code_scales(a->head_dim));
            memcpy((char *)at.scales, from.scales, KVF_CODE_TOKENS * sizeof(uint16_t));
        }
    return to;
}

static void score_codes_case(check *c, uint32_t head_dim, uint32_t page_size, uint32_t group,
                             bool is_extreme)
{
    kvf_score_codes_args a = {.head_dim = head_dim, .page_size = page_size, .group = group};
    if (!check_begin(c))
        return;
    a.block_size = page_size > 32 ? 64 : 32u << check_below(c, 2);
    a.lists = 1 + check_below(c, 2);
    a.pages_max = kvf_max_u32(1, (1 + check_below(c, 2600)) / page_size);
    a.tiles_max = kvf_tiles(a.pages_max, page_size) + check_below(c, 2);
    a.tiles_max += check_below(c, 3) ? 0 : 4 * KVF_SCORE_CODES_TASKS; /* more of them in a task */
    a.cap = fminf(check_cap(c), CAP_MAX);
    a.sub = check_subgroup(c, group);
    check_describe(c, "d=%u P=%u block=%u G=%u+%u/%u lists=%u pages=%u%s", head_dim, page_size,
                   a.block_size, a.sub.first, a.sub.count, group, a.lists, a.pages_max,
                   is_extreme ? " extreme" : "");
    const void **codes = check_in(c, a.lists * sizeof *codes);
    const uint32_t **block_of = check_in(c, a.lists * sizeof *block_of);
    const uint64_t **bits = check_in(c, a.lists * sizeof *bits);
    const uint32_t *pages = check_counts(c, a.lists, a.pages_max);
    for (uint32_t l = 0; l < a.lists; l++) {
        uint32_t all;
        const uint32_t blocks = kvf_div_ceil_u32(pages[l] * page_size, a.block_size);
        uint64_t *words = check_in(c, blocks * sizeof *words);
        make_bits(c, words, blocks);
        bits[l] = words;
        block_of[l] = check_block_of(c, blocks, &all);
        make_codes(c, &a, &codes[l], all * a.block_size, is_extreme);
    }
    make_queries(c, &a, is_extreme);
    a.codes = codes;
    a.block_of = block_of;
    a.bits = bits;
    a.pages = pages;
    const kvf_score_codes_args ref = run_codes(c, c->ref, &a), var = run_codes(c, c->var, &a);
    /* The same numbers, without a cap; a largest of -0 and +0 may be either. */
    check_elements(c, "tile_max", var.tile_max, ref.tile_max, KVF_FP32,
                   (size_t)a.lists * group * a.tiles_max, 0.0, a.cap > 0.0f ? 1e-6 : 0.0);
    compare_masses(c, &var, &ref);
    const kvf_score_codes_args apart = put_in_blocks(c, &a);
    expect_codes(c, c->var, &apart, &var);
}

/* The front of list l of `a` gets the codes that list `from` of `b` has. */
static void copy_codes(const kvf_score_codes_args *a, uint32_t l, const kvf_score_codes_args *b,
                       uint32_t from, uint32_t tokens)
{
    for (uint32_t t = 0; t < tokens; t += KVF_CODE_TOKENS)
        memcpy((char *)(uintptr_t)kvf_score_codes_group(a, l, t).words,
               kvf_score_codes_group(b, from, t).words, kvf_code_bytes(a->head_dim));
}

/* Rows of which some have tiles in common with the one before: `apart` has codes for each, in
 * `shared` those of common tiles are noise but in the first row, and rows are in another order. */
static void make_sharers(check *c, kvf_score_codes_args *a, kvf_score_codes_args *shared,
                         uint32_t *order, uint32_t *common)
{
    const void **codes[] = {check_in(c, a->lists * sizeof **codes),
                            check_in(c, a->lists * sizeof **codes)};
    const uint32_t **block_of[] = {check_in(c, a->lists * sizeof **block_of),
                                   check_in(c, a->lists * sizeof **block_of)};
    const uint32_t rows = a->lists / a->row_lists, tokens = a->pages_max * a->page_size;
    const uint32_t blocks = kvf_div_ceil_u32(tokens, a->block_size);
    const uint32_t turn = check_below(c, rows);
    a->codes = codes[0];
    a->block_of = block_of[0];
    shared->codes = codes[1];
    shared->block_of = block_of[1];
    for (uint32_t i = 0; i < rows; i++) {
        order[i] = (i + turn) % rows;
        common[i] = i ? check_below(c, tokens / KVF_SCORE_CODES_TOKENS + 1) : 0;
        for (uint32_t h = 0; h < a->row_lists; h++) {
            const uint32_t l = order[i] * a->row_lists + h;
            for (int k = 0; k < 2; k++) {
                uint32_t all;
                block_of[k][l] = check_block_of(c, blocks, &all);
                make_codes(c, a, &codes[k][l], all * a->block_size, false);
            }
            copy_codes(a, l, shared, l, tokens);
            if (i)
                copy_codes(a, l, a, order[i - 1] * a->row_lists + h,
                           common[i] * KVF_SCORE_CODES_TOKENS);
        }
    }
}

/* Codes in common are looked at in one place, and give the bits of codes for each. */
static void share_case(check *c, uint32_t head_dim, uint32_t page_size, uint32_t group)
{
    kvf_score_codes_args a = {.head_dim = head_dim, .page_size = page_size, .group = group};
    if (!check_begin(c))
        return;
    const uint32_t rows = 1 + check_below(c, 4);
    a.block_size = page_size > 32 ? 64 : 32u << check_below(c, 2);
    a.row_lists = 1 + check_below(c, 2);
    a.lists = rows * a.row_lists;
    a.pages_max = (1024 + check_below(c, 1200)) / page_size;
    a.tiles_max = kvf_tiles(a.pages_max, page_size) + check_below(c, 2);
    a.cap = fminf(check_cap(c), CAP_MAX);
    check_describe(c, "d=%u P=%u block=%u G=%u rows=%u of %u pages=%u", head_dim, page_size,
                   a.block_size, group, rows, a.row_lists, a.pages_max);
    const uint64_t **bits = check_in(c, a.lists * sizeof *bits);
    uint32_t *pages = check_in(c, a.lists * sizeof *pages);
    uint32_t *order = check_in(c, rows * sizeof *order);
    uint32_t *common = check_in(c, rows * sizeof *common);
    for (uint32_t l = 0; l < a.lists; l++) {
        const uint32_t blocks = kvf_div_ceil_u32(a.pages_max * page_size, a.block_size);
        uint64_t *words = check_in(c, blocks * sizeof *words);
        make_bits(c, words, blocks);
        bits[l] = words;
        pages[l] = a.pages_max;
    }
    make_queries(c, &a, false);
    a.bits = bits;
    a.pages = pages;
    kvf_score_codes_args shared = a;
    shared.order = order;
    shared.common = common;
    make_sharers(c, &a, &shared, order, common);
    for (int i = 0; i < 2; i++) {
        const kvf_kernels *const table = i ? c->var : c->ref;
        const kvf_score_codes_args want = run_codes(c, table, &a);
        expect_codes(c, table, &shared, &want);
    }
}

void check_score_codes(check *c)
{
    for (uint32_t d = 0; d < HEAD_DIMS; d++)
        for (uint32_t p = 0; p < 7; p++)
            for (uint32_t i = 0; i < 3; i++)
                score_codes_case(c, head_dims[d], 1u << p,
                                 check_groups[(d + 5 * p + 7 * i) % CHECK_GROUPS], i == 2);
    for (uint32_t i = 0; i < 14; i++)
        share_case(c, i % 3 ? 32u << i % 3 : 256, 1u << i % 7,
                   check_groups[i % 4 ? i % 5 : 3 * i % CHECK_GROUPS]);
}

/* Tops of ordinary logits; with `is_damaged` also what no tile should have. */
static void make_tiles(check *c, const kvf_reduce_mass_args *a, float *top, float *sum,
                       bool is_damaged)
{
    static const float special[] = {NAN, INFINITY, -INFINITY, 3e38f, -1.0f, 0.0f};
    for (size_t i = 0; i < (size_t)a->lists * a->group * a->tiles_max; i++) {
        top[i] = (float)check_normal(c) * 5.0f;
        sum[i] = 1.0f + (float)check_below(c, 1000);
        if (check_below(c, 6) == 0)
            top[i] = -INFINITY;
        if (is_damaged && check_below(c, 3) == 0)
            top[i] = special[check_below(c, 6)];
        if (is_damaged && check_below(c, 3) == 0)
            sum[i] = special[check_below(c, 6)];
    }
}

/* Masses: a page of a tile without tokens has none; the heads of a page agree on that. Those of
 * blocks none of whose tokens counts are never looked at, so they are anything. */
static void make_masses(check *c, const kvf_reduce_mass_args *a, uint16_t *mass, const float *top,
                        bool is_damaged)
{
    static const uint16_t special[] = {0x7fc0, 0x7f80, 0xff80, 0x7f7f, 0x8000, 0x0001};
    for (uint32_t l = 0; l < a->lists; l++)
        for (uint32_t p = 0; p < a->pages_max; p++) {
            const bool is_empty = check_below(c, 5) == 0;
            for (uint32_t g = 0; g < a->group; g++) {
                const size_t row = (size_t)l * a->group + g;
                const float t = top[row * a->tiles_max + p / kvf_tile_pages(a->page_size)];
                float x = (float)exp(5.0 * check_normal(c) - 5.0);
                x = check_below(c, 20) ? x : 0.0f;
                uint16_t *to = &mass[row * a->pages_max + p];
                *to = kvf_bf16_from_float(is_empty || t == -INFINITY ? -1.0f : x);
                if (is_damaged && check_below(c, 20) == 0)
                    *to = special[check_below(c, 6)];
                if (!kvf_block_counts(a->bits[l][p / (a->block_size / a->page_size)],
                                      a->block_size))
                    *to = (uint16_t)check_random(c);
            }
        }
}

/* Whether a page has a mass that no sound page has: what it scores is its own business. */
static bool is_heavy(const kvf_reduce_mass_args *a, size_t list, uint32_t page)
{
    const uint64_t bits = a->bits[list][page / (a->block_size / a->page_size)];
    for (uint32_t g = 0; g < a->group; g++)
        if (kvf_block_counts(bits, a->block_size) &&
            kvf_bf16_to_float(a->mass[(list * a->group + g) * a->pages_max + page]) > 1e9f)
            return true;
    return false;
}

/* A logarithm and a top cancel at most to the error of the larger, about 90 * 2^-23 per head; a
 * weight is a product of exponentials of at most -88, in 2^-23, and a sum over tiles and heads. */
static void compare_scores(check *c, const kvf_reduce_mass_args *a, const float *got,
                           const float *want)
{
    const bool is_centroid = a->kind == KVF_GROUP_MEAN_SOFTMAX;
    for (size_t l = 0; l < a->lists; l++)
        for (uint32_t p = 0; p < a->pages_max; p++) {
            const size_t i = l * a->pages_max + p;
            if (p < a->pages[l] && (isnan(got[i]) || (double)got[i] == INFINITY))
                check_fail(c, "out[%zu] is %g", i, (double)got[i]);
            if (p < a->pages[l] && is_heavy(a, l, p))
                continue;
            check_elements(c, "out", got + i, want + i, KVF_FP32, 1,
                           is_centroid ? 1e-36 : 16 * 2e-5, is_centroid ? 4e-5 : 1e-6);
        }
}

void check_masses(check *c, kvf_reduce_mass_args *a, bool is_damaged, bool has_ties)
{
    const size_t rows = (size_t)a->lists * a->group;
    const uint32_t blocks = kvf_div_ceil_u32(a->pages_max * a->page_size, a->block_size);
    a->tiles_max = kvf_tiles(a->pages_max, a->page_size) + check_below(c, 2);
    uint16_t *mass = check_in(c, rows * a->pages_max * sizeof *mass);
    float *top = check_in(c, rows * a->tiles_max * sizeof *top);
    float *sum = check_in(c, rows * a->tiles_max * sizeof *sum);
    const uint64_t **bits = check_in(c, a->lists * sizeof *bits);
    for (uint32_t l = 0; l < a->lists; l++) {
        uint64_t *words = check_in(c, blocks * sizeof *words);
        make_bits(c, words, blocks);
        bits[l] = words;
    }
    a->bits = bits;
    make_tiles(c, a, top, sum, is_damaged);
    for (size_t i = 0; i < rows * a->tiles_max && has_ties; i++)
        top[i] = 1.0f;
    make_masses(c, a, mass, top, is_damaged);
    for (size_t i = 0; i < rows * a->pages_max && has_ties; i++)
        mass[i] = kvf_bf16_from_float((float)check_below(c, 3));
    a->mass = mass;
    a->tile_max = top;
    a->tile_sum = sum;
}

static void reduce_mass_case(check *c, kvf_group_reduce kind, uint32_t page_size, uint32_t group,
                             bool is_damaged)
{
    kvf_reduce_mass_args a = {.kind = kind, .page_size = page_size, .group = group};
    if (!check_begin(c))
        return;
    a.block_size = page_size > 32 ? 64 : 32u << check_below(c, 2);
    a.lists = 1 + check_below(c, 2);
    a.pages_max = 1 + check_below(c, check_below(c, 8) ? 3000 : 2 * KVF_REDUCE_PAGES);
    check_describe(c, "kind=%d P=%u block=%u G=%u lists=%u pages=%u%s", (int)kind, page_size,
                   a.block_size, group, a.lists, a.pages_max, is_damaged ? " damaged" : "");
    a.pages = check_counts(c, a.lists, a.pages_max);
    check_masses(c, &a, is_damaged, false);
    float *out[2];
    const size_t count = (size_t)a.lists * a.pages_max;
    for (int i = 0; i < 2; i++) {
        out[i] = a.out = check_out(c, count * sizeof(float));
        CHECK_RUN(c, i ? c->var : c->ref, reduce_mass, &a, i);
    }
    compare_scores(c, &a, out[1], out[0]);
}

void check_reduce_mass(check *c)
{
    for (uint32_t p = 0; p < 7; p++)
        for (uint32_t i = 0; i < 18; i++)
            reduce_mass_case(c, (kvf_group_reduce)(i % 3), 1u << p,
                             check_groups[(p + 5 * i) % CHECK_GROUPS], i >= 12);
}

/* ---- centroids, score_centroids, filter ---- */

static void centroids_case(check *c, uint32_t head_dim, bool is_extreme)
{
    if (!check_begin(c))
        return;
    const uint32_t block = 32u << check_below(c, 2), per = KVF_CENTROID_TOKENS / block;
    kvf_centroids_args a = {.rows = 1 + check_below(c, 3), .segments = 3};
    kvf_paging *p = &a.paging;
    *p = (kvf_paging){.shape = {KVF_BF16, head_dim, 4, KVF_PAGES_NATIVE, 0},
                      .kv_heads = 1 + check_below(c, 3),
                      .block_size = block,
                      .block_jobs = 1,
                      .digest_bytes = block / KVF_CODE_TOKENS * (uint32_t)kvf_code_bytes(head_dim),
                      .blocks_max = 8 * per + check_below(c, 2),
                      .segments_max = 8};
    uint32_t all;
    const uint32_t *block_of = check_block_of(c, p->blocks_max, &all);
    check_describe(c, "d=%u block=%u rows=%u heads=%u%s", head_dim, block, a.rows, p->kv_heads,
                   is_extreme ? " extreme" : "");
    const size_t centroids = (size_t)p->kv_heads * p->segments_max * head_dim;
    const size_t scales = (size_t)p->kv_heads * p->segments_max * sizeof(uint16_t);
    int8_t *mean = check_changed(c, "centroids", a.rows * centroids);
    uint16_t *scale = check_changed(c, "centroid_scales", a.rows * scales);
    kvf_row *row = check_in(c, a.rows * sizeof *row);
    const kvf_score_codes_args codes = {.head_dim = head_dim};
    for (uint32_t r = 0; r < a.rows; r++) {
        const void *of_row;
        make_codes(c, &codes, &of_row, p->kv_heads * all * block, is_extreme);
        kvf_row one = {.digests = (char *)(uintptr_t)of_row,
                       .digest_stride = (size_t)all * p->digest_bytes,
                       .block_of = (uint32_t *)(uintptr_t)block_of};
        one.sealed_before = check_below(c, 6 * per);
        one.sealed = one.sealed_before + check_below(c, 2 * per + 1);
        one.centroids = mean + r * centroids;
        one.centroid_scales = scale + r * scales / sizeof(uint16_t);
        row[r] = one;
    }
    a.row = row;
    CHECK_BOTH(c, centroids, &a);
}

void check_centroids(check *c)
{
    for (uint32_t d = 0; d < HEAD_DIMS; d++)
        for (uint32_t i = 0; i < 6; i++)
            centroids_case(c, head_dims[d], i % 2);
}

static void fill_centroids(check *c, int8_t *centroids, size_t levels, uint16_t *scales,
                           size_t count, bool is_extreme)
{
    for (size_t i = 0; i < levels; i++)
        centroids[i] = (int8_t)(is_extreme ? (check_below(c, 2) ? 127 : -127)
                                           : (int)check_below(c, 255) - 127);
    for (size_t i = 0; i < count; i++)
        scales[i] = (uint16_t)check_below(c, is_extreme ? 0x7c00 : 0x3c00);
}

/* Means of each list by themselves. */
static void make_centroids(check *c, kvf_score_centroids_args *a, bool is_extreme)
{
    const int8_t **centroids = check_in(c, a->lists * sizeof *centroids);
    const uint16_t **scale = check_in(c, a->lists * sizeof *scale);
    for (uint32_t l = 0; l < a->lists; l++) {
        int8_t *mean = check_in(c, (size_t)a->count[l] * a->head_dim);
        uint16_t *scales = check_in(c, a->count[l] * sizeof *scales);
        fill_centroids(c, mean, (size_t)a->count[l] * a->head_dim, scales, a->count[l], is_extreme);
        centroids[l] = mean;
        scale[l] = scales;
    }
    a->centroids = centroids;
    a->scale = scale;
}

/* Those of physical blocks, in any order, and some by several rows; a head without any has no
 * number. */
static void make_physical_centroids(check *c, kvf_score_centroids_args *a, uint32_t *count,
                                    bool is_extreme)
{
    const uint32_t per = 1 + check_below(c, 2), all = 1 + check_below(c, 40);
    const uint32_t heads = a->lists % 2 ? 1 : 2;
    uint32_t *number = check_in(c, heads * sizeof *number), numbers = 0;
    a->physical_stride = (a->stride + 1) * per;
    uint32_t *physical = check_in(c, a->lists / heads * a->physical_stride * sizeof *physical);
    for (uint32_t i = 0; i < a->lists / heads * a->physical_stride; i += per)
        physical[i] = check_below(c, all) * per;
    for (uint32_t h = 0; h < heads; h++) {
        number[h] = h == 0 || check_below(c, 2) ? numbers++ : UINT32_MAX;
        for (uint32_t l = h; number[h] == UINT32_MAX && l < a->lists; l += heads)
            count[l] = 0;
    }
    int8_t *centroids = check_in(c, (size_t)numbers * all * a->head_dim);
    uint16_t *scales = check_in(c, numbers * all * sizeof *scales);
    fill_centroids(c, centroids, (size_t)numbers * all * a->head_dim, scales, (size_t)numbers * all,
                   is_extreme);
    a->physical = physical;
    a->physical_centroids = (kvf_physical_centroids){.centroids = centroids,
                                                     .scales = scales,
                                                     .number = number,
                                                     .kv_heads = heads,
                                                     .segments = all,
                                                     .blocks = per};
}

static void score_centroids_case(check *c, uint32_t head_dim, uint32_t group, bool is_extreme)
{
    if (!check_begin(c))
        return;
    kvf_score_centroids_args a = {
        .head_dim = head_dim, .lists = 1 + check_below(c, 4), .group = group};
    a.stride = 1 + check_below(c, 3 * KVF_CENTROIDS_PER_TASK);
    const bool by_table = check_below(c, 3) == 0;
    check_describe(c, "d=%u G=%u lists=%u stride=%u%s%s", head_dim, group, a.lists, a.stride,
                   is_extreme ? " extreme" : "", by_table ? " by table" : "");
    uint32_t *count = check_in(c, a.lists * sizeof *count);
    for (uint32_t l = 0; l < a.lists; l++)
        count[l] = check_below(c, 3) ? check_below(c, a.stride + 1) : l ? 0 : a.stride;
    a.count = count;
    if (by_table)
        make_physical_centroids(c, &a, count, is_extreme);
    else
        make_centroids(c, &a, is_extreme);
    kvf_score_codes_args queries = {.head_dim = head_dim, .lists = a.lists, .group = group};
    make_queries(c, &queries, is_extreme);
    a.q = queries.q;
    a.q_scale = queries.q_scale;
    a.scores = check_changed(c, "scores", (size_t)a.lists * group * a.stride * sizeof(float));
    CHECK_BOTH(c, score_centroids, &a);
}

void check_score_centroids(check *c)
{
    for (uint32_t d = 0; d < HEAD_DIMS; d++)
        for (uint32_t i = 0; i < CHECK_GROUPS; i++)
            score_centroids_case(c, head_dims[d], check_groups[i], i % 4 == 0);
}

static void filter_case(check *c, uint32_t block_size)
{
    if (!check_begin(c))
        return;
    const uint32_t per = KVF_CENTROID_TOKENS / block_size;
    kvf_filter_args a = {.lists = 1 + check_below(c, 4), .block_size = block_size};
    a.blocks_max = 1 + check_below(c, 600);
    a.ids_max = a.blocks_max;
    check_describe(c, "block=%u lists=%u blocks=%u", block_size, a.lists, a.blocks_max);
    const uint64_t **from = check_in(c, a.lists * sizeof *from);
    uint32_t *blocks = check_in(c, a.lists * sizeof *blocks);
    uint32_t *id_count = check_in(c, a.lists * sizeof *id_count);
    int32_t *ids = check_in(c, (size_t)a.lists * a.ids_max * sizeof *ids);
    for (uint32_t l = 0; l < a.lists; l++) {
        blocks[l] = check_below(c, 3) ? check_below(c, a.blocks_max + 1) : a.blocks_max;
        uint64_t *bits = check_in(c, blocks[l] * sizeof *bits);
        make_bits(c, bits, blocks[l]);
        from[l] = check_below(c, 4) ? bits : NULL;
        id_count[l] = 0;
        const uint32_t whole = blocks[l] / per, one_in = 1 + check_below(c, 12);
        for (uint32_t i = 1; i < whole; i++)
            if (check_below(c, one_in) == 0)
                ids[(size_t)l * a.ids_max + id_count[l]++] = (int32_t)i - 1;
    }
    a.from = from;
    a.blocks = blocks;
    a.ids = ids;
    a.id_count = id_count;
    a.bits = check_changed(c, "bits", (size_t)a.lists * a.blocks_max * sizeof(uint64_t));
    CHECK_BOTH(c, filter, &a);
}

void check_filter(check *c)
{
    for (uint32_t i = 0; i < 40; i++)
        filter_case(c, 32u << i % 2);
}
