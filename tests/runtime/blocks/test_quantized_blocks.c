/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Quantized pages under the caller's block tables, of any tokens: outputs follow from tokens alone,
 * and a block takes less memory. test_blocks.c runs once more with tokens that quantization does
 * not change, against sequences.
 */

#include "blocks_rig.h"

#include <string.h>

/* One request after the other, in regions and blocks of their own; their outputs are kept. */
static void record(rig *r, uint64_t seed)
{
    rig_take_any_tokens(r, seed);
    r->records = 1;
    for (uint32_t i = 0; i < r->requests; i++) {
        rig_request *q = &r->request[i];
        rig_grow(r, q, q->count, 0);
        q->region = (int32_t)i;
        while (!rig_is_done(q))
            (void)rig_pass(r, &q, 1);
        rig_drop(r, q);
    }
}

/* The outputs must be those that `from` kept. Prompts come in other chunks. */
static void expect_outputs_of(rig *r, const rig *from)
{
    const kvf_cache_config *c = &r->config.cache;
    const size_t heads = c->query_heads;
    const size_t row = heads * test_value_dim(c) * test_dtype_bytes(c->dtype);
    for (uint32_t i = 0; i < r->requests; i++) {
        rig_request *q = &r->request[i];
        const size_t rows = (size_t)r->config.cache.layers * q->count;
        memcpy(q->out, from->request[i].out, rows * row);
        memcpy(q->lse, from->request[i].lse, rows * heads * sizeof *q->lse);
        q->chunk = 1 + (q->chunk + 37) % 150;
    }
}

/* Whatever the ids, the regions, the chunks, the method, the threads, and what is resident. */
TEST(outputs_follow_from_tokens_alone)
{
    static const kvf_dtype dtypes[] = {KVF_BF16, KVF_FP32, KVF_FP16, KVF_BF16};
    const uint8_t *const masks[] = {rig_all_kinds, NULL, rig_kinds, NULL};
    for (uint32_t i = 0; i < (test_on_cuda() ? 2u : 4u); i++) {
        kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = i % 2 ? rig_config() : rig_coarse_config();
        rig one, many;
        bc.cache.head_mask = masks[i];
        bc.cache.layer_windows = i ? NULL : rig_windows;
        bc.cache.pages = i < 2 ? KVF_PAGES_K8V4 : KVF_PAGES_K8V8;
        bc.cache.dtype = test_on_cuda() ? KVF_BF16 : dtypes[i];
        if (i == 1) { /* the widths that a GPU has */
            bc.cache.head_dim = 192;
            bc.cache.value_dim = 128;
        }
        bc.cache.transfer = test_transfer(KVF_TRANSFER_DIRECT);
        test_seed_print("quantized blocks", 130 + i);
        rc.threads = 1;
        rig_open(&one, &rc, &bc, 3, 130 + i);
        record(&one, 130 + i);
        bc.cache.transfer = KVF_TRANSFER_MAPPED;
        rc = test_runtime_config();
        rig_open(&many, &rc, &bc, 3, 130 + i);
        rig_take_any_tokens(&many, 130 + i);
        expect_outputs_of(&many, &one);
        rig_serve(&many, 1);
        assert_true(many.compared > 100);
        assert_int_equal(rig_stats(&many).bad_rows, 0);
        rig_close(&many);
        rig_close(&one);
    }
}

static kvf_blocks_plan plan_of(kvf_runtime *runtime, kvf_pages pages, uint32_t page_size)
{
    kvf_blocks_config bc = rig_config();
    kvf_blocks_plan plan;
    bc.cache.pages = pages;
    bc.cache.transfer = KVF_TRANSFER_MAPPED; /* into slots, also on the host device */
    bc.cache.page_size = page_size;
    bc.cache.head_dim = 128;
    bc.cache.dtype = KVF_BF16;
    bc.block_count = 4096;
    test_expect(runtime, kvf_blocks_plan_make(runtime, &bc, &plan, NULL), KVF_OK);
    return plan;
}

/* For heads of 128 in bf16: 896 and 1,088 bytes for the 2,048 of a page of 4, and the more in
 * slots; window and sink, codes and what of a block is on the device stay, and there is room for
 * one row in full precision. */
TEST(a_block_takes_less_memory)
{
    const kvf_blocks_config bc = rig_config();
    const uint64_t row = 2 * 2 * 128 * sizeof(uint16_t) * (RIG_TOKENS + 31) / 32 * 32;
    kvf_runtime *runtime = test_runtime();
    const kvf_blocks_plan exact = plan_of(runtime, KVF_PAGES_NATIVE, 4);
    const kvf_blocks_plan bytes = plan_of(runtime, KVF_PAGES_K8V8, 4);
    const kvf_blocks_plan halves = plan_of(runtime, KVF_PAGES_K8V4, 4);
    const uint64_t pages = (uint64_t)RIG_LAYERS * bc.cache.kv_heads * 4096 * bc.block_tokens / 4;
    assert_true(exact.host_bytes - bytes.host_bytes >= pages * (2048 - 1088) * 99 / 100);
    assert_true(exact.host_bytes - halves.host_bytes >= pages * (2048 - 896) * 99 / 100);
    assert_true(halves.host_bytes <= pages * 896 * 102 / 100);
    assert_int_equal(halves.device_block_bytes, exact.device_block_bytes);
    assert_int_equal(halves.code_bytes, exact.code_bytes);
    assert_true(halves.device_bytes <= exact.device_bytes + row * 102 / 100 + (1u << 16));
    kvf_runtime_close(runtime);
}
