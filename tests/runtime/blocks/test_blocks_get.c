/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tokens read back: what was put, whatever the ids, what is resident and which copies there are.
 */

#include "blocks_rig.h"
#include "refusals.h"

#include <math.h>
#include <string.h>

#include "quantized.h"

enum { GAP = 3, ROW = 10, LEFT_ALONE = 0xa5 };

/* ---- what there must be ---- */

/* Key and value of a head of a token, as pages have them, in dtype. */
static void make_wanted(const rig *r, const rig_request *q, uint32_t layer, uint32_t token,
                        uint32_t head, void *exact)
{
    const kvf_cache_config *c = &r->config.cache;
    const kvf_shape s = {c->dtype, c->head_dim, 1, c->pages, (uint16_t)c->value_dim};
    const uint32_t values = test_value_dim(c);
    const kvf_dtype given = test_tensor_dtype(c);
    const void *k = test_k(&q->tokens, layer, token), *v = test_v(&q->tokens, layer, token);
    uint64_t page[2 * KVF_HEAD_DIM_MAX];
    float x[KVF_HEAD_DIM_MAX];
    assert_true(kvf_stored_page_bytes(&s) <= sizeof page);
    for (uint32_t i = 0; i < c->head_dim; i++)
        kvf_element_set(exact, c->dtype, i, kvf_element_get(k, given, head * c->head_dim + i));
    for (uint32_t i = 0; i < values; i++)
        kvf_element_set(exact, c->dtype, c->head_dim + i,
                        kvf_element_get(v, given, head * values + i));
    if (c->pages == KVF_PAGES_NATIVE)
        return;
    kvf_quantize_token(&s, page, 0, exact, x);
    kvf_dequantize_token(&s, page, 0, exact, x);
}

/* Rows of a call, with gaps between them and left out ones. */
typedef struct reading {
    kvf_blocks_get_args args;
    kvf_dtype dtype; /* of the rows */
    size_t k_bytes, v_bytes;
    char *k, *v;
    int64_t *slots;
} reading;

static int64_t slot_of(const rig *r, const rig_request *q, uint32_t token)
{
    const uint32_t size = r->config.block_tokens;
    return (int64_t)q->ids[token / size] * size + token % size;
}

static reading open_reading(const rig *r, uint32_t layer, uint32_t tokens, uint32_t fp32)
{
    const kvf_cache_config *c = &r->config.cache;
    reading g = {.dtype = fp32 ? KVF_FP32 : c->dtype};
    g.args = (kvf_blocks_get_args){.layer = layer,
                                   .tokens = tokens,
                                   .k_stride = (size_t)c->kv_heads * c->head_dim + GAP,
                                   .v_stride = (size_t)c->kv_heads * test_value_dim(c) + 2 * GAP,
                                   .fp32 = fp32};
    g.k_bytes = g.args.k_stride * test_dtype_bytes(g.dtype);
    g.v_bytes = g.args.v_stride * test_dtype_bytes(g.dtype);
    g.args.k = g.k = memset(malloc(tokens * g.k_bytes), LEFT_ALONE, tokens * g.k_bytes);
    g.args.v = g.v = memset(malloc(tokens * g.v_bytes), LEFT_ALONE, tokens * g.v_bytes);
    g.args.slots = g.slots = malloc(tokens * sizeof *g.slots);
    return g;
}

static void close_reading(const reading *g)
{
    free(g->k);
    free(g->v);
    free(g->slots);
}

static void expect_left_alone(const char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        assert_int_equal((unsigned char)bytes[i], LEFT_ALONE);
}

/* Row `row` is that token; of `exact`, a head of it, every number. */
static void expect_row(const rig *r, const reading *g, uint32_t row, const rig_request *q,
                       uint32_t token)
{
    const kvf_cache_config *c = &r->config.cache;
    const uint32_t values = test_value_dim(c);
    const char *k = g->k + row * g->k_bytes, *v = g->v + row * g->v_bytes;
    const size_t element = test_dtype_bytes(g->dtype);
    uint64_t exact[KVF_HEAD_DIM_MAX];
    for (uint32_t h = 0; h < c->kv_heads; h++) {
        make_wanted(r, q, g->args.layer, token, h, exact);
        for (uint32_t i = 0; i < c->head_dim + values; i++) {
            const float wanted = kvf_element_get(exact, c->dtype, i);
            const float got = i < c->head_dim
                                  ? kvf_element_get(k, g->dtype, h * c->head_dim + i)
                                  : kvf_element_get(v, g->dtype, h * values + i - c->head_dim);
            if (kvf_float_bits(got) != kvf_float_bits(wanted))
                fail_msg("layer %u, token %u, head %u, number %u: %g is not %g", g->args.layer,
                         token, h, i, (double)got, (double)wanted);
        }
    }
    expect_left_alone(k + g->k_bytes - GAP * element, GAP * element);
    expect_left_alone(v + g->v_bytes - 2 * GAP * element, 2 * GAP * element);
}

static int is_left_out(uint32_t row)
{
    return row % 5 == 3;
}

/* Tokens first .. end - 1 of a request, the newest first; some are left out, and one is twice. */
static void expect_tokens(rig *r, const rig_request *q, uint32_t layer, uint32_t first,
                          uint32_t end, uint32_t fp32)
{
    const uint32_t tokens = end - first;
    const reading g = open_reading(r, layer, tokens + 1, fp32);
    for (uint32_t i = 0; i <= tokens; i++)
        g.slots[i] =
            is_left_out(i) ? -1 - (int64_t)i : slot_of(r, q, i < tokens ? end - 1 - i : first);
    test_expect(r->runtime, kvf_blocks_get(r->blocks, &g.args, r->stream), KVF_OK);
    for (uint32_t i = 0; i <= tokens; i++)
        if (is_left_out(i)) {
            expect_left_alone(g.k + i * g.k_bytes, g.k_bytes);
            expect_left_alone(g.v + i * g.v_bytes, g.v_bytes);
        } else
            expect_row(r, &g, i, q, i < tokens ? end - 1 - i : first);
    close_reading(&g);
}

static void expect_all(rig *r)
{
    for (uint32_t i = 0; i < r->requests; i++)
        for (uint32_t layer = 0; layer < r->config.cache.layers; layer++)
            expect_tokens(r, &r->request[i], layer, 0, r->request[i].count, (i + layer) % 2);
}

/* ---- tests ---- */

/* Requests have come and gone, and their pages are in slots, in regions, and nowhere but in host
 * memory. */
TEST(what_was_put_comes_back)
{
    static const kvf_dtype dtypes[] = {KVF_BF16, KVF_FP32, KVF_FP16};
    for (uint32_t i = 0; i < (test_on_cuda() ? 2u : 6u); i++) {
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = i % 2 ? rig_config() : rig_coarse_config();
        rig r;
        if (bc.cache.pages == KVF_PAGES_NATIVE || !test_on_cuda())
            bc.cache.dtype = dtypes[i % 3];
        if (bc.cache.pages != KVF_PAGES_NATIVE && i % 2)
            bc.cache.pages = KVF_PAGES_K8V8;
        bc.cache.head_mask = i ? bc.cache.head_mask : rig_all_kinds;
        bc.cache.value_dim = i == 4 ? 32 : 0;
        bc.cache.page_size = 4u << i % 3;
        bc.cache.transfer = test_transfer(i < 4 ? KVF_TRANSFER_MAPPED : KVF_TRANSFER_DIRECT);
        test_seed_print("tokens read back", 30 + i);
        rig_open(&r, &rc, &bc, 3, 30 + i);
        rig_serve(&r, 1);
        expect_all(&r);
        rig_close(&r);
    }
}

/* Quantization changes these tokens. */
TEST(quantized_tokens_come_back_as_they_are_attended_to)
{
    for (uint32_t i = 0; i < 4; i++) {
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = rig_config();
        rig r;
        bc.cache.pages = i % 2 ? KVF_PAGES_K8V4 : KVF_PAGES_K8V8;
        bc.cache.dtype = i < 2 || test_on_cuda() ? KVF_BF16 : KVF_FP32;
        rig_open(&r, &rc, &bc, 2, 50 + i);
        rig_take_any_tokens(&r, 51 + i);
        for (uint32_t q = 0; q < 2; q++) {
            rig_grow(&r, &r.request[q], r.request[q].count, 1);
            rig_put(&r, &r.request[q], 0, r.request[q].count);
        }
        expect_all(&r);
        rig_close(&r);
    }
}

/* Token `token` of layer 0 from row `ROW` of the arrays, which the rows of rig_last_tokens leave
 * alone. */
static void put_row(rig *r, const rig_request *q, uint32_t token)
{
    const kvf_blocks_put_args put = {.tokens = 1,
                                     .k = r->rows.k + ROW * r->rows.k_bytes,
                                     .v = r->rows.v + ROW * r->rows.v_bytes,
                                     .slots = r->slots + ROW};
    r->slots[ROW] = slot_of(r, q, token);
    test_expect(r->runtime, kvf_blocks_put(r->blocks, &put, r->stream), KVF_OK);
}

/* Nobody waits between them. */
TEST(a_get_has_what_was_put_before_it)
{
    rig r;
    rig_open_two(&r);
    rig_request *q = &r.request[1];
    const kvf_blocks_rows rows = rig_last_tokens(&r);
    for (uint32_t i = 0; i < 20; i++) {
        const uint32_t token = i * 7 % q->count;
        kvf_element_set(test_k(&q->tokens, 0, token), test_tensor_dtype(&r.config.cache), 5,
                        (float)i / 16.0f);
        test_rows_put(&r.rows, ROW, &q->tokens, 0, token);
        rig_decode(&r, 0, &rows);
        put_row(&r, q, token);
        expect_tokens(&r, q, 0, token, token + 1, i % 2);
    }
    rig_close(&r);
}

/* And keeps it when its origin is written. */
TEST(a_copy_comes_back_too)
{
    rig r;
    rig_open_two(&r);
    rig_request *q = &r.request[0], copied = *q;
    const uint32_t size = kvf_min_u32(r.config.block_tokens, q->count);
    const uint32_t from = (uint32_t)q->ids[0], to = (uint32_t)r.free_ids[r.free_count - 1];
    int32_t id = (int32_t)to;
    copied.ids = &id;
    test_expect(r.runtime, kvf_blocks_copy(r.blocks, &from, &to, 1, r.stream), KVF_OK);
    test_rows_put(&r.rows, ROW, &r.request[1].tokens, 0, 5);
    put_row(&r, q, 0);
    for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
        expect_tokens(&r, &copied, layer, 0, size, layer);
    expect_tokens(&r, q, 0, 1, size, 0);
    rig_close(&r);
}

/* It is all NaN, its neighbours are what they were, and put again it is what it was. */
TEST(a_token_that_is_not_finite_comes_back_as_one)
{
    rig r;
    rig_open_two(&r);
    const kvf_cache_config *c = &r.config.cache;
    const kvf_dtype given = test_tensor_dtype(c);
    const uint32_t numbers = c->kv_heads * c->head_dim;
    rig_request *q = &r.request[0];
    void *value = test_v(&q->tokens, 0, 3);
    const float sound = kvf_element_get(value, given, 7);
    kvf_element_set(value, given, 7, INFINITY);
    rig_put(&r, q, 3, 4);
    const reading g = open_reading(&r, 0, 1, given == KVF_FP32);
    g.slots[0] = slot_of(&r, q, 3);
    test_expect(r.runtime, kvf_blocks_get(r.blocks, &g.args, r.stream), KVF_OK);
    for (uint32_t i = 0; i < numbers; i++) {
        assert_true(isnan(kvf_element_get(g.k, g.dtype, i)));
        assert_true(isnan(kvf_element_get(g.v, g.dtype, i)));
    }
    expect_tokens(&r, q, 0, 0, 3, 0);
    expect_tokens(&r, q, 0, 4, q->count, 1);
    kvf_element_set(value, given, 7, sound);
    rig_put(&r, q, 3, 4);
    expect_tokens(&r, q, 0, 3, 4, 0);
    memcpy(r.rows.k + ROW * r.rows.k_bytes, g.k, r.rows.k_bytes);
    memcpy(r.rows.v + ROW * r.rows.v_bytes, g.v, r.rows.v_bytes);
    put_row(&r, q, 3);
    test_expect(r.runtime, kvf_stream_wait(r.stream), KVF_OK); /* counters are read next */
    const kvf_blocks_rows rows = rig_last_tokens(&r);
    rig_expect_rows(&r, &rows, 1);
    close_reading(&g);
    rig_close(&r);
}

/* Either may be left out, and rows without a stride lie side by side. */
TEST(keys_or_values_alone)
{
    rig r;
    rig_open_two(&r);
    const kvf_cache_config *c = &r.config.cache;
    const rig_request *q = &r.request[0];
    reading both = open_reading(&r, 1, 2, 0);
    for (uint32_t i = 0; i < 2; i++)
        both.slots[i] = slot_of(&r, q, i);
    test_expect(r.runtime, kvf_blocks_get(r.blocks, &both.args, r.stream), KVF_OK);
    for (uint32_t i = 0; i < 2; i++) {
        const reading one = open_reading(&r, 1, 2, 0);
        kvf_blocks_get_args args = one.args;
        const size_t row = (size_t)c->kv_heads * (i ? test_value_dim(c) : c->head_dim) *
                           test_dtype_bytes(c->dtype);
        args.k = i ? NULL : one.k;
        args.v = i ? one.v : NULL;
        args.k_stride = args.v_stride = 0;
        args.slots = both.slots;
        test_expect(r.runtime, kvf_blocks_get(r.blocks, &args, r.stream), KVF_OK);
        for (uint32_t t = 0; t < 2; t++)
            assert_memory_equal((i ? one.v : one.k) + t * row,
                                i ? both.v + t * both.v_bytes : both.k + t * both.k_bytes, row);
        expect_left_alone(i ? one.k : one.v, row);
        close_reading(&one);
    }
    close_reading(&both);
    rig_close(&r);
}

/* ---- refusals ---- */

static kvf_status get_row(void *user, char *change, size_t size, kvf_error *error)
{
    rig *r = user;
    const reading g = open_reading(r, 0, 2, 0);
    kvf_blocks_get_args args = g.args;
    const char *value = refusals_value(change);
    const uint32_t number = (uint32_t)strtoul(value, NULL, 10);
    const int is_args = strcmp(change, "args") == 0;
    g.slots[0] = g.slots[1] = 0;
    if (strcmp(change, "slots") == 0 && strcmp(value, "NULL") == 0)
        args.slots = NULL;
    else if (strcmp(change, "slots") == 0)
        g.slots[1] = (int64_t)strtoll(value, NULL, 10);
    else if (strcmp(change, "k_and_v") == 0)
        args.k = args.v = NULL;
    else if (strcmp(change, "layer") == 0)
        args.layer = number;
    else if (strcmp(change, "k_stride") == 0)
        args.k_stride = number;
    else if (strcmp(change, "v_stride") == 0)
        args.v_stride = number;
    else if (strcmp(change, "fp32") == 0)
        args.fp32 = number;
    else if (!is_args)
        fail_msg("there is no argument %s", change);
    const kvf_status status = kvf_blocks_get(r->blocks, is_args ? NULL : &args, r->stream);
    expect_left_alone(g.k, 2 * g.k_bytes);
    expect_left_alone(g.v, 2 * g.v_bytes);
    *error = *kvf_runtime_error(r->runtime);
    close_reading(&g);
    return status;
}

TEST(bad_arguments_are_named)
{
    rig r;
    rig_open_two(&r);
    refusals_check(&(refusals){
        .path = "tests/runtime/blocks/blocks_get.refusals", .call = get_row, .user = &r});
    expect_tokens(&r, &r.request[0], 0, 0, r.request[0].count, 0);
    rig_close(&r);
}

/* The capture goes on, and what it holds is there once it has run. */
TEST(a_capture_of_the_caller_is_no_place_for_it)
{
    if (!test_on_cuda())
        return;
    rig r;
    kvf_graph *graph = NULL;
    rig_open_two(&r);
    rig_request *q = &r.request[0];
    const kvf_device_ops *ops = r.runtime->device->ops;
    kvf_element_set(test_k(&q->tokens, 0, 2), test_tensor_dtype(&r.config.cache), 5, 0.25f);
    test_rows_put(&r.rows, ROW, &q->tokens, 0, 2);
    test_expect(r.runtime, ops->capture_begin(r.stream), KVF_OK);
    put_row(&r, q, 2);
    const reading g = open_reading(&r, 0, 1, 0);
    g.slots[0] = slot_of(&r, q, 2);
    test_expect(r.runtime, kvf_blocks_get(r.blocks, &g.args, r.stream), KVF_INVALID);
    assert_string_equal(kvf_runtime_error(r.runtime)->text,
                        "the stream is being captured, and tokens are read back by the host; call "
                        "kvf_blocks_get after the capture has ended");
    expect_left_alone(g.k, g.k_bytes);
    test_expect(r.runtime, ops->capture_end(r.stream, &graph), KVF_OK);
    test_expect(r.runtime, ops->graph_launch(graph, r.stream), KVF_OK);
    expect_tokens(&r, q, 0, 2, 3, 0);
    ops->graph_destroy(graph);
    close_reading(&g);
    rig_close(&r);
}
