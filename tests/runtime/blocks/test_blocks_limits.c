/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Limits of blocks: a mistake costs a row and no more, bad slots and chunks are left out, and
 * what has no home, bad arguments and memory that runs out are refused, with nothing left behind.
 */

#include "blocks_rig.h"
#include "refusals.h"
#include "resident.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- mistakes ---- */

TEST(mistakes_cost_a_row)
{
    rig r;
    rig_open_two(&r);
    const int32_t bad_ids[] = {-1, (int32_t)r.config.block_count, INT32_MAX, INT32_MIN};
    const int32_t bad_lengths[] = {-1, RIG_TOKENS + 1, INT32_MAX, INT32_MIN};
    const int32_t bad_regions[] = {-1, RIG_REQUESTS, INT32_MAX, 0};
    kvf_blocks_rows rows = rig_last_tokens(&r);
    rig_expect_rows(&r, &rows, 0);
    for (uint32_t i = 0; i < 4; i++) {
        rows = rig_last_tokens(&r);
        r.table[i % 2 * r.table_stride] = bad_ids[i];
        rig_expect_rows(&r, &rows, 1u << i % 2);
        rows = rig_last_tokens(&r);
        r.lengths[i % 2] = bad_lengths[i];
        rig_expect_rows(&r, &rows, 1u << i % 2);
        rows = rig_last_tokens(&r);
        r.regions[1] = bad_regions[i]; /* the last one is that of row 0 */
        rig_expect_rows(&r, &rows, 2);
    }
    rows = rig_last_tokens(&r);
    rows.rows = 1;
    rows.table_stride = 0; /* shorter than any length */
    rig_expect_rows(&r, &rows, 1);
    rows = rig_last_tokens(&r);
    rig_expect_rows(&r, &rows, 0); /* nothing of it is left */
    rig_close(&r);
}

TEST(a_row_of_length_zero_is_none)
{
    rig r;
    rig_open_two(&r);
    kvf_blocks_rows rows = rig_last_tokens(&r);
    r.lengths[1] = 0;
    r.regions[1] = 12345;
    memset(r.table + r.table_stride, 0xff, r.table_stride * sizeof *r.table);
    rig_decode(&r, 0, &rows);
    test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
    assert_memory_equal(r.rows.out, r.request[0].out + (r.request[0].count - 1) * r.rows.out_bytes,
                        r.rows.out_bytes);
    for (uint32_t d = 0; d < r.config.cache.head_dim; d++)
        assert_true(((const float *)(const void *)(r.rows.out + r.rows.out_bytes))[d] == 0.0f);
    assert_int_equal(rig_stats(&r).bad_rows, 0);
    rig_close(&r);
}

TEST(a_token_that_is_not_finite_costs_its_rows)
{
    rig r;
    rig_open_two(&r);
    rig_request *q = &r.request[0];
    float *key = test_k(&q->tokens, 0, 3);
    const float sound = key[5];
    kvf_blocks_rows rows;
    for (uint32_t i = 0; i < 2; i++) {
        key[5] = i ? INFINITY : NAN;
        rig_put(&r, q, 3, 4);
        rows = rig_last_tokens(&r);
        rig_expect_rows(&r, &rows, 1);
        key[5] = sound;
        rig_put(&r, q, 3, 4); /* written again */
        rows = rig_last_tokens(&r);
        rig_expect_rows(&r, &rows, 0);
    }
    rig_close(&r);
}

/* Queries before it do not see it: the outputs, and so what other rows share, are as ever. */
TEST(a_chunk_keeps_what_comes_before_a_bad_token)
{
    rig r;
    rig_open_two(&r);
    rig_request *q = &r.request[0];
    enum { QUERIES = 20, BAD = 11 };
    const uint32_t starts[] = {0, QUERIES}, contexts[] = {q->count - QUERIES};
    const size_t bytes = r.rows.q_bytes, all = QUERIES * bytes;
    char *sound = test_scratch(all);
    const uint32_t heads = r.config.cache.query_heads;
    float *lse = test_alloc((size_t)QUERIES * heads * sizeof *lse);
    float *value = test_v(&q->tokens, 0, contexts[0] + BAD);
    kvf_blocks_rows rows = rig_last_tokens(&r);
    rows.rows = 1;
    for (uint32_t i = 0; i < 3; i++) {
        value[3] = i == 1 ? INFINITY : 0.5f;
        rig_put(&r, q, contexts[0] + BAD, contexts[0] + BAD + 1);
        memcpy(r.rows.q, test_q(&q->tokens, 0, contexts[0]), all);
        rig_extend(&r, &(kvf_blocks_extend_args){.rows = &rows,
                                                 .starts = starts,
                                                 .contexts = contexts,
                                                 .q = r.rows.q,
                                                 .out = r.rows.out,
                                                 .lse = lse});
        test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
        if (i == 0)
            memcpy(sound, r.rows.out, all);
        assert_memory_equal(r.rows.out, sound, i == 1 ? BAD * bytes : all);
        for (size_t d = BAD * bytes; i == 1 && d < all; d += sizeof(float))
            assert_true(isnan(*(const float *)(const void *)(r.rows.out + d)));
        for (uint32_t h = 0; h < QUERIES * heads; h++)
            assert_int_equal(isnan(lse[h]), i == 1 && h >= BAD * heads);
        assert_int_equal(rig_stats(&r).bad_rows, i != 0);
    }
    test_release(lse);
    rig_close(&r);
}

/* More than a launch takes, and one without queries, whose length nobody looks at: outputs are
 * those of a call for each. */
TEST(chunks_of_many_rows_are_single_ones)
{
    enum { ROWS = KVF_CHUNKS_MAX + 3, EMPTY = 4, QUERIES = 3 };
    uint32_t starts[ROWS + 1] = {0}, contexts[ROWS], tokens = 0;
    kvf_blocks_config bc = rig_config();
    rig r;
    bc.cache.sequences_max = ROWS;
    rig_open_two_of(&r, bc);
    const uint32_t heads = r.config.cache.query_heads;
    const size_t bytes = r.rows.q_bytes, out_bytes = ROWS * QUERIES * bytes;
    float *lse = test_alloc(ROWS * QUERIES * heads * sizeof *lse), *one_lse = r.rows.lse;
    char *out = test_alloc(out_bytes);
    kvf_blocks_rows rows = rig_last_tokens(&r);
    rows.rows = ROWS;
    rows.regions = NULL;
    for (uint32_t i = 0; i < ROWS; i++) {
        const uint32_t n = i == EMPTY ? 0 : 1 + i % QUERIES;
        contexts[i] = i * 13 % (r.request[0].count - QUERIES);
        r.lengths[i] = i == EMPTY ? -5 : (int32_t)(contexts[i] + n);
        memcpy(r.table + (size_t)i * r.table_stride, r.request[0].ids,
               r.request[0].ids_count * sizeof *r.table);
        memcpy(r.rows.q + tokens * bytes, test_q(&r.request[0].tokens, 0, contexts[i]), n * bytes);
        starts[i + 1] = tokens += n;
    }
    rig_extend(&r, &(kvf_blocks_extend_args){.rows = &rows,
                                             .starts = starts,
                                             .contexts = contexts,
                                             .q = r.rows.q,
                                             .out = out,
                                             .lse = lse});
    test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
    for (uint32_t i = 0; i < ROWS; i++) {
        const uint32_t one[] = {0, starts[i + 1] - starts[i]};
        const kvf_blocks_rows row = {.rows = 1,
                                     .table_stride = r.table_stride,
                                     .table = r.table + (size_t)i * r.table_stride,
                                     .lengths = r.lengths + i};
        rig_extend(&r, &(kvf_blocks_extend_args){.rows = &row,
                                                 .starts = one,
                                                 .contexts = contexts + i,
                                                 .q = r.rows.q + starts[i] * bytes,
                                                 .out = r.rows.out,
                                                 .lse = one_lse});
        test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
        assert_memory_equal(out + starts[i] * bytes, r.rows.out, one[1] * bytes);
        assert_memory_equal(lse + starts[i] * heads, one_lse, one[1] * heads * sizeof *lse);
    }
    assert_int_equal(rig_stats(&r).bad_rows, 0);
    test_release(lse);
    test_release(out);
    rig_close(&r);
}

/* For one query: a step that attends to everything has the sum of weights of a chunk, and so have
 * streaming heads; one within a budget has a part of it. Both add floats in an order of their own:
 * 1e-4 of a logarithm below 10. */
TEST(a_chunk_tells_what_share_a_step_has)
{
    static const uint8_t some_stream[] = {1, 0, 0, 1};
    for (uint32_t is_full = 0; is_full < 3; is_full++) {
        rig r;
        float most = 0.0f;
        kvf_blocks_config bc = rig_coarse_config();
        bc.cache.select = is_full ? KVF_SELECT_FULL : KVF_SELECT_DYNAMIC;
        bc.cache.head_mask = is_full == 2 ? some_stream : NULL;
        rig_open_two_of(&r, bc);
        const uint32_t starts[] = {0, 1, 2}, heads = r.config.cache.query_heads;
        const uint32_t contexts[] = {r.request[0].count - 1, r.request[1].count - 1};
        float *dense = test_alloc(2 * heads * sizeof *dense);
        const kvf_blocks_rows rows = rig_last_tokens(&r);
        rig_expect_rows(&r, &rows, 0);
        rig_extend(&r, &(kvf_blocks_extend_args){.rows = &rows,
                                                 .starts = starts,
                                                 .contexts = contexts,
                                                 .q = r.rows.q,
                                                 .out = r.rows.out,
                                                 .lse = dense});
        test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
        for (uint32_t h = 0; h < 2 * heads; h++) {
            assert_true(r.rows.lse[h] < dense[h] + 1e-4f);
            most = fmaxf(most, dense[h] - r.rows.lse[h]);
        }
        /* The shorter requests on CUDA have next to nothing outside of a budget. */
        assert_true(is_full ? most < 1e-4f : test_on_cuda() || most > 1e-2f);
        test_release(dense);
        rig_close(&r);
    }
}

TEST(bad_slots_are_left_out)
{
    rig r;
    rig_open_two(&r);
    const int64_t all = (int64_t)r.config.block_count * r.config.block_tokens;
    const uint64_t before = rig_stats(&r).tokens_put;
    const kvf_blocks_put_args put = {.tokens = 4, .k = r.rows.k, .v = r.rows.v, .slots = r.slots};
    r.slots[0] = -1;
    r.slots[1] = all;
    r.slots[2] = INT64_MAX;
    r.slots[3] = INT64_MIN;
    test_expect(r.runtime, kvf_blocks_put(r.blocks, &put, r.stream), KVF_OK);
    test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
    assert_int_equal(rig_stats(&r).bad_slots, 2);
    assert_int_equal(rig_stats(&r).tokens_put, before);
    const kvf_blocks_rows rows = rig_last_tokens(&r);
    rig_expect_rows(&r, &rows, 0);
    kvf_blocks_stats_reset(r.blocks);
    assert_int_equal(rig_stats(&r).bad_slots, 0);
    rig_close(&r);
}

TEST(a_chunk_of_another_length_is_bad)
{
    rig r;
    rig_open_two(&r);
    kvf_blocks_rows rows = rig_last_tokens(&r);
    const uint32_t starts[] = {0, 2}, contexts[] = {r.request[0].count - 1};
    rows.rows = 1;
    rows.regions = NULL;
    rig_extend(&r, &(kvf_blocks_extend_args){.rows = &rows,
                                             .starts = starts,
                                             .contexts = contexts,
                                             .q = r.rows.q,
                                             .out = r.rows.out});
    test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK);
    for (uint32_t i = 0; i < 2; i++)
        assert_true(isnan(((const float *)(const void *)(r.rows.out + i * r.rows.out_bytes))[0]));
    assert_int_equal(rig_stats(&r).bad_rows, 1);
    rig_close(&r);
}

/* A layer's tails are as long as its own window. */
TEST(rows_take_what_windows_need)
{
    static const uint32_t windows[][RIG_LAYERS] = {{50, 50}, {50, 13}, {13, 50}, {13, 13}};
    const kvf_runtime_config rc = test_runtime_config();
    kvf_blocks_plan plan[4];
    kvf_runtime *runtime = NULL;
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    for (uint32_t i = 0; i < 4; i++) {
        kvf_blocks_config bc = rig_coarse_config();
        bc.cache.head_mask = rig_all_kinds;
        bc.cache.transfer = KVF_TRANSFER_MAPPED;
        bc.cache.layer_windows = windows[i];
        test_expect(runtime, kvf_blocks_plan_make(runtime, &bc, &plan[i], NULL), KVF_OK);
    }
    assert_true(plan[1].device_region_bytes < plan[0].device_region_bytes);
    assert_true(plan[3].device_region_bytes < plan[1].device_region_bytes);
    assert_int_equal(plan[1].device_region_bytes, plan[2].device_region_bytes);
    kvf_runtime_close(runtime);
}

/* ---- refusals ---- */

static kvf_status open_row(void *user, char *change, size_t size, kvf_error *error)
{
    kvf_runtime *runtime = user;
    kvf_blocks_config bc = rig_config();
    kvf_blocks *blocks = NULL;
    kvf_blocks_plan plan;
    kvf_error planned = {0};
    uint8_t *mask = test_alloc(sizeof rig_kinds);
    uint32_t *windows = test_alloc(sizeof rig_kinds * sizeof *windows);
    const uint64_t live = runtime->context->live_bytes;
    for (char *field = change, *next; field; field = next) {
        const char *value = refusals_part(field, &next);
        if (strcmp(field, "layer_windows") == 0)
            bc.cache.layer_windows = windows, windows[0] = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(field, "head_mask") == 0)
            bc.cache.head_mask = memset(mask, atoi(value), sizeof rig_kinds);
        else if (strcmp(field, "disk_path") == 0)
            bc.cache.disk_path = value;
        else if (strcmp(field, "block_count") == 0)
            bc.block_count = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(field, "block_tokens") == 0)
            bc.block_tokens = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(field, "on_demand") == 0)
            bc.on_demand = (uint32_t)strtoul(value, NULL, 10);
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
    test_release(windows);
    test_release(mask);
    return status;
}

TEST(what_has_no_home_is_refused)
{
    kvf_runtime *runtime = test_runtime();
    refusals_check(&(refusals){
        .path = "tests/runtime/blocks/blocks.refusals", .call = open_row, .user = runtime});
    if (test_on_cuda())
        refusals_check(&(refusals){.path = "tests/runtime/blocks/blocks_cuda.refusals",
                                   .call = open_row,
                                   .user = runtime});
    kvf_runtime_close(runtime);
}

/* One change of sound arguments; the words are those of blocks_calls.refusals. */
static kvf_status call_row(void *user, char *change, size_t size, kvf_error *error)
{
    rig *r = user;
    kvf_blocks *b = r->blocks;
    kvf_blocks_put_args put = {.tokens = 1, .k = r->rows.k, .v = r->rows.v, .slots = r->slots};
    kvf_blocks_rows rows = rig_last_tokens(r);
    uint32_t starts[] = {0, 1, 2}, contexts[] = {0, 0}, from = 0, to = 1;
    kvf_status status = KVF_OK;
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
        const kvf_blocks_decode_args args = {
            .layer = strcmp(change, "decode layer 2") == 0 ? 2 : 0,
            .rows = strcmp(change, "decode rows NULL") == 0 ? NULL : &rows,
            .q = r->rows.q,
            .out = strcmp(change, "decode out NULL") == 0 ? NULL : r->rows.out,
            .page_ids = strncmp(change, "decode page_", 12) == 0 ? r->lengths : NULL,
            .page_scores = strcmp(change, "decode page_scores too") == 0 ? r->rows.lse : NULL};
        const bool is_given = strcmp(change, "decode args NULL") != 0;
        status = kvf_blocks_decode(b, is_given ? &args : NULL, r->stream);
    } else if (strncmp(change, "extend ", 7) == 0) {
        contexts[1] = strcmp(change, "extend contexts 400") == 0 ? 400 : 0;
        starts[2] = strcmp(change, "extend starts 0") == 0 ? 0 : 2;
        const kvf_blocks_extend_args args = {
            .rows = &rows,
            .starts = starts,
            .contexts = strcmp(change, "extend contexts NULL") == 0 ? NULL : contexts,
            .q = r->rows.q,
            .out = r->rows.out};
        const bool is_given = strcmp(change, "extend args NULL") != 0;
        status = kvf_blocks_extend(b, is_given ? &args : NULL, r->stream);
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

TEST(bad_arguments_are_named)
{
    rig r;
    rig_open_two(&r);
    refusals_check(&(refusals){
        .path = "tests/runtime/blocks/blocks_calls.refusals", .call = call_row, .user = &r});
    const kvf_blocks_rows rows = rig_last_tokens(&r);
    rig_expect_rows(&r, &rows, 0); /* nothing was enqueued */
    rig_close(&r);
}

/* ---- memory that runs out ---- */

static kvf_status open_kinds(void *user, kvf_error *error)
{
    kvf_blocks_config bc = rig_coarse_config();
    kvf_blocks *blocks = NULL;
    bc.cache.head_mask = rig_all_kinds;
    bc.cache.layer_windows = rig_windows;
    const kvf_status status = kvf_blocks_open(user, &bc, &blocks, error);
    assert_true((status == KVF_OK) == (blocks != NULL));
    kvf_blocks_close(blocks);
    return status;
}

TEST(open_survives_every_failure)
{
    kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime = NULL;
    rc.allocator = test_asking_allocator();
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    assert_true(test_refuse_each(runtime, open_kinds, runtime) > 10);
    kvf_runtime_close(runtime);
}

/* A handle that was just opened holds what was planned, or little of it. */
TEST(memory_on_demand_is_not_there_at_first)
{
    kvf_runtime *runtime = test_runtime();
    for (uint32_t on_demand = 0; kvf_runtime_device(runtime) == KVF_DEVICE_HOST && on_demand < 2;
         on_demand++) {
        kvf_blocks_config bc = rig_config();
        kvf_blocks *blocks = NULL;
        bc.cache.head_dim = 128;
        bc.block_count = 2048;
        bc.on_demand = on_demand;
        const uint64_t before = resident_bytes();
        test_expect(runtime, kvf_blocks_open(runtime, &bc, &blocks, NULL), KVF_OK);
        const uint64_t grown = resident_bytes() - before;
        const uint64_t planned = kvf_blocks_memory(blocks)->host_bytes;
        assert_true(planned > 16u << 20);
        assert_true(on_demand ? grown < planned / 2 : grown + (4u << 20) > planned);
        kvf_blocks_close(blocks);
    }
    kvf_runtime_close(runtime);
}
