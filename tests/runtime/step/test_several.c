/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Several tokens of a sequence in one call: outputs, logarithms and statistics are those of single
 * calls, bit for bit, whatever the policy, the way to move pages, and the kinds of heads.
 *
 * Compares runs of the library with each other; what is right is the business of other tests. Calls
 * with several tokens of some sequences are in test_forks.c, tokens that are taken back in the fuzz
 * target of the API.
 */

#include <math.h>

#include "cache.h"
#include "harness.h"

#define MOST 16u

enum { PROMPT = TEST_SANITIZED ? 120 : 190, TOKENS = 44 };

/* The newest pages that have a score; of a policy of one's own. */
static uint32_t choose_scored(void *user, const kvf_select_view *view, int32_t *ids)
{
    uint32_t count = 0;
    for (uint32_t i = view->pages; i-- > 0 && count < view->pages_max;)
        if (view->scores[i] > -INFINITY && (i % 3 || view->pages < 8))
            ids[count++] = (int32_t)i;
    for (uint32_t i = 0; i < count / 2; i++) {
        const int32_t id = ids[i];
        ids[i] = ids[count - 1 - i];
        ids[count - 1 - i] = id;
    }
    return count;
}

static kvf_cache_config config_of(const char *settings)
{
    kvf_cache_config c = test_config_small();
    c.layers = 2;
    c.tokens_per_step_max = MOST;
    c.streaming_sink = 5;
    c.streaming_recent = 30;
    c.coarse_share = 0.3f;
    if (strncmp(settings, "custom", 6) == 0) {
        c.select = KVF_SELECT_CUSTOM;
        c.select_fn = choose_scored;
        settings += 6;
    }
    test_set(&c, settings);
    return c;
}

typedef struct outcome {
    char *out;  /* [layers, TOKENS, query_heads, head_dim] */
    float *lse; /* [layers, TOKENS, query_heads] */
    kvf_stats stats;
} outcome;

/* The same tokens in calls of one, or of some. */
static outcome play(const kvf_cache_config *c, const test_tokens *t, bool several)
{
    const size_t row = test_steps_bytes(t, 1) / c->layers;
    outcome o = {test_alloc(test_steps_bytes(t, TOKENS)),
                 test_alloc(c->layers * TOKENS * c->query_heads * sizeof(float)),
                 {0}};
    const kvf_runtime_config rc = test_runtime_config();
    test_world w;
    test_hooks.block_size = c->page_size < 8 ? 0 : 8;
    test_world_open(&w, &rc, c);
    kvf_sequence *s = test_sequence(&w);
    test_fill(&w, s, t, 0, PROMPT);
    for (uint32_t at = 0, count; at < TOKENS; at += count) {
        count = several ? kvf_min_u32(1 + at * 7 % MOST, TOKENS - at) : 1;
        for (uint32_t layer = 0; layer < c->layers; layer++) {
            const size_t first = layer * TOKENS + at;
            kvf_decode_args a = test_step_args(&s, t, layer, PROMPT + at, o.out + first * row);
            a.lse = o.lse + first * c->query_heads;
            a.tokens = several ? &count : NULL;
            test_ok(&w, kvf_decode(w.cache, &a, w.stream));
        }
    }
    test_wait(&w);
    kvf_cache_stats(w.cache, &o.stats);
    for (uint32_t i = 0; i < w.cache->kv_group_count; i++) {
        assert_true(kvf_page_pool_is_valid(&w.cache->kv_groups[i].pool));
        assert_true(test_residency_is_valid(&w.cache->kv_groups[i].residency));
    }
    test_world_close(&w);
    return o;
}

TEST(several_tokens_are_single_ones)
{
    static const char *const settings[] = {
        "select=hybrid", "select=full transfer=gather verify_interval=9",
        "select=static transfer=each dtype=bf16", "select=dynamic verify_interval=9 dtype=fp16",
        "select=streaming transfer=gather", "select=quest transfer=each dtype=bf16",
        "select=arkvale transfer=gather", "select=oracle", "custom transfer=gather",
        "digest=codes page_size=4 local_tokens=5 sink_tokens=37 budget_tokens=112 transfer=gather",
        ("digest=codes page_size=4 local_tokens=40 budget_tokens=112 static_ratio=auto "
         "refresh=exact"),
        "select=dynamic digest=codes page_size=1 budget_share=0.6",
        "select=dynamic digest=codes head_dim=192 value_dim=128",
        /* layers of all kinds, with streaming heads only, and without */
        "select=dynamic digest=codes layers=4 head_mask=12010022",
        "select=dynamic digest=codes layers=4 head_mask=12010022 transfer=gather"};
    const uint64_t seed = test_seed(1201);
    for (uint32_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        if (!test_takes(i))
            continue;
        const kvf_cache_config c = config_of(settings[i]);
        test_tokens t;
        test_tokens_make(
            &t, &c,
            &(test_tokens_spec){
                .count = PROMPT + TOKENS, .seed = seed + i, .sharpness = 2.5f, .topics = 6});
        outcome one = play(&c, &t, false), some = play(&c, &t, true);
        const kvf_stats *a = &one.stats, *b = &some.stats;
        if (memcmp(one.out, some.out, test_steps_bytes(&t, TOKENS)) != 0 ||
            memcmp(one.lse, some.lse, c.layers * TOKENS * c.query_heads * sizeof(float)) != 0)
            fail_msg("%s: several tokens and single ones differ", settings[i]);
        assert_int_equal(a->steps, b->steps);
        assert_int_equal(a->tokens_attended, b->tokens_attended);
        assert_int_equal(a->tokens_held, b->tokens_held);
        assert_int_equal(a->pages_selected, b->pages_selected);
        assert_int_equal(a->hits + a->misses, b->hits + b->misses);
        assert_int_equal(a->bytes_to_host, b->bytes_to_host);
        assert_int_equal(a->refreshes, b->refreshes);
        assert_int_equal(a->verified, b->verified);
        assert_true(fabs(a->recall_sum - b->recall_sum) < 1e-9); /* sums round another way */
        test_tokens_free(&t);
        void *const all[] = {one.out, one.lse, some.out, some.lse};
        for (size_t k = 0; k < 4; k++)
            test_release(all[k]);
    }
}

/* Sixteen tokens are one step, or as many as begin with a block that is sealed. */
TEST(tokens_share_a_step)
{
    const uint64_t seed = test_seed(1231);
    kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config c = config_of("select=dynamic");
    test_tokens t;
    test_world w;
    test_hooks.block_size = 0;
    c.layers = 1;
    test_tokens_make(&t, &c, &(test_tokens_spec){.count = 200, .seed = seed, .sharpness = 1.0f});
    test_world_open(&w, &rc, &c);
    kvf_sequence *s = test_sequence(&w);
    char *out = test_scratch(MOST * test_steps_bytes(&t, 1));
    /* Blocks of 32 leave a window of 16: one is sealed at 112 tokens. */
    static const uint32_t tokens[] = {11, 16, 16}, steps[] = {1, 1, 2};
    test_prefill(&w, s, &t, &(test_range){.count = 81, .chunk = 128}, NULL);
    uint32_t first = 81;
    for (uint32_t i = 0; i < 3; first += tokens[i++]) {
        const uint32_t before = w.cache->order.next_frame;
        kvf_decode_args a = test_step_args(&s, &t, 0, first, out);
        a.tokens = &tokens[i];
        test_ok(&w, kvf_decode(w.cache, &a, w.stream));
        assert_int_equal((w.cache->order.next_frame + KVF_FRAMES - before) % KVF_FRAMES, steps[i]);
    }
    test_wait(&w);
    test_close(&w, &t);
}

/* A pool that has room for some of the tokens: nothing is appended. */
TEST(a_full_pool_takes_nothing)
{
    const uint64_t seed = test_seed(1229);
    kvf_cache_config c = test_config_small();
    test_tokens t;
    test_world w;
    c.tokens_per_step_max = MOST;
    c.host_tokens_max = 64; /* 8 blocks, which are sealed at 80 tokens */
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 120, .seed = seed, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    char *out = test_scratch(MOST * test_steps_bytes(&t, 1));
    const uint32_t tokens = 10;
    test_prefill(&w, s, &t, &(test_range){.count = 78, .chunk = 128}, NULL);
    kvf_decode_args a = test_step_args(&s, &t, 0, 78, out);
    a.tokens = &tokens;
    test_expect(w.runtime, kvf_decode(w.cache, &a, w.stream), KVF_FULL);
    assert_int_equal(kvf_sequence_length(s, 0), 78);
    a.tokens = &(const uint32_t){9};
    a.positions = (const uint32_t[]){78, 79, 80, 81, 90, 91, 92, 93, 94};
    test_ok(&w, kvf_decode(w.cache, &a, w.stream));
    assert_int_equal(kvf_sequence_length(s, 0), 87);
    assert_int_equal(kvf_sequence_position(s, 0, 82), 90);
    test_wait(&w);
    test_close(&w, &t);
}
