/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The device cache of pages as a cache has it: how much memory it takes, and that a block which is
 * given to another sequence never shows its old pages. test_forks.c counts the pages that move.
 */

#include "cache.h"
#include "harness.h"

#include <string.h>

enum { TOKENS = 400, PROMPT = 320, STEPS = 60 };

static kvf_cache_config config_of(uint64_t device_bytes)
{
    kvf_cache_config c = test_config_small();
    c.layers = 2;
    c.tokens_max = TOKENS;
    c.select = KVF_SELECT_DYNAMIC;
    c.digest = KVF_DIGEST_CODES;
    c.transfer = test_transfer(KVF_TRANSFER_GATHER);
    c.device_bytes = device_bytes;
    return c;
}

/* ---- memory ---- */

static uint64_t device_total(const kvf_cache_plan *p)
{
    return p->device_kv_bytes + p->device_digest_bytes + p->device_table_bytes;
}

static kvf_cache_plan plan_of(kvf_runtime *runtime, uint64_t device_bytes)
{
    const kvf_cache_config c = config_of(device_bytes);
    kvf_cache_plan plan;
    test_expect(runtime, kvf_cache_plan_make(runtime, &c, &plan, NULL), KVF_OK);
    return plan;
}

/* Never more than what was asked for, and more slots for more bytes, up to all pages. */
TEST(the_plan_takes_what_it_may)
{
    kvf_runtime *runtime = test_runtime();
    const kvf_cache_plan least = plan_of(runtime, 0);
    const kvf_cache_plan all = plan_of(runtime, UINT64_C(1) << 40);
    const uint64_t low = device_total(&least), high = device_total(&all);
    assert_true(least.slots < all.slots && low < high);
    assert_true(all.resident_tokens >= TOKENS - 8 && least.resident_tokens < TOKENS / 2);
    assert_int_equal(plan_of(runtime, low).slots, least.slots);
    assert_int_equal(plan_of(runtime, high).slots, all.slots);
    uint32_t before = least.slots;
    for (uint32_t i = 0; i <= 8; i++) {
        const uint64_t bytes = low + (high - low) * i / 8;
        const kvf_cache_plan some = plan_of(runtime, bytes);
        assert_true(device_total(&some) <= bytes);
        assert_true(bytes - device_total(&some) < (high - low) / (all.slots - least.slots) * 64);
        assert_true(some.slots >= before);
        before = some.slots;
    }
    kvf_runtime_close(runtime);
}

TEST(too_little_is_refused_with_both_numbers)
{
    const kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime;
    kvf_error error;
    char text[128];
    test_hooks.prefill_arena = 2; /* which would be left out first: test_arena.c */
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_OK);
    const kvf_cache_plan least = plan_of(runtime, 0);
    kvf_cache_config c = config_of(device_total(&least) - 1);
    kvf_cache *cache;
    test_expect(runtime, kvf_cache_open(runtime, &c, &cache, &error), KVF_INVALID);
    snprintf(text, sizeof text,
             "device_bytes = %llu: windows, digests, tables and slots for one call take %llu;",
             (unsigned long long)c.device_bytes, (unsigned long long)c.device_bytes + 1);
    assert_non_null(strstr(error.text, text));
    kvf_runtime_close(runtime);
}

/* An eighth of what is free is left. */
TEST(auto_takes_what_is_free)
{
    const kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime;
    kvf_error error;
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_OK);
    const kvf_cache_plan least = plan_of(runtime, 0), all = plan_of(runtime, UINT64_C(1) << 40);
    const uint64_t middle = (device_total(&least) + device_total(&all)) / 2;
    assert_int_equal(plan_of(runtime, KVF_DEVICE_BYTES_AUTO).slots, least.slots); /* 1 is free */
    kvf_runtime_close(runtime);
    test_hooks.device_left = middle / 7 * 8;
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_OK);
    const kvf_cache_plan some = plan_of(runtime, KVF_DEVICE_BYTES_AUTO);
    assert_int_equal(some.slots, plan_of(runtime, middle / 7 * 7).slots);
    assert_true(some.slots > least.slots && some.slots < all.slots);
    kvf_runtime_close(runtime);
    test_hooks.device_left = 0;
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_OK);
    assert_int_equal(plan_of(runtime, KVF_DEVICE_BYTES_AUTO).slots, all.slots); /* the machine's */
    kvf_runtime_close(runtime);
}

/* ---- blocks that go to another sequence ---- */

/* Outputs of the second of two sequences that have the same blocks one after the other; `alone`:
 * there was no first one. */
static void *run_second(uint32_t ignores_writes, bool alone)
{
    const kvf_runtime_config rc = test_runtime_config();
    const kvf_cache_config c = config_of(UINT64_C(1) << 40);
    test_world w;
    test_tokens t[2];
    void *out = NULL;
    test_hooks.ignores_writes = ignores_writes;
    test_world_open(&w, &rc, &c);
    for (uint32_t i = 0; i < 2; i++)
        test_tokens_make(&t[i], &c,
                         &(test_tokens_spec){.count = TOKENS, .seed = 50 + i, .sharpness = 2});
    for (uint32_t i = alone; i < 2; i++) {
        kvf_sequence *s = test_sequence(&w);
        test_fill(&w, s, &t[i], 0, PROMPT);
        free(out);
        out = test_steps(&w, s, &t[i], PROMPT, STEPS);
        kvf_sequence_destroy(s);
    }
    test_world_close(&w);
    test_tokens_free(&t[0]);
    test_tokens_free(&t[1]);
    return out;
}

/* Where sealing admits nothing, outputs are wrong: so the test sees what it is for. */
TEST(a_block_never_shows_its_old_pages)
{
    const kvf_cache_config c = config_of(0);
    const size_t bytes =
        (size_t)STEPS * c.layers * c.query_heads * c.head_dim * test_dtype_bytes(c.dtype);
    void *alone = run_second(0, true), *after = run_second(0, false), *deaf = run_second(1, false);
    assert_memory_equal(alone, after, bytes);
    assert_memory_not_equal(alone, deaf, bytes);
    free(alone);
    free(after);
    free(deaf);
}
