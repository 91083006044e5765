/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages under the caller's block tables: outputs have the bits of sequences, whatever the ids, the
 * regions and what is resident; a write voids what the device has; mistakes cost a row and no more.
 */

#include "blocks_rig.h"
#include "refusals.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const kvf_transfer methods[] = {KVF_TRANSFER_MAPPED, KVF_TRANSFER_DIRECT};

static uint32_t method_count(void)
{
    return test_on_cuda() ? 1 : 2; /* a GPU reads pages in no other way */
}

static kvf_blocks_stats stats_of(const rig *r)
{
    kvf_blocks_stats s;
    kvf_blocks_stats_get(r->blocks, &s);
    return s;
}

/* Regions of a pass: any, each once. */
static void deal_regions(rig *r, rig_request *const *list, uint32_t count)
{
    uint32_t taken = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t region;
        do
            region = test_random_below(&r->random, RIG_REQUESTS);
        while (taken >> region & 1);
        taken |= 1u << region;
        list[i]->region = (int32_t)region;
    }
}

static uint32_t room_of(const rig *r, const rig_request *q)
{
    const uint32_t next = q->length < q->prompt ? kvf_min_u32(q->chunk, q->prompt - q->length) : 1;
    return kvf_div_ceil_u32(q->length + next, r->config.block_tokens) - q->ids_count;
}

/* Passes of requests that come, wait, lose their blocks and go, until all are done. */
static void serve(rig *r, int moves_regions)
{
    uint32_t dropped = 0;
    for (uint32_t pass = 0, done = 0; done < r->requests; pass++) {
        rig_request *list[RIG_REQUESTS];
        uint32_t count = 0;
        done = 0;
        for (uint32_t i = 0; i < r->requests; i++) {
            rig_request *q = &r->request[i];
            done += (uint32_t)rig_is_done(q);
            q->region = (int32_t)i;
            if (rig_is_done(q) || test_random_below(&r->random, 4) == 0)
                continue;
            if (q->length && dropped < 3 && test_random_below(&r->random, 30) == 0) {
                rig_drop(r, q); /* preempted: it begins anew, in other blocks */
                dropped++;
                continue;
            }
            if (room_of(r, q) > r->free_count)
                continue;
            rig_grow(r, q, q->length + room_of(r, q) * r->config.block_tokens, 1);
            rig_grow(r, q, q->length + 1, 1);
            list[count++] = q;
        }
        if (moves_regions)
            deal_regions(r, list, count);
        if (count && rig_pass(r, list, count))
            fail_msg("pass %u: %u outputs differ", pass, r->differs);
    }
}

static void bits_are_those_of_sequences(void **state)
{
    static const kvf_select selects[] = {KVF_SELECT_DYNAMIC, KVF_SELECT_FULL, KVF_SELECT_STREAMING};
    static const kvf_dtype dtypes[] = {KVF_FP32, KVF_BF16, KVF_FP16};
    (void)state;
    /* The emulated device is slow: three cases with all types and both sizes of blocks. */
    for (uint32_t i = 0; i < 12; i += test_on_cuda() ? 5 : 1) {
        if (!test_takes(i))
            continue;
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = rig_config();
        rig r;
        bc.cache.select = i < 6 ? KVF_SELECT_DYNAMIC : selects[i % 3];
        bc.cache.transfer = methods[i / 2 % method_count()];
        bc.cache.dtype = dtypes[i % 3];
        bc.cache.page_size = 1u << i % 7;
        bc.cache.budget_tokens = test_on_cuda() ? 128 : 192;
        bc.cache.budget_share = i < 6 && i % 2 ? 0.6f : 0.0f;
        bc.cache.sink_tokens = (i * 5) % 40;
        bc.block_tokens = i % 2 ? 64 : 128;
        bc.block_count = 24;
        test_seed_print("blocks", 70 + i);
        rig_open(&r, &rc, &bc, 4, 70 + i);
        serve(&r, i % 4 != 3);
        const kvf_blocks_stats s = stats_of(&r);
        assert_true(r.compared > 100);
        assert_int_equal(s.bad_rows, 0);
        assert_int_equal(s.bad_slots, 0);
        assert_true(s.tokens_put > 0 && s.tokens_attended > 0);
        rig_close(&r);
    }
}

/* ---- kinds of heads ---- */

/* [layers, kv_heads] */
static const uint8_t kinds[] = {1, 2, 2, 2}, all_kinds[] = {0, 2, 1, 0}, none_hot[] = {0, 0, 2, 0};

/* Stretches of 64 tokens, of which coarse heads rank up to five and take one or two. */
static kvf_blocks_config coarse_config(void)
{
    kvf_blocks_config bc = rig_config();
    bc.cache.head_mask = kinds;
    bc.cache.budget_tokens = 64;
    bc.cache.local_tokens = 8;
    bc.cache.streaming_sink = 6;
    bc.cache.streaming_recent = 50;
    bc.block_tokens = 64;
    return bc;
}

/* Outputs of sequences that differ, of two rigs of the same tokens. */
static uint32_t differing(const rig *a, const rig *b)
{
    const size_t rows = a->config.cache.layers, row = a->config.cache.query_heads *
                                                      a->config.cache.head_dim *
                                                      test_dtype_bytes(a->config.cache.dtype);
    uint32_t n = 0;
    for (uint32_t i = 0; i < a->requests; i++)
        for (size_t t = 0; t < rows * a->request[i].count; t++)
            n += memcmp(a->request[i].out + t * row, b->request[i].out + t * row, row) != 0;
    return n;
}

static void kinds_of_heads_have_the_bits_of_sequences(void **state)
{
    static const uint8_t *const masks[] = {kinds, none_hot, all_kinds, all_kinds};
    (void)state;
    /* The emulated device is slow: the case with all kinds. */
    for (uint32_t i = test_on_cuda() ? 2 : 0; i < (test_on_cuda() ? 3u : 4u); i++) {
        if (!test_takes(i))
            continue;
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = coarse_config();
        rig r, hot;
        bc.cache.head_mask = masks[i];
        bc.cache.transfer = methods[i % method_count()];
        bc.cache.page_size = i == 1 ? 64 : 8;
        bc.cache.budget_tokens = i == 1 ? 144 : 64;
        bc.cache.dtype = i ? KVF_BF16 : KVF_FP32;
        bc.cache.streaming_sink = i == 3 ? 0 : 6;
        bc.block_tokens = i == 2 ? 128 : 64;
        bc.block_count = 24;
        test_seed_print("blocks", 110 + i);
        rig_open(&r, &rc, &bc, 4, 110 + i);
        serve(&r, 1);
        assert_true(r.compared > 100);
        assert_int_equal(stats_of(&r).bad_rows, 0);
        if (test_on_cuda()) {
            rig_close(&r);
            continue;
        }
        bc.cache.head_mask = NULL; /* which would be something else */
        rig_open(&hot, &rc, &bc, 4, 110 + i);
        assert_true(differing(&r, &hot) > 0);
        rig_close(&hot);
        rig_close(&r);
    }
}

/* What the caller recorded once runs again with other tokens, tables, lengths and regions. */
static void a_capture_of_the_caller_has_the_same_bits(void **state)
{
    static const kvf_select selects[] = {KVF_SELECT_DYNAMIC, KVF_SELECT_FULL, KVF_SELECT_STREAMING};
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        if (!test_takes(i))
            continue;
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = i == 0 ? coarse_config() : rig_config();
        rig r;
        bc.cache.head_mask = i == 0 ? all_kinds : NULL; /* with hot heads, too */
        bc.cache.select = selects[i];
        bc.cache.transfer = KVF_TRANSFER_MAPPED;
        test_seed_print("blocks", 90 + i);
        rig_open(&r, &rc, &bc, 3, 90 + i);
        r.captures = 1;
        serve(&r, 1);
        assert_true(r.compared > 100);
        assert_true(r.replays > 40);
        assert_int_equal(stats_of(&r).bad_rows, 0);
        rig_close(&r);
    }
}

/* One request after another, with the same ids in the same region: pages, window and sink of the
 * one lie where those of the other are looked for. Returns how many outputs differ. */
static uint32_t serve_in_turn(kvf_blocks_config bc, uint64_t seed, uint32_t is_deaf,
                              kvf_blocks_stats *stats)
{
    const kvf_runtime_config rc = test_runtime_config();
    rig r;
    test_seams.is_deaf = is_deaf;
    rig_open(&r, &rc, &bc, 3, seed);
    for (uint32_t i = 0; i < r.requests; i++) {
        rig_request *q = &r.request[i];
        rig_grow(&r, q, q->count, 0);
        for (uint32_t b = 0; b < q->ids_count; b++)
            q->ids[b] = (int32_t)b;
        while (!rig_is_done(q))
            (void)rig_pass(&r, &q, 1);
    }
    *stats = stats_of(&r);
    const uint32_t differs = r.differs;
    rig_close(&r);
    return differs;
}

static void a_write_voids_what_the_device_has(void **state)
{
    kvf_blocks_stats heard, deaf;
    (void)state;
    for (uint32_t i = 0; i < method_count(); i++) {
        kvf_blocks_config bc = rig_config();
        bc.cache.transfer = methods[i];
        assert_int_equal(serve_in_turn(bc, 5, 0, &heard), 0);
        assert_true(heard.pages_voided > 0 && heard.hits > 0);
        assert_true(heard.tokens_brought > 0);
        /* The same without counting writes: stale bytes are taken for true. */
        assert_true(serve_in_turn(bc, 5, 1, &deaf) > 0);
        assert_true(deaf.pages_voided < heard.pages_voided);
        assert_true(deaf.tokens_brought < heard.tokens_brought);
    }
}

/* Means of what was there before would choose other pages; tails have tags as windows have. */
static void a_write_voids_means_and_tails(void **state)
{
    kvf_blocks_stats unused;
    (void)state;
    assert_int_equal(serve_in_turn(coarse_config(), 9, 0, &unused), 0);
    assert_true(serve_in_turn(coarse_config(), 9, 2, &unused) > 0);
    kvf_blocks_config bc = coarse_config();
    bc.cache.head_mask = none_hot;
    bc.cache.layers = 1;
    bc.cache.transfer = KVF_TRANSFER_MAPPED; /* into tails; else they are read in the cells */
    assert_int_equal(serve_in_turn(bc, 9, 0, &unused), 0);
    assert_true(serve_in_turn(bc, 9, 1, &unused) > 0);
}

/* ---- mistakes ---- */

static size_t q_bytes_of(const rig *r)
{
    const kvf_cache_config *c = &r->config.cache;
    return c->query_heads * c->head_dim * test_dtype_bytes(c->dtype);
}

/* The last token of the first two requests, which are put; row 0 is the first. */
static kvf_block_rows last_tokens(rig *r)
{
    for (uint32_t i = 0; i < 2; i++) {
        rig_request *q = &r->request[i];
        r->lengths[i] = (int32_t)q->count;
        r->regions[i] = (int32_t)i;
        memcpy(r->table + (size_t)i * r->table_stride, q->ids, q->ids_count * sizeof *q->ids);
        memcpy(r->q + i * q_bytes_of(r), test_q(&q->tokens, 0, q->count - 1), q_bytes_of(r));
    }
    return (kvf_block_rows){.rows = 2,
                            .table_stride = r->table_stride,
                            .table = r->table,
                            .lengths = r->lengths,
                            .regions = r->regions};
}

/* Decodes; `bad` has a bit per row that must be NaN, and the others are the sequences'. */
static void expect_rows(rig *r, const kvf_block_rows *rows, uint32_t bad)
{
    const uint32_t heads = r->config.cache.query_heads;
    const uint64_t before = stats_of(r).bad_rows;
    test_expect(r->runtime, kvf_blocks_decode(r->blocks, 0, rows, r->q, r->out, r->lse, r->stream),
                KVF_OK);
    test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    for (uint32_t i = 0; i < rows->rows; i++) {
        const rig_request *q = &r->request[i];
        const float *out = (const float *)(const void *)(r->out + i * q_bytes_of(r));
        const size_t want = (size_t)q->count - 1;
        for (uint32_t d = 0; bad >> i & 1 && d < heads * r->config.cache.head_dim; d++)
            assert_true(isnan(out[d]));
        if (bad >> i & 1)
            assert_true(isnan(r->lse[i * heads]));
        else
            assert_memory_equal(out, q->out + want * q_bytes_of(r), q_bytes_of(r));
    }
    assert_int_equal(stats_of(r).bad_rows - before, __builtin_popcount(bad));
}

static void open_two_of(rig *r, kvf_blocks_config bc)
{
    const kvf_runtime_config rc = test_runtime_config();
    rig_open(r, &rc, &bc, 2, 9);
    for (uint32_t i = 0; i < 2; i++) {
        rig_grow(r, &r->request[i], r->request[i].count, 1);
        rig_put(r, &r->request[i], 0, r->request[i].count);
    }
}

static void open_two(rig *r)
{
    open_two_of(r, rig_config());
}

static void mistakes_cost_a_row(void **state)
{
    rig r;
    (void)state;
    open_two(&r);
    const int32_t bad_ids[] = {-1, (int32_t)r.config.block_count, INT32_MAX, INT32_MIN};
    const int32_t bad_lengths[] = {-1, RIG_TOKENS + 1, INT32_MAX, INT32_MIN};
    const int32_t bad_regions[] = {-1, RIG_REQUESTS, INT32_MAX, 0};
    kvf_block_rows rows = last_tokens(&r);
    expect_rows(&r, &rows, 0);
    for (uint32_t i = 0; i < 4; i++) {
        rows = last_tokens(&r);
        r.table[i % 2 * r.table_stride] = bad_ids[i];
        expect_rows(&r, &rows, 1u << i % 2);
        rows = last_tokens(&r);
        r.lengths[i % 2] = bad_lengths[i];
        expect_rows(&r, &rows, 1u << i % 2);
        rows = last_tokens(&r);
        r.regions[1] = bad_regions[i]; /* the last one is that of row 0 */
        expect_rows(&r, &rows, 2);
    }
    rows = last_tokens(&r);
    rows.rows = 1;
    rows.table_stride = 0; /* shorter than any length */
    expect_rows(&r, &rows, 1);
    rows = last_tokens(&r);
    expect_rows(&r, &rows, 0); /* nothing of it is left */
    rig_close(&r);
}

static void a_row_of_length_zero_is_none(void **state)
{
    rig r;
    (void)state;
    open_two(&r);
    kvf_block_rows rows = last_tokens(&r);
    r.lengths[1] = 0;
    r.regions[1] = 12345;
    memset(r.table + r.table_stride, 0xff, r.table_stride * sizeof *r.table);
    test_expect(r.runtime, kvf_blocks_decode(r.blocks, 0, &rows, r.q, r.out, r.lse, r.stream),
                KVF_OK);
    test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
    assert_memory_equal(r.out, r.request[0].out + (r.request[0].count - 1) * q_bytes_of(&r),
                        q_bytes_of(&r));
    for (uint32_t d = 0; d < r.config.cache.head_dim; d++)
        assert_true(((const float *)(const void *)(r.out + q_bytes_of(&r)))[d] == 0.0f);
    assert_int_equal(stats_of(&r).bad_rows, 0);
    rig_close(&r);
}

static void a_token_that_is_not_finite_costs_its_rows(void **state)
{
    rig r;
    (void)state;
    open_two(&r);
    rig_request *q = &r.request[0];
    float *key = test_k(&q->tokens, 0, 3);
    const float sound = key[5];
    kvf_block_rows rows;
    for (uint32_t i = 0; i < 2; i++) {
        key[5] = i ? INFINITY : NAN;
        rig_put(&r, q, 3, 4);
        rows = last_tokens(&r);
        expect_rows(&r, &rows, 1);
        key[5] = sound;
        rig_put(&r, q, 3, 4); /* written again */
        rows = last_tokens(&r);
        expect_rows(&r, &rows, 0);
    }
    rig_close(&r);
}

/* What comes before it does not see it: the outputs, and so what other rows share, are as ever. */
static void a_chunk_keeps_what_comes_before_a_bad_token(void **state)
{
    rig r;
    (void)state;
    open_two(&r);
    rig_request *q = &r.request[0];
    enum { QUERIES = 20, BAD = 11 };
    const uint32_t starts[] = {0, QUERIES}, contexts[] = {q->count - QUERIES};
    const size_t bytes = q_bytes_of(&r), all = QUERIES * bytes;
    char *sound = test_alloc(all);
    const uint32_t heads = r.config.cache.query_heads;
    float *lse = test_alloc((size_t)QUERIES * heads * sizeof *lse);
    float *value = test_v(&q->tokens, 0, contexts[0] + BAD);
    kvf_block_rows rows = last_tokens(&r);
    rows.rows = 1;
    for (uint32_t i = 0; i < 3; i++) {
        value[3] = i == 1 ? INFINITY : 0.5f;
        rig_put(&r, q, contexts[0] + BAD, contexts[0] + BAD + 1);
        memcpy(r.q, test_q(&q->tokens, 0, contexts[0]), all);
        test_expect(
            r.runtime,
            kvf_blocks_extend(r.blocks, 0, &rows, starts, contexts, r.q, r.out, lse, r.stream),
            KVF_OK);
        test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
        if (i == 0)
            memcpy(sound, r.out, all);
        assert_memory_equal(r.out, sound, i == 1 ? BAD * bytes : all);
        for (size_t d = BAD * bytes; i == 1 && d < all; d += sizeof(float))
            assert_true(isnan(*(const float *)(const void *)(r.out + d)));
        for (uint32_t h = 0; h < QUERIES * heads; h++)
            assert_int_equal(isnan(lse[h]), i == 1 && h >= BAD * heads);
        assert_int_equal(stats_of(&r).bad_rows, i != 0);
    }
    test_release(lse);
    test_release(sound);
    rig_close(&r);
}

/* More than a launch takes, and one without queries, whose length nobody looks at: outputs are
 * those of a call for each. */
static void chunks_of_many_rows_are_single_ones(void **state)
{
    enum { ROWS = KVF_CHUNKS_MAX + 3, EMPTY = 4, QUERIES = 3 };
    uint32_t starts[ROWS + 1] = {0}, contexts[ROWS], tokens = 0;
    kvf_blocks_config bc = rig_config();
    rig r;
    (void)state;
    bc.cache.sequences_max = ROWS;
    open_two_of(&r, bc);
    const uint32_t heads = r.config.cache.query_heads;
    const size_t bytes = q_bytes_of(&r), out_bytes = ROWS * QUERIES * bytes;
    float *lse = test_alloc(ROWS * QUERIES * heads * sizeof *lse), *one_lse = r.lse;
    char *out = test_alloc(out_bytes);
    kvf_block_rows rows = last_tokens(&r);
    rows.rows = ROWS;
    rows.regions = NULL;
    for (uint32_t i = 0; i < ROWS; i++) {
        const uint32_t n = i == EMPTY ? 0 : 1 + i % QUERIES;
        contexts[i] = i * 13 % (r.request[0].count - QUERIES);
        r.lengths[i] = i == EMPTY ? -5 : (int32_t)(contexts[i] + n);
        memcpy(r.table + (size_t)i * r.table_stride, r.request[0].ids,
               r.request[0].ids_count * sizeof *r.table);
        memcpy(r.q + tokens * bytes, test_q(&r.request[0].tokens, 0, contexts[i]), n * bytes);
        starts[i + 1] = tokens += n;
    }
    test_expect(r.runtime,
                kvf_blocks_extend(r.blocks, 0, &rows, starts, contexts, r.q, out, lse, r.stream),
                KVF_OK);
    test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
    for (uint32_t i = 0; i < ROWS; i++) {
        const uint32_t one[] = {0, starts[i + 1] - starts[i]};
        const kvf_block_rows row = {.rows = 1,
                                    .table_stride = r.table_stride,
                                    .table = r.table + (size_t)i * r.table_stride,
                                    .lengths = r.lengths + i};
        test_expect(r.runtime,
                    kvf_blocks_extend(r.blocks, 0, &row, one, contexts + i, r.q + starts[i] * bytes,
                                      r.out, one_lse, r.stream),
                    KVF_OK);
        test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
        assert_memory_equal(out + starts[i] * bytes, r.out, one[1] * bytes);
        assert_memory_equal(lse + starts[i] * heads, one_lse, one[1] * heads * sizeof *lse);
    }
    assert_int_equal(stats_of(&r).bad_rows, 0);
    test_release(lse);
    test_release(out);
    rig_close(&r);
}

/* Of one query: a step that attends to everything has the sum of weights of a chunk, and so have
 * streaming heads; one within a budget has a part of it. Both add floats in an order of their own:
 * 1e-4 of a logarithm below 10. */
static void a_chunk_tells_what_share_a_step_has(void **state)
{
    static const uint8_t some_stream[] = {1, 0, 0, 1};
    (void)state;
    for (uint32_t is_full = 0; is_full < 3; is_full++) {
        rig r;
        float most = 0.0f;
        kvf_blocks_config bc = coarse_config();
        bc.cache.select = is_full ? KVF_SELECT_FULL : KVF_SELECT_DYNAMIC;
        bc.cache.head_mask = is_full == 2 ? some_stream : NULL;
        open_two_of(&r, bc);
        const uint32_t starts[] = {0, 1, 2}, heads = r.config.cache.query_heads;
        const uint32_t contexts[] = {r.request[0].count - 1, r.request[1].count - 1};
        float *dense = test_alloc(2 * heads * sizeof *dense);
        const kvf_block_rows rows = last_tokens(&r);
        expect_rows(&r, &rows, 0);
        test_expect(
            r.runtime,
            kvf_blocks_extend(r.blocks, 0, &rows, starts, contexts, r.q, r.out, dense, r.stream),
            KVF_OK);
        test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
        for (uint32_t h = 0; h < 2 * heads; h++) {
            assert_true(r.lse[h] < dense[h] + 1e-4f);
            most = fmaxf(most, dense[h] - r.lse[h]);
        }
        /* The shorter requests on CUDA have next to nothing outside of a budget. */
        assert_true(is_full ? most < 1e-4f : test_on_cuda() || most > 1e-2f);
        test_release(dense);
        rig_close(&r);
    }
}

static void bad_slots_are_left_out(void **state)
{
    rig r;
    (void)state;
    open_two(&r);
    const int64_t all = (int64_t)r.config.block_count * r.config.block_tokens;
    const uint64_t before = stats_of(&r).tokens_put;
    const kvf_put_args put = {.tokens = 4, .k = r.k, .v = r.v, .slots = r.slots};
    r.slots[0] = -1;
    r.slots[1] = all;
    r.slots[2] = INT64_MAX;
    r.slots[3] = INT64_MIN;
    test_expect(r.runtime, kvf_blocks_put(r.blocks, &put, r.stream), KVF_OK);
    test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
    assert_int_equal(stats_of(&r).bad_slots, 2);
    assert_int_equal(stats_of(&r).tokens_put, before);
    const kvf_block_rows rows = last_tokens(&r);
    expect_rows(&r, &rows, 0);
    kvf_blocks_stats_reset(r.blocks);
    assert_int_equal(stats_of(&r).bad_slots, 0);
    rig_close(&r);
}

static void a_chunk_of_another_length_is_bad(void **state)
{
    rig r;
    (void)state;
    open_two(&r);
    kvf_block_rows rows = last_tokens(&r);
    const uint32_t starts[] = {0, 2}, contexts[] = {r.request[0].count - 1};
    rows.rows = 1;
    rows.regions = NULL;
    test_expect(r.runtime,
                kvf_blocks_extend(r.blocks, 0, &rows, starts, contexts, r.q, r.out, NULL, r.stream),
                KVF_OK);
    test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
    for (uint32_t i = 0; i < 2; i++)
        assert_true(isnan(((const float *)(const void *)(r.out + i * q_bytes_of(&r)))[0]));
    assert_int_equal(stats_of(&r).bad_rows, 1);
    rig_close(&r);
}

/* ---- copies ---- */

static void a_copy_has_the_same_bits(void **state)
{
    rig r;
    (void)state;
    open_two_of(&r, coarse_config());
    kvf_block_rows rows = last_tokens(&r);
    expect_rows(&r, &rows, 0); /* means of the blocks that are copied are there */
    rig_request *q = &r.request[0];
    for (uint32_t i = 0; i < q->ids_count; i++) {
        const uint32_t from = (uint32_t)q->ids[i];
        const uint32_t to = (uint32_t)r.free_ids[--r.free_count];
        test_expect(r.runtime, kvf_blocks_copy(r.blocks, &from, &to, 1, r.stream), KVF_OK);
        test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
        for (uint32_t layer = 0; layer < r.config.cache.layers; layer++) {
            char *codes = r.codes + layer * r.config.block_count * r.stride;
            memcpy(codes + to * r.stride, codes + from * r.stride, r.stride);
        }
        q->ids[i] = (int32_t)to;
        r.free_ids[r.free_count++] = (int32_t)from;
    }
    rows = last_tokens(&r);
    expect_rows(&r, &rows, 0);
    rig_close(&r);
}

/* ---- refusals ---- */

static kvf_status open_row(void *user, char *change, size_t size, kvf_error *error)
{
    kvf_runtime *runtime = user;
    kvf_blocks_config bc = rig_config();
    kvf_blocks *blocks = NULL;
    kvf_blocks_plan plan;
    kvf_error planned = {0};
    uint8_t *mask = test_alloc(sizeof kinds);
    const uint64_t live = runtime->context->live_bytes;
    (void)size;
    for (char *field = change, *next; field; field = next) {
        const char *value = refusals_part(field, &next);
        if (strcmp(field, "head_mask") == 0)
            bc.cache.head_mask = memset(mask, atoi(value), sizeof kinds);
        else if (strcmp(field, "disk_path") == 0)
            bc.cache.disk_path = value;
        else if (strcmp(field, "block_count") == 0)
            bc.block_count = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(field, "block_tokens") == 0)
            bc.block_tokens = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(field, "size") == 0)
            bc.size = strtoul(value, NULL, 10);
        else if (!refusals_set(kvf_cache_setting, &bc.cache, field, value))
            fail_msg("there is no field %s", field);
    }
    const kvf_status status = kvf_blocks_open(runtime, &bc, &blocks, error);
    assert_int_equal(blocks == NULL, status != KVF_OK);
    kvf_blocks_close(blocks);
    assert_int_equal(runtime->context->live_bytes, live);
    assert_int_equal(kvf_blocks_plan_make(runtime, &bc, &plan, &planned), status);
    assert_string_equal(planned.text, error->text);
    test_release(mask);
    return status;
}

static void what_has_no_home_is_refused(void **state)
{
    const kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime = NULL;
    (void)state;
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    refusals_check(&(refusals){
        .path = "tests/runtime/blocks/blocks.refusals", .call = open_row, .user = runtime});
    kvf_runtime_close(runtime);
}

/* One change of sound arguments; the words are those of blocks_calls.refusals. */
static kvf_status call_row(void *user, char *change, size_t size, kvf_error *error)
{
    rig *r = user;
    kvf_blocks *b = r->blocks;
    kvf_put_args put = {.tokens = 1, .k = r->k, .v = r->v, .slots = r->slots};
    kvf_block_rows rows = last_tokens(r);
    uint32_t starts[] = {0, 1, 2}, contexts[] = {0, 0}, from = 0, to = 1;
    kvf_status status = KVF_OK;
    (void)size;
    if (strncmp(change, "put ", 4) == 0) {
        put.layer = strcmp(change, "put layer 2") == 0 ? 2 : 0;
        put.k = strcmp(change, "put k NULL") == 0 ? NULL : put.k;
        put.k_stride = strcmp(change, "put k_stride 127") == 0 ? 127 : 0;
        put.v_stride = strcmp(change, "put v_stride 1") == 0 ? 1 : 0;
        status = kvf_blocks_put(b, &put, r->stream);
    } else if (strncmp(change, "decode ", 7) == 0) {
        rows.rows = strcmp(change, "decode rows 0") == 0   ? 0
                    : strcmp(change, "decode rows 7") == 0 ? 7
                                                           : 2;
        rows.table = strcmp(change, "decode table NULL") == 0 ? NULL : rows.table;
        status = kvf_blocks_decode(b, 0, &rows, r->q,
                                   strcmp(change, "decode out NULL") == 0 ? NULL : r->out, NULL,
                                   r->stream);
    } else if (strncmp(change, "extend ", 7) == 0) {
        contexts[1] = strcmp(change, "extend contexts 400") == 0 ? 400 : 0;
        starts[2] = strcmp(change, "extend starts 0") == 0 ? 0 : 2;
        status = kvf_blocks_extend(b, 0, &rows, starts,
                                   strcmp(change, "extend contexts NULL") == 0 ? NULL : contexts,
                                   r->q, r->out, NULL, r->stream);
    } else if (strncmp(change, "copy ", 5) == 0) {
        from = strcmp(change, "copy from 40") == 0 ? 40 : 1;
        status = kvf_blocks_copy(b, &from, &to, 1, r->stream);
    } else if (strncmp(change, "bind ", 5) == 0) {
        status = strcmp(change, "bind codes NULL") == 0 ? kvf_blocks_bind(b, 0, NULL, 4096)
                 : strcmp(change, "bind layer 2") == 0  ? kvf_blocks_bind(b, 2, r->codes, 4096)
                                                        : kvf_blocks_bind(b, 0, r->codes, 1008);
    }
    *error = *kvf_runtime_error(r->runtime);
    return status;
}

static void bad_arguments_are_named(void **state)
{
    rig r;
    (void)state;
    open_two(&r);
    refusals_check(&(refusals){
        .path = "tests/runtime/blocks/blocks_calls.refusals", .call = call_row, .user = &r});
    const kvf_block_rows rows = last_tokens(&r);
    expect_rows(&r, &rows, 0); /* nothing was enqueued */
    rig_close(&r);
}

/* ---- memory that runs out ---- */

typedef struct refuser {
    uint32_t asked, at;
} refuser;

static int refuse_one(void *user, const char *what)
{
    refuser *f = user;
    (void)what;
    return f->asked++ == f->at;
}

static void *alloc_or_refuse(void *user, size_t bytes, size_t alignment)
{
    void *p = NULL;
    if (refuse_one(user, "memory") || posix_memalign(&p, alignment, bytes ? bytes : 1))
        return NULL;
    return memset(p, 0xa5, bytes); /* nobody may count on zeros */
}

static void give_back(void *user, void *p)
{
    (void)user;
    free(p);
}

static void open_survives_every_failure(void **state)
{
    refuser f = {.at = UINT32_MAX};
    kvf_runtime_config rc = test_runtime_config();
    kvf_blocks_config bc = coarse_config();
    bc.cache.head_mask = all_kinds;
    rc.allocator = (kvf_allocator){.alloc = alloc_or_refuse, .free = give_back, .user = &f};
    kvf_runtime *runtime = NULL;
    uint32_t n = 0;
    (void)state;
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    const uint64_t live = runtime->context->live_bytes;
    for (;; n++) {
        f = (refuser){.at = n};
        kvf_error error = {0};
        kvf_blocks *blocks = NULL;
        kvf_device_set_fault(runtime->device, refuse_one, &f);
        const kvf_status status = kvf_blocks_open(runtime, &bc, &blocks, &error);
        kvf_device_set_fault(runtime->device, NULL, NULL);
        f.at = UINT32_MAX;
        if (status == KVF_OK) {
            kvf_blocks_close(blocks);
            assert_int_equal(runtime->context->live_bytes, live);
            break;
        }
        assert_null(blocks);
        assert_true(error.text[0]);
        assert_int_equal(runtime->context->live_bytes, live);
    }
    assert_true(n > 10);
    kvf_runtime_close(runtime);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_are_those_of_sequences),
        cmocka_unit_test(kinds_of_heads_have_the_bits_of_sequences),
        cmocka_unit_test(a_write_voids_what_the_device_has),
        cmocka_unit_test(mistakes_cost_a_row),
        cmocka_unit_test(a_row_of_length_zero_is_none),
        cmocka_unit_test(a_token_that_is_not_finite_costs_its_rows),
        cmocka_unit_test(bad_slots_are_left_out),
        cmocka_unit_test(a_chunk_of_another_length_is_bad),
        cmocka_unit_test(a_chunk_keeps_what_comes_before_a_bad_token),
        cmocka_unit_test(a_chunk_tells_what_share_a_step_has),
        cmocka_unit_test(chunks_of_many_rows_are_single_ones),
        cmocka_unit_test(a_copy_has_the_same_bits),
        cmocka_unit_test(what_has_no_home_is_refused),
        cmocka_unit_test(bad_arguments_are_named),
        cmocka_unit_test(open_survives_every_failure),
    };
    const struct CMUnitTest captured[] = {
        cmocka_unit_test(a_capture_of_the_caller_has_the_same_bits),
    };
    /* Kernels of both devices note writes alike: check_cells.c. */
    const struct CMUnitTest deaf[] = {
        cmocka_unit_test(a_write_voids_means_and_tails),
    };
    const int failed = cmocka_run_group_tests_name("blocks", tests, NULL, NULL);
    if (!test_on_cuda()) /* the host device has no graphs */
        return failed + cmocka_run_group_tests_name("blocks that are deaf", deaf, NULL, NULL);
    return failed + cmocka_run_group_tests_name("blocks in a capture", captured, NULL, NULL);
}
