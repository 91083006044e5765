/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Quantized pages: quantize, dequantize, read and carry against their references, bit for bit; that
 * what is carried is what was quantized; and what quantization may lose.
 *
 * A code is half a step off at most. The step of int8 is the bf16 number above m / 127, m the
 * largest magnitude, so at most m / 127 * (1 + 2^-7). That of int4 is (largest - minimum) / 15 in
 * fp16; the minimum is off by 2^-11 of itself, which the other end of the range may miss as well.
 */

#include <math.h>
#include <string.h>

#include "check_rows.h"
#include "quantized.h"

/* Rows of quantized pages, or of such in another form. False: this case is left out. */
static bool begin_rows(check *c, check_rows *w, uint32_t rows, const char *what)
{
    const bool is_exact = strcmp(what, "read") == 0 && c->cases % 4 == 3;
    return CHECK_ROWS(c, w, what, .rows = rows, .blocks_max = 1 + check_below(c, 12),
                      .pages = is_exact            ? KVF_PAGES_NATIVE
                               : check_below(c, 2) ? KVF_PAGES_K8V8
                                                   : KVF_PAGES_K8V4,
                      .pool_blocks = 8);
}

/* Numbers where quantize reads them, and in every third case a few that are none. */
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

/* Every row has pool blocks of its own, which quantize writes. */
static void give_pool(check *c, const check_rows *w)
{
    const size_t block = kvf_stored_block_bytes(&w->p);
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

static void quantize_case(check *c, uint32_t rows, bool from_ring, check_data data)
{
    check_rows w;
    if (!begin_rows(c, &w, rows, "quantize"))
        return;
    fill_ring(c, &w, data);
    for (uint32_t b = 0; b < rows; b++) /* a step seals one block of a row, which is in its ring */
        if (from_ring && w.row[b].sealed)
            w.row[b].sealed_before = w.row[b].sealed - 1;
    give_pool(c, &w);
    kvf_quantize_args a = {.paging = w.p, .rows = rows, .count = 1, .row = w.row};
    if (!from_ring) {
        const size_t bytes = w.p.blocks_max * kvf_block_bytes(&w.p);
        a.first = w.row->sealed_before;
        a.count = w.row->sealed - a.first;
        a.scratch = check_changed(c, "scratch", bytes);
        fill_exact(c, &w.p.shape, a.scratch, bytes, data);
    }
    CHECK_BOTH(c, quantize, &a);
}

/* Scales of a quantized block become numbers, as those that quantize makes are. */
static void sound_scales(const kvf_paging *p, const void *block)
{
    const kvf_shape *s = &p->shape;
    const uint32_t count = s->page_size * (1 + kvf_quantized_scale_bytes(s) / 2);
    for (uint32_t i = 0; i < p->kv_heads * p->block_pages; i++)
        for (uint32_t k = 0; k < count; k++)
            kvf_quantized_key_scale(s, kvf_offset(block, i * kvf_stored_page_bytes(s)), 0)[k] &=
                0x3fffu;
}

static void dequantize_case(check *c, bool to_ring)
{
    check_rows w;
    if (!begin_rows(c, &w, 1, "dequantize"))
        return;
    for (uint32_t b = 0; b < w.row->sealed; b++)
        sound_scales(&w.p, w.row->blocks[b]);
    kvf_dequantize_args a = {.paging = w.p, .row = w.row};
    a.first = check_below(c, w.row->sealed + 1);
    a.count = w.row->sealed - a.first;
    if (to_ring) {
        a.count = kvf_min_u32(1, a.count);
        a.block = w.row->sealed ? w.row->blocks[0] : NULL;
        check_track(c, "ring", w.row->ring, kvf_ring_size(&w.p));
    } else {
        a.scratch = check_changed(c, "scratch", w.p.blocks_max * kvf_block_bytes(&w.p));
        a.table = check_changed(c, "table", w.p.blocks_max * sizeof *a.table);
        a.view = check_changed(c, "view", sizeof *a.view);
    }
    CHECK_BOTH(c, dequantize, &a);
}

void check_quantize(check *c)
{
    for (uint32_t i = 0; i < 24; i++)
        quantize_case(c, i % 2 ? 1 + i % 3 : 1, i % 2,
                      i % 3 ? DATA_NORMAL : (check_data)(i / 3 % DATA_COUNT));
}

void check_dequantize(check *c)
{
    for (uint32_t i = 0; i < 16; i++)
        dequantize_case(c, i % 4 == 3);
}

/* Some pages of every row, and what is read of them. */
static void read_case(check *c, uint32_t rows)
{
    check_rows w;
    if (!begin_rows(c, &w, rows, "read"))
        return;
    const kvf_paging *p = &w.p;
    const uint32_t lists = rows * p->kv_heads;
    int32_t *indptr = check_in(c, (lists + 1) * sizeof *indptr), end = 0;
    int32_t *indices = check_in(c, (size_t)lists * p->pages_max * sizeof *indices);
    for (uint32_t l = 0; l < lists; l++) {
        const kvf_row *row = &w.row[l / p->kv_heads];
        indptr[l] = end;
        end += (int32_t)check_subset(c, kvf_row_pages(p, row), p->pages_max, indices + end);
        for (uint32_t b = 0; b < row->sealed && p->shape.pages != KVF_PAGES_NATIVE; b++)
            sound_scales(p, row->blocks[b]);
    }
    indptr[lists] = end;
    const size_t bytes = (size_t)end * kvf_page_bytes(&p->shape);
    const kvf_read_args a = {.paging = *p,
                             .rows = rows,
                             .row = w.row,
                             .indptr = indptr,
                             .indices = indices,
                             .out = check_changed(c, "out", bytes + 1)};
    CHECK_BOTH(c, read, &a);
}

void check_read(check *c)
{
    for (uint32_t i = 0; i < 24; i++)
        read_case(c, 1 + i % 3);
}

/* ---- what is carried ---- */

/* Ascending ids of `count` tokens of those below `length`, for every KV head. */
static uint32_t *kept_ids(check *c, uint32_t kv_heads, uint32_t count, uint32_t length)
{
    uint32_t *ids = check_in(c, (size_t)kv_heads * count * sizeof *ids);
    for (uint32_t h = 0; h < kv_heads; h++)
        for (uint32_t i = 0, n = 0; i < length && n < count; i++)
            if (check_below(c, length - i) < count - n)
                ids[h * count + n++] = i;
    return ids;
}

/* The page of token t of a block in storage format, or the same of all its bytes. */
static const void *page_of(const kvf_paging *p, const void *block, uint32_t head, uint32_t t)
{
    return kvf_offset(block, head * kvf_stored_run_bytes(p) + t % p->block_size /
                                                                  p->shape.page_size *
                                                                  kvf_stored_page_bytes(&p->shape));
}

/* A carried token is where it was quantized, byte for byte, in a copy of what was there. */
static void expect_carried(check *c, const kvf_carry_args *a, const char *before, const char *after,
                           uint32_t head, uint32_t i)
{
    const kvf_paging *p = &a->paging;
    const kvf_shape *s = &p->shape;
    const size_t block = kvf_stored_block_bytes(p);
    const uint32_t id = a->ids[head * a->stride + i];
    if (id / p->block_size >= a->quantized)
        return;
    const void *from = page_of(p, before + id / p->block_size * block, head, id);
    const void *to = page_of(p, after + i / p->block_size * block, head, i);
    const uint32_t t = i % s->page_size, u = id % s->page_size;
    check_bits(c, "key", kvf_quantized_key(s, to, t), kvf_quantized_key(s, from, u), s->head_dim);
    check_bits(c, "value", kvf_quantized_value(s, to, t), kvf_quantized_value(s, from, u),
               kvf_quantized_value_bytes(s));
    check_bits(c, "scale of a key", kvf_quantized_key_scale(s, to, t),
               kvf_quantized_key_scale(s, from, u), 2);
    check_bits(c, "scale of a value", kvf_quantized_value_scale(s, to, t),
               kvf_quantized_value_scale(s, from, u), kvf_quantized_scale_bytes(s));
}

/* In place: block b of what the row was is where its block b goes. */
static void carry_case(check *c, check_data data)
{
    check_rows w;
    if (!begin_rows(c, &w, 1, "carry"))
        return;
    kvf_row *row = w.row;
    const size_t block = kvf_stored_block_bytes(&w.p),
                 bytes = w.p.blocks_max * kvf_block_bytes(&w.p);
    const uint32_t count = row->sealed * w.p.block_size;
    kvf_carry_args a = {.paging = w.p, .quantized = check_below(c, w.p.blocks_max + 1), .row = row};
    const uint32_t blocks = kvf_max_u32(a.quantized, row->sealed);
    char *pool = check_changed(c, "pool", blocks * block + 1);
    const void **from = check_in(c, a.quantized * sizeof *from);
    void **to = check_in(c, row->sealed * sizeof *to);
    check_noise(c, pool, blocks * block);
    for (uint32_t b = 0; b < blocks; b++)
        sound_scales(&w.p, pool + b * block);
    const char *before = check_put(c, pool, blocks * block);
    for (uint32_t b = 0; b < a.quantized; b++)
        from[b] = pool + b * block;
    for (uint32_t b = row->sealed_before; b < row->sealed; b++)
        to[b - row->sealed_before] = pool + b * block;
    row->pool = to;
    a.from = from;
    a.stride = count;
    a.ids = kept_ids(c, w.p.kv_heads, count,
                     kvf_max_u32(blocks + check_below(c, 4), row->sealed) * w.p.block_size);
    a.scratch = check_changed(c, "scratch", bytes);
    fill_exact(c, &w.p.shape, a.scratch, bytes, data);
    CHECK_BOTH(c, carry, &a);
    for (uint32_t i = row->sealed_before * w.p.block_size; i < count; i++)
        expect_carried(c, &a, before, pool, i % w.p.kv_heads, i);
}

void check_carry(check *c)
{
    for (uint32_t i = 0; i < 24; i++)
        carry_case(c, i % 3 ? DATA_NORMAL : (check_data)(i / 3 % DATA_COUNT));
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
            check_fail(c, "%s %u is %g, quantized from %g; at most %g off", what, i, (double)got[i],
                       (double)want[i], error);
}

static void loss_case(check *c, const kvf_shape *keys, check_data data)
{
    if (!check_begin(c))
        return;
    const kvf_shape s = check_values(c, keys);
    check_describe(c, "loss, %s data=%d", check_shape_text(&s), (int)data);
    const uint32_t t = check_below(c, s.page_size), d = s.head_dim, values = kvf_value_dim(&s);
    void *token = check_in(c, kvf_token_bytes(&s)), *page = check_in(c, kvf_stored_page_bytes(&s));
    float x[KVF_HEAD_DIM_MAX], y[KVF_HEAD_DIM_MAX];
    check_fill(c, token, s.dtype, d + values, data);
    kvf_quantize_token(&s, page, t, token, x);
    for (uint32_t i = 0; i < d; i++)
        y[i] = kvf_element_get(token, s.dtype, i);
    kvf_code_rotate(y, d);
    kvf_dequantize_key(&s, page, t, x);
    const kvf_shape bytes = {s.dtype, d, s.page_size, KVF_PAGES_K8V8, 0};
    near(c, "rotated key", x, y, d, step_of(&bytes, y, d));
    for (uint32_t i = 0; i < values; i++)
        y[i] = kvf_element_get(token, s.dtype, d + i);
    const uint32_t group = s.pages == KVF_PAGES_K8V4 ? KVF_QUANTIZED_GROUP : values;
    kvf_dequantize_value(&s, page, t, x);
    for (uint32_t i = 0; i < values; i += group)
        near(c, "value", x + i, y + i, kvf_min_u32(group, values - i),
             step_of(&s, y + i, kvf_min_u32(group, values - i)));
}

/* Zeros, whatever else the token has. */
static void nothing_case(check *c, kvf_shape s, float bad, uint32_t channel)
{
    if (!check_begin(c))
        return;
    check_describe(c, "%g in channel %u, pages %d", (double)bad, channel, (int)s.pages);
    void *token = check_in(c, kvf_token_bytes(&s)), *page = check_in(c, kvf_stored_page_bytes(&s));
    float x[KVF_HEAD_DIM_MAX];
    static const float zeros[KVF_HEAD_DIM_MAX];
    check_fill(c, token, s.dtype, 2 * s.head_dim, DATA_NORMAL);
    kvf_element_set(token, s.dtype, channel, bad);
    kvf_quantize_token(&s, page, 0, token, x);
    if (channel < s.head_dim)
        kvf_dequantize_key(&s, page, 0, x);
    else
        kvf_dequantize_value(&s, page, 0, x);
    near(c, "channel", x, zeros, s.head_dim, 0.0);
}

void check_quantized(check *c)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (uint32_t i = 0; i < 6 * check_dims(c); i++)
        for (uint32_t kind = 0; kind < 2; kind++) {
            kvf_shape s = check_shape(c, i, i / 6, i);
            s.pages = kind ? KVF_PAGES_K8V8 : KVF_PAGES_K8V4;
            /* Values beyond fp16 are cut off in int4. */
            const check_data data = (check_data)(i % DATA_COUNT);
            loss_case(c, &s, data == DATA_LARGE && !kind ? DATA_NORMAL : data);
            nothing_case(c, s, bad[i % 3], i % 2 * s.head_dim + i % s.head_dim);
        }
}
