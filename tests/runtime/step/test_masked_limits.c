/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streaming heads: what they cost, what they count, and what is refused.
 *
 * Memory is held to formulas: host pages are those of retrieval heads, and what streaming heads
 * take does not depend on the longest sequence.
 */

#include "harness.h"

#include <math.h>

#include <kvferry/prune.h>

enum { LAYERS = 3, HEADS = 4, GROUP = 2 };

/* Both kinds, no retrieval head, no streaming head. */
static const uint8_t mask_of_all_kinds[LAYERS * HEADS] = {0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1};
static const uint8_t zeros[LAYERS * HEADS];

static kvf_cache_config config_masked(const uint8_t *mask)
{
    kvf_cache_config c = test_config_small();
    c.layers = LAYERS;
    c.kv_heads = HEADS;
    c.query_heads = HEADS * GROUP;
    c.select = KVF_SELECT_FULL;
    c.head_mask = mask;
    c.streaming_sink = 6;
    c.streaming_recent = 21;
    return c;
}

static kvf_cache_plan plan_of(kvf_runtime *runtime, const kvf_cache_config *c)
{
    kvf_cache_plan p;
    test_expect(runtime, kvf_cache_plan_make(runtime, c, &p, NULL), KVF_OK);
    return p;
}

TEST(memory_is_what_the_mask_says)
{
    kvf_runtime *runtime = test_runtime();
    kvf_cache_config c = config_masked(NULL);
    c.sequences_max = 2;
    c.tokens_max = 4096;
    const kvf_cache_plan dense = plan_of(runtime, &c);
    c.head_mask = mask_of_all_kinds;
    const kvf_cache_plan some = plan_of(runtime, &c);
    c.head_mask = zeros;
    const kvf_cache_plan none = plan_of(runtime, &c);
    c.tokens_max = 1u << 20;
    const kvf_cache_plan longer = plan_of(runtime, &c);
    /* 6 of 12 heads retrieve. */
    assert_int_equal(some.host_kv_bytes, dense.host_kv_bytes / 12 * 6);
    assert_int_equal(some.device_digest_bytes, dense.device_digest_bytes / 12 * 6);
    assert_int_equal(none.host_kv_bytes, 0);
    assert_int_equal(none.host_staging_bytes, 0);
    assert_int_equal(none.device_digest_bytes, 0);
    assert_int_equal(none.slots, 0);
    /* Sink of 6 tokens: 1 page of 8. 21 newest tokens lie in up to 4 pages. A chunk of 128 lies in
     * up to 17, beside the ring, and there is one of zeros. */
    const uint64_t page = 2 * 8 * 64 * 4;
    assert_int_equal(none.device_kv_bytes, (2 * LAYERS * (1 + 4) + 17 + 1) * HEADS * page);
    assert_int_equal(longer.device_kv_bytes, none.device_kv_bytes);
    assert_int_equal(longer.device_table_bytes, none.device_table_bytes);
    assert_int_equal(longer.host_kv_bytes, 0);
    /* 65 newest tokens lie in up to 9 pages, 1 in one: each layer has what its own window takes. */
    c.layer_windows = (const uint32_t[LAYERS]){65, 21, 1};
    assert_int_equal(plan_of(runtime, &c).device_kv_bytes,
                     (2 * (3 * 1 + 9 + 4 + 1) + 17 + 1) * HEADS * page);
    assert_int_equal(plan_of(runtime, &c).host_kv_bytes, 0);
    c.layer_windows = NULL;
    c.tokens_max = 16; /* no more pages than there can be tokens */
    assert_int_equal(plan_of(runtime, &c).device_kv_bytes,
                     (2 * LAYERS * 2 + 17 + 1) * HEADS * page);
    kvf_runtime_close(runtime);
}

TEST(a_cache_takes_its_plan)
{
    static const uint8_t *const masks[] = {mask_of_all_kinds, zeros};
    for (uint32_t i = 0; i < 2; i++) {
        test_world w;
        kvf_cache_config c = config_masked(masks[i]);
        c.transfer = test_transfer(KVF_TRANSFER_AUTO);
        test_world_open(&w, NULL, &c);
        const kvf_cache_plan plan = plan_of(w.runtime, &c);
        assert_memory_equal(kvf_cache_memory(w.cache), &plan, sizeof plan);
        /* The mask in force is a copy. */
        const kvf_cache_config *settings = kvf_cache_settings(w.cache);
        assert_true(settings->head_mask && settings->head_mask != masks[i]);
        assert_memory_equal(settings->head_mask, masks[i], LAYERS * HEADS);
        assert_int_equal(settings->kv_heads, HEADS);
        test_world_close(&w);
    }
}

/* Windows in force are a copy; where all have one length they are that. */
TEST(windows_in_force)
{
    static const uint32_t some[LAYERS] = {40, 9, 0}, equal[LAYERS] = {9, 9, 0};
    for (uint32_t i = 0; i < 2; i++) {
        test_world w;
        kvf_cache_config c = config_masked(mask_of_all_kinds);
        c.layer_windows = i ? equal : some;
        test_world_open(&w, NULL, &c);
        const kvf_cache_config *settings = kvf_cache_settings(w.cache);
        assert_int_equal(settings->streaming_recent, i ? 9 : 40);
        assert_true(settings->layer_windows != c.layer_windows);
        assert_true((settings->layer_windows == NULL) == (i == 1));
        if (i == 0)
            assert_memory_equal(settings->layer_windows, some, sizeof some);
        const kvf_cache_plan plan = plan_of(w.runtime, settings); /* which can be given again */
        assert_int_equal(plan.device_kv_bytes, kvf_cache_memory(w.cache)->device_kv_bytes);
        test_world_close(&w);
    }
}

TEST(steps_and_tokens_are_counted)
{
    enum { PROMPT = 20, STEPS = 12 };
    test_world w;
    test_tokens t;
    float *out = test_scratch(HEADS * GROUP * 64 * sizeof *out);
    static const uint32_t windows[LAYERS] = {21, 9, 0};
    kvf_cache_config c = config_masked(mask_of_all_kinds);
    c.layer_windows = windows;
    kvf_stats s;
    uint64_t attended = 0, attended_middle = 0;
    test_open(&w, &t, &c,
              &(test_tokens_spec){.count = PROMPT + STEPS, .seed = 1, .sharpness = 1.0f});
    kvf_sequence *sequence = test_sequence(&w);
    test_fill(&w, sequence, &t, 0, PROMPT);
    for (uint32_t i = PROMPT; i < PROMPT + STEPS; i++) {
        const uint64_t held = i + 1 < 27 ? i + 1 : 27; /* sink + recent */
        const uint64_t middle = 6 + 9;                 /* of layer 1, whose window is shorter */
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            test_decode(&w, sequence, &t, layer, i, out, NULL);
        attended += 6 * (i + 1) + 2 * held + 4 * middle;
        attended_middle += 4 * middle;
    }
    test_wait(&w);
    kvf_cache_stats(w.cache, &s);
    assert_int_equal(s.steps, LAYERS * STEPS);
    assert_int_equal(s.tokens_attended, attended);
    assert_int_equal(s.tokens_held, 12 * (STEPS * PROMPT + STEPS * (STEPS + 1) / 2));
    kvf_cache_layer_stats(w.cache, 1, &s);
    assert_int_equal(s.steps, STEPS);
    assert_int_equal(s.tokens_attended, attended_middle);
    assert_int_equal(s.pages_selected + s.misses + s.bytes_to_host + s.static_tokens_min, 0);
    kvf_cache_stats_reset(w.cache);
    kvf_cache_stats(w.cache, &s);
    assert_int_equal(s.steps + s.tokens_attended + s.tokens_held, 0);
    test_close(&w, &t);
}

/* ---- refusals ---- */

static void expect_text(test_world *w, const char *text)
{
    const char *got = kvf_runtime_error(w->runtime)->text;
    if (!strstr(got, text))
        fail_msg("\"%s\" does not say \"%s\"", got, text);
}

TEST(what_needs_pages_is_refused)
{
    test_world w;
    test_tokens t;
    float *out = test_scratch(HEADS * GROUP * 64 * sizeof *out);
    kvf_cache_config c = config_masked(mask_of_all_kinds);
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 9, .seed = 1, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    test_decode(&w, s, &t, 0, 0, out, NULL);
    test_wait(&w);
    kvf_prune_config pc;
    kvf_prune *prune = NULL;
    kvf_prune_config_init(&pc, NULL);
    test_expect(w.runtime, kvf_prune_open(w.cache, &pc, &prune, NULL), KVF_UNSUPPORTED);
    expect_text(&w, "head_mask");
    assert_null(prune);
    kvf_prune_plan plan;
    test_expect(w.runtime,
                kvf_prune_plan_make(w.runtime, kvf_cache_settings(w.cache), &pc, &plan, NULL),
                KVF_UNSUPPORTED);
    expect_text(&w, "head_mask");
    /* Retrieval heads have pages: heads 1 and 3 of layer 0. */
    assert_null(kvf_page_address(s, 0, 0, 0));
    assert_null(kvf_page_address(s, 0, 2, 0));
    assert_non_null(kvf_page_address(s, 0, 1, 0));
    assert_memory_equal(test_seen(kvf_page_address(s, 0, 3, 0), 64 * sizeof(float)),
                        (const char *)test_k(&t, 0, 0) + 3 * 64 * sizeof(float),
                        64 * sizeof(float));
    assert_int_equal(kvf_sequence_length(s, 0), 1);
    test_close(&w, &t);
}

TEST(a_full_pool_changes_nothing)
{
    test_world w;
    test_tokens t;
    float *out = test_scratch(HEADS * GROUP * 64 * sizeof *out);
    kvf_cache_config c = config_masked(mask_of_all_kinds);
    c.host_tokens_max = 16; /* two pages; the window holds up to 16 + 7 tokens more */
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 200, .seed = 1, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    test_prefill(&w, s, &t, &(test_range){.count = 39, .chunk = 39}, NULL);
    kvf_prefill_args p =
        test_chunk_args(s, &t, 0, 39, 20, test_alloc(20 * HEADS * GROUP * 64 * sizeof *out));
    test_expect(w.runtime, kvf_prefill(w.cache, &p, w.stream), KVF_FULL);
    kvf_decode_args d = {.batch = 1, .sequences = &s, .q = p.q, .k = p.k, .v = p.v, .out = out};
    test_expect(w.runtime, kvf_decode(w.cache, &d, w.stream), KVF_FULL);
    assert_int_equal(kvf_sequence_length(s, 0), 39);
    /* A layer without retrieval heads needs no pages; the cache is usable. */
    test_prefill(&w, s, &t, &(test_range){.layer = 1, .count = 150, .chunk = 100}, NULL);
    assert_int_equal(kvf_sequence_length(s, 1), 150);
    p.layer = 1;
    p.tokens = 0;
    test_expect(w.runtime, kvf_prefill(w.cache, &p, w.stream), KVF_INVALID);
    test_wait(&w);
    test_release(p.out);
    test_close(&w, &t);
}

/* ---- a policy of the embedder ---- */

static uint32_t note_view(void *user, const kvf_select_view *view, int32_t *ids)
{
    uint8_t *seen = user;
    seen[view->layer * HEADS + view->kv_head] = 1;
    return 0;
}

TEST(custom_policies_see_the_models_heads)
{
    test_world w;
    test_tokens t;
    float *out = test_scratch(HEADS * GROUP * 64 * sizeof *out);
    uint8_t seen[LAYERS * HEADS] = {0};
    kvf_cache_config c = config_masked(mask_of_all_kinds);
    c.select = KVF_SELECT_CUSTOM;
    c.select_fn = note_view;
    c.select_user = seen;
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 201, .seed = 1, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        test_prefill(&w, s, &t, &(test_range){.layer = layer, .count = 200, .chunk = 100}, NULL);
        test_decode(&w, s, &t, layer, 200, out, NULL);
    }
    test_wait(&w);
    assert_memory_equal(seen, mask_of_all_kinds, sizeof seen);
    test_close(&w, &t);
}
