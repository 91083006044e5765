/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Speculation moves pages earlier and changes no answer: runs with and without it are compared bit
 * for bit, under every method, policy and refresh, through forks, ends and batches.
 */

#include "harness.h"

static test_scenario scenario_of(kvf_select select, uint64_t seed)
{
    test_scenario sc = {.cc = test_config_small(),
                        .tokens = {.seed = seed, .sharpness = 2.5f, .topics = 6},
                        .prompt = TEST_SANITIZED ? 200 : 300,
                        .steps = test_afford(70),
                        .chunk = 100};
    sc.cc.layers = 3;
    sc.cc.dtype = KVF_BF16;
    sc.cc.select = select;
    return sc;
}

/* Runs both ways; what was foreseen is checked against what was saved. */
static void compare(test_scenario *sc, const char *what)
{
    test_trace exact, ahead;
    sc->cc.speculate = 0;
    test_run(sc, &exact);
    sc->cc.speculate = 1;
    test_run(sc, &ahead);
    test_same_bits(&exact, &ahead, what);
    assert_int_equal(exact.stats.pages_selected, ahead.stats.pages_selected);
    assert_int_equal(exact.stats.pages_ahead, 0);
    if (ahead.stats.pages_ahead == 0 || ahead.stats.pages_ahead_used == 0 ||
        ahead.stats.pages_ahead_used > ahead.stats.pages_ahead ||
        ahead.stats.misses >= exact.stats.misses)
        fail_msg("%s: %llu ahead, %llu used, %llu misses with, %llu without", what,
                 (unsigned long long)ahead.stats.pages_ahead,
                 (unsigned long long)ahead.stats.pages_ahead_used,
                 (unsigned long long)ahead.stats.misses, (unsigned long long)exact.stats.misses);
    const uint64_t page = sc->cc.page_size * sc->cc.head_dim * 4u;
    if (exact.stats.bytes_to_device)
        assert_int_equal(ahead.stats.bytes_to_device,
                         (ahead.stats.misses + ahead.stats.pages_ahead) * page);
    test_trace_free(&exact);
    test_trace_free(&ahead);
}

static void answers_are_those_of_exact_fetching(void **state)
{
    const uint64_t seed = test_seed(907);
    static const struct {
        const char *name;
        kvf_select select;
        kvf_transfer transfer;
        kvf_refresh refresh;
        float static_ratio;
        uint32_t slots, pages;
    } ways[] = {
        {"dynamic, direct", KVF_SELECT_DYNAMIC, KVF_TRANSFER_DIRECT, 0, 0, 0, 0},
        {"dynamic, gather", KVF_SELECT_DYNAMIC, KVF_TRANSFER_GATHER, 0, 0, 0, 5},
        {"dynamic, each, few slots", KVF_SELECT_DYNAMIC, KVF_TRANSFER_EACH, 0, 0, 13, 3},
        {"hybrid, gather", KVF_SELECT_HYBRID, KVF_TRANSFER_GATHER, 0, 0.25f, 0, 0},
        {"hybrid, direct", KVF_SELECT_HYBRID, KVF_TRANSFER_DIRECT, 0, 0.25f, 0, 0},
        {"hybrid, few slots", KVF_SELECT_HYBRID, KVF_TRANSFER_GATHER, 0, 0.25f, 12, 2},
        {"hybrid, exact refresh", KVF_SELECT_HYBRID, KVF_TRANSFER_GATHER, KVF_REFRESH_EXACT, 0.25f,
         0, 3},
        {"hybrid, auto", KVF_SELECT_HYBRID, KVF_TRANSFER_GATHER, 0, KVF_STATIC_RATIO_AUTO, 0, 0},
        {"quest", KVF_SELECT_QUEST, KVF_TRANSFER_GATHER, 0, 0, 0, 3},
        {"arkvale", KVF_SELECT_ARKVALE, KVF_TRANSFER_GATHER, 0, 0, 0, 3},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        if (!test_takes(i))
            continue;
        test_scenario sc = scenario_of(ways[i].select, seed + i);
        sc.cc.transfer = ways[i].transfer;
        sc.cc.refresh = ways[i].refresh;
        sc.cc.static_ratio = ways[i].static_ratio;
        sc.cc.slots = ways[i].slots;
        sc.cc.speculate_pages = ways[i].pages;
        compare(&sc, ways[i].name);
    }
}

static void delays_do_not_change_answers(void **state)
{
    const uint64_t seed = test_seed(911);
    static const kvf_transfer methods[] = {KVF_TRANSFER_DIRECT, KVF_TRANSFER_GATHER,
                                           KVF_TRANSFER_EACH};
    for (uint32_t m = 0; m < 3; m++) {
        kvf_runtime_config rc = test_runtime_config();
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed + m);
        test_seams.delay_seed = 7919 * (m + 1);
        sc.rc = &rc;
        sc.steps = test_afford(60);
        sc.cc.transfer = methods[m];
        compare(&sc, "delays");
    }
}

#define ALIVE 3u
#define COUNT 420u

/* Prompts, forks, ends and batches by one seed; outputs in order of the calls. */
static size_t wander(const kvf_cache_config *cc, uint32_t speculate, uint64_t seed, char *out,
                     kvf_stats *stats)
{
    kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config mine = *cc;
    kvf_sequence *s[ALIVE] = {0};
    test_random r = {seed};
    test_world w;
    test_tokens t;
    size_t used = 0;
    const size_t size = test_dtype_bytes(cc->dtype);
    const size_t row = (size_t)cc->query_heads * cc->head_dim * size;
    mine.speculate = speculate;
    test_seams.delay_seed = speculate ? 53 : 0;
    test_tokens_make(
        &t, cc, &(test_tokens_spec){.count = COUNT, .seed = seed, .sharpness = 2.5f, .topics = 5});
    test_world_open(&w, &rc, &mine);
    for (uint32_t n = 0; n < test_afford(260); n++) {
        const uint32_t i = test_random_below(&r, ALIVE), other = (i + 1) % ALIVE;
        const uint32_t what = test_random_below(&r, 24);
        if (!s[i] && s[other]) {
            test_ok(&w, kvf_sequence_fork(w.cache, s[other], w.stream, &s[i]));
        } else if (!s[i]) {
            s[i] = test_sequence(&w);
            for (uint32_t layer = 0; layer < cc->layers; layer++) {
                test_prefill(&w, s[i], &t, &(test_range){.layer = layer, .count = 200, .chunk = 64},
                             out + used);
                used += 200 * row;
            }
        } else if (what == 0 || kvf_sequence_length(s[i], 0) + 8 > COUNT) {
            kvf_sequence_destroy(s[i]);
            s[i] = NULL;
        } else {
            for (uint32_t layer = 0; layer < cc->layers; layer++) {
                test_decode(&w, s[i], &t, layer, kvf_sequence_length(s[i], layer), out + used,
                            NULL);
                used += row;
            }
        }
    }
    test_wait(&w);
    kvf_cache_stats(w.cache, stats);
    test_close(&w, &t);
    return used;
}

static void forks_and_ends_do_not_disturb(void **state)
{
    const uint64_t seed = test_seed(919);
    const size_t room = 24u << 20;
    for (uint32_t m = 0; m < 3; m++) {
        kvf_cache_config cc = test_config_small();
        kvf_stats exact, ahead;
        char *a = test_alloc(room), *b = test_alloc(room);
        assert_true(a && b);
        cc.layers = 2;
        cc.dtype = KVF_BF16;
        cc.sequences_max = ALIVE;
        cc.host_tokens_max = 700; /* blocks of ended sequences are used again */
        cc.transfer = m == 1 ? KVF_TRANSFER_EACH : KVF_TRANSFER_GATHER;
        if (m == 2)
            cc.host_tokens_max = 0;
        const size_t used = wander(&cc, 0, seed + m, a, &exact);
        assert_true(used < room);
        assert_int_equal(wander(&cc, 1, seed + m, b, &ahead), used);
        assert_memory_equal(a, b, used);
        assert_true(ahead.pages_ahead_used > 0 && ahead.misses < exact.misses);
        test_release(a);
        test_release(b);
    }
}

static void settings_say_what_is_in_force(void **state)
{
    test_world w;
    kvf_cache_config cc = test_config_small();
    cc.select = KVF_SELECT_DYNAMIC;
    test_world_open(&w, NULL, &cc);
    const uint32_t slots = kvf_cache_settings(w.cache)->slots;
    test_world_close(&w);
    cc.speculate = 1;
    test_world_open(&w, NULL, &cc);
    const kvf_cache_config *in_force = kvf_cache_settings(w.cache);
    assert_int_equal(in_force->speculate, 1);
    assert_int_equal(in_force->speculate_pages, kvf_cache_memory(w.cache)->dynamic_pages / 4);
    assert_int_equal(in_force->slots, slots + in_force->speculate_pages);
    test_world_close(&w);
    cc.select = KVF_SELECT_FULL; /* nothing to rank */
    test_world_open(&w, NULL, &cc);
    assert_int_equal(kvf_cache_settings(w.cache)->speculate, 0);
    test_world_close(&w);
    cc.speculate = 2;
    kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime = NULL;
    kvf_cache *cache = NULL;
    kvf_error error = {0};
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    test_expect(runtime, kvf_cache_open(runtime, &cc, &cache, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "speculate = 2"));
    kvf_runtime_close(runtime);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_those_of_exact_fetching),
        cmocka_unit_test(delays_do_not_change_answers),
        cmocka_unit_test(forks_and_ends_do_not_disturb),
        cmocka_unit_test(settings_say_what_is_in_force),
    };
    return cmocka_run_group_tests_name("runtime: speculation", tests, NULL, NULL);
}
