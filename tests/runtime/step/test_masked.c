/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streaming heads: what a cache with a head mask attends to, head by head, against the naive
 * model.
 *
 * A streaming head sees token j from query i iff j < sink or j > i - recent, which a layer may have
 * of its own. Retrieval heads are held to the bits that they have in a cache without a mask.
 * Batches and forks have the bits of single sequences: test_forks.c; chunks change none:
 * test_bits.c.
 */

#include "naive.h"

static int is_seen(const kvf_cache_config *c, uint32_t layer, uint32_t kv_head, uint32_t query,
                   uint32_t j)
{
    if (!c->head_mask || c->head_mask[layer * c->kv_heads + kv_head])
        return 1;
    const uint32_t recent = c->layer_windows ? c->layer_windows[layer] : c->streaming_recent;
    return j < c->streaming_sink || query - j < recent;
}

/* Three layers of four KV heads: both kinds, no retrieval head, no streaming head. */
static const uint8_t mask_of_all_kinds[12] = {0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1};

static kvf_cache_config config_masked(const uint8_t *mask)
{
    kvf_cache_config c = test_config_small();
    c.layers = 3;
    c.kv_heads = 4;
    c.query_heads = 8;
    c.tokens_max = 400;
    c.prefill_chunk_max = 100;
    c.select = KVF_SELECT_FULL;
    c.head_mask = mask;
    c.streaming_sink = 6;
    c.streaming_recent = 21;
    return c;
}

static void expect_run(const test_scenario *sc, const char *what)
{
    naive_expect_run(&(naive_run){.scenario = sc, .what = what, .sees = is_seen});
}

TEST(any_mask_is_what_it_says)
{
    static const uint32_t sinks[] = {0, 6, 8, 17}, recents[] = {1, 8, 21, 64};
    const uint64_t seed = 401;
    test_random r = {seed};
    test_seed_print("any_mask_is_what_it_says", seed);
    for (uint32_t i = 0; i < (test_on_cuda() || TEST_SANITIZED ? 4u : 12u); i++) {
        uint8_t mask[12];
        char what[96];
        memcpy(mask, mask_of_all_kinds, sizeof mask);
        for (uint32_t k = 0; i && k < 12; k++)
            mask[k] = (uint8_t)test_random_below(&r, 2);
        test_scenario sc = {.cc = config_masked(mask),
                            .tokens = {.seed = seed + i, .sharpness = 1.5f},
                            .prompt = 60 + test_random_below(&r, 60),
                            .steps = 30,
                            .chunk = 1 + test_random_below(&r, 100)};
        sc.cc.dtype = (kvf_dtype)(i % 3);
        sc.cc.head_dim = i % 2 ? 80 : 64;
        sc.cc.page_size = 8u << (i % 3);
        sc.cc.budget_tokens = 400;
        sc.cc.streaming_sink = sinks[(i + i / 4) % 4];
        sc.cc.streaming_recent = recents[i % 4];
        snprintf(what, sizeof what, "mask %u, sink %u, recent %u, pages of %u, chunks of %u", i,
                 sc.cc.streaming_sink, sc.cc.streaming_recent, sc.cc.page_size, sc.chunk);
        expect_run(&sc, what);
    }
}

/* One layer in full, two with windows of their own. */
static const uint8_t mask_of_windows[12] = {1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0};

/* Windows of layers, lengths about sink and window, and rings that wrap many times. */
TEST(windows_and_lengths)
{
    static const struct {
        const char *settings;
        uint32_t prompt, steps, chunk;
        bool has_windows; /* which layers have, and streaming_recent is not looked at */
    } rows[] = {
        {"layer_windows=0,9,40 streaming_recent=3 streaming_sink=0", 130, 30, 17, true},
        {"layer_windows=0,64,1 streaming_recent=3 dtype=fp16", 130, 30, 37, true},
        {"layer_windows=0,8,500 streaming_recent=3 streaming_sink=0 dtype=bf16", 0, 150, 57, true},
        {"layer_windows=0,21,21 streaming_recent=3", 130, 30, 77, true},
        {"", 25, 4, 9, false}, /* sink + recent = 27 */
        {"", 26, 4, 9, false},
        {"", 27, 4, 9, false},
        {"", 28, 4, 9, false},
        {"", 0, 40, 1, false},
        /* rings are as long as the longest sequence */
        {"tokens_max=41 streaming_sink=30 streaming_recent=1000", 40, 1, 1, false},
        {"tokens_max=41 streaming_sink=1000 streaming_recent=1", 40, 1, 1, false},
        {"streaming_sink=3 streaming_recent=10", 5, 190, 5, false},
        {"streaming_sink=3 streaming_recent=10", 190, 5, 7, false},
        {"head_dim=192 value_dim=128", 60, 20, 17, false},
    };
    for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!test_takes(i))
            continue;
        test_scenario sc = {
            .cc = config_masked(rows[i].has_windows ? mask_of_windows : mask_of_all_kinds),
            .tokens = {.seed = 61 + i, .sharpness = 1.5f},
            .prompt = rows[i].prompt,
            .steps = rows[i].steps,
            .chunk = rows[i].chunk};
        sc.cc.budget_tokens = rows[i].has_windows ? 400 : sc.cc.budget_tokens;
        test_set(&sc.cc, rows[i].settings);
        expect_run(&sc, rows[i].settings);
    }
}

/* Parts first, first + stride, ... that differ. */
static size_t differing(const void *a, const void *b, size_t bytes, size_t part, uint32_t first,
                        uint32_t stride)
{
    size_t n = 0;
    for (size_t at = first * part; at < bytes; at += stride * part)
        n += memcmp((const char *)a + at, (const char *)b + at, part) != 0;
    return n;
}

/* Cells whose mask is 1 have the bits of a cache without a mask, beside streaming heads and coarse
 * ones, which have others. */
TEST(retrieval_heads_keep_their_bits)
{
#define COARSE                                                                                     \
    "layers=2 kv_heads=3 query_heads=6 tokens_max=1024 page_size=4 budget_tokens=128 "             \
    "select=dynamic digest=codes coarse_share=0.1 streaming_recent=50 "
    static const char *const rows[] = {"select=hybrid budget_tokens=96 head_mask=111111111111",
                                       "select=hybrid budget_tokens=96 head_mask=010100001111",
                                       COARSE "head_mask=121222", COARSE "head_mask=201021"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        test_trace plain, masked;
        test_scenario sc = {.cc = config_masked(NULL),
                            .tokens = {.seed = 17, .sharpness = 2.5f, .topics = 9},
                            .prompt = i < 2 ? 220 : 600,
                            .steps = test_afford(40),
                            .chunk = 64};
        test_set(&sc.cc, rows[i]);
        test_run(&sc, &masked);
        const uint8_t *mask = sc.cc.head_mask;
        const uint32_t kv_heads = sc.cc.kv_heads, cells = sc.cc.layers * kv_heads;
        const size_t part = masked.out_bytes / sc.steps / cells;
        const size_t prompt = masked.prefill_bytes / sc.cc.layers; /* of a layer */
        uint32_t with_pages = 0;
        sc.cc.head_mask = NULL;
        test_run(&sc, &plain);
        for (uint32_t cell = 0; cell < cells; cell++) {
            const size_t at = cell / kv_heads * prompt;
            const size_t n = differing(plain.out, masked.out, plain.out_bytes, part, cell, cells);
            if (mask[cell] == 1 ? n != 0 : n == 0)
                fail_msg("%s: cell %u: %zu of %u steps differ", rows[i], cell, n, sc.steps);
            if (mask[cell] == 1)
                assert_int_equal(differing((char *)plain.prefill + at, (char *)masked.prefill + at,
                                           prompt, part, cell % kv_heads, kv_heads),
                                 0);
            with_pages += mask[cell] != 0;
        }
        assert_int_equal(masked.stats.steps, plain.stats.steps);
        assert_int_equal(masked.stats.pages_selected,
                         plain.stats.pages_selected / cells * with_pages);
        test_trace_free(&masked);
        test_trace_free(&plain);
    }
}
