/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels that move rows, pages and bytes against their references: copy, repack, narrow, take;
 * stamp, table, append, seal; publish, move, writeback, frame; heads, ring.
 *
 * Bit for bit, except that stamp reads a clock. Where a result can be said in a line without the
 * reference, it is checked against that as well, because on a CPU most of these kernels have no
 * second form. Links and threads are for the tests of the offload folder.
 */

#include <math.h>
#include <string.h>

#include "check_rows.h"
#include "common/convert.h"

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

/* ---- rows ---- */

static void track_row(check *c, const kvf_paging *p, const kvf_row *row)
{
    const size_t store_bytes = p->kv_heads * p->static_pages * kvf_page_bytes(&p->shape);
    const size_t static_room = p->kv_heads * kvf_static_room(p);
    check_track(c, "blocks", row->blocks, p->blocks_max * sizeof *row->blocks);
    check_track(c, "bits", row->bits, p->kv_heads * p->blocks_max * sizeof *row->bits);
    check_track(c, "static_kv", row->static_kv, store_bytes);
    check_track(c, "static_ids", row->static_ids, static_room * sizeof(uint32_t));
    check_track(c, "static_count", row->static_count, p->kv_heads * sizeof(uint32_t));
    check_track(c, "fault", row->fault, sizeof *row->fault);
    check_track(c, "chosen_at", row->chosen_at,
                (size_t)p->kv_heads * p->pages_max * sizeof *row->chosen_at);
}

static void stamp_case(check *c)
{
    if (!check_begin(c))
        return;
    check_describe(c, "stamp");
    uint64_t *last = check_put_out(c, &(uint64_t){0}, sizeof(uint64_t));
    uint64_t *sum = check_put_out(c, &(uint64_t){5}, sizeof(uint64_t));
    kvf_stamp_args a = {.last = last};
    CHECK_RUN(c, c->var, stamp, &a, false);
    const uint64_t first = *last;
    a.sum = sum;
    CHECK_RUN(c, c->var, stamp, &a, false);
    const uint64_t second = *last;
    CHECK_RUN(c, c->var, stamp, &a, false);
    if (first == 0 || second < first || *last < second || *sum != 5 + *last - first)
        check_fail(c, "at %llu, %llu, %llu the sum is %llu", (unsigned long long)first,
                   (unsigned long long)second, (unsigned long long)*last, (unsigned long long)*sum);
}

static void table_case(check *c, uint32_t blocks_max)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "table", .rows = 1 + check_below(c, 3), .blocks_max = blocks_max,
                    .pool_blocks = 20))
        return;
    const kvf_table_args a = {.paging = w.p, .rows = w.rows, .row = w.row};
    for (uint32_t b = 0; b < w.rows; b++) {
        const kvf_row *row = &w.row[b];
        memset(row->blocks + row->sealed_before, 0xee,
               (w.p.blocks_max - row->sealed_before) * sizeof *row->blocks);
        track_row(c, &w.p, row);
    }
    CHECK_BOTH(c, table, &a);
}

/* Tensors of a caller are aligned to their elements only. */
static void *make_tensor(check *c, kvf_dtype dtype, size_t count, uint32_t shift)
{
    const size_t bytes = count * kvf_dtype_bytes(dtype), skip = shift * kvf_dtype_bytes(dtype);
    char *base = check_in(c, bytes + skip);
    check_fill(c, base + skip, dtype, count, DATA_NORMAL);
    return base + skip;
}

/* One number of a row of keys or values that is not finite; one that is rounded may be so large
 * that it is not finite in fp16. A NaN that is rounded has other bits on a GPU. */
static void put_nonfinite(check *c, const kvf_append_args *a, void *k, void *v, uint32_t bad)
{
    static const float nonfinite[] = {INFINITY, -INFINITY, NAN};
    const kvf_shape *shape = &a->paging.shape;
    const bool of_value = check_below(c, 2);
    const uint32_t dim = of_value ? kvf_value_dim(shape) : shape->head_dim;
    const size_t row = (size_t)a->paging.kv_heads * dim;
    const bool is_large = a->wide_keys && shape->dtype == KVF_FP16 && check_below(c, 2);
    kvf_element_set(of_value ? v : k, a->wide_keys ? KVF_FP32 : shape->dtype,
                    row * bad + check_below(c, (uint32_t)row),
                    is_large ? 1e6f : nonfinite[check_below(c, a->wide_keys ? 2 : 3)]);
}

/* Numbers of the caller, room for rotated queries, and for how many pages each list chooses. */
static void fill_append(check *c, kvf_append_args *a, bool is_select, uint32_t bad)
{
    const kvf_paging *p = &a->paging;
    const kvf_dtype dtype = p->shape.dtype;
    const uint32_t shift = check_below(c, 3) ? 0 : 1 + check_below(c, 7);
    const size_t heads = (size_t)a->rows * p->kv_heads, queries = heads * p->group;
    const uint32_t wide = dtype == KVF_FP32 ? 0 : check_below(c, 3);
    a->wide_queries = wide > 0;
    a->wide_keys = wide > 1;
    const kvf_dtype keys = a->wide_keys ? KVF_FP32 : dtype;
    void *k = make_tensor(c, keys, heads * p->shape.head_dim, shift);
    void *v = make_tensor(c, keys, heads * kvf_value_dim(&p->shape), shift);
    if (bad < a->rows)
        put_nonfinite(c, a, k, v, bad);
    a->q = make_tensor(c, wide ? KVF_FP32 : dtype, queries * p->shape.head_dim, shift);
    a->k = is_select ? NULL : k;
    a->v = is_select ? NULL : v;
    if (wide)
        a->rounded = check_changed(c, "rounded", queries * kvf_key_bytes(&p->shape));
    if (check_below(c, 3)) {
        a->rotated = check_changed(c, "rotated", queries * p->shape.head_dim);
        a->rotated_scale = check_changed(c, "rotated_scale", queries * sizeof(float));
        a->scale = check_below(c, 4) ? 0.09f : 1e30f;
    }
    a->choose_lists = check_below(c, 2) ? p->lists : 1;
    a->choose = check_changed(c, "choose", a->rows * a->choose_lists * sizeof *a->choose);
}

static void append_case(check *c, bool is_select)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, is_select ? "append nothing" : "append", .rows = 1 + check_below(c, 3),
                    .blocks_max = 1 + check_below(c, 12), .pool_blocks = 12))
        return;
    const kvf_paging *p = &w.p;
    const uint32_t bad = check_below(c, 2) ? w.rows : check_below(c, w.rows);
    kvf_append_args a = {.paging = *p, .rows = w.rows, .row = w.row};
    fill_append(c, &a, is_select, bad);
    for (uint32_t b = 0; b < w.rows; b++) {
        kvf_row *row = &w.row[b];
        const uint32_t token = row->length - 1, block = token / p->block_size;
        row->blocks[block] =
            token % p->block_size ? kvf_row_ring_block(p, row, block) : (void *)NULL;
        track_row(c, p, row);
        check_track(c, "ring", row->ring, p->ring_blocks * kvf_block_bytes(p));
        check_track(c, "queries", row->queries,
                    p->query_window * p->kv_heads * p->group * kvf_key_bytes(&p->shape));
        if (check_below(c, 4) == 0)
            row->queries = NULL; /* not kept, and the tracked ones stay */
    }
    CHECK_BOTH(c, append, &a);
    for (uint32_t b = 0; b < w.rows && !is_select; b++) {
        const kvf_row *row = &w.row[b];
        const uint64_t fault = (uint64_t)row->fault_key << 32 | (row->length - 1);
        if (*row->fault != (b == bad ? fault : UINT64_MAX))
            check_fail(c, "row %u, bad row %u: fault %llx", b, bad,
                       (unsigned long long)*row->fault);
    }
}

/* Codes instead of boxes, at blocks of a pool; of some rows they were there before. */
static void put_codes(check *c, check_rows *w)
{
    kvf_paging *p = &w->p;
    p->block_jobs = 1;
    p->digest_bytes = 64;
    const uint32_t blocks = w->rows * p->blocks_max;
    char *codes = check_out(c, (size_t)p->kv_heads * blocks * p->digest_bytes);
    for (uint32_t b = 0; b < w->rows; b++) {
        kvf_row *row = &w->row[b];
        uint32_t *block_of = check_changed(c, "block_of", p->blocks_max * sizeof *block_of);
        uint32_t *fresh = check_in(c, (row->sealed - row->sealed_before) * sizeof *fresh);
        for (uint32_t i = 0; i < p->blocks_max; i++)
            block_of[i] = check_below(c, blocks);
        for (uint32_t i = row->sealed_before; i < row->sealed; i++)
            fresh[i - row->sealed_before] = check_below(c, blocks);
        row->digests = codes;
        row->digest_stride = (size_t)blocks * p->digest_bytes;
        row->block_of = block_of;
        row->new_block_of = check_below(c, 4) ? fresh : NULL;
    }
}

static void seal_case(check *c, bool is_chunk)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "seal", .rows = is_chunk ? 1 : 1 + check_below(c, 3),
                    .blocks_max = 1 + check_below(c, is_chunk ? 90 : 20), .pool_blocks = 12))
        return;
    const bool has_codes = check_below(c, 2);
    uint32_t jobs = 0;
    if (has_codes)
        put_codes(c, &w);
    for (uint32_t b = 0; b < w.rows; b++) {
        jobs += (w.row[b].sealed - w.row[b].sealed_before) * w.p.block_jobs * w.p.kv_heads;
        track_row(c, &w.p, &w.row[b]);
    }
    kvf_seal_args a = {.paging = w.p, .rows = w.rows, .row = w.row};
    a.jobs = check_changed(c, "jobs", jobs * sizeof *a.jobs);
    if (is_chunk) {
        const uint32_t fault = check_below(c, 2) ? UINT32_MAX : check_below(c, 100);
        a.chunk_first = check_below(c, 1000);
        a.chunk_fault = check_put(c, &fault, sizeof fault);
        *w.row->fault =
            (uint64_t)(w.row->fault_key + check_below(c, 3)) << 32 | check_below(c, 1100);
    }
    CHECK_BOTH(c, seal, &a);
}

void check_row_moves(check *c)
{
    stamp_case(c);
    for (uint32_t i = 0; i < 12; i++)
        table_case(c, i ? 1 + 9 * i : 5000);
    for (uint32_t i = 0; i < 30; i++)
        append_case(c, i % 5 == 4);
    for (uint32_t i = 0; i < 20; i++)
        seal_case(c, i % 2);
}

/* ---- transfer ---- */

void check_publish(check *c)
{
    for (uint32_t i = 0; i < 24; i++) {
        static const uint32_t counts[] = {0, 1, 31, 32, 300, 700};
        const uint32_t n = counts[i % 6];
        kvf_publish_args a = {.low = i % 4 < 2 ? 0 : 32, .high = 300, .ticket = 77 + i};
        if (!check_begin(c))
            continue;
        a.list_max = i / 6 % 2 ? 700 : 100;
        a.low = i % 4 == 1 ? UINT32_MAX : a.low;
        check_describe(c, "count=%u low=%u high=%u list_max=%u", n, a.low, a.high, a.list_max);
        a.count = check_put(c, &n, sizeof n);
        a.from = check_noise_in(c, n * sizeof *a.from);
        a.to = check_noise_in(c, n * sizeof *a.to);
        a.out_from = check_changed(c, "out_from", a.list_max * sizeof *a.out_from);
        a.out_to = check_changed(c, "out_to", a.list_max * sizeof *a.out_to);
        a.out_count = check_changed(c, "out_count", sizeof *a.out_count);
        a.request = check_put_out(c, &(uint32_t){3}, sizeof(uint32_t));
        a.done = check_put_out(c, &(uint32_t){4}, sizeof(uint32_t));
        check_track(c, "request", a.request, sizeof *a.request);
        check_track(c, "done", a.done, sizeof *a.done);
        CHECK_BOTH(c, publish, &a);
    }
}

static void move_case(check *c, size_t bytes, uint32_t n)
{
    kvf_move_args a = {.bytes = bytes};
    if (!check_begin(c))
        return;
    a.low = check_below(c, 3) ? 0 : check_below(c, n + 2);
    a.high = check_below(c, 3) ? UINT32_MAX : check_below(c, n + 2);
    a.blocks = 1 + check_below(c, 5);
    a.value = (uint32_t)check_random(c);
    check_describe(c, "bytes=%zu count=%u low=%u high=%u blocks=%u", bytes, n, a.low, a.high,
                   a.blocks);
    uint8_t *pages = check_noise_in(c, n * bytes), *slots = check_changed(c, "slots", n * bytes);
    const void **from = check_in(c, n * sizeof *from);
    void **to = check_in(c, n * sizeof *to);
    for (uint32_t i = 0; i < n; i++) {
        from[i] = pages + check_below(c, n) * bytes;
        to[i] = slots + (n - 1 - i) * bytes;
    }
    a.from = from;
    a.to = to;
    a.count = check_put(c, &n, sizeof n);
    a.arrived = check_put_out(c, &(uint32_t){0}, sizeof(uint32_t));
    a.done = check_put_out(c, &(uint32_t){9}, sizeof(uint32_t));
    check_track(c, "arrived", a.arrived, sizeof *a.arrived);
    check_track(c, "done", a.done, sizeof *a.done);
    if (check_below(c, 4) == 0)
        a.done = NULL;
    CHECK_BOTH(c, move, &a);
}

void check_move(check *c)
{
    static const size_t bytes[] = {64, 1024, 4096, 5120, 16384, 16448, 65536};
    static const uint32_t counts[] = {0, 1, 2, 7, 40};
    for (uint32_t i = 0; i < 70; i++)
        move_case(c, bytes[i % 7], counts[i / 7 % 5]);
    /* Rows: several of them are one turn of a warp. */
    static const size_t rows[] = {64, 128, 192, 256, 512, 576, 1024, 2048, 2560};
    static const uint32_t row_counts[] = {1, 3, 8, 31, 65, 300, 1000};
    for (uint32_t i = 0; i < 63; i++)
        move_case(c, rows[i % 9], row_counts[i / 9]);
}

static void writeback_case(check *c)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "writeback", .rows = 1 + check_below(c, 3),
                    .blocks_max = 1 + check_below(c, 12), .pool_blocks = 4))
        return;
    const kvf_writeback_args a = {.paging = w.p, .rows = w.rows, .row = w.row};
    const size_t block = kvf_block_bytes(&w.p);
    for (uint32_t b = 0; b < w.rows; b++) {
        kvf_row *row = &w.row[b];
        const uint32_t most = kvf_min_u32(row->sealed, w.p.ring_blocks);
        row->sealed_before = row->sealed - check_below(c, most + 1);
        const uint32_t sealed = row->sealed - row->sealed_before;
        char *pool = check_changed(c, "pool", sealed * block);
        void **blocks = check_in(c, sealed * sizeof *blocks);
        for (uint32_t i = 0; i < sealed; i++)
            blocks[i] = pool + (sealed - 1 - i) * block;
        row->pool = blocks;
    }
    CHECK_BOTH(c, writeback, &a);
}

static void frame_case(check *c)
{
    if (!check_begin(c))
        return;
    kvf_frame_args a = {.frames = 1 + check_below(c, 4), .parts = 1 + check_below(c, 5)};
    a.bytes = 16 * (1 + check_below(c, 300));
    check_describe(c, "frame, frames=%u parts=%u bytes=%zu", (unsigned)a.frames, (unsigned)a.parts,
                   (size_t)a.bytes);
    a.from = check_noise_in(c, (size_t)a.frames * a.parts * a.bytes);
    a.to = check_changed(c, "to", (size_t)a.parts * a.bytes);
    a.turns = check_changed(c, "turns", a.parts * sizeof *a.turns);
    for (uint32_t i = 0; i < a.parts; i++)
        a.turns[i] = check_below(c, 100);
    for (uint32_t i = 0; i < 3; i++)
        CHECK_BOTH(c, frame, &a);
}

void check_recorded(check *c)
{
    for (uint32_t i = 0; i < 16; i++) {
        writeback_case(c);
        frame_case(c);
    }
}

/* ---- streaming heads ---- */

/* `count` distinct heads of `heads`, in any order; NULL: 0, 1, ... */
static uint32_t *choose_heads(check *c, uint32_t heads, uint32_t count)
{
    if (check_below(c, 3) == 0)
        return NULL;
    uint32_t *list = check_in(c, count * sizeof *list);
    uint8_t used[64] = {0};
    for (uint32_t i = 0; i < count; i++) {
        do
            list[i] = check_below(c, heads);
        while (used[list[i]]);
        used[list[i]] = 1;
    }
    return list;
}

static uint32_t head_at(const uint32_t *list, uint32_t i)
{
    return list ? list[i] : i;
}

static void heads_case(check *c, uint32_t tokens, uint32_t bytes)
{
    if (!check_begin(c))
        return;
    const uint32_t jobs = 1 + check_below(c, 4), shift = check_below(c, 3) ? 0 : 4;
    check_describe(c, "tokens=%u bytes=%u jobs=%u shift=%u", tokens, bytes, jobs, shift);
    kvf_heads_job *job = check_in(c, jobs * sizeof *job);
    for (uint32_t j = 0; j < jobs; j++) {
        kvf_heads_job *b = &job[j];
        *b = (kvf_heads_job){.from_heads = 1 + check_below(c, 40),
                             .to_heads = 1 + check_below(c, 40),
                             .bytes = bytes};
        b->count = 1 + check_below(c, kvf_min_u32(b->from_heads, b->to_heads));
        b->from_head = choose_heads(c, b->from_heads, b->count);
        b->to_head = choose_heads(c, b->to_heads, b->count);
        const size_t from_bytes = (size_t)tokens * b->from_heads * bytes;
        const size_t to_bytes = (size_t)tokens * b->to_heads * bytes;
        b->from = (char *)check_noise_in(c, from_bytes + shift) + shift;
        b->to = check_changed(c, "to", to_bytes);
    }
    const kvf_heads_args a = {.tokens = tokens, .job_count = jobs, .jobs = job};
    CHECK_BOTH(c, heads, &a);
    for (uint32_t j = 0; j < jobs; j++)
        for (uint32_t token = 0; token < tokens; token++)
            for (uint32_t i = 0; i < job[j].count; i++) {
                const size_t from =
                    (size_t)token * job[j].from_heads + head_at(job[j].from_head, i);
                const size_t to = (size_t)token * job[j].to_heads + head_at(job[j].to_head, i);
                check_bits(c, "a head", (char *)job[j].to + to * bytes,
                           (const char *)job[j].from + from * bytes, bytes);
            }
}

/* The spans name every token below the sink and the newest ones, once and in order. */
static void ring_spans(check *c, const kvf_ring_args *a, uint32_t task)
{
    const kvf_ring *r = &a->ring;
    const kvf_row *row = &a->row[task / r->heads];
    const uint32_t head = task % r->heads, page_size = r->shape.page_size;
    const kvf_span *spans = a->spans + (size_t)task * a->spans_max;
    uint32_t token = 0, span = 0;
    for (; span < a->span_count[task]; span++)
        for (uint32_t t = 0; t < spans[span].count; t++) {
            if (spans[span].skip >> t & 1)
                continue;
            if (token >= r->sink && token + r->recent < row->length)
                token = row->length - r->recent;
            const uint32_t page = token / page_size;
            const uint32_t block = page < r->sink_blocks
                                       ? page
                                       : r->sink_blocks + (page - r->sink_blocks) % r->ring_blocks;
            const char *want =
                row->ring + ((size_t)block * r->heads + head) * kvf_page_bytes(&r->shape);
            if (spans[span].page != want || token % page_size != t)
                check_fail(c, "list %u span %u row %u is not token %u", task, span, t, token);
            token++;
        }
    if (token != row->length || span > a->spans_max)
        check_fail(c, "list %u: %u spans end at token %u of %u", task, span, token, row->length);
}

/* The newest token lies in its page as it came; a number that is not finite is told by its row. */
static void expect_ring(check *c, const kvf_ring_args *a, uint32_t bad)
{
    const kvf_ring *r = &a->ring;
    const kvf_row *row = a->row;
    const size_t bytes = kvf_key_bytes(&r->shape), value_bytes = kvf_value_bytes(&r->shape);
    for (uint32_t l = 0; l < a->rows * r->heads; l++) {
        const uint32_t b = l / r->heads, head = l % r->heads, token = row[b].length - 1;
        const size_t at = (size_t)b * a->kv_heads + head_at(a->head, head);
        const char *key = kvf_ring_page(r, row[b].ring, token / r->shape.page_size, head) +
                          token % r->shape.page_size * kvf_token_bytes(&r->shape);
        ring_spans(c, a, l);
        check_bits(c, "key", key, (const char *)a->k + at * bytes, bytes);
        check_bits(c, "value", key + bytes, (const char *)a->v + at * value_bytes, value_bytes);
    }
    for (uint32_t b = 0; b < a->rows; b++)
        if (*row[b].fault !=
            (b == bad ? (uint64_t)row[b].fault_key << 32 | (row[b].length - 1) : UINT64_MAX))
            check_fail(c, "row %u, bad row %u: fault %llx", b, bad,
                       (unsigned long long)*row[b].fault);
}

static void ring_case(check *c, uint32_t index)
{
    static const float nonfinite[] = {NAN, INFINITY, -INFINITY};
    static const uint32_t recents[] = {1, 2, 31, 32, 33, 64, 100}, sinks[] = {0, 1, 16, 33, 128};
    const uint32_t lengths[] = {1, 2, 16, 33, 127, 128, 129, 160, 161, 700, 1000, 4096, 100003};
    if (!check_begin(c))
        return;
    kvf_ring_args a = {.ring = {.shape = check_shape(c, index, index / 3, index % 4),
                                .heads = 1 + check_below(c, 4),
                                .sink = sinks[index % 5],
                                .recent = recents[index % 7]},
                       .rows = 1 + check_below(c, 3)};
    kvf_ring *r = &a.ring;
    r->shape = check_values(c, &r->shape);
    const size_t page = kvf_page_bytes(&r->shape);
    r->sink_blocks = kvf_div_ceil_u32(r->sink, r->shape.page_size);
    r->ring_blocks = kvf_div_ceil_u32(r->recent - 1, r->shape.page_size) + 1;
    a.kv_heads = r->heads + check_below(c, 3);
    check_describe(c, "%s heads=%u of %u rows=%u sink=%u recent=%u", check_shape_text(&r->shape),
                   r->heads, a.kv_heads, a.rows, r->sink, r->recent);
    const uint32_t dims[] = {r->shape.head_dim, kvf_value_dim(&r->shape)};
    const size_t heads = (size_t)a.rows * a.kv_heads, size = kvf_dtype_bytes(r->shape.dtype);
    void *k = check_in(c, heads * dims[0] * size), *v = check_in(c, heads * dims[1] * size);
    kvf_row *row = check_in(c, a.rows * sizeof *row);
    check_fill(c, k, r->shape.dtype, heads * dims[0], DATA_NORMAL);
    check_fill(c, v, r->shape.dtype, heads * dims[1], DATA_NORMAL);
    a.head = choose_heads(c, a.kv_heads, r->heads);
    const uint32_t bad = check_below(c, 2) ? a.rows : check_below(c, a.rows);
    const uint32_t of_value = check_below(c, 2);
    if (bad < a.rows)
        kvf_element_set(of_value ? v : k, r->shape.dtype,
                        ((size_t)bad * a.kv_heads + head_at(a.head, 0)) * dims[of_value] +
                            check_below(c, dims[of_value]),
                        nonfinite[check_below(c, 3)]);
    const size_t ring_bytes = (size_t)(r->sink_blocks + r->ring_blocks) * r->heads * page;
    for (uint32_t b = 0; b < a.rows; b++) {
        row[b] = (kvf_row){.ring = check_changed(c, "ring", ring_bytes),
                           .fault = check_put_out(c, &(uint64_t){UINT64_MAX}, sizeof(uint64_t)),
                           .fault_key = 7u << 12 | b,
                           .length = lengths[check_below(c, sizeof lengths / sizeof *lengths)]};
        check_track(c, "fault", row[b].fault, sizeof *row[b].fault);
    }
    a.row = row;
    a.k = k;
    a.v = v;
    a.spans_max = r->sink_blocks + r->ring_blocks + check_below(c, 3);
    const size_t lists = (size_t)a.rows * r->heads;
    a.spans = check_changed(c, "spans", lists * a.spans_max * sizeof *a.spans);
    a.span_count = check_changed(c, "span_count", lists * sizeof *a.span_count);
    CHECK_BOTH(c, ring, &a);
    expect_ring(c, &a, bad);
}

void check_heads(check *c)
{
    static const uint32_t bytes[] = {4, 8, 16, 20, 128, 160, 512, 4096};
    for (uint32_t i = 0; i < 40; i++)
        heads_case(c, 1 + (i * 7 % 40), bytes[i % 8]);
}

void check_ring(check *c)
{
    for (uint32_t i = 0; i < 105; i++)
        ring_case(c, i);
}
