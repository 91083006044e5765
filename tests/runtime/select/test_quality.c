/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The purpose of a selection: attention recall of the policies on keys with planted structure, the
 * automatic ratio, and the counters.
 *
 * The landscape: heavy tokens that every query looks at, scattered one by one; segments of a topic
 * that only queries of that topic look at; noise. So pages alone waste budget on heavy tokens, and
 * a static set alone misses topics that come back.
 */

#include "harness.h"

#include <math.h>

#define PROMPT (TEST_SANITIZED ? 460u : 700u)
#define STEPS  64u
#define TOPICS 6u

static kvf_cache_config quality_config(void)
{
    kvf_cache_config c = test_config_small();
    c.tokens_max = 1024;
    c.budget_tokens = 128;
    c.verify_interval = 1;
    return c;
}

static void add(const test_tokens *t, void *row, uint32_t heads, const float *direction, float gain)
{
    for (uint32_t i = 0; i < heads * t->head_dim; i++)
        kvf_element_set(row, t->dtype, i,
                        kvf_element_get(row, t->dtype, i) + gain * direction[i % t->head_dim]);
}

static void scale(const test_tokens *t, void *row, uint32_t heads, float gain)
{
    for (uint32_t i = 0; i < heads * t->head_dim; i++)
        kvf_element_set(row, t->dtype, i, gain * kvf_element_get(row, t->dtype, i));
}

static void make_landscape(test_tokens *t, const kvf_cache_config *c, uint64_t seed)
{
    test_tokens_make(t, c,
                     &(test_tokens_spec){.count = PROMPT + STEPS, .seed = seed, .sharpness = 0.4f});
    test_random r = {seed ^ 0x5eedu};
    float heavy[256], topic[TOPICS][256];
    for (uint32_t d = 0; d < t->head_dim; d++) {
        heavy[d] = test_random_normal(&r);
        for (uint32_t i = 0; i < TOPICS; i++)
            topic[i][d] = test_random_normal(&r);
    }
    for (uint32_t layer = 0; layer < t->layers; layer++)
        for (uint32_t i = 0; i < t->count; i++) {
            scale(t, test_k(t, layer, i), t->kv_heads, 0.5f);
            if (i < PROMPT && i % 41 == 20)
                add(t, test_k(t, layer, i), t->kv_heads, heavy, 1.0f);
            if (i < PROMPT - 60 && i / 12 % 8 == 3) /* twelve tokens in ninety-six */
                add(t, test_k(t, layer, i), t->kv_heads, topic[i / 96 % TOPICS], 1.0f);
            add(t, test_q(t, layer, i), t->query_heads, heavy, 0.8f);
            const uint32_t asked = i < PROMPT ? i / 20 % 3 : (i - PROMPT) / 8 % TOPICS;
            add(t, test_q(t, layer, i), t->query_heads, topic[asked], 0.8f);
        }
}

typedef struct outcome {
    double recall;
    kvf_stats stats;
} outcome;

static void run_landscape(const kvf_cache_config *c, uint64_t seed, outcome *o)
{
    test_world w;
    test_tokens t;
    make_landscape(&t, c, seed);
    test_world_open(&w, NULL, c);
    kvf_sequence *s = test_sequence(&w);
    void *out = test_alloc(test_steps_bytes(&t, 1));
    test_fill(&w, s, &t, 0, PROMPT);
    for (uint32_t i = 0; i < STEPS; i++)
        for (uint32_t layer = c->layers; layer-- > 0;) {
            test_decode(&w, s, &t, layer, PROMPT + i, out, NULL);
            test_wait(&w);
        }
    test_wait(&w);
    kvf_cache_stats(w.cache, &o->stats);
    o->recall = o->stats.verified ? o->stats.recall_sum / (double)o->stats.verified : 0.0;
    test_release(out);
    test_close(&w, &t);
}

static double recall_of(kvf_select select, uint64_t seed)
{
    kvf_cache_config c = quality_config();
    outcome o;
    c.select = select;
    run_landscape(&c, seed, &o);
    assert_int_equal(o.stats.verified, STEPS * c.query_heads);
    assert_true(o.recall > 0.0 && o.recall <= 1.0 + 1e-6);
    return o.recall;
}

TEST(policies_rank_as_they_should)
{
    const uint64_t seed = test_seed(601);
    double sum[9] = {0.0};
    const uint64_t rounds = TEST_SANITIZED ? 1 : 3;
    for (uint64_t i = 0; i < rounds; i++)
        for (uint32_t s = KVF_SELECT_HYBRID; s <= KVF_SELECT_ORACLE; s++)
            sum[s] += recall_of((kvf_select)s, seed + i) / (double)rounds;
    print_message(
        "# recall: hybrid %.4f static %.4f dynamic %.4f streaming %.4f quest %.4f arkvale "
        "%.4f oracle %.4f\n",
        sum[KVF_SELECT_HYBRID], sum[KVF_SELECT_STATIC], sum[KVF_SELECT_DYNAMIC],
        sum[KVF_SELECT_STREAMING], sum[KVF_SELECT_QUEST], sum[KVF_SELECT_ARKVALE],
        sum[KVF_SELECT_ORACLE]);
    assert_true(fabs(sum[KVF_SELECT_FULL] - 1.0) < 1e-5);
    assert_true(sum[KVF_SELECT_HYBRID] > sum[KVF_SELECT_STATIC]);
    assert_true(sum[KVF_SELECT_HYBRID] > sum[KVF_SELECT_DYNAMIC] - 0.005);
    assert_true(sum[KVF_SELECT_STREAMING] < sum[KVF_SELECT_HYBRID] - 0.2);
    static const kvf_select others[] = {KVF_SELECT_HYBRID,  KVF_SELECT_STATIC,
                                        KVF_SELECT_DYNAMIC, KVF_SELECT_STREAMING,
                                        KVF_SELECT_QUEST,   KVF_SELECT_ARKVALE};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        assert_true(sum[KVF_SELECT_ORACLE] >= sum[others[i]] - 1e-6);
}

/* One token far back, which only the very last query asks for. */
TEST(a_needle_is_found_by_pages_and_missed_by_streaming)
{
    const uint64_t seed = test_seed(607);
    static const struct {
        kvf_select select;
        int finds;
    } rows[] = {{KVF_SELECT_HYBRID, 1}, {KVF_SELECT_DYNAMIC, 1},   {KVF_SELECT_QUEST, 1},
                {KVF_SELECT_ORACLE, 1}, {KVF_SELECT_STREAMING, 0}, {KVF_SELECT_STATIC, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvf_cache_config c = quality_config();
        test_tokens t;
        test_world w;
        c.select = rows[i].select;
        make_landscape(&t, &c, seed);
        test_random r = {seed};
        float needle[256];
        for (uint32_t d = 0; d < c.head_dim; d++)
            needle[d] = test_random_normal(&r);
        add(&t, test_k(&t, 0, 333), c.kv_heads, needle, 2.0f);
        add(&t, test_q(&t, 0, PROMPT + 5), c.query_heads, needle, 2.0f);
        test_world_open(&w, NULL, &c);
        kvf_sequence *s = test_sequence(&w);
        float *out = test_scratch(256 * sizeof *out);
        test_prefill(&w, s, &t, &(test_range){.count = PROMPT, .chunk = 128}, NULL);
        for (uint32_t p = 0; p < 5; p++)
            test_decode(&w, s, &t, 0, PROMPT + p, out, NULL);
        test_wait(&w);
        kvf_cache_stats_reset(w.cache);
        test_decode(&w, s, &t, 0, PROMPT + 5, out, NULL);
        test_wait(&w);
        kvf_stats stats;
        kvf_cache_stats(w.cache, &stats);
        const double recall = stats.recall_sum / (double)stats.verified;
        if (rows[i].finds ? recall < 0.9 : recall > 0.5)
            fail_msg("policy %d: recall %g", (int)rows[i].select, recall);
        test_close(&w, &t);
    }
}

TEST(the_automatic_ratio_stays_in_the_budget)
{
    const uint64_t seed = test_seed(631);
    kvf_cache_config c = quality_config();
    outcome o, fixed;
    c.layers = 2;
    run_landscape(&c, seed, &fixed);
    c.static_ratio = KVF_STATIC_RATIO_AUTO;
    run_landscape(&c, seed, &o);
    const uint32_t rest = c.budget_tokens - c.sink_tokens - (c.local_tokens + c.page_size - 1);
    assert_true(o.stats.static_tokens_min <= o.stats.static_tokens_max);
    assert_true(o.stats.static_tokens_max <= rest);
    assert_int_equal(o.stats.static_tokens_min % c.page_size, 0);
    assert_true(o.stats.tokens_attended <= (uint64_t)STEPS * 2 * c.kv_heads * c.budget_tokens);
    print_message("# auto: %u to %u static tokens, recall %.4f (fixed quarter: %.4f)\n",
                  o.stats.static_tokens_min, o.stats.static_tokens_max, o.recall, fixed.recall);
    assert_true(o.recall > fixed.recall - 0.1);
}

/* ---- counters ---- */

TEST(counters_add_up)
{
    const uint64_t seed = test_seed(641);
    static const kvf_transfer methods[] = {KVF_TRANSFER_DIRECT, KVF_TRANSFER_GATHER,
                                           KVF_TRANSFER_EACH};
    for (uint32_t m = 0; m < 3; m++) {
        kvf_cache_config c = quality_config();
        outcome o;
        c.transfer = methods[m];
        c.dtype = KVF_BF16;
        c.verify_interval = 4;
        c.phase_times = 1;
        run_landscape(&c, seed, &o);
        const int moves = m || test_on_cuda(); /* there the first one is mapped */
        const uint64_t page = 2u * c.page_size * c.head_dim * 2u;
        const kvf_stats *s = &o.stats;
        assert_int_equal(s->steps, STEPS);
        assert_int_equal(s->hits + s->misses, s->pages_selected);
        assert_true(s->hits > 0 && s->misses > 0);
        assert_true(s->tokens_attended <= (uint64_t)STEPS * c.kv_heads * c.budget_tokens);
        assert_int_equal(s->bytes_to_device, moves ? s->misses * page : 0);
        assert_true(m == 0   ? (s->copies > 0) == moves
                    : m == 2 ? s->copies == s->misses
                             : s->copies > 0 && s->copies <= s->misses);
        assert_int_equal(s->verified, STEPS / 4 * c.query_heads);
        assert_true(s->attend_ns > 0 && s->score_ns > 0 && s->select_ns > 0);
    }
}

TEST(layers_add_up_to_the_cache)
{
    const uint64_t seed = test_seed(643);
    kvf_cache_config c = quality_config();
    test_tokens t;
    test_world w;
    float *out = test_scratch(256 * sizeof *out);
    c.layers = 3;
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 260, .seed = seed, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    for (uint32_t layer = 0; layer < 3; layer++)
        test_prefill(&w, s, &t, &(test_range){.layer = layer, .count = 200 + layer, .chunk = 128},
                     NULL);
    for (uint32_t i = 0; i < 20; i++)
        for (uint32_t layer = 0; layer < 3; layer++)
            test_decode(&w, s, &t, layer, 200 + layer + i, out, NULL);
    test_wait(&w);
    kvf_stats all, one, sum = {0};
    kvf_cache_stats(w.cache, &all);
    for (uint32_t layer = 0; layer < 3; layer++) {
        kvf_cache_layer_stats(w.cache, layer, &one);
        assert_int_equal(one.steps, 20);
        sum.steps += one.steps;
        sum.tokens_attended += one.tokens_attended;
        sum.pages_selected += one.pages_selected;
        sum.hits += one.hits;
        sum.misses += one.misses;
        sum.refreshes += one.refreshes;
        sum.verified += one.verified;
    }
    assert_int_equal(sum.steps, all.steps);
    assert_int_equal(sum.tokens_attended, all.tokens_attended);
    assert_int_equal(sum.pages_selected, all.pages_selected);
    assert_int_equal(sum.hits, all.hits);
    assert_int_equal(sum.misses, all.misses);
    assert_int_equal(sum.refreshes, all.refreshes);
    assert_int_equal(sum.verified, all.verified);
    assert_int_equal(all.refreshes, 3 * 2); /* at the first step and sixteen later */
    assert_true(all.bytes_refresh > 0);
    kvf_cache_stats_reset(w.cache);
    kvf_cache_stats(w.cache, &all);
    assert_int_equal(all.steps + all.hits + all.misses + all.tokens_attended + all.attend_ns, 0);
    test_close(&w, &t);
}
