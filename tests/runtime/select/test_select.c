/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which tokens are attended: every policy, step by step, against the naive model.
 *
 * The LSE is the witness: it is fp32 in every dtype, and a token that is missing or counted twice
 * changes it by its weight. Statistics (tokens, pages, hits, misses, recall) must agree exactly or
 * to rounding. Where the naive model says that two scores at a border are too close to call, the
 * comparison ends for that run, and the test demands that most steps were compared.
 */

#include "harness.h"

#include <math.h>

#include "naive.h"

typedef struct tally {
    uint32_t compared, steps;
} tally;

typedef struct follow {
    const char *what;
    const test_scenario *scenario;
    tally *tally;
} follow;

static double relative(double a, double b)
{
    return fabs(a - b) / fmax(1.0, fmax(fabs(a), fabs(b)));
}

static void compare_step(const follow *f, const naive *n, const naive_result *r, const void *out,
                         const float *lse, uint32_t step)
{
    const kvf_cache_config *c = &n->c;
    for (uint32_t h = 0; h < c->query_heads; h++)
        if (!(fabs(r->lse[h] - (double)lse[h]) <= TEST_LSE_TOLERANCE))
            fail_msg("%s: step %u head %u: LSE %.7g, the naive model has %.7g", f->what, step, h,
                     (double)lse[h], r->lse[h]);
    for (size_t i = 0; i < (size_t)c->query_heads * c->head_dim; i++)
        if (!(fabs(r->out[i] - (double)kvf_element_get(out, c->dtype, i)) <=
              test_tolerance(c->dtype)))
            fail_msg("%s: step %u: output %zu is %g, the naive model has %g", f->what, step, i,
                     (double)kvf_element_get(out, c->dtype, i), r->out[i]);
}

static void compare_stats(const follow *f, const kvf_stats *stats, const naive_result *r,
                          const naive *n, uint32_t step)
{
    if (stats->tokens_attended != r->attended)
        fail_msg("%s: step %u attends %llu tokens, the naive model %llu", f->what, step,
                 (unsigned long long)stats->tokens_attended, (unsigned long long)r->attended);
    if (n->c.select != KVF_SELECT_ORACLE && stats->pages_selected != r->pages)
        fail_msg("%s: step %u: %llu pages; the naive model has %llu", f->what, step,
                 (unsigned long long)stats->pages_selected, (unsigned long long)r->pages);
    if (stats->hits + stats->misses != stats->pages_selected)
        fail_msg("%s: step %u: %llu hits and %llu misses of %llu pages", f->what, step,
                 (unsigned long long)stats->hits, (unsigned long long)stats->misses,
                 (unsigned long long)stats->pages_selected);
    if (n->c.verify_interval != 1)
        return;
    double recall = 0.0;
    for (uint32_t h = 0; h < n->c.query_heads; h++)
        recall += r->recall[h];
    assert_int_equal(stats->verified, n->c.query_heads);
    if (relative(stats->recall_sum, recall) > 1e-3)
        fail_msg("%s: step %u: attention recall %g, the naive model has %g", f->what, step,
                 stats->recall_sum, recall);
    double far = 0.0;
    for (size_t i = 0; i < (size_t)n->c.query_heads * n->c.head_dim; i++)
        far = fmax(far, fabs(r->out[i] - r->dense[i]));
    if (fabs(stats->error_max - far) > 2.0 * test_tolerance(n->c.dtype))
        fail_msg("%s: step %u: error %g, the naive model has %g", f->what, step, stats->error_max,
                 far);
}

/* One run, compared after every step of every layer. */
static void follow_run(const follow *f)
{
    const test_scenario *sc = f->scenario;
    test_world w;
    test_tokens t;
    naive n;
    naive_result r;
    test_tokens_spec spec = sc->tokens;
    spec.count = sc->prompt + sc->steps;
    test_tokens_make(&t, &sc->cc, &spec);
    test_world_open(&w, sc->rc, &sc->cc);
    naive_open(&n, kvf_cache_settings(w.cache), kvf_cache_memory(w.cache));
    naive_result_open(&r, &sc->cc);
    kvf_sequence *s = test_sequence(&w);
    for (uint32_t layer = 0; layer < sc->cc.layers && sc->prompt; layer++) {
        test_prefill(&w, s, &t,
                     &(test_range){.layer = layer, .count = sc->prompt, .chunk = sc->chunk}, NULL);
        for (uint32_t i = 0; i < sc->prompt; i++)
            naive_append(&n, layer, test_q(&t, layer, i), test_k(&t, layer, i),
                         test_v(&t, layer, i));
    }
    float *lse = test_alloc(sc->cc.query_heads * sizeof *lse);
    void *out = test_alloc((size_t)sc->cc.query_heads * sc->cc.head_dim * 4);
    assert_true(lse && out);
    f->tally->steps += sc->steps;
    for (uint32_t step = 0; step < sc->steps && n.border >= NAIVE_BORDER; step++)
        for (uint32_t layer = 0; layer < sc->cc.layers && n.border >= NAIVE_BORDER; layer++) {
            const uint32_t token = sc->prompt + step;
            kvf_cache_stats_reset(w.cache);
            test_decode(&w, s, &t, layer, token, out, lse);
            test_wait(&w);
            naive_decode(&n, layer, test_q(&t, layer, token), test_k(&t, layer, token),
                         test_v(&t, layer, token), &r);
            if (n.border < NAIVE_BORDER)
                break;
            kvf_stats stats;
            kvf_cache_stats(w.cache, &stats);
            compare_step(f, &n, &r, out, lse, step);
            compare_stats(f, &stats, &r, &n, step);
            f->tally->compared += layer == 0;
        }
    test_release(lse);
    test_release(out);
    kvf_sequence_destroy(s);
    naive_result_close(&r);
    naive_close(&n);
    test_close(&w, &t);
}

static test_scenario scenario_of(kvf_select select, uint64_t seed)
{
    test_scenario sc = {.cc = test_config_small(),
                        .tokens = {.seed = seed, .sharpness = 2.0f, .topics = 6},
                        .prompt = 230,
                        .steps = TEST_SANITIZED ? 24 : 60,
                        .chunk = 128};
    sc.cc.select = select;
    return sc;
}

static void demand(const tally *t)
{
    print_message("# %u of %u steps compared\n", t->compared, t->steps);
    assert_true(t->compared * 4u >= t->steps * 3u);
}

static void policies_agree_with_the_naive_model(void **state)
{
    const uint64_t seed = test_seed(211);
    static const struct {
        kvf_select select;
        const char *name;
    } policies[] = {
        {KVF_SELECT_HYBRID, "hybrid"},   {KVF_SELECT_STATIC, "static"},
        {KVF_SELECT_DYNAMIC, "dynamic"}, {KVF_SELECT_STREAMING, "streaming"},
        {KVF_SELECT_ORACLE, "oracle"},   {KVF_SELECT_FULL, "full"},
        {KVF_SELECT_QUEST, "quest"},     {KVF_SELECT_ARKVALE, "arkvale"},
    };
    tally all = {0};
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++)
        for (uint32_t exact = 0; exact < 2; exact++) {
            test_scenario sc = scenario_of(policies[i].select, seed + i);
            const kvf_runtime_config rc = test_runtime_config();
            test_seams.block_size = exact ? 32 : 8; /* pages are of 8 */
            sc.rc = &rc;
            sc.cc.refresh = exact ? KVF_REFRESH_EXACT : KVF_REFRESH_RESIDENT;
            sc.cc.verify_interval = 1;
            follow_run(&(follow){.what = policies[i].name, .scenario = &sc, .tally = &all});
        }
    demand(&all);
}

/* The prompt is shorter than the budget: everything at first, a selection later. */
static void growing_past_the_budget(void **state)
{
    const uint64_t seed = test_seed(223);
    tally all = {0};
    for (uint32_t i = 0; i < 3; i++) {
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed + i);
        sc.prompt = 20 + 30 * i;
        sc.steps = 130;
        sc.cc.verify_interval = 1;
        follow_run(&(follow){.what = "growing", .scenario = &sc, .tally = &all});
    }
    demand(&all);
}

/* A share of the context above budget_tokens: for every policy that has a budget, from short to
 * long. */
static void a_budget_that_grows(void **state)
{
    const uint64_t seed = test_seed(239);
    static const kvf_select policies[] = {KVF_SELECT_HYBRID,    KVF_SELECT_DYNAMIC,
                                          KVF_SELECT_STREAMING, KVF_SELECT_ORACLE,
                                          KVF_SELECT_QUEST,     KVF_SELECT_ARKVALE};
    tally all = {0};
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
        test_scenario sc = scenario_of(policies[i], seed + i);
        sc.prompt = 130;
        sc.cc.budget_share = 0.6f; /* 78 of 130 tokens: budget_tokens has more; 114 of 190 */
        follow_run(&(follow){.what = "a growing budget", .scenario = &sc, .tally = &all});
    }
    demand(&all);
}

static void static_ratios(void **state)
{
    const uint64_t seed = test_seed(227);
    static const float ratios[] = {0.0f, 0.1f, 0.25f, 0.5f, 0.75f, 1.0f};
    tally all = {0};
    for (size_t i = 0; i < sizeof ratios / sizeof *ratios; i++) {
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed + i);
        sc.cc.static_ratio = ratios[i];
        follow_run(&(follow){.what = "static ratio", .scenario = &sc, .tally = &all});
    }
    demand(&all);
}

static void the_automatic_ratio(void **state)
{
    const uint64_t seed = test_seed(241);
    static const uint32_t prompts[] = {230, 60, 0, 400};
    tally all = {0};
    for (uint32_t i = 0; i < 4; i++) {
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed + i);
        const kvf_runtime_config rc = test_runtime_config();
        test_seams.block_size = i % 2 ? 32 : 8;
        sc.rc = &rc;
        sc.cc.static_ratio = KVF_STATIC_RATIO_AUTO;
        sc.cc.layers = 2;
        sc.prompt = prompts[i];
        sc.steps = prompts[i] < 100 ? 150 : 40;
        follow_run(&(follow){.what = "automatic ratio", .scenario = &sc, .tally = &all});
    }
    demand(&all);
}

static void digests_and_reductions(void **state)
{
    const uint64_t seed = test_seed(229);
    static const kvf_digest_kind kinds[] = {KVF_DIGEST_MINMAX, KVF_DIGEST_CUBOID_MEAN,
                                            KVF_DIGEST_MEAN};
    static const kvf_group_reduce reduces[] = {KVF_GROUP_MEAN_SOFTMAX, KVF_GROUP_MAX,
                                               KVF_GROUP_SUM};
    static const uint32_t subs[] = {1, 2, 4};
    tally all = {0};
    for (uint32_t i = 0; i < 9; i++) {
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed + i);
        sc.steps = 30;
        sc.cc.digest = kinds[i % 3];
        sc.cc.group_reduce = reduces[i / 3];
        sc.cc.sub_digests = subs[(i + i / 3) % 3];
        char what[64];
        snprintf(what, sizeof what, "digest %u, reduction %u, sub %u", i % 3, i / 3,
                 sc.cc.sub_digests);
        follow_run(&(follow){.what = what, .scenario = &sc, .tally = &all});
    }
    demand(&all);
}

/* Codes score tokens: pages of any size, static sets that come and go, dtypes and dimensions. */
static void codes(void **state)
{
    const uint64_t seed = test_seed(241);
    static const struct {
        kvf_select select;
        kvf_dtype dtype;
        kvf_group_reduce reduce;
        uint32_t page, group, head_dim;
    } rows[] = {
        {KVF_SELECT_DYNAMIC, KVF_BF16, KVF_GROUP_MEAN_SOFTMAX, 1, 3, 64},
        {KVF_SELECT_HYBRID, KVF_FP32, KVF_GROUP_MEAN_SOFTMAX, 4, 2, 80},
        {KVF_SELECT_HYBRID, KVF_FP16, KVF_GROUP_MAX, 8, 4, 96},
        {KVF_SELECT_DYNAMIC, KVF_BF16, KVF_GROUP_SUM, 16, 2, 128},
        {KVF_SELECT_HYBRID, KVF_BF16, KVF_GROUP_MEAN_SOFTMAX, 1, 1, 64},
        {KVF_SELECT_HYBRID, KVF_BF16, KVF_GROUP_MEAN_SOFTMAX, 64, 2, 64},
        {KVF_SELECT_HYBRID, KVF_BF16, KVF_GROUP_MEAN_SOFTMAX, 4, 20, 64},
        {KVF_SELECT_DYNAMIC, KVF_FP32, KVF_GROUP_MAX, 8, 33, 64},
    };
    tally all = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        test_scenario sc = scenario_of(rows[i].select, seed + i);
        sc.steps = 36;
        sc.prompt = 300;
        sc.cc.dtype = rows[i].dtype;
        sc.cc.digest = KVF_DIGEST_CODES;
        sc.cc.group_reduce = rows[i].reduce;
        sc.cc.page_size = rows[i].page;
        sc.cc.query_heads = sc.cc.kv_heads * rows[i].group;
        sc.cc.head_dim = rows[i].head_dim;
        sc.cc.budget_tokens = rows[i].page == 64 ? 224 : 120;
        sc.cc.refresh_interval = 10;
        char what[64];
        snprintf(what, sizeof what, "codes row %zu", i);
        follow_run(&(follow){.what = what, .scenario = &sc, .tally = &all});
    }
    /* Masses have eight bits, so some tokens tie. */
    print_message("# %u of %u steps compared\n", all.compared, all.steps);
    assert_true(all.compared * 3u >= all.steps * 2u);
}

/* Pages counted by their tokens: digests, sinks longer than a page, every share of the static set,
 * pages of one token, which have no holes. */
static void budgets_filled_with_tokens(void **state)
{
    const uint64_t seed = test_seed(251);
    static const struct {
        kvf_digest_kind digest;
        float ratio;
        uint32_t page, sink, budget, block;
    } rows[] = {
        {KVF_DIGEST_MINMAX, 0.25f, 8, 4, 120, 8},
        {KVF_DIGEST_MINMAX, 0.75f, 16, 20, 200, 32},
        {KVF_DIGEST_CODES, 0.5f, 8, 0, 150, 64},
        {KVF_DIGEST_CODES, 0.25f, 1, 4, 130, 64},
        {KVF_DIGEST_MINMAX, KVF_STATIC_RATIO_AUTO, 8, 4, 160, 8},
        {KVF_DIGEST_MINMAX, 0.0f, 8, 11, 120, 8},
        {KVF_DIGEST_MINMAX, 1.0f, 8, 4, 120, 8},
    };
    tally all = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed + i);
        const kvf_runtime_config rc = test_runtime_config();
        test_seams.block_size = rows[i].block;
        sc.rc = &rc;
        sc.steps = 40;
        sc.prompt = 300;
        sc.cc.fill = KVF_FILL_TOKENS;
        sc.cc.digest = rows[i].digest;
        sc.cc.static_ratio = rows[i].ratio;
        sc.cc.page_size = rows[i].page;
        sc.cc.sink_tokens = rows[i].sink;
        sc.cc.budget_tokens = rows[i].budget;
        sc.cc.refresh_interval = 10;
        sc.cc.verify_interval = 1;
        char what[64];
        snprintf(what, sizeof what, "filled row %zu", i);
        follow_run(&(follow){.what = what, .scenario = &sc, .tally = &all});
    }
    demand(&all);
}

/* k = 1024 tokens beside a window of 64 to 95, as published: at most a page less. */
static void the_prkv_preset_attends_to_k_tokens(void **state)
{
    enum { PROMPT = 2000, STEPS = 8, K = 1024, LOCAL = 64 };
    test_world w;
    test_tokens t;
    kvf_cache_config cc = test_config_small();
    kvf_cache_config_preset(&cc, KVF_PRESET_PRKV);
    cc.tokens_max = PROMPT + STEPS;
    test_tokens_make(
        &t, &cc,
        &(test_tokens_spec){
            .seed = test_seed(257), .sharpness = 2.0f, .topics = 6, .count = PROMPT + STEPS});
    test_world_open(&w, NULL, &cc);
    assert_int_equal(kvf_cache_memory(w.cache)->static_tokens, K / 4);
    kvf_sequence *s = test_sequence(&w);
    test_prefill(&w, s, &t, &(test_range){.count = PROMPT, .chunk = 128}, NULL);
    float *out = test_alloc(cc.query_heads * cc.head_dim * sizeof *out);
    for (uint32_t step = 0; step < STEPS; step++) {
        kvf_cache_stats_reset(w.cache);
        test_decode(&w, s, &t, 0, PROMPT + step, out, NULL);
        test_wait(&w);
        kvf_stats stats;
        kvf_cache_stats(w.cache, &stats);
        const uint64_t window = LOCAL + (PROMPT + step + 1 - LOCAL) % cc.page_size;
        const uint64_t most = cc.kv_heads * (K + window);
        assert_in_range(stats.tokens_attended, most - cc.kv_heads * (cc.page_size - 1), most);
    }
    test_release(out);
    kvf_sequence_destroy(s);
    test_close(&w, &t);
}

/* Other geometries: dtypes, page sizes, no sink, a sink longer than a page, odd windows, layers. */
static void geometries(void **state)
{
    const uint64_t seed = test_seed(233);
    static const struct {
        kvf_dtype dtype;
        uint32_t page, sink, local, budget, group, layers, head_dim, block;
    } rows[] = {
        {KVF_BF16, 8, 0, 16, 96, 4, 2, 64, 8},
        {KVF_FP16, 16, 4, 32, 128, 1, 1, 80, 8},
        {KVF_BF16, 32, 4, 64, 192, 2, 1, 64, 8},
        {KVF_FP32, 8, 19, 13, 100, 3, 1, 96, 8},
        {KVF_BF16, 16, 16, 1, 101, 2, 2, 128, 8},
        {KVF_FP16, 64, 1, 10, 150, 2, 1, 64, 8},
        /* pages smaller than blocks */
        {KVF_BF16, 1, 4, 16, 90, 2, 2, 64, 8},
        {KVF_FP32, 2, 7, 20, 100, 3, 1, 80, 32},
        {KVF_FP16, 4, 4, 30, 128, 2, 1, 64, 32},
        {KVF_BF16, 8, 3, 5, 96, 4, 1, 128, 64},
        {KVF_FP32, 16, 20, 16, 160, 1, 1, 64, 32},
        /* several sub-groups, and kept queries that are scored in pieces */
        {KVF_BF16, 8, 4, 64, 160, 48, 1, 64, 8},
        {KVF_FP32, 4, 4, 40, 120, 65, 1, 64, 32},
    };
    tally all = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed + i);
        sc.steps = 40;
        sc.prompt = 300;
        sc.cc.dtype = rows[i].dtype;
        sc.cc.page_size = rows[i].page;
        sc.cc.sink_tokens = rows[i].sink;
        sc.cc.local_tokens = rows[i].local;
        sc.cc.budget_tokens = rows[i].budget;
        sc.cc.query_heads = sc.cc.kv_heads * rows[i].group;
        sc.cc.layers = rows[i].layers;
        sc.cc.head_dim = rows[i].head_dim;
        sc.cc.softmax_scale = i % 2 ? 0.1f : 0.0f;
        const kvf_runtime_config rc = test_runtime_config();
        test_seams.block_size = rows[i].block;
        sc.rc = &rc;
        char what[64];
        snprintf(what, sizeof what, "geometry row %zu", i);
        follow_run(&(follow){.what = what, .scenario = &sc, .tally = &all});
    }
    demand(&all);
}

/* Few slots: victims by lowest score, and what a resident refresh can see, as defined. */
static void slots_and_victims(void **state)
{
    const uint64_t seed = test_seed(239);
    tally all = {0};
    for (uint32_t i = 0; i < 4; i++) {
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed + i);
        sc.cc.device_bytes = i % 2 ? 0 : UINT64_C(1) << 30;
        sc.cc.transfer = i % 2 ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT;
        sc.steps = 70;
        follow_run(&(follow){.what = "slots", .scenario = &sc, .tally = &all});
    }
    demand(&all);
}

int main(void)
{
    return unit_run(policies_agree_with_the_naive_model, growing_past_the_budget,
                    a_budget_that_grows, static_ratios, the_automatic_ratio, digests_and_reductions,
                    codes, budgets_filled_with_tokens, the_prkv_preset_attends_to_k_tokens,
                    geometries, slots_and_victims);
}
