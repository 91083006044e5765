/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The engine of the tests of blocks.h. Knows nothing of what is inside.
 */

#include "blocks_rig.h"

#include <math.h>
#include <string.h>

#include "attention_params.h"
#include "lossless.h"

kvf_blocks_config rig_config(void)
{
    kvf_blocks_config bc;
    kvf_blocks_config_init(&bc);
    bc.cache = test_config_small();
    bc.cache.layers = RIG_LAYERS;
    bc.cache.digest = KVF_DIGEST_CODES;
    bc.cache.select = KVF_SELECT_DYNAMIC;
    bc.cache.static_ratio = 0.0f;
    bc.cache.sequences_max = RIG_REQUESTS;
    bc.cache.tokens_max = RIG_TOKENS;
    bc.cache.budget_tokens = test_on_cuda() ? 96 : 128;
    bc.cache.prefill_chunk_max = RIG_TOKENS;
    if (test_on_cuda() && bc.cache.pages != KVF_PAGES_NATIVE)
        bc.cache.dtype = KVF_BF16; /* a GPU dequantizes no other type */
    bc.block_tokens = 32;
    bc.block_count = 40;
    return bc;
}

/* ---- what steps are given ---- */

rig_form rig_gives;

/* The place of a row in what is given. */
static void *given_at(const rig *r, uint32_t row)
{
    return (char *)r->given + (size_t)row * r->config.cache.kv_heads * RIG_GIVEN * sizeof(float);
}

/* Lists of a step of a row: pages by ids of any order, some of which there are, or scores of the
 * first pages, with equal ones and with those that take none. */
static void give_row(const rig *r, uint32_t layer, uint32_t length, uint32_t row)
{
    test_random random = {layer * 100000 + length};
    const uint32_t pages = length / r->config.cache.page_size + 3;
    float *scores = given_at(r, row);
    int32_t *ids = given_at(r, row);
    for (uint32_t i = 0; i < r->config.cache.kv_heads * RIG_GIVEN; i++) {
        const uint32_t n = test_random_below(&random, r->form == RIG_IDS ? pages : 12);
        if (r->form == RIG_IDS)
            ids[i] = (int32_t)n - 1;
        else
            scores[i] = n == 0 ? NAN : n == 1 ? -INFINITY : n == 2 ? INFINITY : 5.0f - (float)n;
    }
}

static const float *scores_of(const rig *r)
{
    return r->form == RIG_SCORES ? r->given : NULL;
}

static const int32_t *ids_of(const rig *r)
{
    return r->form == RIG_IDS ? r->given : NULL;
}

/* ---- what sequences give ---- */

static void run_layer(rig *r, rig_request *q, kvf_cache *cache, kvf_sequence *s, uint32_t layer)
{
    const uint32_t heads = r->config.cache.query_heads;
    char *out = q->out + (size_t)layer * q->count * r->rows.out_bytes;
    float *lse = q->lse + (size_t)layer * q->count * heads;
    for (uint32_t i = 0; i < q->prompt; i += q->chunk) {
        const uint32_t n = kvf_min_u32(q->chunk, q->prompt - i);
        const kvf_prefill_args a =
            test_chunk_args(s, &q->tokens, layer, i, n, out + i * r->rows.out_bytes);
        test_expect(r->runtime, kvf_prefill(cache, &a, r->stream), KVF_OK);
    }
    for (uint32_t i = q->prompt; i < q->count; i++) {
        kvf_decode_args a = test_step_args(&s, &q->tokens, layer, i, out + i * r->rows.out_bytes);
        a.lse = lse + (size_t)i * heads;
        if (r->form != RIG_NOTHING) {
            give_row(r, layer, i + 1, 0);
            a.page_scores = scores_of(r);
            a.page_ids = ids_of(r);
            a.page_stride = RIG_GIVEN;
        }
        test_expect(r->runtime, kvf_decode(cache, &a, r->stream), KVF_OK);
        if (r->form != RIG_NOTHING)
            test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    }
}

static void run_sequences(rig *r)
{
    const kvf_cache_config *cc = &r->config.cache;
    kvf_cache *cache = NULL;
    kvf_error error = {0};
    if (kvf_cache_open(r->runtime, cc, &cache, &error) != KVF_OK)
        fail_msg("%s", error.text);
    test_give_attention_params(cache, cc);
    for (uint32_t i = 0; i < r->requests; i++) {
        rig_request *q = &r->request[i];
        const size_t rows = (size_t)cc->layers * q->count;
        kvf_sequence *s = NULL;
        q->out = test_alloc(rows * r->rows.out_bytes);
        q->lse = test_alloc(rows * cc->query_heads * sizeof *q->lse);
        test_expect(r->runtime, kvf_sequence_create(cache, &s), KVF_OK);
        for (uint32_t layer = 0; layer < cc->layers; layer++)
            run_layer(r, q, cache, s, layer);
        q->chunk = 1 + (q->chunk + 37) % 150; /* where chunks end changes no bit */
    }
    test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    kvf_cache_close(cache);
}

/* ---- open and close ---- */

static void make_tokens(rig *r, uint32_t i, uint64_t seed)
{
    test_tokens_make(
        &r->request[i].tokens, &r->config.cache,
        &(test_tokens_spec){
            .count = r->request[i].count, .seed = seed * 100 + i, .sharpness = 2.0f, .topics = 5});
}

/* The emulated device is slow: requests are shorter there, and all but one longer than a budget. */
static void make_requests(rig *r, uint64_t seed)
{
    const uint32_t most = test_on_cuda() ? 220 : RIG_TOKENS - 60, answer = test_on_cuda() ? 8 : 20;
    for (uint32_t i = 0; i < r->requests; i++) {
        rig_request *q = &r->request[i];
        const uint32_t least = test_on_cuda() && i ? 130 : 1;
        q->prompt = least + test_random_below(&r->random, most - least + 1);
        q->count = q->prompt + answer + test_random_below(&r->random, 2 * answer);
        q->chunk = 1 + test_random_below(&r->random, 150);
        q->ids = test_alloc(r->table_stride * sizeof *q->ids);
        make_tokens(r, i, seed);
        /* There are none of other sizes, and a test takes any tokens. */
        if (r->config.cache.pages != KVF_PAGES_NATIVE && r->config.cache.head_dim == 64)
            lossless_make(&q->tokens, r->config.cache.pages);
    }
}

void rig_take_any_tokens(rig *r, uint64_t seed)
{
    for (uint32_t i = 0; i < r->requests; i++) {
        test_tokens_free(&r->request[i].tokens);
        make_tokens(r, i, seed);
    }
}

static void open_blocks(rig *r)
{
    const kvf_blocks_config *bc = &r->config;
    kvf_error error = {0};
    if (kvf_blocks_open(r->runtime, bc, &r->blocks, &error) != KVF_OK)
        fail_msg("%s", error.text);
    test_give_block_attention_params(r->blocks, &bc->cache);
    const size_t gap = 32; /* the caller has something of its own there */
    r->stride = kvf_blocks_memory(r->blocks)->code_bytes + gap;
    r->codes = test_alloc(bc->cache.layers * bc->block_count * r->stride);
    memset(r->codes, 0xa5, bc->cache.layers * bc->block_count * r->stride);
    for (uint32_t layer = 0; layer < bc->cache.layers; layer++)
        test_expect(r->runtime,
                    kvf_blocks_bind(r->blocks, layer,
                                    r->codes + layer * bc->block_count * r->stride, r->stride),
                    KVF_OK);
}

void rig_open_again(rig *r, uint64_t device_bytes)
{
    test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    kvf_blocks_close(r->blocks);
    test_release(r->codes);
    r->config.cache.device_bytes = device_bytes;
    open_blocks(r);
}

void rig_open(rig *r, const kvf_runtime_config *rc, const kvf_blocks_config *bc, uint32_t requests,
              uint64_t seed)
{
    const kvf_cache_config *c = &bc->cache;
    const size_t tokens = (size_t)requests * RIG_TOKENS;
    kvf_error error = {0};
    *r = (rig){.config = *bc, .random = {seed}, .requests = requests};
    r->table_stride = kvf_div_ceil_u32(c->tokens_max, bc->block_tokens);
    r->free_ids = test_alloc(bc->block_count * sizeof *r->free_ids);
    for (uint32_t i = 0; i < bc->block_count; i++)
        r->free_ids[r->free_count++] = (int32_t)(bc->block_count - 1 - i);
    if (test_runtime_open(rc, &r->runtime, &error) != KVF_OK)
        fail_msg("%s", error.text);
    test_expect(r->runtime, kvf_stream_create(r->runtime, &r->stream), KVF_OK);
    test_rows_open(&r->rows, c, tokens);
    make_requests(r, seed);
    r->form = rig_gives;
    if (r->form != RIG_NOTHING)
        r->given = test_alloc((size_t)RIG_REQUESTS * c->kv_heads * RIG_GIVEN * sizeof(float));
    run_sequences(r);
    open_blocks(r);
    r->slots = test_alloc(tokens * sizeof *r->slots);
    r->table = test_alloc(2 * RIG_REQUESTS * r->table_stride * sizeof *r->table);
    r->lengths = test_alloc(2 * RIG_REQUESTS * sizeof *r->lengths);
    r->regions = test_alloc(2 * RIG_REQUESTS * sizeof *r->regions);
}

void rig_close(rig *r)
{
    void *all[] = {r->slots, r->table, r->lengths, r->regions, r->codes, r->free_ids, r->given};
    test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    for (uint32_t i = 0; i < RIG_LAYERS; i++)
        if (r->graphs[i])
            r->runtime->device->ops->graph_destroy(r->graphs[i]);
    kvf_blocks_close(r->blocks);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        test_release(all[i]);
    test_rows_close(&r->rows);
    for (uint32_t i = 0; i < r->requests; i++) {
        test_tokens_free(&r->request[i].tokens);
        test_release(r->request[i].out);
        test_release(r->request[i].lse);
        test_release(r->request[i].ids);
    }
    kvf_stream_destroy(r->stream);
    kvf_runtime_close(r->runtime);
}

/* ---- ids ---- */

void rig_grow(rig *r, rig_request *q, uint32_t length, int shuffled)
{
    while (q->ids_count * r->config.block_tokens < length) {
        assert_true(r->free_count > 0);
        const uint32_t at =
            shuffled ? test_random_below(&r->random, r->free_count) : r->free_count - 1;
        q->ids[q->ids_count++] = r->free_ids[at];
        r->free_ids[at] = r->free_ids[--r->free_count];
    }
}

void rig_drop(rig *r, rig_request *q)
{
    while (q->ids_count)
        r->free_ids[r->free_count++] = q->ids[--q->ids_count];
    q->length = 0;
}

/* ---- passes ---- */

int rig_is_done(const rig_request *q)
{
    return q->length == q->count;
}

static uint32_t next_tokens(const rig_request *q)
{
    return q->length < q->prompt ? kvf_min_u32(q->chunk, q->prompt - q->length) : 1;
}

static int64_t slot_of(const rig *r, const rig_request *q, uint32_t token)
{
    const uint32_t size = r->config.block_tokens;
    return (int64_t)q->ids[token / size] * size + token % size;
}

static void put_tokens(rig *r, uint32_t layer, uint32_t first, uint32_t tokens)
{
    const kvf_blocks_put_args put = {.layer = layer,
                                     .tokens = tokens,
                                     .k = r->rows.k + first * r->rows.k_bytes,
                                     .v = r->rows.v + first * r->rows.v_bytes,
                                     .slots = r->slots + first};
    test_expect(r->runtime, kvf_blocks_put(r->blocks, &put, r->stream), KVF_OK);
}

/* Tokens first .. first + count - 1 of a request to place `at` of the arrays of a pass. */
static void lay_out(rig *r, const rig_request *q, uint32_t layer, uint32_t first, uint32_t count,
                    uint32_t at)
{
    for (uint32_t i = 0; i < count; i++) {
        r->slots[at + i] = slot_of(r, q, first + i);
        test_rows_put(&r->rows, at + i, &q->tokens, layer, first + i);
    }
}

void rig_put(rig *r, rig_request *q, uint32_t first, uint32_t end)
{
    for (uint32_t layer = 0; layer < r->config.cache.layers; layer++) {
        lay_out(r, q, layer, first, end - first, 0);
        put_tokens(r, layer, 0, end - first);
        test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    }
    q->length = kvf_max_u32(q->length, end);
}

/* Rows of steps come first. */
static void sort_rows(rig_request *const *list, uint32_t count, rig_request **to, uint32_t *steps)
{
    uint32_t n = 0;
    for (uint32_t pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < count; i++)
            if ((list[i]->length < list[i]->prompt) == (int)pass)
                to[n++] = list[i];
        if (pass == 0)
            *steps = n;
    }
}

static void compare(rig *r, const rig_request *q, uint32_t layer, uint32_t tokens, uint32_t at,
                    const float *lse)
{
    const uint32_t heads = r->config.cache.query_heads;
    const size_t row = (size_t)layer * q->count + q->length;
    if (r->records) {
        memcpy(q->out + row * r->rows.out_bytes, r->rows.out + at * r->rows.out_bytes,
               tokens * r->rows.out_bytes);
        if (lse)
            memcpy(q->lse + row * heads, lse, heads * sizeof *lse);
        return;
    }
    r->compared += tokens;
    if (memcmp(r->rows.out + at * r->rows.out_bytes, q->out + row * r->rows.out_bytes,
               tokens * r->rows.out_bytes) != 0 ||
        (lse && memcmp(lse, q->lse + row * heads, heads * sizeof *lse) != 0))
        r->differs++;
}

/* Rows of a call: `first` of those of the pass, in the arrays. */
static kvf_blocks_rows rows_from(const rig *r, uint32_t first, uint32_t count)
{
    return (kvf_blocks_rows){.rows = count,
                             .table_stride = r->table_stride,
                             .table = r->table + (size_t)first * r->table_stride,
                             .lengths = r->lengths + first,
                             .regions = r->regions + first};
}

static void lay_out_row(rig *r, const rig_request *q, uint32_t layer, uint32_t row, uint32_t at)
{
    lay_out(r, q, layer, q->length, next_tokens(q), at);
    r->lengths[row] = (int32_t)(q->length + next_tokens(q));
    r->regions[row] = q->region;
    memcpy(r->table + (size_t)row * r->table_stride, q->ids, q->ids_count * sizeof *r->table);
    if (r->form != RIG_NOTHING && row < RIG_REQUESTS)
        give_row(r, layer, q->length + next_tokens(q), row);
}

void rig_decode(rig *r, uint32_t layer, const kvf_blocks_rows *rows)
{
    const kvf_blocks_decode_args args = {.layer = layer,
                                         .rows = rows,
                                         .q = r->rows.q,
                                         .out = r->rows.out,
                                         .lse = r->rows.lse,
                                         .page_scores = scores_of(r),
                                         .page_ids = ids_of(r),
                                         .page_stride = RIG_GIVEN};
    test_expect(r->runtime, kvf_blocks_decode(r->blocks, &args, r->stream), KVF_OK);
}

void rig_extend(rig *r, const kvf_blocks_extend_args *args)
{
    test_expect(r->runtime, kvf_blocks_extend(r->blocks, args, r->stream), KVF_OK);
}

/* A token of each of the first `steps` rows. */
static void run_steps(rig *r, uint32_t layer, uint32_t steps)
{
    const kvf_blocks_rows rows = rows_from(r, 0, steps);
    put_tokens(r, layer, 0, steps);
    rig_decode(r, layer, &rows);
}

/* As many rows as there can be, in a graph of the caller's; those after `steps` are none. */
static void replay_steps(rig *r, uint32_t layer, uint32_t steps)
{
    const kvf_device_ops *ops = r->runtime->device->ops;
    for (uint32_t i = steps; i < RIG_REQUESTS; i++) {
        r->lengths[i] = 0;
        r->slots[i] = -1;
    }
    if (!r->graphs[layer]) {
        test_expect(r->runtime, ops->capture_begin(r->stream), KVF_OK);
        run_steps(r, layer, RIG_REQUESTS);
        test_expect(r->runtime, ops->capture_end(r->stream, &r->graphs[layer]), KVF_OK);
    }
    test_expect(r->runtime, ops->graph_launch(r->graphs[layer], r->stream), KVF_OK);
    r->replays++;
}

/* Chunks of rows `first` and up, whose tokens begin at starts[0]. */
static void run_chunks(rig *r, uint32_t layer, uint32_t first, uint32_t count,
                       const uint32_t *starts, const uint32_t *contexts)
{
    kvf_blocks_rows rows = rows_from(r, first, count);
    rows.regions = NULL;
    put_tokens(r, layer, starts[0], starts[count] - starts[0]);
    rig_extend(r, &(kvf_blocks_extend_args){.layer = layer,
                                            .rows = &rows,
                                            .starts = starts,
                                            .contexts = contexts,
                                            .q = r->rows.q,
                                            .out = r->rows.out});
}

static void run_pass_layer(rig *r, uint32_t layer, rig_request *const *rows, uint32_t count,
                           uint32_t steps)
{
    const uint32_t heads = r->config.cache.query_heads;
    const uint32_t chunks = r->captures ? RIG_REQUESTS : steps; /* where they begin */
    uint32_t starts[RIG_REQUESTS + 1] = {0}, contexts[RIG_REQUESTS] = {0}, at = 0;
    for (uint32_t i = 0; i < count; i++) {
        at = i == steps ? chunks : at;
        lay_out_row(r, rows[i], layer, i < steps ? i : chunks + i - steps, at);
        starts[i] = at;
        contexts[i] = rows[i]->length;
        starts[i + 1] = at += next_tokens(rows[i]);
    }
    if (steps && r->captures)
        replay_steps(r, layer, steps);
    else if (steps)
        run_steps(r, layer, steps);
    if (steps < count)
        run_chunks(r, layer, chunks, count - steps, starts + steps, contexts + steps);
    test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    for (uint32_t i = 0; i < count; i++)
        compare(r, rows[i], layer, next_tokens(rows[i]), starts[i],
                i < steps ? r->rows.lse + (size_t)i * heads : NULL);
}

uint32_t rig_pass(rig *r, rig_request *const *list, uint32_t count)
{
    const uint32_t before = r->differs;
    rig_request *rows[RIG_REQUESTS] = {NULL};
    uint32_t steps = 0;
    sort_rows(list, count, rows, &steps);
    for (uint32_t layer = 0; layer < r->config.cache.layers; layer++)
        run_pass_layer(r, layer, rows, count, steps);
    for (uint32_t i = 0; i < count; i++)
        rows[i]->length += next_tokens(rows[i]);
    return r->differs - before;
}

/* ---- what tests share ---- */

kvf_blocks_stats rig_stats(const rig *r)
{
    kvf_blocks_stats s;
    kvf_blocks_stats_get(r->blocks, &s);
    return s;
}

const uint8_t rig_kinds[4] = {1, 2, 2, 2}, rig_all_kinds[4] = {0, 2, 1, 0};
const uint32_t rig_windows[RIG_LAYERS] = {50, 13};

kvf_blocks_config rig_coarse_config(void)
{
    kvf_blocks_config bc = rig_config();
    bc.cache.head_mask = rig_kinds;
    bc.cache.budget_tokens = 64;
    bc.cache.local_tokens = 8;
    bc.cache.streaming_sink = 6;
    bc.cache.streaming_recent = 50;
    bc.block_tokens = 64;
    return bc;
}

kvf_blocks_rows rig_last_tokens(rig *r)
{
    for (uint32_t i = 0; i < 2; i++) {
        rig_request *q = &r->request[i];
        r->lengths[i] = (int32_t)q->count;
        r->regions[i] = (int32_t)i;
        memcpy(r->table + (size_t)i * r->table_stride, q->ids, q->ids_count * sizeof *q->ids);
        memcpy(r->rows.q + i * r->rows.q_bytes, test_q(&q->tokens, 0, q->count - 1),
               r->rows.q_bytes);
    }
    return (kvf_blocks_rows){.rows = 2,
                             .table_stride = r->table_stride,
                             .table = r->table,
                             .lengths = r->lengths,
                             .regions = r->regions};
}

void rig_expect_rows(rig *r, const kvf_blocks_rows *rows, uint32_t bad)
{
    const uint32_t heads = r->config.cache.query_heads;
    const uint64_t before = rig_stats(r).bad_rows;
    rig_decode(r, 0, rows);
    test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    for (uint32_t i = 0; i < rows->rows; i++) {
        const rig_request *q = &r->request[i];
        const char *out = r->rows.out + i * r->rows.out_bytes;
        const size_t want = (size_t)q->count - 1;
        for (uint32_t d = 0; bad >> i & 1 && d < heads * test_value_dim(&r->config.cache); d++)
            assert_true(isnan(kvf_element_get(out, test_tensor_dtype(&r->config.cache), d)));
        if (bad >> i & 1)
            assert_true(isnan(r->rows.lse[i * heads]));
        else
            assert_memory_equal(out, q->out + want * r->rows.out_bytes, r->rows.out_bytes);
    }
    assert_int_equal(rig_stats(r).bad_rows - before, __builtin_popcount(bad));
}

void rig_open_two_of(rig *r, kvf_blocks_config bc)
{
    const kvf_runtime_config rc = test_runtime_config();
    rig_open(r, &rc, &bc, 2, 9);
    for (uint32_t i = 0; i < 2; i++) {
        rig_grow(r, &r->request[i], r->request[i].count, 1);
        rig_put(r, &r->request[i], 0, r->request[i].count);
    }
}

void rig_open_two(rig *r)
{
    rig_open_two_of(r, rig_config());
}

/* ---- many requests ---- */

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

void rig_serve(rig *r, int moves_regions)
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
