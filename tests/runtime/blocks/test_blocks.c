/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages under the caller's block tables: outputs have the bits of sequences, whatever the ids, the
 * regions and what is resident; a write voids what the device has.
 */

#include "blocks_rig.h"

#include "block_store.h"

#include <string.h>

static const kvf_transfer methods[] = {KVF_TRANSFER_MAPPED, KVF_TRANSFER_DIRECT};

/* Quantized physical blocks are dequantized by `dequantize_chunks`. */
static bool is_exact(void)
{
    return rig_config().cache.pages == KVF_PAGES_NATIVE;
}

static uint32_t method_count(void)
{
    return test_on_cuda() ? 1 : 2; /* a GPU reads pages in no other way */
}

TEST(bits_are_those_of_sequences)
{
    static const kvf_select selects[] = {KVF_SELECT_DYNAMIC, KVF_SELECT_FULL, KVF_SELECT_STREAMING};
    static const kvf_dtype dtypes[] = {KVF_FP32, KVF_BF16, KVF_FP16};
    /* The emulated device is slow: three cases with all types and both sizes of blocks. */
    for (uint32_t i = 0; i < 12; i += test_on_cuda() ? 5 : 1) {
        if (!test_takes(i))
            continue;
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = rig_config();
        rig r;
        bc.cache.select = i < 6 ? KVF_SELECT_DYNAMIC : selects[i % 3];
        bc.cache.transfer = methods[i / 2 % method_count()];
        if (bc.cache.pages == KVF_PAGES_NATIVE || !test_on_cuda())
            bc.cache.dtype = dtypes[i % 3];
        if (bc.cache.pages != KVF_PAGES_NATIVE && i % 2)
            bc.cache.pages = KVF_PAGES_K8V8;
        bc.cache.value_dim = i % 4 == 2 && !test_on_cuda() ? 32 : 0;
        if (i == 10 && test_on_cuda() && bc.cache.pages == KVF_PAGES_NATIVE) {
            bc.cache.head_dim = 192; /* the one size whose values are narrower there */
            bc.cache.value_dim = 128;
        }
        bc.cache.page_size = 1u << i % 7;
        bc.cache.budget_tokens = test_on_cuda() ? 128 : 192;
        bc.cache.budget_share = i < 6 && i % 2 ? 0.6f : 0.0f;
        bc.cache.sink_tokens = (i * 5) % 40;
        if (i == 5) /* two sub-groups */
            bc.cache.query_heads = 20 * bc.cache.kv_heads;
        bc.block_tokens = i % 2 ? 64 : 128;
        bc.block_count = 24;
        test_seed_print("blocks", 70 + i);
        rig_open(&r, &rc, &bc, 4, 70 + i);
        rig_serve(&r, i % 4 != 3);
        const kvf_blocks_stats s = rig_stats(&r);
        assert_true(r.compared > 100);
        assert_int_equal(s.bad_rows, 0);
        assert_int_equal(s.bad_slots, 0);
        assert_true(s.tokens_put > 0 && s.tokens_attended > 0);
        rig_close(&r);
    }
}

/* ---- kinds of heads ---- */

static const uint8_t none_hot[] = {0, 0, 2, 0};

/* Outputs of sequences that differ, of two rigs of the same tokens. */
static uint32_t differing(const rig *a, const rig *b)
{
    const size_t rows = a->config.cache.layers,
                 row = a->config.cache.query_heads * test_value_dim(&a->config.cache) *
                       test_dtype_bytes(test_tensor_dtype(&a->config.cache));
    uint32_t n = 0;
    for (uint32_t i = 0; i < a->requests; i++)
        for (size_t t = 0; t < rows * a->request[i].count; t++)
            n += memcmp(a->request[i].out + t * row, b->request[i].out + t * row, row) != 0;
    return n;
}

TEST(kinds_of_heads_have_the_bits_of_sequences)
{
    static const uint8_t *const masks[] = {rig_kinds, none_hot, rig_all_kinds, rig_all_kinds};
    /* The emulated device is slow: the case with all kinds. */
    for (uint32_t i = test_on_cuda() ? 2 : 0; i < (test_on_cuda() ? 3u : 4u); i++) {
        if (!test_takes(i))
            continue;
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = rig_coarse_config();
        rig r, hot;
        bc.cache.head_mask = masks[i];
        bc.cache.transfer = methods[i % method_count()];
        bc.cache.page_size = i == 1 ? 64 : 8;
        bc.cache.budget_tokens = i == 1 ? 144 : 64;
        bc.cache.dtype = i ? KVF_BF16 : KVF_FP32; /* the emulated device's case is not the first */
        bc.cache.streaming_sink = i == 3 ? 0 : 6;
        bc.cache.layer_windows = i == 2 ? rig_windows : NULL;
        bc.cache.value_dim = i % 2 && !test_on_cuda() ? 32 : 0;
        if (i == 2) /* two sub-groups */
            bc.cache.query_heads = 20 * bc.cache.kv_heads;
        bc.block_tokens = i == 2 ? 128 : 64;
        bc.block_count = 24;
        test_seed_print("blocks", 110 + i);
        rig_open(&r, &rc, &bc, 4, 110 + i);
        rig_serve(&r, 1);
        assert_true(r.compared > 100);
        assert_int_equal(rig_stats(&r).bad_rows, 0);
        if (test_on_cuda()) {
            rig_close(&r);
            continue;
        }
        bc.cache.head_mask = NULL; /* which would be something else */
        bc.cache.layer_windows = NULL;
        rig_open(&hot, &rc, &bc, 4, 110 + i);
        assert_true(differing(&r, &hot) > 0);
        rig_close(&hot);
        rig_close(&r);
    }
}

/* A graph that the caller recorded once runs again with other tokens, tables, lengths and regions.
 */
TEST_IF(test_on_cuda(), a_capture_of_the_caller_has_the_same_bits)
{
    static const kvf_select selects[] = {KVF_SELECT_DYNAMIC, KVF_SELECT_FULL, KVF_SELECT_STREAMING};
    for (uint32_t i = 0; i < 3; i++) {
        if (!test_takes(i))
            continue;
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = i == 0 ? rig_coarse_config() : rig_config();
        rig r;
        bc.cache.head_mask = i == 0 ? rig_all_kinds : NULL; /* with hot heads, too */
        bc.cache.layer_windows = i == 0 ? rig_windows : NULL;
        bc.cache.select = selects[i];
        bc.cache.transfer = KVF_TRANSFER_MAPPED;
        test_seed_print("blocks", 90 + i);
        rig_open(&r, &rc, &bc, 3, 90 + i);
        r.captures = 1;
        rig_serve(&r, 1);
        assert_true(r.compared > 100);
        assert_true(r.replays > 40);
        assert_int_equal(rig_stats(&r).bad_rows, 0);
        rig_close(&r);
    }
}

static void decode_twice(rig *r, kvf_graph *graph, void *out)
{
    const kvf_device_ops *ops = r->runtime->device->ops;
    const kvf_blocks_rows rows = rig_last_tokens(r);
    rig_decode(r, 0, &rows);
    test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    memcpy(out, r->rows.out, 2 * r->rows.out_bytes);
    memset(r->rows.out, 0, 2 * r->rows.out_bytes);
    test_expect(r->runtime, ops->graph_launch(graph, r->stream), KVF_OK);
    test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    assert_memory_equal(r->rows.out, out, 2 * r->rows.out_bytes);
}

/* Engines get new weights between replays. */
TEST_IF(test_on_cuda(), a_capture_has_sinks_that_come_after_it)
{
    rig r;
    kvf_blocks_config bc = rig_config();
    kvf_attention_params params;
    char *out[2];
    bc.cache.transfer = KVF_TRANSFER_MAPPED;
    rig_open_two_of(&r, bc);
    kvf_attention_params_init(&params);
    for (uint32_t i = 0; i < 2; i++) {
        const float sinks[4] = {1.0f, 99.0f * (float)i, -INFINITY, 0.5f};
        params.sinks = sinks;
        test_expect(r.runtime, kvf_blocks_attention_params(r.blocks, 0, &params), KVF_OK);
        if (i == 0) {
            const kvf_device_ops *ops = r.runtime->device->ops;
            const kvf_blocks_rows rows = rig_last_tokens(&r);
            test_expect(r.runtime, ops->capture_begin(r.stream), KVF_OK);
            rig_decode(&r, 0, &rows);
            test_expect(r.runtime, ops->capture_end(r.stream, &r.graphs[0]), KVF_OK);
        }
        out[i] = test_alloc(2 * r.rows.out_bytes);
        decode_twice(&r, r.graphs[0], out[i]);
    }
    assert_memory_not_equal(out[0], out[1], 2 * r.rows.out_bytes);
    for (uint32_t i = 0; i < 2; i++)
        test_release(out[i]);
    rig_close(&r);
}

/* Steps are told what to select: as sequences, all kinds of heads, captured too. */
TEST(given_pages_have_the_bits_of_sequences)
{
    for (uint32_t i = 0; i < 8; i++) {
        if (!test_takes(i))
            continue;
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = i % 2 ? rig_coarse_config() : rig_config();
        rig r;
        bc.cache.head_mask = i % 2 ? rig_all_kinds : NULL;
        bc.cache.page_size = i % 2 ? 8 : 4;
        bc.cache.transfer = methods[i / 2 % method_count()];
        test_seed_print("blocks", 140 + i);
        rig_gives = i < 4 ? RIG_IDS : RIG_SCORES;
        rig_open(&r, &rc, &bc, 3, 140 + i);
        rig_gives = RIG_NOTHING;
        r.captures = test_on_cuda() && i % 4 < 2;
        rig_serve(&r, 1);
        assert_true(r.compared > 100);
        assert_true(!r.captures || r.replays > 40);
        assert_int_equal(rig_stats(&r).bad_rows, 0);
        assert_true(rig_stats(&r).pages_selected > 0);
        rig_close(&r);
    }
}

/* ---- what chunks read across a link ---- */

/* Every physical block, but what is put after this; a token that is read there again is NaN. */
static void poison_blocks(rig *r)
{
    const kvf_kv_group *kv_group = &r->blocks->cache->kv_groups[0];
    test_expect(r->runtime, kvf_stream_wait(r->stream), KVF_OK);
    for (uint32_t b = 0; b < kv_group->dims.block_count; b++)
        memset(kvf_page_pool_host(&kv_group->pool, (kvf_block){b}), 0xff,
               kvf_stored_block_bytes(&kv_group->dims.paging));
}

/* The prompt of a request in chunks. Returns bytes_prompt; outputs are those of the sequence. */
static uint64_t read_prompt(rig *r, uint32_t chunk, uint32_t poisons)
{
    rig_request *q = &r->request[0];
    const uint64_t before = rig_stats(r).bytes_prompt;
    rig_grow(r, q, q->count, 1);
    q->chunk = chunk;
    while (q->length < q->prompt) {
        if (rig_pass(r, &q, 1))
            fail_msg("chunks of %u: %u outputs differ at %u", chunk, r->differs, q->length);
        if (poisons)
            poison_blocks(r);
    }
    rig_drop(r, q);
    return rig_stats(r).bytes_prompt - before;
}

/* Bytes that chunks attend to of physical blocks, if each has its tokens' pages once. */
static uint64_t every_page_once(const rig *r, uint32_t chunk)
{
    const kvf_cache_config *c = &r->config.cache;
    const uint32_t prompt = r->request[0].prompt;
    const size_t token = 2 * c->kv_heads * c->head_dim * test_dtype_bytes(c->dtype);
    uint64_t pages = 0;
    for (uint32_t end = kvf_min_u32(chunk, prompt);; end = kvf_min_u32(end + chunk, prompt)) {
        pages += (end + c->page_size - 1) / c->page_size;
        if (end == prompt)
            return pages * c->layers * c->page_size * token;
    }
}

/* Chunks of any length, with so many halves of the slots that pages could use. */
static void read_with_room(rig *r, uint32_t halves, uint32_t ignores_writes)
{
    static const uint32_t sizes[] = {64, 50, 17};
    const uint32_t size = r->config.cache.page_size, prompt = r->request[0].prompt;
    const uint64_t page = every_page_once(r, prompt) / ((prompt + size - 1) / size);
    for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const bool whole = halves == 2 && !ignores_writes && sizes[i] % size == 0;
        const uint64_t read = read_prompt(r, sizes[i], whole), all = every_page_once(r, sizes[i]);
        if (ignores_writes)
            assert_int_equal(read, all);
        else if (whole) /* but for the page in which a prompt ends */
            assert_int_equal(read, prompt % size ? page : 0);
        else
            assert_in_range(read, 1, all / (halves == 2 ? 2 : 1));
    }
}

TEST_IF(is_exact(), chunks_read_what_is_on_the_device_there)
{
    const kvf_runtime_config rc = test_runtime_config();
    uint64_t total[2];
    for (uint32_t ignores_writes = 0; ignores_writes < 2; ignores_writes++) {
        kvf_blocks_config bc = rig_config();
        rig r;
        bc.cache.transfer = KVF_TRANSFER_MAPPED;
        test_hooks.ignores_writes = ignores_writes;
        rig_open(&r, &rc, &bc, 1, 123);
        assert_true(r.request[0].prompt > 128);
        for (uint32_t i = 0; i < 2; i++) {
            rig_open_again(&r, i ? UINT64_C(1) << 40 : 0);
            total[i] = kvf_blocks_memory(r.blocks)->device_bytes;
            read_with_room(&r, 2 * i, ignores_writes);
        }
        rig_open_again(&r, total[0] + (total[1] - total[0]) / 2);
        read_with_room(&r, 1, ignores_writes);
        rig_close(&r);
    }
}

/* Room for a prompt's layer is left out where a number is too small for it. */
TEST_IF(is_exact(), the_room_of_chunks_gives_way)
{
    const kvf_runtime_config rc = test_runtime_config();
    kvf_blocks_config bc = rig_config();
    rig r;
    bc.cache.transfer = KVF_TRANSFER_MAPPED;
    rig_open(&r, &rc, &bc, 1, 123);
    const kvf_blocks_plan with = *kvf_blocks_memory(r.blocks);
    assert_true(with.prompt_bytes > 0);
    rig_open_again(&r, with.device_bytes - 1);
    const kvf_blocks_plan without = *kvf_blocks_memory(r.blocks);
    assert_int_equal(without.prompt_bytes, 0);
    assert_true(without.slots > with.slots && without.device_bytes < with.device_bytes);
    assert_int_equal(read_prompt(&r, 64, 0), 0); /* not counted */
    rig_close(&r);
}

/* One request after another, with the same ids in the same region: pages, window and sink of the
 * one lie where those of the other are looked for. Returns how many outputs differ. */
static uint32_t serve_in_turn(kvf_blocks_config bc, uint64_t seed, uint32_t ignores_writes,
                              kvf_blocks_stats *stats)
{
    const kvf_runtime_config rc = test_runtime_config();
    rig r;
    test_hooks.ignores_writes = ignores_writes;
    rig_open(&r, &rc, &bc, 3, seed);
    for (uint32_t i = 0; i < r.requests; i++) {
        rig_request *q = &r.request[i];
        rig_grow(&r, q, q->count, 0);
        q->chunk = 5; /* no whole pages, which would have slots as they are put */
        for (uint32_t b = 0; b < q->ids_count; b++)
            q->ids[b] = (int32_t)b;
        while (!rig_is_done(q))
            (void)rig_pass(&r, &q, 1);
    }
    *stats = rig_stats(&r);
    const uint32_t differs = r.differs;
    rig_close(&r);
    return differs;
}

TEST(a_write_voids_what_the_device_has)
{
    kvf_blocks_stats heard, deaf;
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

/* Means of what was there before would choose other pages; tails have tags as windows have. Kernels
 * of both devices note writes alike: check_blocks.c. */
TEST_IF(!test_on_cuda(), a_write_voids_centroids_and_tails)
{
    kvf_blocks_stats unused;
    assert_int_equal(serve_in_turn(rig_coarse_config(), 9, 0, &unused), 0);
    assert_true(serve_in_turn(rig_coarse_config(), 9, 2, &unused) > 0);
    kvf_blocks_config bc = rig_coarse_config();
    bc.cache.head_mask = none_hot;
    bc.cache.layers = 1;
    bc.cache.transfer =
        KVF_TRANSFER_MAPPED; /* into tails; else they are read in the physical blocks */
    assert_int_equal(serve_in_turn(bc, 9, 0, &unused), 0);
    assert_true(serve_in_turn(bc, 9, 1, &unused) > 0);
}

/* ---- copies ---- */

TEST(a_copy_has_the_same_bits)
{
    rig r;
    rig_open_two_of(&r, rig_coarse_config());
    kvf_blocks_rows rows = rig_last_tokens(&r);
    rig_expect_rows(&r, &rows, 0); /* means of the blocks that are copied are there */
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
    rows = rig_last_tokens(&r);
    rig_expect_rows(&r, &rows, 0);
    rig_close(&r);
}
