/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Packed pages: narrow and widen against their references, bit for bit, and what packing may lose.
 *
 * A code is half a step off at most. The step of int8 is the bf16 number above m / 127, m the
 * largest magnitude, so at most m / 127 * (1 + 2^-7). That of int4 is (largest - minimum) / 15 in
 * fp16; the minimum is off by 2^-11 of itself, which the other end of the range may miss as well.
 */

#include <math.h>
#include <string.h>

#include "check_rows.h"
#include "packed.h"

/* Numbers where narrow reads them, and in every third case a few that are none. */
static void fill_exact(check *c, const kvf_shape *s, void *to, size_t bytes, check_data data)
{
    const uint32_t count = (uint32_t)(bytes / kvf_dtype_bytes(s->dtype));
    check_fill(c, to, s->dtype, count, data);
    for (uint32_t i = 0; count && c->cases % 3 == 0 && i < 4; i++)
        kvf_element_set(to, s->dtype, check_below(c, count), i % 2 ? NAN : -INFINITY);
}

static void fill_ring(check *c, const check_rows *w, check_data data)
{
    for (uint32_t b = 0; b < w->rows; b++)
        fill_exact(c, &w->p.shape, w->row[b].ring, kvf_ring_size(&w->p), data);
}

/* Every row has pool blocks of its own, which narrow writes. */
static void give_pool(check *c, const check_rows *w)
{
    const size_t block = kvf_home_block_bytes(&w->p);
    for (uint32_t b = 0; b < w->rows; b++) {
        kvf_row *row = &w->row[b];
        const uint32_t count = row->sealed - row->sealed_before;
        char *pool = check_changed(c, "pool", count * block + 1);
        void **to = check_in(c, count * sizeof *to);
        for (uint32_t i = 0; i < count; i++)
            to[i] = pool + i * block;
        row->pool = to;
        check_track(c, "ring", row->ring, kvf_ring_size(&w->p));
    }
}

static void narrow_case(check *c, uint32_t rows, bool from_ring, check_data data)
{
    check_rows w;
    if (!check_begin(c))
        return;
    check_rows_make(
        c, &w,
        &(check_rows_config){.rows = rows,
                             .blocks_max = 1 + check_below(c, 12),
                             .pages = check_below(c, 2) ? KVF_PAGES_K8V8 : KVF_PAGES_K8V4,
                             .pool_blocks = 8});
    check_rows_describe(c, &w, "narrow");
    fill_ring(c, &w, data);
    for (uint32_t b = 0; b < rows; b++) /* a step seals one block of a row, which is in its ring */
        if (from_ring && w.row[b].sealed)
            w.row[b].sealed_before = w.row[b].sealed - 1;
    give_pool(c, &w);
    kvf_narrow_args a = {.paging = w.p, .rows = rows, .count = 1, .row = w.row};
    if (!from_ring) {
        const size_t bytes = w.p.blocks_max * kvf_block_bytes(&w.p);
        a.first = w.row->sealed_before;
        a.count = w.row->sealed - a.first;
        a.wide = check_changed(c, "wide", bytes);
        fill_exact(c, &w.p.shape, a.wide, bytes, data);
    }
    CHECK_BOTH(c, narrow, &a);
}

/* Scales of sealed pages become numbers, as those that narrow makes are. */
static void sound_scales(const check_rows *w)
{
    const kvf_shape *s = &w->p.shape;
    const uint32_t pages = w->p.kv_heads * w->p.block_pages;
    const uint32_t count = s->page_size * (1 + kvf_packed_scale_bytes(s) / 2);
    for (uint32_t i = 0; i < w->row->sealed * pages; i++) {
        char *page = (char *)w->row->blocks[i / pages] + i % pages * kvf_home_page_bytes(s);
        for (uint32_t k = 0; k < count; k++)
            kvf_packed_key_scale(s, page, 0)[k] &= 0x3fffu;
    }
}

static void widen_case(check *c, bool to_ring)
{
    check_rows w;
    if (!check_begin(c))
        return;
    check_rows_make(
        c, &w,
        &(check_rows_config){.rows = 1,
                             .blocks_max = 1 + check_below(c, 12),
                             .pages = check_below(c, 2) ? KVF_PAGES_K8V8 : KVF_PAGES_K8V4,
                             .pool_blocks = 8});
    check_rows_describe(c, &w, "widen");
    sound_scales(&w);
    kvf_widen_args a = {.paging = w.p, .row = w.row};
    a.first = check_below(c, w.row->sealed + 1);
    a.count = w.row->sealed - a.first;
    if (to_ring) {
        a.count = kvf_min_u32(1, a.count);
        a.block = w.row->sealed ? w.row->blocks[0] : NULL;
        check_track(c, "ring", w.row->ring, kvf_ring_size(&w.p));
    } else {
        a.wide = check_changed(c, "wide", w.p.blocks_max * kvf_block_bytes(&w.p));
        a.table = check_changed(c, "table", w.p.blocks_max * sizeof *a.table);
        a.view = check_changed(c, "view", sizeof *a.view);
    }
    CHECK_BOTH(c, widen, &a);
}

void check_narrow(check *c)
{
    for (uint32_t i = 0; i < 24; i++)
        narrow_case(c, i % 2 ? 1 + i % 3 : 1, i % 2,
                    i % 3 ? DATA_NORMAL : (check_data)(i / 3 % DATA_COUNT));
}

void check_widen(check *c)
{
    for (uint32_t i = 0; i < 16; i++)
        widen_case(c, i % 4 == 3);
}

/* ---- what is lost ---- */

static double largest_of(const float *x, uint32_t count)
{
    double most = 0.0;
    for (uint32_t i = 0; i < count; i++)
        most = fmax(most, fabs((double)x[i]));
    return most;
}

/* Half a step and what rounds to the same number in fp32 beside it. */
static double step_of(const kvf_shape *s, const float *x, uint32_t count)
{
    const double most = largest_of(x, count);
    if (s->pages == KVF_PAGES_K8V8)
        return most / 127.0 * (1.0 + 0x1p-7) / 2.0 + 0x1p-133;
    double low = (double)x[0], high = low;
    for (uint32_t i = 1; i < count; i++) {
        low = fmin(low, (double)x[i]);
        high = fmax(high, (double)x[i]);
    }
    return (high - low) / 30.0 + most * 0x1p-9 + 0x1p-23;
}

static void near(check *c, const char *what, const float *got, const float *want, uint32_t count,
                 double error)
{
    for (uint32_t i = 0; i < count; i++)
        if (!(fabs((double)got[i] - (double)want[i]) <= error))
            check_fail(c, "%s %u is %g, packed from %g; at most %g off", what, i, (double)got[i],
                       (double)want[i], error);
}

static void loss_case(check *c, kvf_shape s, check_data data)
{
    if (!check_begin(c))
        return;
    check_describe(c, "loss of pages %d, %s d=%u P=%u data=%d", (int)s.pages,
                   check_dtype_name(s.dtype), s.head_dim, s.page_size, (int)data);
    const uint32_t t = check_below(c, s.page_size), d = s.head_dim;
    void *token = check_in(c, kvf_token_bytes(&s)), *page = check_in(c, kvf_home_page_bytes(&s));
    float x[KVF_HEAD_DIM_MAX], y[KVF_HEAD_DIM_MAX];
    check_fill(c, token, s.dtype, 2 * d, data);
    kvf_pack_token(&s, page, t, token, x);
    for (uint32_t i = 0; i < d; i++)
        y[i] = kvf_element_get(token, s.dtype, i);
    kvf_code_rotate(y, d);
    kvf_unpack_key(&s, page, t, x);
    const kvf_shape bytes = {s.dtype, d, s.page_size, KVF_PAGES_K8V8};
    near(c, "rotated key", x, y, d, step_of(&bytes, y, d));
    for (uint32_t i = 0; i < d; i++)
        y[i] = kvf_element_get(token, s.dtype, d + i);
    const uint32_t group = s.pages == KVF_PAGES_K8V4 ? KVF_PACKED_GROUP : d;
    kvf_unpack_value(&s, page, t, x);
    for (uint32_t i = 0; i < d; i += group)
        near(c, "value", x + i, y + i, kvf_min_u32(group, d - i),
             step_of(&s, y + i, kvf_min_u32(group, d - i)));
}

/* Zeros, whatever else the token has. */
static void nothing_case(check *c, kvf_shape s, float bad, uint32_t channel)
{
    if (!check_begin(c))
        return;
    check_describe(c, "%g in channel %u, pages %d", (double)bad, channel, (int)s.pages);
    void *token = check_in(c, kvf_token_bytes(&s)), *page = check_in(c, kvf_home_page_bytes(&s));
    float x[KVF_HEAD_DIM_MAX];
    static const float zeros[KVF_HEAD_DIM_MAX];
    check_fill(c, token, s.dtype, 2 * s.head_dim, DATA_NORMAL);
    kvf_element_set(token, s.dtype, channel, bad);
    kvf_pack_token(&s, page, 0, token, x);
    if (channel < s.head_dim)
        kvf_unpack_key(&s, page, 0, x);
    else
        kvf_unpack_value(&s, page, 0, x);
    near(c, "channel", x, zeros, s.head_dim, 0.0);
}

void check_packed(check *c)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (uint32_t i = 0; i < 6 * CHECK_HEAD_DIMS; i++)
        for (uint32_t kind = 0; kind < 2; kind++) {
            const kvf_shape s = {(kvf_dtype)(i % 3), check_head_dims[i / 6],
                                 check_page_sizes[i % CHECK_PAGE_SIZES],
                                 kind ? KVF_PAGES_K8V8 : KVF_PAGES_K8V4};
            /* Values beyond fp16 are cut off in int4. */
            const check_data data = (check_data)(i % DATA_COUNT);
            loss_case(c, s, data == DATA_LARGE && !kind ? DATA_NORMAL : data);
            nothing_case(c, s, bad[i % 3], i % 2 * s.head_dim + i % s.head_dim);
        }
}
