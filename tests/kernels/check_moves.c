/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels on pages and bytes against their references: digest, score, copy, repack.
 *
 * copy, repack and minmax digests: bit for bit. The other digests round an fp32 result that may
 * differ in its last bits, so neighbours in bf16 are equal enough, plus n * 2^-23 of the largest
 * key where terms cancel. A score is a sum of 2 head_dim products: off by at most 2 head_dim *
 * 2^-24 (twice that without fused multiply-add) of the sum of their magnitudes, which is at most
 * |q| (|lo| + |hi|).
 */

#include <math.h>
#include <string.h>

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

static void copy_case(check *c, size_t bytes, uint32_t count, uint32_t per_task_max,
                      uint32_t stream, size_t shift)
{
    kvf_copy_args a = {.bytes = bytes, .count = count, .stream = stream};
    if (!check_begin(c))
        return;
    a.per_task = 1 + check_below(c, per_task_max);
    check_describe(c, "bytes=%zu count=%u per_task=%u stream=%u shift=%zu", bytes, count,
                   a.per_task, stream, shift);
    const uint8_t *from = check_noise_in(c, bytes * count);
    const void **sources = check_in(c, count * sizeof *sources);
    void **targets = check_in(c, count * sizeof *targets);
    for (uint32_t i = 0; i < count; i++)
        sources[i] = from + bytes * check_below(c, count);
    a.from = sources;
    a.to = targets;
    uint8_t *out = check_changed(c, "copy", bytes * count + shift);
    for (uint32_t k = 0; k < count; k++)
        targets[k] = out + shift + bytes * ((k * 7 + 3) % count);
    CHECK_BOTH(c, copy, &a);
}

void check_copy(check *c)
{
    static const size_t sizes[] = {16, 48, 256, 272, 1024, 4096, 5120, 16384, 20480, 65536};
    for (uint32_t i = 0; i < 10; i++)
        for (uint32_t stream = 0; stream < 2; stream++)
            for (size_t shift = 0; shift <= 16; shift += 16) {
                copy_case(c, sizes[i], 1, 5, stream, shift);
                copy_case(c, sizes[i], 8, 5, stream, shift);
            }
    /* Rows: what is prefetched lies many blocks further on, and not at a multiple of their size. */
    static const size_t rows[] = {64, 192, 256, 512, 576, 1024, 2560, 4160};
    for (uint32_t i = 0; i < 8; i++)
        for (uint32_t stream = 0; stream < 2; stream++)
            copy_case(c, rows[i], 300, 256, stream, stream * 64);
}

static void repack_case(check *c, const kvf_shape *keys, uint32_t tokens, uint32_t faults)
{
    kvf_repack_args a = {.tokens = tokens};
    const kvf_shape *shape = &a.shape;
    if (!check_begin(c))
        return;
    a.shape = check_values(c, keys);
    a.kv_heads = 1 + check_below(c, 3);
    a.first = check_below(c, shape->page_size);
    check_describe(c, "%s heads=%u tokens=%u first=%u faults=%u", check_shape_text(shape),
                   a.kv_heads, tokens, a.first, faults);
    const uint32_t blocks = kvf_div_ceil_u32(a.first + tokens, shape->page_size);
    const uint32_t heads = tokens * a.kv_heads;
    const uint32_t elements[] = {heads * shape->head_dim, heads * kvf_value_dim(shape)};
    const size_t block_bytes = a.kv_heads * kvf_page_bytes(shape);
    void *input[2];
    void **targets = check_in(c, blocks * sizeof *targets);
    for (int i = 0; i < 2; i++) {
        input[i] = check_in(c, elements[i] * kvf_dtype_bytes(shape->dtype));
        check_fill(c, input[i], shape->dtype, elements[i], (check_data)check_below(c, DATA_COUNT));
    }
    for (uint32_t i = 0; i < faults && heads; i++) {
        const uint32_t of = check_below(c, 2);
        kvf_element_set(input[of], shape->dtype, check_below(c, elements[of]),
                        check_below(c, 2)   ? NAN
                        : check_below(c, 2) ? INFINITY
                                            : -INFINITY);
    }
    a.k = input[0];
    a.v = input[1];
    a.blocks = targets;
    uint8_t *out = check_changed(c, "pages", blocks * block_bytes);
    for (uint32_t k = 0; k < blocks; k++)
        targets[k] = out + k * block_bytes;
    a.fault = check_changed(c, "fault", sizeof *a.fault);
    *a.fault = UINT32_MAX;
    CHECK_BOTH(c, repack, &a);
    if ((*a.fault != UINT32_MAX) != (faults != 0 && heads != 0))
        check_fail(c, "%u faults, of which %u is reported", faults, *a.fault);
}

void check_repack(check *c)
{
    static const uint32_t tokens[] = {0, 1, 7, 8, 33, 64, 100};
    for (uint32_t i = 0; i < 36 * check_dims(c); i++) {
        const kvf_shape s = check_shape(c, i, i / 3, i / (3 * check_dims(c)) % 4);
        repack_case(c, &s, tokens[i % 7], i % 3 ? 0 : i % 4);
    }
}

/* Numbers that rounding treats each in its own way: between two that are stored, half-way, too
 * large, too small, none. */
static float to_round(check *c)
{
    static const float edges[] = {0.0f,        -0.0f,           INFINITY,    -INFINITY,
                                  65504.0f,    65519.99f,       65520.0f,    -65520.0f,
                                  0x1.fep127f, 0x1.fefffep127f, 0x1.ffp127f, 0x1.fffffep127f,
                                  0x1p-14f,    0x1.8p-25f,      0x1p-25f,    0x1p-149f,
                                  0x1.004p0f,  0x1.00cp0f,      0x1.01p0f,   0x1.03p0f};
    const uint32_t edge = check_below(c, 2 * sizeof edges / sizeof *edges);
    float any = kvf_bits_float((uint32_t)check_random(c));
    if (edge < sizeof edges / sizeof *edges)
        return edges[edge];
    return isnan(any) ? (float)check_normal(c) : any;
}

static void narrow_case(check *c, kvf_dtype dtype)
{
    kvf_narrow_args a = {.dtype = dtype};
    if (!check_begin(c))
        return;
    size_t most = 0;
    for (uint32_t j = 0; j < KVF_NARROW_JOBS; j++) {
        const size_t count = (size_t)16 * check_below(c, j ? 40 : 300);
        float *from = check_in(c, count * sizeof *from);
        for (size_t i = 0; i < count; i++)
            from[i] = to_round(c);
        a.jobs[j] = (kvf_narrow_job){from, check_changed(c, "numbers", count * 2), count};
        most = count > most ? count : most;
    }
    a.parts = (uint32_t)((most + KVF_NARROW_NUMBERS - 1) / KVF_NARROW_NUMBERS);
    check_describe(c, "%s counts=%zu,%zu,%zu", check_dtype_name(dtype), a.jobs[0].count,
                   a.jobs[1].count, a.jobs[2].count);
    CHECK_BOTH(c, narrow, &a);
    for (uint32_t j = 0; j < KVF_NARROW_JOBS; j++) { /* a NaN stays one, with any bits */
        kvf_narrow_args one = {.dtype = dtype, .parts = 1};
        float *from = check_in(c, 16 * sizeof *from);
        for (uint32_t i = 0; i < 16; i++)
            from[i] = i % 3 ? 1.0f : kvf_bits_float((i % 2 ? 0xff800001u : 0x7fc00001u));
        one.jobs[j] = (kvf_narrow_job){from, check_out(c, 32), 16};
        CHECK_RUN(c, c->var, narrow, &one, false);
        for (uint32_t i = 0; i < 16; i++)
            if (isnan(kvf_element_get(one.jobs[j].to, dtype, i)) != (i % 3 == 0))
                check_fail(c, "number %u of %g is %g", i, (double)from[i],
                           (double)kvf_element_get(one.jobs[j].to, dtype, i));
    }
}

void check_narrow(check *c)
{
    for (uint32_t i = 0; i < 40; i++)
        narrow_case(c, i % 2 ? KVF_FP16 : KVF_BF16);
}

static void take_case(check *c, const kvf_shape *keys, uint32_t count)
{
    kvf_take_args a = {.count = count};
    const kvf_shape *shape = &a.shape;
    if (!check_begin(c))
        return;
    a.shape = check_values(c, keys);
    a.kv_heads = 1 + check_below(c, 3);
    a.stride = count + check_below(c, 4);
    const uint32_t pages = 1 + check_below(c, 20), tokens = pages * shape->page_size;
    check_describe(c, "%s heads=%u count=%u pages=%u", check_shape_text(shape), a.kv_heads, count,
                   pages);
    const size_t block = a.kv_heads * kvf_page_bytes(shape);
    const void **blocks = check_in(c, pages * sizeof *blocks);
    for (uint32_t i = 0; i < pages; i++)
        blocks[pages - 1 - i] = check_noise_in(c, block);
    uint32_t *ids = check_in(c, (size_t)a.kv_heads * a.stride * sizeof *ids);
    for (size_t i = 0; i < (size_t)a.kv_heads * a.stride; i++)
        ids[i] = check_below(c, tokens);
    const size_t tokens_heads = (size_t)count * a.kv_heads;
    a.blocks = blocks;
    a.ids = ids;
    a.k = check_changed(c, "k", tokens_heads * kvf_key_bytes(shape));
    a.v = check_changed(c, "v", tokens_heads * kvf_value_bytes(shape));
    CHECK_BOTH(c, take, &a);
    for (uint32_t n = 0; n < 8 && count; n++) { /* and what it means */
        const uint32_t i = check_below(c, count), h = check_below(c, a.kv_heads);
        const uint32_t id = ids[(size_t)h * a.stride + i];
        const void *page = kvf_offset(blocks[id / shape->page_size], h * kvf_page_bytes(shape));
        const size_t at = (size_t)i * a.kv_heads + h;
        check_bits(c, "key of a token", kvf_offset(a.k, at * kvf_key_bytes(shape)),
                   kvf_page_key(shape, page, id % shape->page_size), kvf_key_bytes(shape));
        check_bits(c, "value of a token", kvf_offset(a.v, at * kvf_value_bytes(shape)),
                   kvf_page_value(shape, page, id % shape->page_size), kvf_value_bytes(shape));
    }
}

void check_take(check *c)
{
    static const uint32_t counts[] = {0, 1, 7, 63, 64, 65, 200};
    for (uint32_t i = 0; i < 12 * check_dims(c); i++) {
        const kvf_shape s = check_shape(c, i, i / 12, i / 3 % 4);
        take_case(c, &s, counts[i % 7]);
    }
}
